"""What a receive loop may take before it does something else."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """So many frames, and so much time from the first of them on."""

    def __init__(
        self, max_frames: int, max_s: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._max_frames = max_frames
        self._max_s = max_s
        self._clock = clock
        self.renew()

    def take(self) -> bool:
        """Count a frame; return whether the budget allows it. It always allows the first."""
        self._num_frames += 1
        if self._num_frames == 1:
            self._ends_at = self._clock() + self._max_s
            return True
        return self._num_frames <= self._max_frames and self._clock() < self._ends_at

    def renew(self) -> None:
        """Start anew."""
        self._num_frames = 0
        self._ends_at = 0.0
