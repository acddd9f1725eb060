"""What keeps an event loop free.

*Threads.* Parsing, templating, tokenizing and the writing of long answers run there; short work
never waits for long work. A thread cannot be ended from outside: work that may take long calls its
`check` between two parts, and stops there once its result is not wanted any more.

*Throttle.* A turn of the event loop runs everything that is ready: without a throttle, three
hundred requests that arrive together begin before the next token of any stream is delivered.

*Tick.* A chunk of a stream costs Ray's proxy and the ingress more than a token costs a small model.
So the more streams there are, the longer the next tokens of each wait in its mailbox, all of them
for the same tick, and are sent as one chunk.

*Receive loops.* Awaiting a ZeroMQ socket that has frames returns at once and never yields. So every
loop over a socket pauses after a number of frames, or after a time, for one round of everything
else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from cluster.wire.sockets import Budget
from serve.admission import Overloaded

log = logging.getLogger("lockstep.receiving")

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
WORK_RETRY_S = 5.0
"""The `Retry-After` of that 429."""
NUM_SHORT_THREADS = 2
FREE_STREAMS = 4
"""So many streams send each token as it comes."""
CHUNK_COST = 0.001
"""Seconds of a core that a chunk costs Ray's Python proxy and the ingress together."""
HAPROXY_CHUNK_COST = 0.00018
"""The same behind HAProxy, beside an engine on the same cores. Where there are cores to spare it is
0.00006: most of it is what the engine's threads, which wait for one another, lose by a chunk. With
twice as much, 32 streams wait longer and the engine is no faster; with half, it is slower."""
CHUNK_SHARE = 0.25
"""Of one core, for chunks of all streams of an ingress."""
MAX_TICK_S = 0.1
"""The longest that a token waits for its stream's next chunk; more would show on a screen."""
MAX_FRAMES = 1024
"""Frames, or outputs, received before the loop does everything else once. Each turn has room for a
step of each engine, so nothing piles up."""
MAX_S = 0.01
"""How long frames are received before the loop does everything else once."""


class Abandoned(Exception):
    """The result of the work is not wanted any more."""


class WorkThreads:
    """The threads of one ingress. Must be used from one event loop."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(NUM_SHORT_THREADS, "short-work")
        self._long = ThreadPoolExecutor(1, "long-work")
        self._num_long = 0

    async def run(self, size: int, work: Callable[[Check], T]) -> T:
        """Return what `work` returns. size: of what it reads or writes, in characters or bytes.
        Overloaded if too much long work waits, or this did not end in `WORK_TIMEOUT_S`."""
        if size <= MAX_INLINE:
            return work(lambda: None)
        if size <= LONG:
            return await _run(self._short, work)
        if self._num_long >= MAX_LONG_WAITING:
            wanted = f"at most {MAX_LONG_WAITING} long requests being read or written"
            raise Overloaded(WORK_RETRY_S, f"wanted {wanted}, found one more")
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
        raise Overloaded(WORK_RETRY_S, message) from error
    finally:
        is_wanted = False
        # A future holds its error, whose traceback holds this frame, which holds the input: a cycle
        # that would stay until garbage is collected.
        del future


class LoopThrottle:
    """Lets a few waiters through in each turn of the event loop, in the order of their arrival."""

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Wait for a turn of the loop that has room, which may be this one."""
        if not self.take():
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn

    def take(self) -> bool:
        """Return whether this turn of the loop has room, which is taken."""
        if not self._left:
            return False
        if self._left == self._per_turn:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._left -= 1
        return True

    def _next_turn(self) -> None:
        self._left = self._per_turn
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)
                self.take()


class StreamBatcher:
    """Batches the tokens of streams: sent at once while few streams run, else all together."""

    def __init__(self, chunk_cost: float = CHUNK_COST) -> None:
        """Start without streams. chunk_cost: seconds of a core that each chunk takes."""
        self._chunk_cost = chunk_cost
        self.num_streams = 0
        """Sequences whose tokens are streamed now; one request may have many."""
        self._waiting: list[Callable[[], None]] = []

    @property
    def period_s(self) -> float:
        """Seconds between two ticks: so many that sending takes `CHUNK_SHARE` of a core."""
        if self.num_streams <= FREE_STREAMS:
            return 0.0
        return min(self.num_streams * self._chunk_cost / CHUNK_SHARE, MAX_TICK_S)

    @contextmanager
    def streaming(self, num: int) -> Iterator[None]:
        self.num_streams += num
        try:
            yield
        finally:
            self.num_streams -= num

    def call(self, callback: Callable[[], None]) -> None:
        """Call it at the next tick, or before this returns if there is no reason to wait. A tick
        that comes at once where the last was long ago costs an engine on the same cores a tenth of
        its tokens, and makes no pause of a stream shorter."""
        if (period_s := self.period_s) == 0:
            callback()
            return
        if not self._waiting:
            asyncio.get_running_loop().call_later(period_s, self._fire)
        self._waiting.append(callback)

    def _fire(self) -> None:
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()


def loop_budget() -> Budget:
    """Return what a receive loop may take before the event loop has its turn."""
    return Budget(MAX_FRAMES, MAX_S)


async def yield_if_over_budget(budget: Budget) -> None:
    """Let the event loop do everything else once if the budget is spent."""
    if not budget.take():
        await asyncio.sleep(0)
        budget.renew()
