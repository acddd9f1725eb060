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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Protocol

from cluster.actors.reports import LeaderReport
from cluster.wire.messages import (
    MAX_ABORTS,
    Abort,
    EngineOutput,
    FinishReason,
    GenerateRequest,
    Hello,
    KVHandoff,
    Leave,
    Submit,
    encode,
)
from serve.pools.chooser import Chooser, Routing
from serve.pools.mailbox import Mailbox

log = logging.getLogger("lockstep.directory")


class NoLeader(RuntimeError):
    """No leader of a pool could take a request in time."""


class Connection(Protocol):
    """The way to one leader and back. Its `Leader` is told of what comes and of its end: by
    `on_welcome` once the leader has answered, by `deliver` and by `on_end`."""

    def send(self, body: bytes) -> None: ...
    def close(self) -> None: ...


class Leader:
    """A leader and what it runs for this ingress. Invariant: every mailbox here gets an output with
    a finish reason, or is let go."""

    def __init__(
        self,
        report: LeaderReport,
        connect: Callable[[str, Leader], Connection],
        on_change: Callable[[], None],
    ) -> None:
        self.report = report
        self.is_lost = False
        self._is_welcome = False
        self._on_change = on_change
        self._running: dict[str, tuple[Mailbox, int]] = {}
        """By request id, with its tokens when it came."""
        self._handed_over: dict[str, Mailbox] = {}
        """By request id: its KV is here until another leader has read it."""
        self._leaving: set[str] = set()
        """Those of them that were told to go on elsewhere."""
        self._num_others = 0
        self._aborts: list[str] = []
        self._connection = connect(report.inbox, self)
        self._connection.send(encode(Hello(report.engine_id, report.epoch)))

    def __str__(self) -> str:
        return f"{self.report.engine_id} epoch={self.report.epoch}"

    @property
    def can_take(self) -> bool:
        return self._is_welcome and self.report.state == "ready"

    @property
    def num_requests(self) -> int:
        """Those of this ingress as they are now, and those of others as the board said last."""
        return len(self._running) + self._num_others

    @property
    def num_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self._running.values())

    def see(self, report: LeaderReport) -> None:
        if self.report.state == "draining" and report.state == "ready":
            return  # a late answer of the board: whoever drains serves no more
        self.report = report
        num_unfinished = report.load.num_running + report.load.num_waiting
        self._num_others = max(0, num_unfinished - len(self._running))

    def submit(self, request: GenerateRequest, handoff: KVHandoff | None, to: Mailbox) -> None:
        """Send a request, whose outputs go to a mailbox until one has a finish reason."""
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        self._running[request.request_id] = to, num_tokens
        self._leaving.discard(request.request_id)  # it may have been here before
        self._connection.send(encode(Submit(request, handoff)))

    def abort(self, request_id: str) -> None:
        """Have a request dropped that runs here, or whose KV is held here."""
        self._running.pop(request_id, None)
        self.release(request_id)
        if self.is_lost:
            return
        if not self._aborts:  # those of one client, or of many that leave together, in one frame
            asyncio.get_running_loop().call_soon(self._send_aborts)
        self._aborts.append(request_id)

    def release(self, request_id: str) -> None:
        """Note that a request that was handed over does not need its KV here any more."""
        self._handed_over.pop(request_id, None)

    def leave(self) -> None:
        """Have everything that runs here for this ingress go on elsewhere."""
        told = [request_id for request_id in self._running if request_id not in self._leaving]
        self._leaving = {*self._running}
        for i in range(0, len(told), MAX_ABORTS):
            self._connection.send(encode(Leave(told[i : i + MAX_ABORTS])))

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
        mailbox, _ = self._running.get(output.request_id, (None, 0))
        if mailbox is None:
            return  # it was let go, and its abort is on its way
        if output.finish_reason:
            del self._running[output.request_id]
        if output.handoff is not None:
            self._handed_over[output.request_id] = mailbox
        mailbox.put(output)

    def on_end(self, why: str) -> None:
        """The connection has ended, and so has all that ran over it."""
        if self.is_lost:
            return
        self.is_lost, self._is_welcome = True, False
        self._connection.close()
        running, self._running = self._running, {}
        if running:
            log.warning("%s: %s; %d requests go on elsewhere", self, why, len(running))
        for request_id, (mailbox, _) in running.items():
            mailbox.put(EngineOutput.ended(request_id, FinishReason.DIED, f"{self}: {why}"))
        # Whoever reads from a process that is gone would find out after seconds.
        handed_over, self._handed_over = self._handed_over, {}
        for request_id, mailbox in handed_over.items():
            mailbox.put(EngineOutput.ended(request_id, FinishReason.KV_LOST, f"{self}: {why}"))


class Directory:
    """Belongs to the event loop of its ingress."""

    def __init__(
        self,
        routings: Mapping[str, Routing],
        connect: Callable[[str, Leader], Connection],
        *,
        config_hash: str,
        max_wait_s: float,
    ) -> None:
        """Know of nobody yet. routings: by pool; a request waits at most `max_wait_s` for a leader
        that can take it."""
        self._connect = connect
        self._config_hash = config_hash
        self._max_wait_s = max_wait_s
        self._choosers = {pool: Chooser(routing) for pool, routing in routings.items()}
        self._leaders: dict[str, Leader] = {}
        """By engine id: the connection of its newest epoch."""
        self._last_ends: dict[str, str] = {}
        """By engine id: how its group ended last."""
        self._changed = asyncio.Event()

    def see(self, reports: Iterable[LeaderReport]) -> None:
        """Take what the board says of all leaders. One that it does not know is kept for as long as
        its connection: a board that was made anew hears of all within a second."""
        reported = set()
        for report in reports:
            reported.add(report.engine_id)
            if report.config_hash != self._config_hash or report.pool not in self._choosers:
                continue  # while one deployment replaces another
            if report.last_end:
                self._last_ends[report.engine_id] = report.last_end
            known = self._leaders.get(report.engine_id)
            if known is not None and report.epoch < known.report.epoch:
                continue  # reported before it was rebuilt
            if known is not None and not known.is_lost and report.epoch == known.report.epoch:
                known.see(report)
            elif report.state == "ready":
                if known is not None:
                    known.on_end("it was rebuilt")
                self._leaders[report.engine_id] = Leader(report, self._connect, self._wake)
        for engine_id in [*self._leaders]:
            if self._leaders[engine_id].is_lost and engine_id not in reported:
                del self._leaders[engine_id]  # its replica was replaced, under another name
        for leader in self._leaders.values():
            if leader.report.state == "draining" and self._able(leader.report.pool):
                leader.leave()
        self._wake()

    async def choose(self, pool: str) -> Leader:
        """Return the leader that gets the next request of a pool; NoLeader if none could take it
        in time. Requests that wait go in the order in which they came."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._max_wait_s):
                while True:
                    if leaders := self._able(pool):
                        return leaders[self._choosers[pool].choose(leaders)]
                    await self._changed.wait()
        raise NoLeader(
            f"{pool} pool: wanted an engine that takes requests within {self._max_wait_s:g} s, "
            f"found {self._states(pool)}"
        )

    def last_end(self, engine_id: str) -> str:
        """Return how the last group of an engine that was lost ended, if the board has said so."""
        return self._last_ends.get(engine_id, "")

    def close(self) -> None:
        for leader in self._leaders.values():
            leader.close()

    def _able(self, pool: str) -> list[Leader]:
        return [
            each for each in self._leaders.values() if each.report.pool == pool and each.can_take
        ]

    def _states(self, pool: str) -> str:
        found = [each for each in self._leaders.values() if each.report.pool == pool]
        states = (f"{each} {'lost' if each.is_lost else each.report.state}" for each in found)
        return ", ".join(states) or "none, /ready tells why"

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()
