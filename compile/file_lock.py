"""A lock among the processes and threads of a machine, or of all that share a file system."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.02
"""How often a waiting process tries a lock: short against a build, long against a file."""


@contextmanager
def file_lock(path: Path, wait_s: float) -> Iterator[bool]:
    """Hold a lock that ends with its process; yield whether it was acquired within `wait_s`."""
    try:
        file = path.open("ab")
    except OSError:  # a directory that can only be read
        yield False
        return
    with file:
        yield _acquire(file.fileno(), time.monotonic() + wait_s)


def _acquire(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        except OSError:  # a filesystem without locks
            return False
        else:
            return True
