"""`Shard`: one rank's place in a tensor-parallel group, and the collectives of that group.

The one thing to know: with one rank every method is the identity, so that layers are written once
and never ask whether they are alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from model import collectives
from model.config import ModelError


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `size` ranks that hold a model together.

    Invariant: 0 <= rank < size. `group` carries the tensors where size > 1.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    group_name: str = field(init=False, default="")
    """What ops call the group."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ModelError.of("shard", f"a rank from 0 to {self.size - 1}", self.rank)
        if self.group is not None:
            name = collectives.register_group("tp", self.group)
            object.__setattr__(self, "group_name", name)

    def divide(self, name: str, total: int) -> int:
        """Return one rank's part of `total`.

        Raises:
            ModelError: `total`, called `name`, is not a multiple of the ranks.
        """
        if total % self.size:
            raise ModelError.of(name, f"a multiple of tensor_parallel_size={self.size}", total)
        return total // self.size

    def slice(self, total: int) -> slice:
        """Return this rank's part of `total` items: equal parts, rounded up, the last one short.

        With few items the last parts are empty.
        """
        part = -(-total // self.size)
        start = min(self.rank * part, total)
        return slice(start, min(start + part, total))

    def all_reduce(self, t: torch.Tensor) -> torch.Tensor:
        """Return the sum of `t` over the ranks. `t` is overwritten."""
        if self.size > 1:
            collectives.all_reduce(t, self.group_name)
        return t

    def gather(self, t: torch.Tensor, dim: int) -> torch.Tensor | None:
        """Return the ranks' tensors, which have equal shapes, joined along `dim` in rank order.

        Rank 0 alone gets them: the others send theirs and return None.
        """
        if self.size == 1:
            return t
        t = t.contiguous()
        parts = [torch.empty_like(t) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(t, parts, group=self.group, group_dst=0)
        return None if parts is None else torch.cat(parts, dim=dim)

    def all_gather(
        self, t: torch.Tensor, dim: int, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return the ranks' tensors joined along `dim` in rank order.

        Args:
            sizes: each rank's extent along `dim`; None where all are equal.
        """
        if self.size == 1:
            return t
        sizes = [t.shape[dim]] * self.size if sizes is None else sizes
        joined: torch.Tensor = collectives.all_gather(t, sizes, dim, self.group_name)
        return joined
