"""`KVCacheSpec`: the size and layout of one rank's KV pool.

A block holds its tokens' keys and values of all layers in contiguous bytes, so that a transfer
between processes is one copy per block. A layer's cache is a strided view.

Shapes: N blocks with the scratch block, L layers, P is 2 for keys and values, B tokens per block, H
KV heads, D head dim.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compile.context import KVCacheTensor
from compile.errors import FieldError
from model.config import KV_AXES


@dataclass(frozen=True)
class KVCacheSpec:
    """What a block of KV is made of; the ranks of a group have one `layout`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    has_values: bool = True
    """False: values are made of what is cached as keys, and P is 1."""

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[L, P, B, H, D]; keys, then values."""
        parts = 1 + self.has_values
        return (self.num_layers, parts, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block_shape) * self.dtype.itemsize

    @property
    def layout(self) -> str:
        """Name dtype and shape of a block."""
        sizes = (f"{axis}{size}" for axis, size in zip(KV_AXES, self.block_shape, strict=True))
        return ":".join((str(self.dtype).removeprefix("torch."), *sizes))

    def num_blocks_for(self, memory_bytes: int) -> int:
        """Return how many blocks fit, the scratch block counted like any other."""
        return max(memory_bytes, 0) // self.block_bytes

    def allocate(
        self, num_blocks: int, device: torch.device, storage: memoryview | None = None
    ) -> torch.Tensor:
        """Return a pool of zeros for `num_blocks` blocks beside block 0: [num_blocks + 1, L, P, B,
        H, D].

        On a CPU the pool takes physical memory block by block as it is first written. `storage` is
        memory of exactly its size to live in, on a CPU, fresh from the operating system and so zero
        already.
        """
        shape = (num_blocks + 1, *self.block_shape)
        size = (num_blocks + 1) * self.block_bytes
        if device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=device)
        if storage is None:
            storage = memoryview(mmap.mmap(-1, size))
        if storage.nbytes != size:
            raise FieldError("kv storage", f"{size} bytes", storage.nbytes)
        return torch.frombuffer(storage, dtype=self.dtype).view(shape)

    def views(self, pool: torch.Tensor, layer_names: Sequence[str]) -> dict[str, KVCacheTensor]:
        """Return each layer's view of the pool: [N, B, H, D] for keys and for values, which are the
        same one where there are no values."""
        return {
            name: KVCacheTensor(k_cache=pool[:, i, 0], v_cache=pool[:, i, -1])
            for i, name in enumerate(layer_names)
        }
