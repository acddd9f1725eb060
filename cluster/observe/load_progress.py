"""How far a process has come before it is ready, how long that took and may yet take."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LoadProgress:
    """What a rank does before it is ready, or to go over to compiled steps."""

    what: str
    done: int
    total: int
    elapsed_s: float = 0.0
    remaining_s: float | None = None
    """At the pace since its first part was done; None before two parts are."""
    dp_rank: int | None = None
    tp_rank: int | None = None
    """The rank; None for the whole group."""

    def aged(self, seconds: float) -> LoadProgress:
        left = None if self.remaining_s is None else max(0.0, self.remaining_s - seconds)
        return replace(self, elapsed_s=self.elapsed_s + seconds, remaining_s=left)


class LoadClock:
    """Times one rank's progress. One thread notes it, any may read."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        now = clock()
        self._now = (what, 0, 1, now, (0, now), now)
        """What, done, total, when it began, the first done and when, the last when: read whole."""

    @property
    def what(self) -> str:
        return self._now[0]

    def note(self, what: str, done: int, total: int) -> None:
        old, old_done, _, began, first, at = self._now
        now = self._clock()
        if what != old:
            self._now = (what, done, total, now, (done, now), now)
        elif done != old_done:
            # The first part also waits for what is done once, such as tracing.
            self._now = (what, done, total, began, first if first[0] else (done, now), now)
        else:
            self._now = (what, done, total, began, first, at)

    def read(self, dp_rank: int | None = None, tp_rank: int | None = None) -> LoadProgress:
        what, done, total, began, (first_done, first_at), at = self._now
        now = self._clock()
        remaining_s = None
        if 0 < first_done < done < total:
            pace_s = (at - first_at) / (done - first_done)
            remaining_s = max(0.0, pace_s * (total - done) - (now - at))
        elif done >= total:
            remaining_s = 0.0
        return LoadProgress(what, done, total, now - began, remaining_s, dp_rank, tp_rank)


def keep_what_is_loaded() -> None:
    """Exclude what is loaded from garbage collection, which stops all other Python."""
    gc.collect()
    gc.freeze()
