"""A doorbell: any thread rings, one poller wakes."""

from __future__ import annotations

import contextlib
import os


class Doorbell:
    """A file descriptor that polls readable from the first ring until it is cleared."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._fd

    def ring(self) -> None:
        """Wake the poller."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Forget all rings so far; call it before looking at what was rung for."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Release the descriptor."""
        os.close(self._fd)
