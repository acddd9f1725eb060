"""`PoolCore`: one replica of a pool, without Ray and without sockets.

It owns a rank group, rebuilds it under a new epoch when it ends, reports how it is and where its
leaders are, and ends it once nothing runs there. No request passes through here: ingresses and
leaders are connected (`directory.py`). What Ray does for it is a `PoolShell` (`pool.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Protocol

from cluster.actors.rank_group import RankDied, RankGroup, place_in_group
from cluster.actors.reports import GroupReport, PushAnswer, ReplicaReport, ScalingTargets
from cluster.observe.load_progress import LoadProgress
from cluster.wire.credentials import Hashes
from cluster.wire.messages import LoraAdapter

log = logging.getLogger("lockstep.pool")

MAX_FAILED_STARTS = 3
"""Failed starts of a rank group in a row after which its replica fails: the cause is more than the
death of a rank."""
STUCK_AFTER_S = 3.0
"""A group whose ranks have not all answered for so long is reported as stuck."""
WITH_INBOXES = ("ready", "draining", "stopping")
"""States in which ingresses hear of leaders: in the last one that they are to give them up."""
EMPTY_REPORTS = 4
"""Reports in a row without work after which a draining replica is empty: by then every ingress has
heard of it (`POLL_PERIOD_S` of `ingress_core.py`), and a request between two pools has arrived."""
REPORT_PERIOD_S = 0.25
"""How often a replica reports to the status board; each time costs a few milliseconds of processor
time. Figures of `/ready` are at most three quarters of a second old."""


class PoolShell(Protocol):
    """What a replica needs of its surroundings. `new_group` makes ranks that do not load yet;
    `push` shows a report on the status board, and returns its answer. A failure that is noted is
    found by the replica in this one's place, where `final_failure` returns its reason;
    `note_recovery` forgets one that was not final."""

    def new_group(self, epoch: int) -> RankGroup: ...
    async def push(self, report: ReplicaReport, group: RankGroup) -> PushAnswer: ...
    async def final_failure(self) -> str: ...
    async def note_failure(self, reason: str, is_final: bool) -> None: ...
    async def note_recovery(self) -> None: ...


class PoolCore:
    """A rank group and its states. Invariants: notes (`note_failure`, `note_recovery`) are kept in
    the order of the states, and that of a failure before the state becomes `failed`: Serve then
    starts a replacement, which reads it. `draining` and then `stopping` are the last states."""

    def __init__(
        self,
        name: str,
        replica_id: str,
        hashes: Hashes,
        shell: PoolShell,
        targets: ScalingTargets | None = None,
    ) -> None:
        """Make the first group; call `start` next."""
        self.name = name
        self.state = "loading"
        """loading, ready, restarting, failed, draining or stopping."""
        self.error = ""
        self.group = shell.new_group(0)
        self._replica_id = replica_id
        self._hashes = hashes
        self._shell = shell
        self._targets = targets
        self._noting = asyncio.Lock()
        self._last_end = ""
        """How the group before this one ended."""
        self._restarts: Counter[str] = Counter()
        """By the rank that a group's end was blamed on."""
        self._ended_by_watchdog = False
        """Whether the watchdog ended the last group that ended."""
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
        self._serve()
        self.spawn(self._watch_group())

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run something for as long as the replica lives, which is ill if it fails."""
        self._tasks.append(asyncio.get_running_loop().create_task(coroutine))

    def check_health(self) -> None:
        """Raise if the rank group is gone or unwatched, so that Serve replaces this replica."""
        if self.state == "failed":
            raise RankDied(self.error)
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def drain(self) -> None:
        """Return once nothing runs here any more. Ingresses send nothing more when they have heard
        of it, and what was on its way then has arrived."""
        if self.state != "ready":
            return
        self._enter("draining")
        num_idle = 0
        while num_idle < EMPTY_REPORTS and self.state == "draining":
            await asyncio.sleep(REPORT_PERIOD_S)
            try:
                found = await self.group.report()
            except (TimeoutError, RankDied):
                continue  # its end is noticed elsewhere
            loads = [rank.scheduler for rank in found.ranks]
            is_idle = not any(
                load.num_running or load.num_waiting or load.num_handoffs for load in loads
            )
            num_idle = num_idle + 1 if is_idle else 0

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
            if self.state == "draining":
                self._enter("stopping")
                return
            self._note_end(reason)
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
            self._serve()
            log.warning("%s pool: serves again, epoch %d", self.name, self.group.epoch)
            num_failures = 0
            reason = await self.group.wait_for_end()

    def _is_stopping(self) -> bool:
        return self.state == "stopping"

    def _enter(self, state: str, error: str = "") -> None:
        if not self._is_stopping():
            self.state, self.error = state, error

    def _serve(self) -> None:
        """Enter the ready state. Nothing here waits for Ray, which may be slow just then."""
        self._enter("ready")
        self.spawn(self._note_recovery())

    async def _note_recovery(self) -> None:
        async with self._noting:
            await self._shell.note_recovery()

    async def _fail(self, reason: str, verdict: str) -> None:
        """Enter the failed state, in which Serve replaces this replica. `verdict`: why the one in
        its place would fail as well; empty if it might not."""
        self._note_end(reason)
        async with self._noting:
            await self._shell.note_failure(verdict or reason, is_final=bool(verdict))
        self._enter("failed", reason)

    def _note_end(self, reason: str) -> None:
        log.error("%s pool: %s", self.name, reason)
        self._last_end = reason
        self._enter("loading" if self.state == "loading" else "restarting", reason)

    async def report(self) -> None:
        """Push this replica's figures to the board for as long as it lives, and tell the group what
        adapters it is to have."""
        reported, found, state = self.group, GroupReport([], []), self.state
        clock = asyncio.get_running_loop().time
        answered_at = entered_at = clock()
        answer, told_adapters = PushAnswer(), tuple[LoraAdapter, ...]()
        while True:
            if self.group is not reported:  # the ranks of the one before are dead
                reported, found = self.group, GroupReport([], [])
                answer, told_adapters = PushAnswer(), ()
                answered_at = clock()
            with suppress(TimeoutError, RankDied):
                found = await reported.report(answer.known_prefixes)
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
                epoch=reported.epoch,
                inboxes=tuple(reported.inboxes) if self.state in WITH_INBOXES else (),
                last_end=self._last_end,
                error=self.error,
                hashes=self._hashes,
                is_stuck=self._ended_by_watchdog and state != "ready",
                in_state_s=clock() - entered_at,
                targets=self._targets,
                takes_answer=True,
                counts={("rank_restarts_total", rank): n for rank, n in self._restarts.items()},
            )
            answer = await self._shell.push(report, self.group)
            wanted = told_adapters if answer.adapters is None else answer.adapters
            if have_told and wanted != told_adapters:
                with suppress(TimeoutError, RankDied):  # it is told again, or its end is noticed
                    await reported.set_adapters(wanted)
                    told_adapters = wanted
            await asyncio.sleep(REPORT_PERIOD_S)
