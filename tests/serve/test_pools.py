"""What a pool tells Ray Serve of its health."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from cluster.actors.rank_group import GroupReport, RankDied
from serve import pools
from serve.pools import Pool


class PoolWithoutRanks:
    """Constructing a real one starts its ranks."""

    check_health = Pool.check_health
    _spawn = Pool._spawn

    def __init__(self, state: str, error: str = "") -> None:
        self._state, self._error = state, error
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


class Group:
    """A rank group that reports once, starts as it is told, and ends at once."""

    def __init__(self, epoch: int, pool: PoolWithoutRanks | None = None) -> None:
        self.epoch, self.actors, self.is_stopped = epoch, list[Any](), False
        self._pool = pool
        self._reports = [GroupReport([f"rank of epoch {epoch}"], [])]  # type: ignore[list-item]

    async def report(self) -> GroupReport:
        if not self._reports or self._pool is not None:
            raise TimeoutError
        return self._reports.pop()

    async def start(self) -> None:
        if self._pool is not None:
            self._pool._state = "stopping"

    async def stop(self) -> None:
        self.is_stopped = True

    async def wait_for_end(self) -> str:
        return "rank dp=0 tp=0 epoch=0 ended"


class PoolOfGroups(PoolWithoutRanks):
    """What watches and reports a group, without Ray."""

    _report, _watch_group, _is_stopping = Pool._report, Pool._watch_group, Pool._is_stopping
    _lose, _fail = Pool._lose, Pool._fail
    _replica_id = "r"

    def __init__(self) -> None:
        super().__init__("ready")
        self._pool = PoolConfig  # its name is all that is asked for
        self._group = Group(0)
        self._open: dict[str, Any] = {}
        self._board = self
        self.pushed: list[tuple[str, list[Any]]] = []

    def _new_group(self, epoch: int) -> Group:
        return Group(epoch, self)

    async def push(self, report: Any, actors: list[Any]) -> None:
        self.pushed.append((report.state, report.group.ranks))


class PoolConfig:
    name = "mixed"


@pytest.mark.feature("P14")
def test_ranks_of_a_group_that_ended_are_told_of_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "REPORT_PERIOD_S", 0.01)
    pool = PoolOfGroups()

    async def scenario() -> None:
        pool._spawn(pool._report())  # type: ignore[misc]
        await asyncio.sleep(0.05)
        pool._group, pool._state = Group(1, pool), "restarting"
        await asyncio.sleep(0.05)
        pool._tasks[0].cancel()

    asyncio.run(scenario())
    states = [state for state, _ in pool.pushed]
    # One that does not answer in time keeps its figures, and is stuck.
    assert states[:2] == ["ready", "stuck"] and states[-1] == "restarting"
    assert all(bool(ranks) == (state != "restarting") for state, ranks in pool.pushed)


def test_a_pool_that_is_stopped_while_its_group_is_rebuilt_keeps_no_ranks() -> None:
    pool = PoolOfGroups()
    asyncio.run(pool._watch_group())  # type: ignore[misc]
    assert pool._state == "stopping"
    assert pool._group.epoch == 1 and pool._group.is_stopped
