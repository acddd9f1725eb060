"""The memory of CPU step graphs. A tensor placed in a pool owns its bytes as long as it or a view
of it is held. Segments are never given back, because a replay relies on every address in them."""

from __future__ import annotations

import bisect
import collections
import ctypes
import gc
import mmap
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from compile.graphs.boundary import map_tensors


class CpuGraphPool:
    """Memory at fixed addresses that graphs share. With `poison` every block is filled with NaN, or
    with the extreme integer, when it is handed out, and by a replay where the captured step let go
    of it."""

    device = torch.device("cpu")

    def __init__(self, *, poison: bool = True, segment_bytes: int = 1 << 20) -> None:
        self.poison = poison
        self._arena = Arena(segment_bytes)
        # A finalizer may run inside of any allocation, this pool's too: it only notes the block.
        self._let_go: collections.deque[Block] = collections.deque()

    @property
    def num_bytes(self) -> int:
        return self._arena.num_bytes

    def trim(self) -> None:
        gc.collect()

    def release_cache(self) -> None:
        """Do nothing: outside of pools no memory is kept."""

    def weak_ref(self, value: Any) -> Any:
        """Return `value` with its tensors of this pool as aliases, which own nothing."""
        return map_tensors(lambda t: self.alias(t) if self.owns(t) else t, value)

    def owns(self, tensor: torch.Tensor) -> bool:
        return self._arena.find(tensor.untyped_storage().data_ptr(), 0) is not None

    def place(self, num_bytes: int) -> tuple[Block, torch.UntypedStorage]:
        block = self._arena.allocate(num_bytes)
        memory = self._arena.memory(block)
        weakref.finalize(memory, self._let_go.append, block).atexit = False
        return block, torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def reclaim(self) -> list[Block]:
        """Free the blocks that nothing holds any more; return them."""
        freed = []
        while self._let_go:
            freed.append(self._let_go.popleft())
            self._arena.release(freed[-1])
        return freed

    def bytes_of(self, block: Block) -> torch.Tensor:
        return torch.frombuffer(self._arena.memory(block), dtype=torch.uint8)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same elements that owns nothing. One from outside of the pool must
        not be touched once its owner is gone."""
        if tensor.numel() == 0:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        storage = tensor.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        memory: Any = self._arena.find(address, num_bytes)
        if memory is None:
            memory = (ctypes.c_char * num_bytes).from_address(address)
        # Compiled pieces and in-place ops treat inference tensors differently.
        with torch.inference_mode(tensor.is_inference()):
            return view_of(torch.frombuffer(memory, dtype=torch.uint8).untyped_storage(), tensor)


def view_of(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor that lies in `storage` as `like` lies in its own."""
    empty = torch.empty(0, dtype=like.dtype)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


def poison_value(dtype: torch.dtype) -> float | int:
    """Return a value that shows in every result that it enters."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return True
    limits = torch.iinfo(dtype)
    return limits.min or limits.max


ALIGNMENT = 64
"""A cache line, and the widest vector: kernels take the same path as on torch's own memory."""


@dataclass(frozen=True)
class Block:
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
    """Hands out blocks of memory, best fit first. Invariant: live blocks are disjoint, and what
    they do not cover is in some segment's gaps. The same sequence of calls gives the same
    blocks."""

    def __init__(self, segment_bytes: int = 1 << 20) -> None:
        """Reserve nothing yet; a segment is `segment_bytes` long, or as long as its first block."""
        self._segment_bytes = segment_bytes
        self._segments: list[_Segment] = []

    @property
    def num_bytes(self) -> int:
        return sum(len(segment.memory) for segment in self._segments)

    def allocate(self, num_bytes: int) -> Block:
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
        """Return the bytes at an address as `memory` does, or None if they are not ours."""
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
