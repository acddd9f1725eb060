"""`PrefixIndex`: which blocks an engine has cached, as those know it who choose an engine.

A block is known by the first 8 bytes of its digest (`blocks.py`), which chance makes equal for no
two of a cache's in ages; who is misled by one that was found on purpose chooses a slower engine.
Changes are numbered, so that a report of some hundred blocks a second has only what its reader
lacks:

1. The engine's step thread notes each block that is cached or is no more (`PrefixFeed.changes`).
2. Its rank is asked for what changed since a number (`PrefixFeed.since`), four times a second.
3. The status board applies that to its own index, and says which number it has got to.
4. An ingress tells which number it has, and gets from the board what changed since.

Who is new, or has missed what is not known any more, gets the whole, of at most `MAX_PREFIXES`
blocks.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from threading import Lock

Prefix = int
"""The first bytes of a block's digest: of its tokens, all before them, their salt and adapter."""
PREFIX_BYTES = 8
MAX_PREFIXES = 1 << 17
"""Of one engine: two million tokens in blocks of 16, one MiB on the wire. Once so many are known,
more are passed over until some of them are evicted."""
MAX_REMOVED = 1 << 14
"""Evictions that are remembered for readers who have not heard of them."""
PACKED_AT_ONCE = 2048
"""Other threads may run between them: the whole takes some milliseconds."""


def prefix_of(digest: bytes) -> Prefix:
    return int.from_bytes(digest[:PREFIX_BYTES], "little")


@dataclass(frozen=True)
class PrefixUpdate:
    """What changed after change `since` up to change `until`; after 0: all that is cached. No block
    is among both."""

    since: int
    until: int
    added: bytes
    removed: bytes


class PrefixIndex:
    """A set of prefixes that remembers its changes. `number` is of the last one. Invariant: a
    prefix is in at most one of `_added` and `_removed`, and both are in the order of numbers."""

    def __init__(self) -> None:
        self.number = 0
        self._added: dict[Prefix, int] = {}
        self._removed: dict[Prefix, int] = {}
        self._forgotten = 0
        """Not all removals up to this number are known any more."""

    def __contains__(self, prefix: Prefix) -> bool:
        return prefix in self._added

    def __len__(self) -> int:
        return len(self._added)

    def add(self, prefix: Prefix, number: int) -> None:
        if len(self._added) >= MAX_PREFIXES:
            return
        self._removed.pop(prefix, None)
        self._added.pop(prefix, None)
        self._added[prefix] = self.number = number

    def remove(self, prefix: Prefix, number: int) -> None:
        if self._added.pop(prefix, None) is None:
            return
        self._removed[prefix] = self.number = number
        while len(self._removed) > MAX_REMOVED:
            oldest = next(iter(self._removed))
            self._forgotten = self._removed.pop(oldest)

    def clear(self, number: int) -> None:
        """Know of nothing, and have every reader get the whole."""
        self._added, self._removed = {}, {}
        self.number = self._forgotten = number

    def since(self, number: int) -> PrefixUpdate | None:
        """Return what changed since a number; None if nothing did."""
        if number == self.number:
            return None
        if not self._forgotten <= number < self.number:
            number = 0
        if not number:
            return PrefixUpdate(0, self.number, _packed(self._added), b"")
        added, removed = (_newer(known, number) for known in (self._added, self._removed))
        return PrefixUpdate(number, self.number, _packed(added), _packed(removed))

    def apply(self, update: PrefixUpdate) -> None:
        """Take an update, unless it is known or goes on from another number than this index has."""
        if update.until == self.number:
            return
        if not update.since:
            self.clear(update.until)
        elif update.since != self.number:
            return
        for prefix in _unpacked(update.removed):
            self.remove(prefix, update.until)
        for prefix in _unpacked(update.added):
            self.add(prefix, update.until)
        self.number = update.until


class PrefixFeed:
    """An engine's index. The step thread appends to `changes`, at no more cost than that; any other
    thread may ask what changed."""

    def __init__(self) -> None:
        self.changes: deque[tuple[bytes, bool]] = deque(maxlen=MAX_PREFIXES)
        """Digests of blocks, each with whether it is cached from now on."""
        self._index = PrefixIndex()
        self._lock = Lock()

    def since(self, number: int) -> PrefixUpdate | None:
        with self._lock:
            changes, index = self.changes, self._index
            if len(changes) == changes.maxlen:  # nobody asked for minutes, and some are lost
                index.clear(index.number + 1)
            for _ in range(len(changes)):
                digest, is_cached = changes.popleft()
                change = index.add if is_cached else index.remove
                change(prefix_of(digest), index.number + 1)
            return index.since(number)


def _newer(known: dict[Prefix, int], number: int) -> list[Prefix]:
    newest_first = takewhile(lambda prefix: known[prefix] > number, reversed(known))
    return [*newest_first][::-1]


def _packed(prefixes: Iterable[Prefix]) -> bytes:
    return b"".join(_pieces(iter(prefixes)))


def _pieces(prefixes: Iterator[Prefix]) -> Iterator[bytes]:
    while some := [*islice(prefixes, PACKED_AT_ONCE)]:
        yield struct.pack(f"<{len(some)}Q", *some)


def _unpacked(packed: bytes) -> Iterator[Prefix]:
    return (prefix for (prefix,) in struct.iter_unpack("<Q", packed))
