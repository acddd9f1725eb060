"""The simulated clock, the loop that runs on it, and the processes that it runs.

1. `SimLoop` is an asyncio loop whose time jumps to the next event; what the owner and the clients
   do are ordinary tasks on it.
2. `Process` is a rank's process: a greenlet. Its code blocks like a real rank's; each wait
   switches back to the loop, which goes on with whatever comes next.

Events of one time run in the order in which they were asked for, so that a schedule is a function
of its seed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from heapq import heappop, heappush
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

MAX_ROUNDS = 20
"""A task that is cancelled may wait for others."""


class Violation(AssertionError):
    """What a simulation found: `kind` in a word or two, and the particulars."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind

    def __str__(self) -> str:
        return ": ".join(self.args)


class SimLoop(asyncio.AbstractEventLoop):
    """An event loop without I/O. Invariant: `now` never goes back."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._ready: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        """What runs before time goes on."""
        self._num_asked = 0
        self._error: BaseException | None = None
        self._is_closing = False
        self._tasks: list[asyncio.Task[Any]] = []

    def after(self, delay: float, call: Callable[..., Any], *args: Any) -> None:
        """Call in so many seconds; cheaper than `call_later`, and not to be cancelled."""
        self._num_asked += 1
        heappush(self._events, (self.now + delay, self._num_asked, call, args))

    def at(self, when: float, call: Callable[..., Any], *args: Any) -> None:
        """Call at this very time: a delay that is added again may come out a bit earlier."""
        self._num_asked += 1
        heappush(self._events, (when, self._num_asked, call, args))

    def run(self, end: float) -> bool:
        """Run until nothing is left to do; tell whether that was before `end`."""
        asyncio._set_running_loop(self)
        events, ready = self._events, self._ready
        try:
            while ready or events:
                if ready:
                    call, args = ready.popleft()
                elif events[0][0] <= end:
                    self.now, _, call, args = heappop(events)
                else:
                    return False
                call(*args)
                if self._error is not None:
                    raise self._error
            return True
        finally:
            asyncio._set_running_loop(None)

    def close(self) -> None:
        """End what is left, whatever it makes of that."""
        self._is_closing, self._error = True, None
        for _ in range(MAX_ROUNDS):
            left = [task for task in self._tasks if not task.done()]
            if not left:
                return
            for task in left:
                task.cancel()
            with suppress(Exception):
                self.run(self.now)

    def stop(self) -> None:
        """Let `run` end after this event, whatever is left to do."""
        if not self._is_closing:
            self._ready.clear()
            self._events.clear()

    def fail(self, error: BaseException) -> None:
        """Let `run` raise after this event: for whoever must not raise itself."""
        if not self._is_closing:
            self._error = self._error or error

    # --- what asyncio needs of a loop -------------------------------------------------------

    def time(self) -> float:
        return self.now

    # What is called soon is never cancelled here, and nothing looks at context variables.
    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        self._ready.append((callback, args))
        return None  # type: ignore[return-value]

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(self.now + delay, callback, args, self, context)
        self.after(delay, _run_handle, handle)
        return handle

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_later(when - self.now, callback, *args, context=context)

    def run_in_executor(
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Call at once: what runs on threads here blocks for a moment, and does nothing else."""
        done = self.create_future()
        done.set_result(func(*args))
        return done

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **_: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self)
        self._tasks.append(task)
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception") or RuntimeError(context["message"])
        if not isinstance(error, asyncio.CancelledError):  # of a `gather` that was itself cancelled
            self.fail(error)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Leave it in the queue, where it will do nothing."""


def _run_handle(handle: asyncio.Handle) -> None:
    if not handle.cancelled():
        handle._run()


class Process:
    """One rank's process. All methods but `wait` and `sleep` are called from the loop.

    Invariant: a stopped process runs no code, whatever wakes it, until it is continued.
    """

    def __init__(self, loop: SimLoop, main: Callable[[], None]) -> None:
        self._loop = loop
        self._hub = getcurrent()
        self._greenlet = greenlet(main)
        self._woken = -1
        """The wait that would have ended if the process were not stopped."""
        self._error: Exception | None = None
        self._num_stops = 0
        self._on_continue: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.ticket = 0
        """Identifies the wait that comes next, or the one under way."""
        self.is_dead = False

    def wake(self, ticket: int) -> None:
        """End the wait of this ticket, if it has not ended yet."""
        if ticket != self.ticket or self.is_dead:
            return
        if self._num_stops:
            self._woken = ticket
            return
        self.ticket += 1
        self._greenlet.switch()

    def interrupt(self, error: Exception) -> None:
        self._error = error
        self.wake(self.ticket)

    def call(self, callback: Callable[..., None], *args: Any) -> None:
        """Run a call on another thread of the process, as soon as it is not stopped."""
        if self.is_dead:
            return
        if self._num_stops:
            self._on_continue.append((callback, args))
        else:
            callback(*args)

    def stop(self) -> None:
        """Do what SIGSTOP does; two who stop it must both let it go on."""
        self._num_stops += 1

    def resume(self) -> None:
        """Do what SIGCONT does."""
        self._num_stops -= 1
        if self._num_stops:
            return
        calls, self._on_continue = self._on_continue, []
        for callback, args in calls:
            self.call(callback, *args)
        self.wake(self._woken)

    def kill(self) -> None:
        """Do what SIGKILL does."""
        if not self.is_dead:
            self.is_dead = True
            self._greenlet.throw(GreenletExit)

    def wait(self) -> None:
        """Inside the process: wait until something wakes it."""
        self._hub.switch()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def sleep(self, delay: float) -> None:
        """Inside the process: let time pass."""
        self._loop.after(delay, self.wake, self.ticket)
        self._hub.switch()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
