"""Quarantine of requests that may crash ranks: a suspect runs while no other suspect does.

A request may kill its ranks, and with them the requests beside it. After `SHARED_DEATHS` of them a
request is a suspect, and each attempt of it is a trial: one at a time, until it has its next
tokens. One whose ranks die in `MAX_FAILED_TRIALS` trials of its own is the cause, and fails.

As ranks serve all ingresses, there is one trial in the whole application: each ingress asks a
`FairLock` that all of them share (`ingress.py` has it in an actor).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf
from typing import Protocol

from cluster.wire.messages import FinishReason

MAX_LOSSES = 3
"""Losses of KV or outputs in a row, while ranks are alive, after which a request fails, but not
before `LOSING_S` have passed since the first."""
LOSING_S = 30.0
"""A connection that is cut may be cut again within milliseconds, for as long as a network fails."""
SHARED_DEATHS = 2
"""Deaths of a request's ranks that any request beside it may have caused."""
ONE_EVENT_S = 2.0
"""Two deaths so close to each other count once: a node takes all its engines with it, and a request
that was sent from one to another may have been at both. A third one counts, or a request that kills
ranks at once would meet too many of them."""
MAX_FAILED_TRIALS = 2
"""Deaths of ranks in a request's own trial after which it fails; the first may be a coincidence."""
PROGRESS_TOKENS = 2
"""With so many new ones a trial is over, and losses before them count no more: the first comes from
prefill, the second from decode."""
ASK_PERIOD_S = 0.25
"""How often an ingress asks for the lock, and says that it still has it."""
LOST_AFTER_S = 5.0
"""Who has the lock or waits for it and is silent for so long is taken for dead."""


class CrashHistory:
    """How a request was lost. While it `is_on_trial` no other suspect runs, unless nobody can be
    asked for the lock."""

    def __init__(self) -> None:
        self._num_lost = self._num_failed_trials = self._num_new_tokens = 0
        self._num_deaths = self._num_events = 0
        self._losing_since = self._lost_at = 0.0
        self._died_at = -inf
        """When its ranks last died, if another death may count with that one."""
        self._end: Callable[[], None] | None = None

    def __str__(self) -> str:
        if self._num_failed_trials >= MAX_FAILED_TRIALS:
            return f"its ranks died {self._num_deaths} times"
        return f"lost {self._num_lost} times on its way"

    def add(self, reason: FinishReason, now: float) -> None:
        """Note how an attempt ended, at a time in seconds."""
        self._num_new_tokens = 0
        if reason == FinishReason.DIED:
            self._num_deaths += 1
            self._num_failed_trials += self.is_on_trial
            is_same = now - self._died_at < ONE_EVENT_S
            self._num_events += not is_same
            self._died_at = -inf if is_same else now
        else:
            self._losing_since = self._losing_since if self._num_lost else now
            self._lost_at = now
            self._num_lost += 1

    @property
    def is_suspect(self) -> bool:
        """Whether its ranks died so often that it may be the cause."""
        return self._num_events >= SHARED_DEATHS

    @property
    def is_too_long(self) -> bool:
        """Whether the request fails instead of being submitted again."""
        is_losing = self._lost_at - self._losing_since >= LOSING_S
        is_lost = is_losing and self._num_lost >= MAX_LOSSES
        return is_lost or self._num_failed_trials >= MAX_FAILED_TRIALS

    @property
    def is_on_trial(self) -> bool:
        return self._end is not None

    def begin_trial(self, end: Callable[[], None]) -> None:
        self._end = end

    def count(self, num_tokens: int) -> None:
        """Note new tokens of the attempt."""
        self._num_new_tokens += num_tokens
        if self._num_new_tokens >= PROGRESS_TOKENS:
            self._num_lost = 0
            self.end_trial()

    def end_trial(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()


class SharedLock(Protocol):
    """One ingress's way to the `FairLock` of all. `take` returns whether it has it, and true where
    nobody can be asked: nothing here raises."""

    async def take(self) -> bool: ...
    def give_back(self) -> None: ...


class Quarantine:
    """Suspects of one ingress, one after another. Belongs to its event loop."""

    def __init__(self, lock: SharedLock | None = None) -> None:
        """Start with nobody on trial; without a lock, this ingress is alone."""
        self._lock = lock
        self._mine = asyncio.Lock()
        self._keeping: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def attempt(self, history: CrashHistory) -> AsyncIterator[None]:
        """Run an attempt; that of a suspect is a trial, and waits for those before it."""
        if not history.is_suspect:
            yield
            return
        await self._enter()
        history.begin_trial(self._leave)
        try:
            yield
        finally:
            history.end_trial()

    async def _enter(self) -> None:
        await self._mine.acquire()
        try:
            while not await self._take():
                await asyncio.sleep(ASK_PERIOD_S)
        except BaseException:
            self._give_back()
            raise
        self._keeping = asyncio.get_running_loop().create_task(self._keep())

    def _leave(self) -> None:
        assert self._keeping is not None, "quarantine: wanted a trial, found none"
        self._keeping.cancel()
        self._keeping = None
        self._give_back()

    async def _take(self) -> bool:
        return self._lock is None or await self._lock.take()

    def _give_back(self) -> None:
        if self._lock is not None:
            self._lock.give_back()
        self._mine.release()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(ASK_PERIOD_S)
            await self._take()


class FairLock:
    """One holder at a time among processes, in the order in which they asked. Who has it or waits
    for it asks again and again; whoever is silent for `LOST_AFTER_S` loses it. Nothing is kept: if
    this is made anew, two may have it for a moment."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked_at: dict[str, float] = {}
        """Of all that want it, in the order of their first asking: the first one has it."""

    def take(self, name: str) -> bool:
        """Return whether this one has it, which it then keeps until `give_back`."""
        now = self._clock()
        self._asked_at[name] = now
        for other, asked_at in list(self._asked_at.items()):
            if now - asked_at > LOST_AFTER_S:
                del self._asked_at[other]
        return next(iter(self._asked_at)) == name

    def give_back(self, name: str) -> None:
        """Let the next one have it, or wait no longer."""
        self._asked_at.pop(name, None)
