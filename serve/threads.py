"""Threads for work that would block the event loop.

Parsing, templating, tokenizing and the writing of long answers run here. Short work has threads of
its own and never waits for long work; the queue is bounded, and so is how long work may take. A
thread cannot be ended from outside: work that may take long calls its `check` between two parts,
and stops there once its result is not wanted any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from serve.admission import Overloaded

T = TypeVar("T")
Check = Callable[[], None]
"""Raises where the work is not wanted any more."""

MAX_INLINE = 2000
"""Characters or bytes that are handled on the event loop: about a millisecond of tokenizing."""
LONG = 256 * 1024
"""Characters or bytes above which work is long."""
MAX_LONG_WAITING = 16
"""Pieces of long work at once: one runs, the others wait; more get 429."""
WORK_TIMEOUT_S = 30.0
"""How long work may wait and run in a thread; then its request gets 429."""
RETRY_AFTER_S = 5.0
"""What such a client is told to wait."""
NUM_SHORT_THREADS = 2


class Abandoned(Exception):
    """The result of the work is not wanted any more."""


class WorkThreads:
    """The threads of one ingress. Must be used from one event loop."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(NUM_SHORT_THREADS, "short-work")
        self._long = ThreadPoolExecutor(1, "long-work")
        self._num_long = 0

    async def run(self, size: int, work: Callable[[Check], T]) -> T:
        """Return what `work` returns.

        Args:
            size: of what it reads or writes, in characters or bytes.

        Raises:
            Overloaded: too much long work waits, or this did not end in `WORK_TIMEOUT_S`.
        """
        if size <= MAX_INLINE:
            return work(_always_wanted)
        if size <= LONG:
            return await _run(self._short, work)
        if self._num_long >= MAX_LONG_WAITING:
            wanted = f"at most {MAX_LONG_WAITING} long requests being read or written"
            raise Overloaded(RETRY_AFTER_S, f"wanted {wanted}, found one more")
        self._num_long += 1
        try:
            return await _run(self._long, work)
        finally:
            self._num_long -= 1


async def _run(executor: ThreadPoolExecutor, work: Callable[[Check], T]) -> T:
    is_wanted = True

    def check() -> None:
        if not is_wanted:
            raise Abandoned

    future = asyncio.get_running_loop().run_in_executor(executor, work, check)
    try:
        async with asyncio.timeout(WORK_TIMEOUT_S):
            return await future
    except TimeoutError as error:
        message = f"wanted a request that is read in {WORK_TIMEOUT_S:g} s, found it unfinished"
        raise Overloaded(RETRY_AFTER_S, message) from error
    finally:
        is_wanted = False
        # A future holds its error, whose traceback holds this frame, which holds the input: a cycle
        # that would stay until garbage is collected.
        del future


def _always_wanted() -> None:
    return None
