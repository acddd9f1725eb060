"""How much of a piecewise step is spent between its replayed pieces.

Replaying pieces does not speed up what runs between them, in prefill attention with its metadata.
Host seconds: on a GPU a replay takes as long as launching it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class GapTimer:
    """Sums up host time of piecewise steps. Belongs to the step thread; any thread may read it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.num_steps = 0
        self.last_share = 0.0
        """Of the last step that was timed."""
        self._replayed_s = 0.0
        self._steps_s = 0.0
        self._gaps_s = 0.0

    @property
    def share(self) -> float:
        """The share of gaps in all steps so far; 0 before the first one."""
        return self._gaps_s / self._steps_s if self._steps_s else 0.0

    def replay(self, graph: Any) -> None:
        """Replay the graph of one piece of the current step, and book how long that took."""
        began = self._clock()
        graph.replay()
        self._replayed_s += self._clock() - began

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a step. One that fails is not booked."""
        self._replayed_s, began = 0.0, self._clock()
        yield
        seconds = self._clock() - began
        gaps = max(0.0, seconds - self._replayed_s)
        self.num_steps += 1
        self.last_share = gaps / seconds if seconds else 0.0
        self._steps_s += seconds
        self._gaps_s += gaps
