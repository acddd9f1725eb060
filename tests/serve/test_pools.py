"""What a pool tells Ray Serve of its health."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from cluster.actors.rank_group import RankDied
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
