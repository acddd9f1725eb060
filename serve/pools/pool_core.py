"""`PoolCore`: one replica of a pool, without Ray and without sockets.

It owns a rank group and its open requests, rebuilds the group under a new epoch when it ends, and
reports how it is. Tokens never pass through here: a request's call only stays open until its engine
is done with it. What Ray and ZeroMQ do for it is a `PoolShell` (`pool.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

from cluster.actors.rank_group import RankDied, RankGroup, place_in_group
from cluster.actors.reports import GroupReport, ReplicaReport
from cluster.observe.load_progress import LoadProgress
from cluster.wire.messages import EngineOutput, Submit, decode
from serve.pools.routing import LeaderRouter, Routing

log = logging.getLogger("lockstep.pool")

MAX_FAILED_STARTS = 3
"""Failed starts of a rank group in a row after which its replica fails: the cause is more than the
death of a rank."""
HOLD_S = 5.0
"""How long a request waits in a replica that cannot run it, mostly while ranks are being rebuilt.
If it were refused at once, this replica would have the fewest open calls, and Serve would send it
the next request although another one is healthy."""
STUCK_AFTER_S = 3.0
"""A group whose ranks have not all answered for so long is reported as stuck."""
REPORT_PERIOD_S = 0.25
"""How often a replica reports to the status board; each time costs a few milliseconds of processor
time. Figures of `/ready` are at most three quarters of a second old."""


class PoolUnavailable(RuntimeError):
    """A pool's replica has no ranks at the moment; the request did not reach an engine."""


class LeaderLink(Protocol):
    """The way to one leader; one that is closed drops an abort."""

    async def submit(self, frame: bytes) -> None: ...
    def abort(self, request_id: str) -> None: ...


class PoolShell(Protocol):
    """What a replica needs of its surroundings. `new_group` makes ranks that do not load yet;
    `connect` opens links to its leaders in place of those before; `push` shows a report on the
    status board. A failure that is noted is found by the replica in this one's place, where
    `final_failure` returns its reason; `note_recovery` forgets one that was not final."""

    def new_group(self, epoch: int) -> RankGroup: ...
    async def connect(self, inboxes: Sequence[str]) -> Sequence[LeaderLink]: ...
    async def push(self, report: ReplicaReport, group: RankGroup) -> None: ...
    async def final_failure(self) -> str: ...
    async def note_failure(self, reason: str, is_final: bool) -> None: ...
    async def note_recovery(self) -> None: ...


class PoolCore:
    """A rank group and its open requests. Invariants: a state's note (`note_failure`,
    `note_recovery`) is kept before the next one's, and that of a failure before it is entered,
    since Serve then starts another replica, which reads it. `stopping` is the last state."""

    def __init__(
        self,
        name: str,
        replica_id: str,
        config_hash: str,
        shell: PoolShell,
        *,
        routing: Routing,
        hold_s: float,
    ) -> None:
        """Make the first group; call `start` next."""
        self.name = name
        self.state = "loading"
        """loading, ready, restarting, failed or stopping."""
        self.error = ""
        self.group = shell.new_group(0)
        self._replica_id = replica_id
        self._config_hash = config_hash
        self._shell = shell
        self._routing = routing
        self._hold_s = hold_s
        self._is_ready = asyncio.Event()
        self._noting = asyncio.Lock()
        self._open: dict[str, asyncio.Future[EngineOutput]] = {}
        self._restarts: Counter[str] = Counter()
        """By the rank that a group's end was blamed on."""
        self._ended_by_watchdog = False
        """Whether the watchdog ended the last group that ended."""
        self._links: Sequence[LeaderLink] = ()
        self._router = LeaderRouter(routing, 0)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Return when the ranks are ready, or raise RankDied; a group that ends is then rebuilt."""
        try:
            if reason := await self._shell.final_failure():
                raise RankDied(reason, reason)
            await self.group.start()
        except RankDied as error:
            self.group.kill()
            await self._fail(str(error), error.verdict)
            await asyncio.sleep(2 * REPORT_PERIOD_S)  # the reason reaches `/ready`
            raise
        await self._serve()
        self.spawn(self._watch_group())

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run something for as long as the replica lives, which is ill if it fails."""
        self._tasks.append(asyncio.get_running_loop().create_task(coroutine))

    async def generate(self, request_id: str, frame: bytes, config_hash: str) -> str:
        """Submit a request and return its finish reason when its engine is done with it; cancelling
        the call aborts it. PoolUnavailable: the ranks are being rebuilt, or `config_hash` is that
        of another deployment, of which replicas are called while one replaces another. RankDied:
        the group ended."""
        if config_hash != self._config_hash:
            await asyncio.sleep(self._hold_s)
            raise PoolUnavailable(f"config_hash: wanted {self._config_hash}, found {config_hash}")
        if not self._is_ready.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_ready.wait(), self._hold_s)
        if not self._is_ready.is_set():
            raise PoolUnavailable(f"wanted a ready rank group, found it {self.state}: {self.error}")
        num_tokens = _num_tokens(frame) if self._routing is Routing.LEAST_TOKENS else 0
        router = self._router  # a rebuilt group has another one
        dp_rank = router.take(num_tokens)
        leader = self._links[dp_rank]
        ended = self._open[request_id] = asyncio.get_running_loop().create_future()
        try:
            await leader.submit(frame)
            output: EngineOutput = await ended
            return output.finish_reason
        except asyncio.CancelledError:
            leader.abort(request_id)
            raise
        finally:
            router.give_back(dp_rank, num_tokens)
            self._open.pop(request_id, None)

    def on_ended(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            future = self._open.get(output.request_id)
            if future is not None and not future.done():
                future.set_result(output)

    def check_health(self) -> None:
        """Raise if the rank group is gone or unwatched, so that Serve replaces this replica."""
        if self.state == "failed":
            raise RankDied(self.error)
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def stop(self) -> None:
        self._enter("stopping")
        await self.group.stop()
        for task in self._tasks:
            task.cancel()

    async def _watch_group(self) -> None:
        """Rebuild the group under a new epoch whenever it ends, until that fails too often."""
        num_failures = 0
        reason = await self.group.wait_for_end()
        while not self._is_stopping():
            self._ended_by_watchdog = self.group.is_named_by_watchdog
            self._restarts[place_in_group(reason)] += 1
            if self.group.verdict:
                await self._fail(reason, self.group.verdict)
                return
            self._lose(reason)
            self.group = self._shell.new_group(self.group.epoch + 1)
            try:
                await self.group.start()
            except RankDied as error:
                num_failures += 1
                reason = str(error)
                if error.verdict or num_failures == MAX_FAILED_STARTS:
                    await self._fail(reason, error.verdict)
                    return
                continue
            if self._is_stopping():
                await self.group.stop()
                return
            await self._serve()
            log.warning("%s pool: serves again, epoch %d", self.name, self.group.epoch)
            num_failures = 0
            reason = await self.group.wait_for_end()

    def _is_stopping(self) -> bool:
        return self.state == "stopping"

    def _enter(self, state: str, error: str = "") -> None:
        """Enter a state; if it is ready, let in the requests that wait for ranks."""
        if self._is_stopping():
            return
        self.state, self.error = state, error
        if state == "ready":
            self._is_ready.set()
        else:
            self._is_ready.clear()

    async def _serve(self) -> None:
        """Enter the ready state. Nothing here waits for Ray, which may be slow just then."""
        self._links = await self._shell.connect(self.group.inboxes)
        self._router = LeaderRouter(self._routing, len(self._links))
        self._enter("ready")
        self.spawn(self._note_recovery())

    async def _note_recovery(self) -> None:
        async with self._noting:
            await self._shell.note_recovery()

    async def _fail(self, reason: str, verdict: str) -> None:
        """Enter the failed state, in which Serve replaces this replica. `verdict`: why the one in
        its place would fail as well; empty if it might not."""
        self._lose(reason)
        async with self._noting:
            await self._shell.note_failure(verdict or reason, is_final=bool(verdict))
        self._enter("failed", reason)

    def _lose(self, reason: str) -> None:
        """Report the end and end all open calls, whose requests the router submits again."""
        log.error("%s pool: %s", self.name, reason)
        self._enter("loading" if self.state == "loading" else "restarting", reason)
        for future in self._open.values():
            if not future.done():
                future.set_exception(RankDied(reason))

    async def report(self) -> None:
        """Push this replica's figures to the board for as long as it lives."""
        reported, found, state = self.group, GroupReport([], []), self.state
        clock = asyncio.get_running_loop().time
        answered_at = entered_at = clock()
        while True:
            if self.group is not reported:  # the ranks of the one before are dead
                reported, found = self.group, GroupReport([], [])
                answered_at = clock()
            with suppress(TimeoutError, RankDied):
                found = await reported.report()
                answered_at = clock()
            # Loading imports torch, which keeps a rank from answering for seconds.
            if not found.ranks and self.state in ("loading", "restarting"):
                starting = LoadProgress("starting ranks", 0, max(1, len(reported.handles)))
                found = GroupReport([], [starting])
            is_silent = self.state == "ready" and clock() - answered_at > STUCK_AFTER_S
            # A pool that is ready before its ranks say so would seem to compile nothing.
            have_told = bool(found.ranks) and all(rank.state == "ready" for rank in found.ranks)
            told = state
            if is_silent:
                state = "stuck"
            elif self.state != "ready" or have_told:
                state = self.state
            if state != told:
                entered_at = clock()
            report = ReplicaReport(
                self.name,
                self._replica_id,
                state,
                found.aged(clock() - answered_at),
                error=self.error,
                config_hash=self._config_hash,
                is_stuck=self._ended_by_watchdog and state != "ready",
                in_state_s=clock() - entered_at,
                counts={("rank_restarts_total", rank): n for rank, n in self._restarts.items()},
            )
            await self._shell.push(report, self.group)
            await asyncio.sleep(REPORT_PERIOD_S)


def hold_s(lease_s: float) -> float:
    """Return a small part of the lease of the KV that a held request may need."""
    return min(HOLD_S, lease_s / 10)


def _num_tokens(frame: bytes) -> int:
    request = decode(frame, Submit).request
    return len(request.prompt_token_ids) + len(request.output_token_ids)
