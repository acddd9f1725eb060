"""A pool's replica without Ray: what it runs, reports and rebuilds, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.actors.rank_group import RankDied
from cluster.actors.reports import GroupReport, ReplicaReport
from cluster.group.context import RankPlace, RankStats
from cluster.wire.messages import EngineOutput, FinishReason
from serve.config import deploy_config
from serve.pools import pool_core
from serve.pools.pool_core import PoolCore, PoolUnavailable
from serve.pools.routing import LeaderRouter, Routing

ENDED = "rank dp=0 tp=0 epoch=0 ended"
VERDICT = "compilation.splitting_ops: wanted an op, found 'lockstep::nothing'"


class Group:
    """A rank group that reports once, starts as it is told, and ends when it is told."""

    def __init__(self, epoch: int, start: Callable[[], None] = lambda: None) -> None:
        self.epoch, self.handles, self.inboxes = epoch, [None], ["inbox"]
        self.is_named_by_watchdog = self.is_stopped = False
        self.verdict = ""
        self.ended, self.is_ready = asyncio.Event(), asyncio.Event()
        self.is_ready.set()
        self._start = start
        self._num_reports = 1 - epoch

    async def report(self) -> GroupReport:
        if self._num_reports <= 0:
            raise TimeoutError
        self._num_reports -= 1
        rank = RankStats(RankPlace(epoch=self.epoch), pid=1, node="", state="ready", step=1)
        return GroupReport([rank], [])

    async def start(self) -> None:
        self._start()
        await self.is_ready.wait()

    async def stop(self) -> None:
        self.is_stopped = True

    def kill(self) -> None:
        """There is nothing to end."""

    async def wait_for_end(self) -> str:
        await self.ended.wait()
        return ENDED


class Shell:
    """What Ray and ZeroMQ do for a replica; its leader ends a request as soon as it comes."""

    def __init__(self, *starts: Callable[[], None], hold_s: float = 0.01) -> None:
        """Let the group of each epoch start like this; the last one's holds on."""
        self._starts = starts or (lambda: None,)
        self.groups: list[Group] = []
        self.noted: list[tuple[str, str, str]] = []
        """The state in which something was noted, what, and of what."""
        self.reports: list[ReplicaReport] = []
        self.is_answering = True
        self.is_next_ready = asyncio.Event()
        self.is_next_ready.set()
        self.aborted: list[str] = []
        self.core = PoolCore(
            "mixed",
            "r",
            "ours",
            self,  # type: ignore[arg-type]
            routing=Routing.LEAST_REQUESTS,
            hold_s=hold_s,
        )

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

    async def connect(self, inboxes: Sequence[str]) -> Sequence[Shell]:
        return [self for _ in inboxes]

    async def submit(self, frame: bytes) -> None:
        if self.is_answering:
            self.core.on_ended([EngineOutput.ended(frame.decode(), FinishReason.LENGTH)])

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def push(self, report: ReplicaReport, group: Any) -> None:
        self.reports.append(report)

    async def final_failure(self) -> str:
        return ""

    async def note_failure(self, reason: str, is_final: bool) -> None:
        await asyncio.sleep(0.01)
        self.noted.append((self.core.state, "final" if is_final else "failed", reason))

    async def note_recovery(self) -> None:
        await asyncio.sleep(0.05)
        self.noted.append((self.core.state, "recovered", ""))

    async def ask(self, config_hash: str = "ours") -> str:
        return await self.core.generate("r", b"r", config_hash)

    async def until(self, is_over: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not is_over():
                await asyncio.sleep(0.01)


async def started(*starts: Callable[[], None], hold_s: float = 0.01) -> Shell:
    shell = Shell(*starts, hold_s=hold_s)
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
async def test_a_request_waits_a_while_for_ranks_that_are_rebuilt() -> None:
    """A refusal at once would draw all requests here, past a replica that is healthy."""
    patient, impatient = await started(hold_s=30), await started(hold_s=0.01)
    ready = [each.end_group() for each in (patient, impatient)]
    await patient.until(lambda: patient.core.state == impatient.core.state == "restarting")
    with pytest.raises(PoolUnavailable, match=f"found it restarting: {ENDED}"):
        await impatient.ask()
    waiting = asyncio.create_task(patient.ask())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    ready[0].set()
    assert await waiting == "length"


async def test_a_request_of_another_deployment_is_not_run() -> None:
    """Its ingress would drop every token; a replica of its own is on its way."""
    shell = await started()
    with pytest.raises(PoolUnavailable, match="config_hash: wanted ours, found theirs"):
        await shell.ask("theirs")


async def test_calls_end_with_their_ranks_and_one_that_is_cancelled_is_aborted() -> None:
    shell = await started()
    shell.is_answering = False
    cancelled = asyncio.create_task(shell.ask())
    await asyncio.sleep(0.01)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert shell.aborted == ["r"]
    lost = asyncio.create_task(shell.ask())
    await asyncio.sleep(0.01)
    shell.groups[0].ended.set()
    with pytest.raises(RankDied, match=ENDED):
        await lost


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


# Requests spread over data-parallel ranks: balanced, and equal ranks take turns.

# What comes: a request of so many tokens, or the end of one that runs.
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(1, 500)), st.tuples(st.just("end"), st.integers(0))
    ),
    max_size=60,
)


@pytest.mark.feature("P08")
@given(st.sampled_from(Routing), st.integers(1, 5), EVENTS)
def test_a_request_goes_to_a_least_loaded_rank_and_equal_ones_take_turns(
    routing: Routing, num_leaders: int, events: list[tuple[str, int]]
) -> None:
    router = LeaderRouter(routing, num_leaders)
    running: list[tuple[int, int]] = []
    last = num_leaders - 1
    for what, value in events:
        if what == "come":
            loads = [0] * num_leaders
            for leader, tokens in running:
                cost = {"round_robin": 0, "least_requests": 1, "least_tokens": tokens}
                loads[leader] += cost[routing.value]
            chosen = router.take(value)
            assert loads[chosen] == min(loads)
            # Whoever is passed over between the last one and this one had more to do.
            for i in range(1, (chosen - last - 1) % num_leaders + 1):
                assert loads[(last + i) % num_leaders] > loads[chosen]
            running.append((chosen, value))
            last = chosen
        elif running:
            router.give_back(*running.pop(value % len(running)))
    for leader, tokens in running:
        router.give_back(leader, tokens)
    assert router.loads == [0] * num_leaders


@pytest.mark.feature("P08")
def test_each_pool_has_a_routing_of_its_own() -> None:
    config = deploy_config({"prefill.routing": "least_tokens"})
    assert [pool.routing for pool in config.pools] == [Routing.LEAST_TOKENS, Routing.LEAST_REQUESTS]
