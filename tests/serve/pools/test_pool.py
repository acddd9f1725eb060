"""What a pool tells Ray Serve of its health."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.actors.failed_starts import FailedStart
from cluster.actors.rank_group import GroupReport, RankDied
from cluster.group.context import RankPlace
from cluster.rank.status import RankStats
from cluster.wire.credentials import Credentials
from serve.pools import pool as pools
from serve.pools.pool import Pool
from serve.pools.router import PoolUnavailable
from serve.pools.routing import LeaderRouter, Routing


class PoolWithoutRanks:
    """Constructing a real one starts its ranks."""

    check_health, generate = Pool.check_health, Pool.generate
    _spawn, _enter = Pool._spawn, Pool._enter

    def __init__(self, state: str, error: str = "") -> None:
        self._is_ready = asyncio.Event()
        self._enter(state, error)
        self._tasks: list[asyncio.Task[None]] = []


async def broken() -> None:
    raise ValueError("inbox: wanted one, found none")


async def health_beside(pool: Any, *tasks: Coroutine[Any, Any, None]) -> None:
    for task in tasks:
        pool._spawn(task)
    await asyncio.sleep(0.01)
    try:
        await pool.check_health()
    finally:
        for task in pool._tasks:
            task.cancel()


def test_a_pool_is_healthy_as_long_as_its_tasks_run() -> None:
    asyncio.run(health_beside(PoolWithoutRanks("ready"), asyncio.sleep(60), asyncio.sleep(0)))


def test_a_pool_that_nobody_watches_any_more_is_not() -> None:
    with pytest.raises(ValueError, match="inbox: wanted one"):
        asyncio.run(health_beside(PoolWithoutRanks("ready"), asyncio.sleep(60), broken()))


def test_a_pool_that_gave_up_says_why() -> None:
    with pytest.raises(RankDied, match="rank dp=0 tp=1"):
        asyncio.run(health_beside(PoolWithoutRanks("failed", "rank dp=0 tp=1 epoch=2: stuck")))


class PoolOfOneLeader(PoolWithoutRanks):
    """What `generate` asks for; its leader ends every request as soon as it comes."""

    def __init__(self, state: str) -> None:
        super().__init__(state, "rank dp=0 tp=1 epoch=0 ended")
        self._router = LeaderRouter(Routing.LEAST_REQUESTS, 1)
        self._leaders = [self]
        self._credentials, self._config_hash = Credentials("ours", b"s" * 32), "ours"
        self._open: dict[str, asyncio.Future[Any]] = {}
        self.closed, self._hold_s = False, 0.01

    async def send_multipart(self, frame: list[bytes]) -> None:
        output = SimpleNamespace(finish_reason="length")
        self._open["r"].set_result(output)


@pytest.mark.feature("P14")
def test_a_request_waits_a_while_for_ranks_that_are_rebuilt() -> None:
    """A refusal at once would draw all requests here, past a replica that is healthy."""

    async def scenario(hold_s: float) -> str:
        pool = PoolOfOneLeader("restarting")
        pool._hold_s = hold_s
        asyncio.get_running_loop().call_later(0.1, pool._enter, "ready")
        return await pool.generate("r", b"", "ours")  # type: ignore[misc]

    assert asyncio.run(scenario(hold_s=30)) == "length"
    with pytest.raises(PoolUnavailable, match="found it restarting: rank dp=0 tp=1 epoch=0 ended"):
        asyncio.run(scenario(hold_s=0.01))


def test_a_request_of_another_deployment_is_not_run() -> None:
    """Its ingress would drop every token; a replica of its own is on its way."""
    pool = PoolOfOneLeader("ready")
    with pytest.raises(PoolUnavailable, match="config_hash: wanted ours, found theirs"):
        asyncio.run(pool.generate("r", b"", "theirs"))  # type: ignore[misc]
    assert not pool._open


class Group:
    """A rank group that reports once, starts as it is told, and ends at once."""

    def __init__(self, epoch: int, pool: PoolWithoutRanks | None = None) -> None:
        self.epoch, self.actors, self.is_stopped = epoch, list[Any](), False
        self.is_named_by_watchdog = False
        self.verdict = ""
        self._pool = pool
        rank = RankStats(RankPlace(epoch=epoch), pid=1, node="", state="ready", step=1)
        self._reports = [GroupReport([rank], [])]

    async def report(self) -> GroupReport:
        if not self._reports or self._pool is not None:
            raise TimeoutError
        return self._reports.pop()

    async def start(self) -> None:
        if self._pool is not None:
            self._pool._enter("stopping")

    async def stop(self) -> None:
        self.is_stopped = True

    async def wait_for_end(self) -> str:
        return "rank dp=0 tp=0 epoch=0 ended"


class PoolOfGroups(PoolWithoutRanks):
    """What watches and reports a group, without Ray."""

    _report, _watch_group, _is_stopping = Pool._report, Pool._watch_group, Pool._is_stopping
    _lose, _fail, _serve = Pool._lose, Pool._fail, Pool._serve
    _replica_id, _config_hash = "r", "ours"

    def __init__(self) -> None:
        super().__init__("ready")
        self._pool = PoolConfig  # its name is all that is asked for
        self._group = Group(0)
        self._open: dict[str, Any] = {}
        self._restarts: Counter[str] = Counter()
        self._is_stuck = False
        self._board = self
        self._failed_starts = self
        self.noted: list[tuple[str, FailedStart]] = []
        self.pushed: list[tuple[str, list[Any]]] = []
        self.in_state_s: list[float] = []

    def _new_group(self, epoch: int) -> Group:
        return Group(epoch, self)

    def note(self, pool: str, failed: FailedStart) -> None:
        self.noted.append((pool, failed))

    async def push(self, report: Any, actors: list[Any]) -> None:
        self.pushed.append((report.state, report.group.ranks))
        self.in_state_s.append(report.in_state_s)

    async def has_pushed(self, state: str) -> None:
        async with asyncio.timeout(30):
            while state not in (told for told, _ in self.pushed):
                await asyncio.sleep(0.01)


class PoolConfig:
    name = "mixed"


@pytest.mark.feature("P14")
def test_ranks_of_a_group_that_ended_are_told_of_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "REPORT_PERIOD_S", 0.01)
    monkeypatch.setattr(pools, "STUCK_AFTER_S", 0.5)
    pool = PoolOfGroups()

    async def scenario() -> None:
        pool._spawn(pool._report())  # type: ignore[misc]
        await pool.has_pushed("stuck")
        await asyncio.sleep(1)
        pool._group = Group(1, pool)
        pool._enter("restarting")
        await pool.has_pushed("restarting")
        pool._tasks[0].cancel()

    asyncio.run(scenario())
    states = [state for state, _ in pool.pushed]
    # One that does not answer in time keeps its figures, and is stuck.
    assert states[:2] == ["ready", "ready"], "one late answer says nothing"
    assert "stuck" in states and states[-1] == "restarting"
    assert all(bool(ranks) == (state != "restarting") for state, ranks in pool.pushed)
    # How long it has been in a state grows until another one begins.
    for old, new in pairwise(zip(states, pool.in_state_s, strict=True)):
        assert (new[1] > old[1]) == (new[0] == old[0]), (old, new)


def test_a_pool_that_is_stopped_while_its_group_is_rebuilt_keeps_no_ranks() -> None:
    pool = PoolOfGroups()
    asyncio.run(pool._watch_group())  # type: ignore[misc]
    assert pool._state == "stopping"
    assert pool._group.epoch == 1 and pool._group.is_stopped


@pytest.mark.feature("E01", "F07")
def test_a_group_that_no_start_can_compile_is_not_rebuilt_and_its_pool_fails() -> None:
    pool = PoolOfGroups()
    group = pool._group
    group.verdict = "compilation.splitting_ops: wanted an op, found 'lockstep::nothing'"
    asyncio.run(pool._watch_group())  # type: ignore[misc]
    assert pool._group is group
    assert pool._state == "failed" and pool._error == "rank dp=0 tp=0 epoch=0 ended"
    assert pool.noted == [("mixed", FailedStart(group.verdict, is_final=True))]
    with pytest.raises(RankDied):
        asyncio.run(pool.check_health())
