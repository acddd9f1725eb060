"""The blocks of a KV pool as bytes, in this process or mapped from another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

NUM_FILLERS = 4
"""Threads that fill pinned memory beside each other: one is a tenth as fast as a GPU's link."""


class BlockStore:
    """The blocks of a pool, in this process or mapped from another: [num_blocks, block_bytes].
    Those of a GPU are copied on a stream of their own, which need not wait for a step: blocks are
    read after the step that wrote them has ended, and written before a step reads them."""

    def __init__(self, pool: torch.Tensor) -> None:
        self._rows = pool.reshape(pool.shape[0], -1).view(torch.uint8)
        self.block_bytes = self._rows.shape[1]
        self.is_on_host = pool.device.type == "cpu"
        self._stream: torch.cuda.Stream | None = None
        if not self.is_on_host:
            self._fillers = ThreadPoolExecutor(NUM_FILLERS, thread_name_prefix="kv-fill")
            self._stream = torch.cuda.Stream(pool.device)
            # The zeros of a new pool would overwrite what is copied into it before they come.
            self._stream.wait_stream(torch.cuda.current_stream(pool.device))

    @classmethod
    def of_memory(cls, memory: memoryview, block_bytes: int) -> BlockStore:
        """Return another process' pool as a store; ValueError: it has no whole blocks."""
        if not len(memory) or len(memory) % block_bytes:
            raise ValueError(f"wanted blocks of {block_bytes} bytes, found {len(memory)} bytes")
        return cls(torch.frombuffer(memory, dtype=torch.uint8).view(-1, block_bytes))

    def copy_from(self, source: BlockStore, source_ids: list[int], ids: list[int]) -> None:
        """Copy blocks of another store into this one; ValueError: it lacks some."""
        num_blocks = source._rows.shape[0]
        if not all(0 <= i < num_blocks for i in source_ids):
            raise ValueError(f"wanted blocks below {num_blocks}, found {max(source_ids)}")
        self._rows[torch.tensor(ids)] = source._rows[torch.tensor(source_ids)]

    def gather(self, ids: list[int]) -> list[memoryview]:
        """Return each block's bytes, without a copy if the pool is in host memory."""
        if self._stream is None:
            return [self._rows[i].numpy().data for i in ids]
        staged = self._pinned(len(ids))
        with torch.cuda.stream(self._stream):
            for row, i in zip(staged, ids, strict=True):
                row.copy_(self._rows[i], non_blocking=True)
        self._stream.synchronize()
        return [row.numpy().data for row in staged]

    def scatter(self, ids: list[int], blocks: list[memoryview]) -> None:
        """Write each block's bytes; ValueError, and nothing written: one has another length."""
        if any(len(block) != self.block_bytes for block in blocks):
            sizes = sorted({len(block) for block in blocks})
            raise ValueError(f"wanted blocks of {self.block_bytes} bytes, found {sizes[:4]}")
        if self._stream is None:
            for i, block in zip(ids, blocks, strict=True):
                _fill(self._rows[i], block)
            return
        staged = self._pinned(len(ids))
        with torch.cuda.stream(self._stream):
            filled = [
                self._fillers.submit(_fill, *each) for each in zip(staged, blocks, strict=True)
            ]
            for row, i, each in zip(staged, ids, filled, strict=True):
                each.result()
                self._rows[i].copy_(row, non_blocking=True)
        self._stream.synchronize()

    def _pinned(self, num_blocks: int) -> torch.Tensor:
        """Return host memory that a GPU copies from and to by itself; torch keeps and reuses it."""
        return torch.empty((num_blocks, self.block_bytes), dtype=torch.uint8, pin_memory=True)


def _fill(row: torch.Tensor, block: memoryview) -> None:
    # torch warns of read-only buffers, numpy takes them.
    row.numpy()[:] = np.frombuffer(block, dtype=np.uint8)
