"""Work beside the event loop: bounded, abandoned when nobody waits, and never in the way."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from serve import threads as threads_module
from serve.admission import Overloaded
from serve.threads import LONG, MAX_INLINE, Abandoned, Check, WorkThreads


def test_small_work_is_done_at_once_and_other_work_in_threads() -> None:
    async def main() -> list[bool]:
        threads = WorkThreads()
        here = threading.get_ident()
        sizes = (MAX_INLINE, MAX_INLINE + 1, LONG + 1)
        return [await threads.run(size, lambda _: threading.get_ident() == here) for size in sizes]

    assert asyncio.run(main()) == [True, False, False]


def test_short_work_does_not_wait_for_long_work() -> None:
    async def main() -> float:
        threads, release = WorkThreads(), threading.Event()
        long = [
            asyncio.create_task(threads.run(LONG + 1, lambda _: release.wait(10))) for _ in range(3)
        ]
        await asyncio.sleep(0.05)
        began = time.monotonic()
        await threads.run(LONG, lambda _: None)
        took_s = time.monotonic() - began
        release.set()
        await asyncio.gather(*long)
        return took_s

    assert asyncio.run(main()) < 1


def test_only_so_much_long_work_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_module, "MAX_LONG_WAITING", 2)

    async def main() -> None:
        threads, release = WorkThreads(), threading.Event()
        running = [
            asyncio.create_task(threads.run(LONG + 1, lambda _: release.wait(10))) for _ in range(2)
        ]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="at most 2 long requests"):
            await threads.run(LONG + 1, lambda _: None)
        release.set()
        await asyncio.gather(*running)
        await threads.run(LONG + 1, lambda _: None)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cancelled", "too slow"])
def test_work_that_nobody_waits_for_stops_at_its_next_check(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = threading.Event()

    def work(check: Check) -> None:
        try:
            while True:
                check()
                time.sleep(0.005)
        except Abandoned:
            stopped.set()

    async def main() -> None:
        task = asyncio.create_task(WorkThreads().run(LONG + 1, work))
        await asyncio.sleep(0.05)
        if how == "cancelled":
            task.cancel()
        with pytest.raises((asyncio.CancelledError, Overloaded)):
            await task

    monkeypatch.setattr(threads_module, "WORK_TIMEOUT_S", 0.1)
    asyncio.run(main())
    assert stopped.wait(5)
