"""A pool's replica without Ray: what it runs, reports and rebuilds, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest

from cluster.actors.rank_group import RankDied
from cluster.actors.reports import GroupReport, LeaderReport, PushAnswer, ReplicaReport, leaders_of
from cluster.group.context import RankPlace, RankStats
from cluster.observe.metrics import SchedulerStats
from cluster.wire.credentials import Hashes
from cluster.wire.messages import FIRST_LOADED_ID, LoraAdapter
from serve.config import deploy_config
from serve.pools import pool_core
from serve.pools.chooser import Routing
from serve.pools.pool_core import EMPTY_REPORTS, PoolCore

ENDED = "rank dp=0 tp=0 epoch=0 ended"
VERDICT = "compilation.splitting_ops: wanted an op, found 'lockstep::nothing'"


class Group:
    """A rank group that reports once, or what `loads` says in turn; starts as it is told, and ends
    when it is told."""

    def __init__(self, epoch: int, start: Callable[[], None] = lambda: None) -> None:
        self.epoch, self.handles, self.inboxes = epoch, [None], ["inbox"]
        self.is_named_by_watchdog = self.is_stopped = False
        self.verdict = ""
        self.ended, self.is_ready = asyncio.Event(), asyncio.Event()
        self.is_ready.set()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self._start = start
        self.loads = [SchedulerStats()] * (1 - epoch)
        self.told: list[tuple[LoraAdapter, ...]] = []
        """The sets of adapters that it was told."""
        self.failures: list[Exception] = []
        """What comes of telling it next."""

    async def report(self, prefixes_since: Mapping[int, int] | None = None) -> GroupReport:
        if not self.loads:
            raise TimeoutError
        rank = RankStats(
            RankPlace(epoch=self.epoch), 1, "", "ready", 1, scheduler=self.loads.pop(0)
        )
        return GroupReport([rank], [])

    async def set_adapters(self, adapters: tuple[LoraAdapter, ...]) -> None:
        self.told.append(adapters)
        if self.failures:
            raise self.failures.pop()

    async def start(self) -> None:
        self._start()
        await self.is_ready.wait()

    async def stop(self) -> None:
        await self.may_end.wait()
        self.is_stopped = True

    def kill(self) -> None:
        """There is nothing to end."""

    async def wait_for_end(self) -> str:
        await self.ended.wait()
        return ENDED


OURS = Hashes("ours", "kv")


class Shell:
    """What Ray does for a replica."""

    def __init__(self, *starts: Callable[[], None]) -> None:
        """Let the group of each epoch start like this; the last one's holds on."""
        self._starts = starts or (lambda: None,)
        self.groups: list[Group] = []
        self.noted: list[tuple[str, str, str]] = []
        """The state in which something was noted, what, and of what."""
        self.reports: list[ReplicaReport] = []
        self.answer = PushAnswer()
        """Of the board."""
        self.is_next_ready = asyncio.Event()
        self.is_next_ready.set()
        self.core = PoolCore("mixed", "r", OURS, self)  # type: ignore[arg-type]

    def new_group(self, epoch: int) -> Group:
        group = Group(epoch, self._starts[min(epoch, len(self._starts) - 1)])
        if epoch:
            group.is_ready = self.is_next_ready
        self.groups.append(group)
        return group

    def end_group(self) -> asyncio.Event:
        """End the group; the next one is ready when the event is set."""
        self.is_next_ready = asyncio.Event()
        self.groups[-1].ended.set()
        return self.is_next_ready

    async def push(self, report: ReplicaReport, group: Any) -> PushAnswer:
        self.reports.append(report)
        return self.answer

    async def final_failure(self) -> str:
        return ""

    async def note_failure(self, reason: str, is_final: bool) -> None:
        await asyncio.sleep(0.01)
        self.noted.append((self.core.state, "final" if is_final else "failed", reason))

    async def note_recovery(self) -> None:
        await asyncio.sleep(0.05)
        self.noted.append((self.core.state, "recovered", ""))

    async def until(self, is_over: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not is_over():
                await asyncio.sleep(0.01)


async def started(*starts: Callable[[], None]) -> Shell:
    shell = Shell(*starts)
    await shell.core.start()
    return shell


def fail(reason: str = ENDED, verdict: str = "") -> Callable[[], None]:
    def start() -> None:
        raise RankDied(reason, verdict)

    return start


async def test_a_pool_is_healthy_as_long_as_its_tasks_run() -> None:
    async def broken() -> None:
        raise ValueError("inbox: wanted one, found none")

    shell = await started()
    shell.core.spawn(asyncio.sleep(0))
    await asyncio.sleep(0.01)
    shell.core.check_health()
    shell.core.spawn(broken())
    await asyncio.sleep(0.01)
    with pytest.raises(ValueError, match="inbox: wanted one"):
        shell.core.check_health()


@pytest.mark.feature("P14")
async def test_ranks_of_a_group_that_ended_are_told_of_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_core, "REPORT_PERIOD_S", 0.01)
    monkeypatch.setattr(pool_core, "STUCK_AFTER_S", 0.5)
    shell = await started()
    shell.core.spawn(shell.core.report())
    await shell.until(lambda: shell.reports and shell.reports[-1].state == "stuck")
    await asyncio.sleep(0.5)
    shell.end_group()
    await shell.until(lambda: shell.reports[-1].state == "restarting")
    await shell.core.stop()
    reports, states = shell.reports, [report.state for report in shell.reports]
    # One that does not answer in time keeps its figures, and is stuck.
    assert states[:2] == ["ready", "ready"], "one late answer says nothing"
    assert "stuck" in states and states[-1] == "restarting"
    assert all(bool(r.group.ranks) == (r.state != "restarting") for r in reports)
    # How long it has been in a state grows until another one begins.
    for old, new in pairwise(reports):
        assert (new.in_state_s > old.in_state_s) == (new.state == old.state), (old, new)


@pytest.mark.feature("P14")
async def test_a_replica_says_where_its_leaders_are_while_they_serve_or_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And of which epoch they are, so that nobody goes on with those of a group that ended."""
    monkeypatch.setattr(pool_core, "REPORT_PERIOD_S", 0.01)
    shell = Shell()
    shell.groups[0].is_ready.clear()
    shell.core.spawn(shell.core.report())
    starting = asyncio.create_task(shell.core.start())
    await shell.until(lambda: shell.reports)
    assert [leaders_of(report) for report in shell.reports] == [[]] * len(shell.reports)
    shell.groups[0].is_ready.set()
    await starting
    await shell.until(lambda: leaders_of(shell.reports[-1]))
    [leader] = leaders_of(shell.reports[-1])
    assert leader == LeaderReport("mixed", "r", 0, 0, "ready", "inbox", OURS, "")
    ready = shell.end_group()
    await shell.until(lambda: shell.reports[-1].state == "restarting")
    assert leaders_of(shell.reports[-1]) == []
    ready.set()
    shell.groups[-1].loads = [SchedulerStats(num_running=3)]
    await shell.until(lambda: leaders_of(shell.reports[-1]))
    [leader] = leaders_of(shell.reports[-1])
    assert (leader.engine_id, leader.epoch, leader.last_end) == ("mixed/r/0", 1, ENDED)
    assert leader.load.num_running == 3
    shell.groups[-1].may_end.clear()  # as where a step does not end
    stopping = asyncio.create_task(shell.core.stop())
    await shell.until(lambda: shell.reports[-1].state == "stopping")
    assert [each.state for each in leaders_of(shell.reports[-1])] == ["stopping"]
    shell.groups[-1].may_end.set()
    await stopping


@pytest.mark.feature("S10")
async def test_each_group_is_told_once_of_the_adapters_that_it_is_to_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Again if that failed, and a group that takes the place of another anew."""
    monkeypatch.setattr(pool_core, "REPORT_PERIOD_S", 0.01)
    one, two = (LoraAdapter(FIRST_LOADED_ID + i, str(i), "/path", b"") for i in range(2))
    shell = await started()

    async def reported(times: int = 3) -> None:
        wanted = len(shell.reports) + times
        await shell.until(lambda: len(shell.reports) >= wanted)

    shell.core.spawn(shell.core.report())
    await reported()
    assert shell.reports[-1].takes_answer and shell.groups[0].told == []
    shell.answer = PushAnswer(adapters=(one,))
    await reported()
    shell.answer = PushAnswer()  # nobody answers
    await reported()
    assert shell.groups[0].told == [(one,)]
    shell.groups[0].failures = [TimeoutError(), RankDied("rank dp=0 tp=0 epoch=0 died")]
    shell.answer = PushAnswer(adapters=(one, two))
    await reported()
    assert shell.groups[0].told == [(one,), *[(one, two)] * 3]
    ready = shell.end_group()
    await shell.until(lambda: len(shell.groups) == 2)
    await reported()
    assert shell.groups[1].told == [], "its ranks do not serve yet"
    shell.groups[1].loads = [SchedulerStats()]
    ready.set()
    await shell.until(lambda: shell.groups[1].told)
    shell.answer = PushAnswer(adapters=())
    await shell.until(lambda: len(shell.groups[1].told) > 1)
    assert shell.groups[1].told == [(one, two), ()]
    await shell.core.stop()


IDLE = SchedulerStats()
BUSY = [
    SchedulerStats(num_running=1),
    SchedulerStats(num_waiting=1),
    SchedulerStats(num_handoffs=1),
]


@pytest.mark.feature("R02")
async def test_a_replica_that_drains_stops_once_nothing_has_run_there_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing runs, waits or is held; what was on its way when it began to drain still comes."""
    monkeypatch.setattr(pool_core, "REPORT_PERIOD_S", 0.001)
    shell = await started()
    [group] = shell.groups
    group.loads = [
        IDLE,
        *BUSY,
        *[IDLE] * (EMPTY_REPORTS - 1),
        BUSY[0],
        *[IDLE] * EMPTY_REPORTS,
        IDLE,
    ]
    draining = asyncio.create_task(shell.core.drain())
    await asyncio.sleep(0)
    assert shell.core.state == "draining"
    async with asyncio.timeout(60):
        await draining
    assert group.loads == [IDLE] and not group.is_stopped
    await shell.core.stop()
    assert group.is_stopped


async def test_a_replica_whose_ranks_are_late_or_end_while_it_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Silence is no idleness; ranks that ended are not rebuilt, since nothing is left to drain."""
    monkeypatch.setattr(pool_core, "REPORT_PERIOD_S", 0.001)
    shell = await started()
    shell.groups[0].loads = []
    draining = asyncio.create_task(shell.core.drain())
    await asyncio.sleep(0.05)
    assert not draining.done()
    shell.groups[0].ended.set()
    async with asyncio.timeout(60):
        await draining
    assert shell.core.state == "stopping" and len(shell.groups) == 1


async def test_a_replica_whose_ranks_are_rebuilt_has_nothing_to_drain() -> None:
    shell = await started()
    shell.end_group()
    await shell.until(lambda: shell.core.state == "restarting")
    async with asyncio.timeout(60):
        await shell.core.drain()
        await shell.core.stop()


async def test_a_pool_that_is_stopped_while_its_group_is_rebuilt_keeps_no_ranks() -> None:
    shell = await started()
    ready = shell.end_group()
    await shell.until(lambda: len(shell.groups) == 2)
    stopping = asyncio.create_task(shell.core.stop())
    await asyncio.sleep(0)
    ready.set()
    await stopping
    assert shell.groups[1].is_stopped and shell.core.state == "stopping"


@pytest.mark.feature("E01", "F07")
async def test_a_group_that_no_start_can_compile_is_not_rebuilt_and_its_pool_fails() -> None:
    shell = await started()
    shell.groups[0].verdict = VERDICT
    shell.groups[0].ended.set()
    await shell.until(lambda: shell.core.state == "failed")
    assert len(shell.groups) == 1 and shell.core.error == ENDED
    # The note is kept before the state is entered, and behind that of the recovery.
    assert shell.noted == [("restarting", "recovered", ""), ("restarting", "final", VERDICT)]
    with pytest.raises(RankDied, match=ENDED):
        shell.core.check_health()


async def test_a_group_that_fails_to_start_again_and_again_fails_its_pool() -> None:
    shell = await started(lambda: None, fail("rank dp=0 tp=1 epoch=2: stuck"))
    shell.groups[0].ended.set()
    await shell.until(lambda: shell.core.state == "failed")
    assert len(shell.groups) == 1 + pool_core.MAX_FAILED_STARTS
    assert shell.noted[-1] == ("restarting", "failed", "rank dp=0 tp=1 epoch=2: stuck")


async def test_a_pool_that_is_stopped_while_it_fails_is_not_failed() -> None:
    shell = Shell(fail(verdict=VERDICT))
    starting = asyncio.create_task(shell.core.start())
    await asyncio.sleep(0)
    await shell.core.stop()
    with pytest.raises(RankDied):
        await starting
    assert shell.noted == [("stopping", "final", VERDICT)] and shell.core.state == "stopping"


@pytest.mark.feature("P08")
def test_each_pool_has_a_routing_of_its_own() -> None:
    config = deploy_config({"prefill.routing": "least_tokens"})
    assert [pool.routing for pool in config.pools] == [Routing.LEAST_TOKENS, Routing.COST]
