"""Files that several processes write and read at once, any of which may be killed: each appears
whole or not at all, and text carries its own checksum in the first line."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

POLL_S = 0.02
"""How often a waiting process tries a lock: short against a build, long against a file."""
_MARK = "# sha256 "


class CorruptFileError(RuntimeError):
    """A file is not what was written. The message is one line: `PATH: wanted ..., found ...`."""


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file that readers see whole; a process that is killed leaves one named `.tmp-*`."""
    handle, name = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def write_checked(path: Path, text: str) -> None:
    """Write text under a first line that holds its checksum: a comment in Python."""
    write_atomic(path, f"{_MARK}{_digest(text)}\n{text}".encode())


def read_checked(path: Path) -> str:
    """Return what `write_checked` wrote; CorruptFileError: this is not it."""
    try:
        first, _, text = path.read_bytes().decode().partition("\n")
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{path}: wanted text, found {error.reason}") from error
    if first != f"{_MARK}{_digest(text)}":
        raise CorruptFileError(f"{path}: wanted the checksum of its text, found {first[:80]!r}")
    return text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


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
