"""Work beside the event loop is bounded and never in the way; a pace loses no turn."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from serve import event_loop
from serve.admission import Overloaded
from serve.event_loop import (
    CHUNK_COST,
    HAPROXY_CHUNK_COST,
    LONG,
    MAX_INLINE,
    Abandoned,
    Check,
    LoopThrottle,
    StreamBatcher,
    WorkThreads,
)


@asynccontextmanager
async def held(num: int) -> AsyncIterator[WorkThreads]:
    """Threads with so much long work that ends with the block."""
    threads, release = WorkThreads(), threading.Event()
    long = [
        asyncio.create_task(threads.run(LONG + 1, lambda _: release.wait(600))) for _ in range(num)
    ]
    await asyncio.sleep(0.05)
    yield threads
    release.set()
    await asyncio.gather(*long)


async def test_small_work_is_done_at_once_and_other_work_in_threads() -> None:
    threads, here = WorkThreads(), threading.get_ident()
    sizes = (MAX_INLINE, MAX_INLINE + 1, LONG + 1)
    found = [await threads.run(size, lambda _: threading.get_ident() == here) for size in sizes]
    assert found == [True, False, False]


async def test_short_work_does_not_wait_for_long_work() -> None:
    async with held(3) as threads:
        began = time.monotonic()
        await threads.run(LONG, lambda _: None)
        assert time.monotonic() - began < 60


async def test_only_so_much_long_work_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "MAX_LONG_WAITING", 2)
    async with held(2) as threads:
        with pytest.raises(Overloaded, match="at most 2 long requests"):
            await threads.run(LONG + 1, lambda _: None)
    await threads.run(LONG + 1, lambda _: None)


@pytest.mark.parametrize("how", ["cancelled", "too slow"])
async def test_work_that_nobody_waits_for_stops_at_its_next_check(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "WORK_TIMEOUT_S", 0.1)
    stopped = threading.Event()

    def work(check: Check) -> None:
        try:
            while True:
                check()
                time.sleep(0.005)
        except Abandoned:
            stopped.set()

    task = asyncio.create_task(WorkThreads().run(LONG + 1, work))
    await asyncio.sleep(0.05)
    if how == "cancelled":
        task.cancel()
    with pytest.raises((asyncio.CancelledError, Overloaded)):
        await task
    assert await asyncio.to_thread(stopped.wait, 60)


async def turns_of(
    pace: LoopThrottle, num: int, cancelled: frozenset[int] = frozenset()
) -> list[list[int]]:
    """Return who came through in each turn of the loop, where all came at once."""
    turns: list[list[int]] = [[]]

    async def come(i: int) -> None:
        await pace.wait()
        turns[-1].append(i)

    tasks = [asyncio.create_task(come(i)) for i in range(num)]
    await asyncio.sleep(0)
    for i in cancelled:
        tasks[i].cancel()
    while not all(task.done() for task in tasks):
        turns.append([])
        await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    return [turn for turn in turns if turn]


@pytest.mark.parametrize("num", [1, 4, 5, 103])
async def test_few_come_through_at_once_and_all_in_order(num: int) -> None:
    turns = await turns_of(LoopThrottle(4), num)
    assert [i for turn in turns for i in turn] == list(range(num))
    assert all(len(turn) == 4 for turn in turns[:-1])


async def test_who_gives_up_takes_nobodys_turn() -> None:
    gone = frozenset({5, 6, 7, 8, 20})
    turns = await turns_of(LoopThrottle(4), 30, gone)
    assert [i for turn in turns for i in turn] == [i for i in range(30) if i not in gone]
    assert all(len(turn) == 4 for turn in turns[:-1])


async def test_an_idle_pace_keeps_nobody_waiting() -> None:
    pace = LoopThrottle(2)
    for _ in range(5):
        async with asyncio.timeout(0):  # ends at the first turn of the loop
            await pace.wait()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


# --- tick -------------------------------------------------------------------------------------


def test_a_tick_comes_at_once_for_few_streams_and_ever_later_for_more() -> None:
    tick, periods = StreamBatcher(), list[float]()
    for num in (0, 1, 4, 5, 8, 32, 64, 10_000):
        with tick.streaming(num):
            periods.append(tick.period_s)
    assert periods[:3] == [0, 0, 0]
    assert 0 < periods[3] < periods[4] < periods[5]
    assert periods == sorted(periods) and periods[-1] == 0.1
    assert tick.num_streams == 0
    called: list[int] = []
    tick.call(lambda: called.append(1))
    assert called == [1]


def test_a_tick_takes_the_same_share_of_a_core_however_cheap_chunks_are() -> None:
    ticks = StreamBatcher(CHUNK_COST), StreamBatcher(HAPROXY_CHUNK_COST)
    for num in (5, 8, 16):
        for tick, cost in zip(ticks, (CHUNK_COST, HAPROXY_CHUNK_COST), strict=True):
            with tick.streaming(num):
                assert num * cost / tick.period_s == pytest.approx(0.25)


def test_all_streams_wait_for_the_same_tick_whenever_they_come(
    run_in_jumps: Callable[..., Any],
) -> None:
    tick, called_at = StreamBatcher(), list[float]()
    tick.num_streams = 10_000
    assert tick.period_s == 0.1

    async def run() -> None:
        def call() -> None:
            tick.call(lambda: called_at.append(round(loop.time() - 1, 3)))

        loop = asyncio.get_running_loop()
        await asyncio.sleep(1)
        call()
        call()  # of the same step
        for pause_s in (0.03, 0.03, 0.09, 0.12, 0.14):
            await asyncio.sleep(pause_s)
            call()
        await asyncio.sleep(1)

    run_in_jumps(run())
    assert called_at == [0.1, 0.1, 0.1, 0.1, 0.25, 0.37, 0.51]
