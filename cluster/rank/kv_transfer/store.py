"""A KV pool seen as blocks of bytes."""

from __future__ import annotations

import numpy as np
import torch


class KVThreadDied(RuntimeError):
    """A KV thread of this rank ended with an error; the rank must end too."""

    def __init__(self, name: str, cause: BaseException) -> None:
        super().__init__(f"{name} thread ended: {type(cause).__name__}: {cause}")


class BlockStore:
    """The blocks of a pool, in this process or mapped from another: [num_blocks, block_bytes]."""

    def __init__(self, pool: torch.Tensor) -> None:
        self._rows = pool.reshape(pool.shape[0], -1).view(torch.uint8)
        self.block_bytes = self._rows.shape[1]
        self.is_on_host = pool.device.type == "cpu"

    @classmethod
    def of_memory(cls, memory: memoryview, block_bytes: int) -> BlockStore:
        """Return the store that another process' pool is, mapped into this one."""
        return cls(torch.frombuffer(memory, dtype=torch.uint8).view(-1, block_bytes))

    def copy_from(self, source: BlockStore, source_ids: list[int], ids: list[int]) -> None:
        """Copy blocks of another store into blocks of this one."""
        self._rows[torch.tensor(ids)] = source._rows[torch.tensor(source_ids)]

    def gather(self, ids: list[int]) -> list[memoryview]:
        """Return each block's bytes, without a copy where the pool is in host memory."""
        if self.is_on_host:
            return [self._rows[i].numpy().data for i in ids]
        return [row.numpy().data for row in self._rows[torch.tensor(ids)].cpu()]

    def scatter(self, ids: list[int], blocks: list[memoryview]) -> None:
        """Write each block's bytes."""
        for i, block in zip(ids, blocks, strict=True):
            # torch warns of read-only buffers, numpy takes them.
            row = np.frombuffer(block, dtype=np.uint8)
            if self.is_on_host:
                self._rows[i].numpy()[:] = row
            else:
                self._rows[i].copy_(torch.from_numpy(row.copy()))
