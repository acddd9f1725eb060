"""The memory of CPU step graphs.

The one thing to know: a tensor placed in a pool owns its bytes as long as anybody holds it or a
view of it. Then they are free, for later ops of the same graph and for other graphs, as in the
private pool of a CUDA graph. A graph itself holds aliases, which own nothing.
"""

from __future__ import annotations

import collections
import ctypes
import gc
import weakref
from typing import Any

import torch

from compile.arena import Arena, Block
from compile.nested import map_tensors


class CpuGraphPool:
    """Memory at fixed addresses that graphs share.

    With `poison` every block is filled with NaN, or with the extreme integer, when it is handed
    out, and by a replay where the captured step let go of it: a use after that shows in the output.
    """

    device = torch.device("cpu")

    def __init__(self, *, poison: bool = True, segment_bytes: int = 1 << 20) -> None:
        self.poison = poison
        self._arena = Arena(segment_bytes)
        # A finalizer may run inside of any allocation, this pool's too: it only notes the block.
        self._let_go: collections.deque[Block] = collections.deque()

    @property
    def num_bytes(self) -> int:
        """Bytes that are reserved."""
        return self._arena.num_bytes

    def trim(self) -> None:
        """Free what only garbage holds."""
        gc.collect()

    def weak_ref(self, value: Any) -> Any:
        """Return `value` with its tensors of this pool as aliases, which own nothing."""
        return map_tensors(lambda t: self.alias(t) if self.owns(t) else t, value)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor lies in this pool."""
        return self._arena.find(tensor.untyped_storage().data_ptr(), 0) is not None

    def place(self, num_bytes: int) -> tuple[Block, torch.UntypedStorage]:
        """Return a block, and the storage that owns it."""
        block = self._arena.allocate(num_bytes)
        memory = self._arena.memory(block)
        weakref.finalize(memory, self._let_go.append, block).atexit = False
        return block, torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def reclaim(self) -> list[Block]:
        """Free the blocks that nobody holds any more; return them."""
        freed = []
        while self._let_go:
            freed.append(self._let_go.popleft())
            self._arena.release(freed[-1])
        return freed

    def bytes_of(self, block: Block) -> torch.Tensor:
        """Return a block as uint8, owning nothing."""
        return torch.frombuffer(self._arena.memory(block), dtype=torch.uint8)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same elements that owns nothing.

        One from outside of the pool must not be touched once its owner is gone.
        """
        if tensor.numel() == 0:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        storage = tensor.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        memory: Any = self._arena.find(address, num_bytes)
        if memory is None:
            memory = (ctypes.c_char * num_bytes).from_address(address)
        # Compiled pieces and in-place ops tell inference tensors from others.
        with torch.inference_mode(tensor.is_inference()):
            return view_of(torch.frombuffer(memory, dtype=torch.uint8).untyped_storage(), tensor)


def view_of(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor that lies in `storage` as `like` lies in its own."""
    empty = torch.empty(0, dtype=like.dtype)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


def poison_value(dtype: torch.dtype) -> float | int:
    """Return what shows when it is used."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return True
    limits = torch.iinfo(dtype)
    return limits.min or limits.max
