"""`Directory`: all leaders of an application, as one ingress knows them.

The status board tells which leaders there are and what they have to do; the ingress connects to
each that is ready and submits to it directly. Its outputs come back over the same connection. A
connection is one socket's: if it ends, everything that this leader ran for the ingress is lost
here, and goes on elsewhere. That is safe even where it was only the network: an attempt that goes
on has another id, and what still comes of the earlier one finds no reader.

Nothing here does I/O (`links.py` does), and a leader that is slow is not lost: ZeroMQ's own threads
answer its heartbeats, however long a step takes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from cluster.actors.reports import LeaderReport
from cluster.engine.step_stats import learn_seconds
from cluster.wire.messages import (
    FIRST_LOADED_ID,
    MAX_ABORTS,
    Abort,
    EngineOutput,
    FinishReason,
    Hello,
    Leave,
    Submit,
    encode,
)
from serve.pools.chooser import (
    Chooser,
    ChosenOffer,
    Offer,
    Routing,
    Why,
    prefilled_on_decode,
    seconds_of,
)
from serve.pools.leader_load import LeaderLoad, Stage
from serve.pools.mailbox import Mailbox

T = TypeVar("T")
log = logging.getLogger("lockstep.directory")

MAX_UNMEASURED = 100
"""Prompts that may be computed where they decode between two transfers that are measured."""


class NoLeader(RuntimeError):
    """No leader of a pool could take a request in time."""


class ChosenLeader(NamedTuple):
    leader: ConnectedLeader
    why: Why
    num_cached_tokens: int
    """Of the request, as far as is known."""


def _chosen_of(
    leaders: Sequence[ConnectedLeader], offers: Sequence[Offer], choice: ChosenOffer, stage: Stage
) -> ChosenLeader:
    place, why = choice
    return ChosenLeader(leaders[place], why, stage.num_tokens - offers[place].uncached_tokens)


class TransferTimes:
    """How long this ingress has seen requests take from the submission of a handoff to the first
    output of the engine that goes on: its KV is there, and mostly its next token."""

    def __init__(self) -> None:
        self._token_s: dict[int, float] = {}
        """Seconds a token, by the number of binary digits of the request's tokens."""
        self._num_unmeasured = 0

    def on_transfer(self, num_tokens: int, seconds: float) -> None:
        learn_seconds(self._token_s, num_tokens, seconds)
        self._num_unmeasured = 0

    def on_none(self) -> None:
        """A prompt is computed where it decodes. What is never measured again is forgotten: else
        one transfer that was slow would keep all others from being tried."""
        self._num_unmeasured += 1
        if self._num_unmeasured > MAX_UNMEASURED:
            self._token_s.clear()

    def expected_s(self, num_tokens: int) -> float | None:
        """Return how long one of so many tokens takes; None if none of so few was measured."""
        return seconds_of(self._token_s, num_tokens)


@dataclass(frozen=True)
class _Taken:
    """A stage that this ingress has submitted."""

    stage: Stage
    to: Mailbox
    at: float
    """When it was submitted, by the loop's clock."""


class Connection(Protocol):
    """The way to one leader and back. Its `ConnectedLeader` is told of what comes and of its end:
    by `on_welcome` once the leader has answered, by `deliver` and by `on_end`."""

    def send(self, body: bytes) -> None: ...
    def close(self) -> None: ...


class ConnectedLeader:
    """A leader and what it runs for this ingress. Invariant: every mailbox here gets an output with
    a finish reason, or is let go."""

    def __init__(
        self,
        report: LeaderReport,
        connect: Callable[[str, ConnectedLeader], Connection],
        on_change: Callable[[], None],
        transfers: TransferTimes,
    ) -> None:
        self.report = report
        self.is_lost = False
        self._is_welcome = False
        self._on_change = on_change
        self._transfers = transfers
        self.load = LeaderLoad(report)
        self._running: dict[str, _Taken] = {}
        """By request id."""
        self._handed_over: dict[str, Mailbox] = {}
        """By request id: its KV is here until another leader has read it."""
        self._leaving: set[str] = set()
        """Those of them that were told to go on elsewhere."""
        self._aborts: list[str] = []
        self._connection = connect(report.inbox, self)
        self._connection.send(encode(Hello(report.engine_id, report.epoch)))

    def __str__(self) -> str:
        return f"{self.report.engine_id} epoch={self.report.epoch}"

    def can_take(self, state: str = "ready") -> bool:
        return self._is_welcome and self.report.state == state

    def can_read(self, stage: Stage) -> bool:
        """Return whether it can read the KV of a stage, if that has some."""
        return stage.handoff is None or stage.handoff.kv_hash == self.report.hashes.kv

    def has_adapter(self, adapter_id: int) -> bool:
        """Return whether requests with an adapter may come: all have those of `lora_modules`."""
        return adapter_id < FIRST_LOADED_ID or adapter_id in self.report.adapters.ids

    def see(self, report: LeaderReport) -> None:
        if self.report.state == "draining" and report.state == "ready":
            return  # a late answer of the board: whoever drains serves no more
        self.report = report
        self.load.see(report)

    def offer(self, stage: Stage) -> Offer:
        """Return what is known for choosing: as reported, and what was submitted here since."""
        return self.load.offer(self._as_taken(stage))

    def _as_taken(self, stage: Stage) -> Stage:
        """Return a stage without a handoff whose KV this leader cannot read."""
        return stage if self.can_read(stage) else replace(stage, handoff=None)

    def submit(self, stage: Stage, to: Mailbox) -> None:
        """Send a request, whose outputs go to a mailbox until one has a finish reason."""
        stage, request_id = self._as_taken(stage), stage.request.request_id
        self.load.begin(stage)
        self._running[request_id] = _Taken(stage, to, asyncio.get_running_loop().time())
        self._leaving.discard(request_id)  # it may have been here before
        self._connection.send(encode(Submit(stage.request, stage.handoff)))

    def _take_out(self, request_id: str) -> None:
        """Note that a request has ended here, if it runs."""
        taken = self._running.pop(request_id, None)
        if taken is not None:
            self.load.end(taken.stage)

    def abort(self, request_id: str) -> None:
        """Have a request dropped that runs here, or whose KV is held here."""
        self._take_out(request_id)
        self.release(request_id)
        if self.is_lost:
            return
        if not self._aborts:  # those of one client, or of many that leave together, in one frame
            asyncio.get_running_loop().call_soon(self._send_aborts)
        self._aborts.append(request_id)

    def release(self, request_id: str) -> None:
        """Note that a request that was handed over does not need its KV here any more."""
        self._handed_over.pop(request_id, None)

    def leave(self, *, with_kv: bool = True) -> None:
        """Have everything that runs here for this ingress go on elsewhere, with its KV if that can
        be read there."""
        told = [request_id for request_id in self._running if request_id not in self._leaving]
        self._leaving = {*self._running}
        for i in range(0, len(told), MAX_ABORTS):
            self._connection.send(encode(Leave(told[i : i + MAX_ABORTS], with_kv)))

    def _send_aborts(self) -> None:
        aborts, self._aborts = self._aborts, []
        for i in range(0, 0 if self.is_lost else len(aborts), MAX_ABORTS):
            self._connection.send(encode(Abort(aborts[i : i + MAX_ABORTS])))

    def close(self) -> None:
        self.on_end("it is not needed any more")

    # What the connection says.

    def on_welcome(self) -> None:
        if not self._is_welcome:
            self._is_welcome = True
            self._on_change()

    def deliver(self, output: EngineOutput) -> None:
        taken = self._running.get(output.request_id)
        if taken is None:
            return  # it was let go, and its abort is on its way
        if self.load.on_output(output.request_id) and taken.stage.handoff is not None:
            self._on_transfer(taken, output)
        if output.finish_reason:
            self._take_out(output.request_id)
        if output.handoff is not None:
            self._handed_over[output.request_id] = taken.to
        taken.to.put(output)

    def _on_transfer(self, taken: _Taken, output: EngineOutput) -> None:
        if output.token_ids or not output.finish_reason:  # else its KV was not read
            took_s = asyncio.get_running_loop().time() - taken.at
            self._transfers.on_transfer(taken.stage.num_tokens, took_s)

    def on_end(self, why: str) -> None:
        """The connection has ended, and so has all that ran over it."""
        if self.is_lost:
            return
        self.is_lost, self._is_welcome = True, False
        self._connection.close()
        running = [*self._running.items()]
        if running:
            log.warning("%s: %s; %d requests go on elsewhere", self, why, len(running))
        for request_id, taken in running:
            self._take_out(request_id)
            taken.to.put(EngineOutput.ended(request_id, FinishReason.DIED, f"{self}: {why}"))
        # Whoever reads from a process that is gone would find out after seconds.
        handed_over, self._handed_over = self._handed_over, {}
        for request_id, mailbox in handed_over.items():
            mailbox.put(EngineOutput.ended(request_id, FinishReason.KV_LOST, f"{self}: {why}"))


class Directory:
    """Belongs to the event loop of its ingress."""

    def __init__(
        self,
        routings: Mapping[str, Routing],
        connect: Callable[[str, ConnectedLeader], Connection],
        *,
        numerics_hash: str,
        max_wait_s: float,
        max_on_decode: int = 0,
    ) -> None:
        """Know of nobody yet. routings: by pool; a request goes to leaders of these numerics alone,
        and waits at most `max_wait_s` for one that can take it; max_on_decode: tokens of a decode
        engine's step, if it may compute prompts that are new, else 0."""
        self._connect = connect
        self._numerics_hash = numerics_hash
        self._max_wait_s = max_wait_s
        self._max_on_decode = max_on_decode
        self._transfers = TransferTimes()
        self._choosers = {pool: Chooser(routing) for pool, routing in routings.items()}
        self._leaders: dict[str, ConnectedLeader] = {}
        """By engine id: the connection of its newest epoch."""
        self._last_ends: dict[str, str] = {}
        """By engine id: how its group ended last."""
        self.has_served = False
        """Whether all pools have, those of another model as well."""
        self._others: set[str] = set()
        """Pools of other numerics that take requests."""
        self._changed = asyncio.Event()

    @property
    def is_replacing(self) -> bool:
        """Whether engines of other numerics take requests, and not yet those of this one's."""
        return self._have_others() and not all(map(self._ready, self._choosers))

    def see(self, reports: Iterable[LeaderReport]) -> None:
        """Take what the board says of all leaders. One that it does not know is kept for as long as
        its connection: a board that was made anew hears of all within a second."""
        reported, serving = set(), set()
        self._others.clear()
        for report in reports:
            reported.add(report.engine_id)
            serving.add(report.pool)
            can_serve = report.hashes.can_serve(self._numerics_hash)
            if not can_serve or report.pool not in self._choosers:
                if report.state == "ready":  # while one deployment replaces another
                    self._others.add(report.pool)
                continue
            if report.last_end:
                self._last_ends[report.engine_id] = report.last_end
            known = self._leaders.get(report.engine_id)
            if known is not None and report.epoch < known.report.epoch:
                continue  # reported before it was rebuilt
            if report.state == "stopping":
                if known is not None:
                    known.on_end("its replica stops")  # nothing runs there, or will not end
            elif known is not None and not known.is_lost and report.epoch == known.report.epoch:
                known.see(report)
            elif report.state == "ready":
                if known is not None:
                    known.on_end("it was rebuilt")
                self._leaders[report.engine_id] = ConnectedLeader(
                    report, self._connect, self._wake, self._transfers
                )
        self.has_served |= serving >= self._choosers.keys()
        for engine_id in [*self._leaders]:
            if self._leaders[engine_id].is_lost and engine_id not in reported:
                del self._leaders[engine_id]  # its replica was replaced, under another name
        for leader in self._leaders.values():
            told = leader.report
            if told.state != "draining":
                continue
            # One that the board does not know may have stopped out of reach.
            others = [each for each in self._ready(told.pool) if each.report.engine_id in reported]
            if others:
                kv_hashes = {each.report.hashes.kv for each in others}
                leader.leave(with_kv=told.hashes.kv in kv_hashes)
        self._wake()

    async def choose(self, pool: str, stage: Stage) -> ChosenLeader:
        """Return the leader that gets a request next, of a pool, one that can read its KV if there
        is one, or of the decode pool if that may compute the prompt. It has the request's adapter.
        NoLeader if none could take it in time. Requests that wait go in the order in which they
        came."""
        adapter_id = stage.request.adapter_id
        return await self._wait_for(pool, adapter_id, lambda: self._choice(pool, stage))

    async def wait(self, adapter_id: int = 0) -> None:
        """Return once every pool has a leader that could take a request with an adapter; NoLeader
        if one has none in time."""
        for pool in self._choosers:
            await self._wait_for(pool, adapter_id, partial(self._able, pool, adapter_id))

    def has_leaders(self, adapter_id: int = 0) -> bool:
        """Return whether every pool has a leader that could take a request with an adapter now."""
        return all(self._able(pool, adapter_id) for pool in self._choosers)

    def lacking(self, adapter_id: int) -> list[str]:
        """Return who lacks an adapter: engines that take requests, and pools without any."""
        found: list[str] = []
        for pool in self._choosers:
            ready = self._ready(pool)
            found += [str(each) for each in ready if not each.has_adapter(adapter_id)]
            found += [] if ready else [f"{pool} pool"]
        return found

    def adapter_error(self, adapter_id: int) -> str:
        """Return why an engine that takes requests cannot load an adapter; empty if all can."""
        errors = (
            f"{leader}: {error}"
            for pool in self._choosers
            for leader in self._ready(pool)
            if (error := leader.report.adapters.errors.get(adapter_id))
        )
        return next(errors, "")

    async def change(self) -> None:
        """Wait until something may be known that was not."""
        await self._changed.wait()

    def _choice(self, pool: str, stage: Stage) -> ChosenLeader | None:
        leaders = self._able(pool, stage.request.adapter_id)
        if chosen := self._on_decode(pool, leaders, stage):
            return chosen
        readers = [each for each in leaders if each.can_read(stage)]
        return self._chosen(pool, readers or leaders, stage) if leaders else None

    async def _wait_for(self, pool: str, adapter_id: int, find: Callable[[], T | None]) -> T:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._max_wait_s):
                while True:
                    if found := find():
                        return found
                    await self._changed.wait()
        is_loaded = adapter_id >= FIRST_LOADED_ID
        what = "requests and has the adapter of this one" if is_loaded else "requests"
        raise NoLeader(
            f"{pool} pool: wanted an engine that takes {what} within {self._max_wait_s:g} s, "
            f"found {self._states(pool, adapter_id)}"
        )

    def _chosen(self, pool: str, leaders: list[ConnectedLeader], stage: Stage) -> ChosenLeader:
        offers = [leader.offer(stage) for leader in leaders]
        # A prefill engine hands a request over after one token.
        num_outputs = 0 if pool == "prefill" else stage.max_outputs
        request_id = stage.request.request_id
        choice = self._choosers[pool].choose(offers, request_id, stage.num_tokens, num_outputs)
        return _chosen_of(leaders, offers, choice, stage)

    def _on_decode(
        self, pool: str, prefill: list[ConnectedLeader], stage: Stage
    ) -> ChosenLeader | None:
        """Return the decode leader that is to compute a prompt, if one is."""
        if pool != "prefill" or not self._max_on_decode:
            return None
        leaders, num_beside = self._able("decode", stage.request.adapter_id), Counter[str]()
        for leader in leaders:
            num_beside[leader.report.replica_id] += leader.load.num_requests
        offers = [
            replace(leader.offer(stage), num_beside=num_beside[leader.report.replica_id])
            for leader in leaders
        ]
        choice = prefilled_on_decode(
            [leader.offer(stage) for leader in prefill],
            offers,
            stage.request.request_id,
            stage.num_tokens,
            stage.max_outputs,
            transfer_s=self._transfers.expected_s(stage.num_tokens),
            max_step_tokens=self._max_on_decode,
        )
        if choice is None:
            return None
        self._transfers.on_none()
        return _chosen_of(leaders, offers, choice, stage)

    @property
    def knows_prefixes(self) -> bool:
        """Whether what is cached counts anywhere."""
        return any(self._counts_prefixes(pool) for pool in self._choosers)

    @property
    def known_prefixes(self) -> dict[str, tuple[int, int]]:
        """By the id of each engine whose prefix cache counts: its epoch, and the number of changes
        that are known."""
        return {
            engine_id: leader.load.known_prefixes
            for engine_id, leader in self._leaders.items()
            if self._counts_prefixes(leader.report.pool) and not leader.is_lost
        }

    def _counts_prefixes(self, pool: str) -> bool:
        # What a decode engine reads is cached there as well; it saves a read, and no computation
        # unless the engine computes prompts.
        can_compute = pool != "decode" or bool(self._max_on_decode)
        return can_compute and self._choosers[pool].routing is Routing.COST

    def last_end(self, engine_id: str) -> str:
        """Return how the last group of an engine that was lost ended, if the board has said so."""
        return self._last_ends.get(engine_id, "")

    def close(self) -> None:
        for leader in self._leaders.values():
            leader.close()

    def _able(self, pool: str, adapter_id: int = 0) -> list[ConnectedLeader]:
        """Return who may take a request with an adapter. Once all pools of a new deployment have
        engines, those of this one that drain still take what its ingress is sent."""
        found = self._ready(pool)
        if not found and self._have_others():
            found = self._in_state(pool, "draining")
        return [each for each in found if each.has_adapter(adapter_id)]

    def _ready(self, pool: str) -> list[ConnectedLeader]:
        return self._in_state(pool, "ready")

    def _in_state(self, pool: str, state: str) -> list[ConnectedLeader]:
        leaders = self._leaders.values()
        return [each for each in leaders if each.report.pool == pool and each.can_take(state)]

    def _have_others(self) -> bool:
        return self._others == self._choosers.keys()

    def _states(self, pool: str, adapter_id: int) -> str:
        found = [each for each in self._leaders.values() if each.report.pool == pool]
        states = (
            f"{each} {'lost' if each.is_lost else each.report.state}"
            f"{'' if each.has_adapter(adapter_id) else ' without it'}"
            for each in found
        )
        return ", ".join(states) or "none, /ready tells why"

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()
