"""What a loop over sockets also needs: a doorbell that wakes it, and a budget that ends it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable


class Doorbell:
    """Any thread rings, one poller wakes.

    A file descriptor that polls readable from the first ring until it is cleared.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Forget all rings so far; call it before looking at what was rung for."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class Budget:
    """What a receive loop may take before it does something else.

    A number of frames, and a time that starts with the first of them.
    """

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
        self._num_frames = 0
        self._ends_at = 0.0
