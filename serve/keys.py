"""API keys: those given as arguments, and those of a file that is read again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from compile.errors import FieldError

log = logging.getLogger("lockstep.keys")

LOOK_EVERY_S = 1.0
"""How often the file is looked at while requests come."""
MAX_FILE_BYTES = 1 << 20
"""Size of a file of keys."""


class ApiKeys:
    """The known keys, as digests: how long comparing two takes reveals nothing about a key.

    Invariant: a file that cannot be read, or has no key, leaves the keys that were read before.
    """

    def __init__(
        self,
        keys: Iterable[str] = (),
        file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with the keys given, and those of a file; FieldError if it cannot be read."""
        self._given = [_digest(key) for key in keys]
        self._file = file
        self._from_file: list[bytes] = []
        self._stamp: tuple[int, int, int] | None = None
        self._clock = clock
        self._look_at = 0.0
        if file is not None:
            self._read(file)

    def has(self, key: str) -> bool:
        """Return whether a key is known, in the same time for every key."""
        if self._file is not None and self._clock() >= self._look_at:
            try:
                if self._read(self._file):
                    log.info("api_keys_file: read again, %d keys", len(self._from_file))
            except FieldError as error:
                log.error("api_keys_file: %s; the keys that were read before stay", error)
        found, is_known = _digest(key), False
        for known in (*self._given, *self._from_file):
            is_known |= hmac.compare_digest(found, known)
        return is_known

    def _read(self, file: Path) -> bool:
        """Read the file's keys if it has changed; return whether it has."""
        self._look_at = self._clock() + LOOK_EVERY_S
        try:
            found = os.stat(file)
        except OSError as error:
            raise FieldError("api_keys_file", "a file of keys", f"{file}: {error}") from None
        stamp = found.st_mtime_ns, found.st_size, found.st_ino
        if has_changed := stamp != self._stamp:
            self._from_file = [_digest(key) for key in read_keys(file)]
            self._stamp = stamp
        return has_changed


def read_keys(file: Path) -> list[str]:
    """Return the keys in a file: one in a line, without blank lines and those that begin with #."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise FieldError("api_keys_file", "a file of keys", f"{file}: {error}") from None
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise FieldError("api_keys_file", "at least one key, one in a line", f"{file}: none")
    check_keys("api_keys_file", keys)
    return keys


def check_keys(field: str, keys: Iterable[str]) -> None:
    """Refuse keys that cannot come in a header, without repeating them in the error."""
    for number, key in enumerate(keys, start=1):
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            wanted = "keys of printable ASCII characters without spaces"
            raise FieldError(field, wanted, f"another one, number {number}")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
