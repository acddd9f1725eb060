"""`Shard`: one rank's place in a group of ranks, and the collectives of that group.

With one rank every method is the identity, so that layers are written once and never ask whether
they are alone.

`ExpertShard` is a rank's place in the grid of tensor-parallel and data-parallel ranks over which
the experts of a model are spread.
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
    kind: str = "tp"
    """Of the group: `tp` for ranks that compute the same tokens, `dp` for others."""
    data: Shard | None = None
    """The data-parallel ranks that share their experts, this rank among those of its own rank
    here; its kind is `dp`. None where no other rank computes other tokens."""
    group_name: str = field(init=False, default="")
    """What ops call the group."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ModelError.of("shard", f"a rank from 0 to {self.size - 1}", self.rank)
        if self.group is not None:
            name = collectives.register_group(self.kind, self.group)
            object.__setattr__(self, "group_name", name)

    @classmethod
    def named(cls, group_name: str) -> Shard:
        """Return this rank's place in the group that ops call so; alone for no name.

        Raises:
            LookupError: no group has this name.
        """
        if not group_name:
            return cls()
        group = collectives.find_group(group_name)
        return cls(group.rank(), group.size(), group, kind=group_name.partition(".")[0])

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

    def reduce_scatter(self, t: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return this rank's rows of the sum of `t` over the ranks, which may overwrite `t`.

        Args:
            sizes: each rank's rows, in rank order; `t` has all of them.
        """
        return t if self.size == 1 else collectives.reduce_scatter(t, sizes, self.group_name)


@dataclass(frozen=True)
class ExpertShard:
    """One rank's place among all ranks that hold a model's experts.

    The ranks form a grid: `tensor` are those that compute the same tokens, `data` those that stand
    at the same place in the other data-parallel ranks and compute other tokens.

    1. Rank r of the grid holds whole experts, num_experts / size of them from r * num_experts /
       size on.
    2. `dispatch` brings the tokens of all data-parallel ranks here: an all-gather over `data`.
       Ranks of one tensor-parallel group have the same tokens already.
    3. Each rank computes what its experts add to all of these tokens.
    4. `combine` sums over the grid and keeps this data-parallel rank's tokens: a reduce-scatter
       over `data`, so that what is left to sum is short, then an all-reduce over `tensor`.

    Every rank makes the same collectives, whatever tokens it has and wherever they are routed.
    Invariant: ranks are numbered data-parallel rank first.
    """

    tensor: Shard
    data: Shard

    @property
    def size(self) -> int:
        """Ranks in the grid."""
        return self.tensor.size * self.data.size

    @property
    def rank(self) -> int:
        """This rank's number in the grid."""
        return self.data.rank * self.tensor.size + self.tensor.rank

    def divide(self, num_experts: int) -> int:
        """Return how many experts a rank holds.

        Raises:
            ModelError: the experts are not a multiple of the ranks.
        """
        if num_experts % self.size:
            sizes = f"tensor_parallel_size={self.tensor.size}"
            if self.data.size > 1:
                sizes += f" times data_parallel_size={self.data.size}"
            raise ModelError.of("num_experts", f"a multiple of {sizes}", num_experts)
        return num_experts // self.size

    def dispatch(self, t: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return the rows of all data-parallel ranks in rank order; rank i has `sizes[i]`."""
        return self.data.all_gather(t, 0, sizes)

    def combine(self, t: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return this data-parallel rank's rows, summed over the grid; may overwrite `t`."""
        return self.tensor.all_reduce(self.data.reduce_scatter(t, sizes))
