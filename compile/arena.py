"""A growing arena of bytes: blocks at addresses that never move.

The one thing to know: memory is reserved in segments and never given back, as a graph's pool on a
GPU does it: whoever replays a graph relies on every address in it.
"""

from __future__ import annotations

import bisect
import mmap
from dataclasses import dataclass, field

import torch

ALIGNMENT = 64
"""A cache line, and the widest vector: kernels take the same path as on torch's own memory."""


@dataclass(frozen=True)
class Block:
    """Bytes [start, stop) of a segment."""

    segment: int
    start: int
    stop: int


@dataclass
class _Segment:
    """Contiguous memory. Invariant: `gaps` are its free ranges, ascending, none beside another."""

    memory: mmap.mmap
    address: int
    gaps: list[tuple[int, int]] = field(default_factory=list)


class Arena:
    """Hands out blocks of memory, best fit first.

    Invariant: live blocks are disjoint, and what they do not cover is in some segment's gaps.
    The same sequence of calls gives the same blocks.
    """

    def __init__(self, segment_bytes: int = 1 << 20) -> None:
        """Reserve nothing yet; a segment is `segment_bytes` long, or as long as its first block."""
        self._segment_bytes = segment_bytes
        self._segments: list[_Segment] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that are reserved."""
        return sum(len(segment.memory) for segment in self._segments)

    def allocate(self, num_bytes: int) -> Block:
        """Return a block of at least so many bytes."""
        size = -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
        fitting = [
            (stop - start, i, start)
            for i, segment in enumerate(self._segments)
            for start, stop in segment.gaps
            if stop - start >= size
        ]
        _, index, start = min(fitting) if fitting else (0, self._grow(size), 0)
        gaps = self._segments[index].gaps
        position = bisect.bisect_left(gaps, (start, 0))
        _, stop = gaps.pop(position)
        if start + size < stop:
            gaps.insert(position, (start + size, stop))
        return Block(index, start, start + size)

    def release(self, block: Block) -> None:
        """Take a block back; its bytes may be handed out again."""
        gaps = self._segments[block.segment].gaps
        position = bisect.bisect_left(gaps, (block.start, 0))
        start, stop = block.start, block.stop
        if position < len(gaps) and gaps[position][0] == stop:
            stop = gaps.pop(position)[1]
        if position > 0 and gaps[position - 1][1] == start:
            position -= 1
            start = gaps.pop(position)[0]
        gaps.insert(position, (start, stop))

    def memory(self, block: Block) -> memoryview:
        """Return a block's bytes, in an object of its own that keeps the segment."""
        return memoryview(self._segments[block.segment].memory)[block.start : block.stop]

    def find(self, address: int, num_bytes: int) -> memoryview | None:
        """Return the bytes at an address as `memory` does, or None where they are not ours."""
        for segment in self._segments:
            offset = address - segment.address
            if 0 <= offset < len(segment.memory):
                return memoryview(segment.memory)[offset : offset + num_bytes]
        return None

    def _grow(self, size: int) -> int:
        """Reserve a segment that holds `size` bytes; return its index."""
        length = max(size, self._segment_bytes)
        # Private: a forked process must not write into this one's graphs.
        memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._segments.append(_Segment(memory, address, [(0, length)]))
        return len(self._segments) - 1
