"""`Shard`: one rank's place in a group of ranks, and the collectives of that group.

With one rank every method is the identity. Collectives are opaque ops that find their group by a
name, which is the same in every rank's process, so the graphs of all ranks are equal. An op that
sums writes into its argument: copying it first would cost a tenth of the collective.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)

from compile.custom_op import direct_register_custom_op
from compile.errors import FieldError
from compile.passes.fuse_all_reduce_rms_norm import OP_NAME, all_reduce_then_norm
from model.kernels.cpu.communicator import ShmCommunicator
from model.quantization import WeightFormat

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

    from model.kernels.triton.all_reduce import PeerMemory

_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, ShmCommunicator] = (
    weakref.WeakKeyDictionary()
)
_peer_memories: weakref.WeakKeyDictionary[dist.ProcessGroup, PeerMemory] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.Lock()


def register_group(kind: str, group: dist.ProcessGroup) -> str:
    """Return the name by which ops, and torch's own, find `group`, the same one for the same group:
    `kind`, or `kind.1` and so on where ranks share a process. Ranks that do not share one, and make
    their groups in the same order, have the same names. A name is free again when its group is
    gone."""
    names = itertools.chain([kind], (f"{kind}.{number}" for number in itertools.count(1)))
    with _lock:
        name, owner = next((n, found) for n in names if (found := _found(n)) in (None, group))
        key = cast("GroupName", name)
        if owner is None:
            _unregister_process_group(key)  # torch keeps the name of a group that is gone
            _register_process_group(key, group)
            group._set_group_name(key)
        return name


def find_group(name: str) -> dist.ProcessGroup:
    if (group := _found(name)) is None:
        raise LookupError(f"group_name: wanted a registered group, found {name!r}")
    return group


def _found(name: str) -> dist.ProcessGroup | None:
    try:
        return _resolve_process_group(cast("GroupName", name))
    except RuntimeError:  # no group has had this name, or it is gone
        return None


def share_memory(group: dist.ProcessGroup, communicator: ShmCommunicator) -> None:
    """Let the collectives of a group go through memory that its ranks share, where it serves."""
    _communicators[group] = communicator


def communicator_of(group_name: str) -> ShmCommunicator | None:
    """Return what `share_memory` gave a group; None: its ranks share no memory."""
    return _communicators.get(find_group(group_name))


def share_peer_memory(group: dist.ProcessGroup, memory: PeerMemory) -> None:
    """Let sums that a norm follows go through memory which all ranks' GPUs have mapped, where it
    serves."""
    _peer_memories[group] = memory


def _all_reduce(x: torch.Tensor, group_name: str) -> None:
    group = find_group(group_name)
    near = _communicators.get(group)
    if near is None or not near.all_reduce(x):
        dist.all_reduce(x, group=group)


def _all_gather(x: torch.Tensor, sizes: Sequence[int], dim: int, group_name: str) -> torch.Tensor:
    """Join the ranks' tensors along `dim` in rank order; rank i's has `sizes[i]` there."""
    group = find_group(group_name)
    if len(sizes) != group.size() or x.shape[dim] != sizes[group.rank()]:
        wanted = f"{group.size()} with {x.shape[dim]} at rank {group.rank()}"
        raise ValueError(f"sizes: wanted {wanted}, found {list(sizes)}")
    padded = _padded(x, max(sizes), dim)
    joined = padded.new_empty((len(sizes) * padded.shape[0], *padded.shape[1:]))
    near = _communicators.get(group)
    if near is None or not near.gather(padded, joined, to_all=True):
        group._allgather_base(joined, padded).wait()
    if dim == 0 and min(sizes) == max(sizes):
        return joined
    parts = zip(joined.chunk(len(sizes)), sizes, strict=True)
    return torch.cat([part.narrow(dim, 0, n) for part, n in parts], dim)


def _all_reduce_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `all_reduce_then_norm` does, on GPUs, in one kernel where they share memory."""
    peers = _peer_memories.get(find_group(group_name))
    found = None if peers is None else peers.all_reduce_add_rms_norm(x, residual, weight, eps)
    return found or all_reduce_then_norm(x, residual, weight, eps, group_name)


def _padded(x: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """Return `x` with zeros behind it up to `size`: backends take tensors of equal shapes alone."""
    missing = list(x.shape)
    missing[dim] = size - x.shape[dim]
    return torch.cat((x, x.new_zeros(missing)), dim) if missing[dim] else x.contiguous()


def _all_gather_fake(
    x: torch.Tensor, sizes: Sequence[int], dim: int, group_name: str
) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    return x.new_empty(shape)


def _gather(x: torch.Tensor, parts: torch.Tensor, group_name: str) -> None:
    """Bring the ranks' tensors of equal shape to rank 0. parts: [ranks, *shape of x] there, else
    empty."""
    group = find_group(group_name)
    near = _communicators.get(group)
    if near is None or not near.gather(x, parts):
        # Rank 0 gets all, the others nothing. torch's `gather` takes lists alone.
        num, size = x.numel(), group.size()
        given = [num, *[0] * (size - 1)]
        taken = [num if group.rank() == 0 else 0] * size
        dist.all_to_all_single(parts.view(-1), x.view(-1), taken, given, group=group)


def reduce_scatter(x: torch.Tensor, sizes: Sequence[int], group_name: str) -> torch.Tensor:
    """Return this rank's rows of the sum of `x` [sum of sizes, ...] over the ranks, inside of
    opaque ops."""
    group = find_group(group_name)
    if len(sizes) != group.size() or x.shape[0] != sum(sizes):
        wanted = f"{group.size()} with the sum {x.shape[0]}"
        raise ValueError(f"sizes: wanted {wanted}, found {list(sizes)}")
    most = max(sizes)
    if min(sizes) < most:
        x = torch.cat([_padded(part, most, 0) for part in x.split(list(sizes))])
    found = x.new_empty((most, *x.shape[1:]))
    x, near = x.contiguous(), _communicators.get(group)
    if near is None or not near.reduce_scatter(x, found):
        group._reduce_scatter_base(found, x, dist.ReduceScatterOptions()).wait()
    return found[: sizes[group.rank()]]


all_reduce = direct_register_custom_op("all_reduce", _all_reduce, mutates_args=["x"])
all_gather = direct_register_custom_op("all_gather", _all_gather, fake_impl=_all_gather_fake)
gather = direct_register_custom_op("gather", _gather, mutates_args=["parts"])
# `compile.passes` defines it, because its pass writes it into graphs.
direct_register_custom_op(
    OP_NAME, _all_reduce_add_rms_norm, mutates_args=["x"], dispatch_key="CUDA"
)


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `size` ranks that hold a model together. Experts are spread over a grid: these
    ranks, which compute the same tokens, times the data-parallel ranks, which compute others. Each
    holds whole experts, as many as any other."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    kind: str = "tp"
    """Of the group: `tp` for ranks that compute the same tokens, `dp` for others."""
    data: Shard | None = None
    """The data-parallel ranks that share their experts; None where there are none."""
    group_name: str = field(init=False, default="")

    def __post_init__(self) -> None:
        if self.group is not None:
            object.__setattr__(self, "group_name", register_group(self.kind, self.group))

    @classmethod
    def named(cls, group_name: str) -> Shard:
        """Return this rank's place in the group that ops call so; alone for no name."""
        if not group_name:
            return cls()
        group = find_group(group_name)
        return cls(group.rank(), group.size(), group, kind=group_name.partition(".")[0])

    def divide(self, name: str, total: int) -> int:
        """Return one rank's part of `total`; a FieldError of `name` if it is no multiple."""
        if total % self.size:
            raise FieldError(name, f"a multiple of tensor_parallel_size={self.size}", total)
        return total // self.size

    def own_experts(self, num_experts: int) -> range:
        """Return the experts that this rank of the grid holds; a FieldError if that is uneven."""
        data = self.data or Shard()
        if num_experts % (self.size * data.size):
            sizes = f"tensor_parallel_size={self.size}"
            if data.size > 1:
                sizes += f" times data_parallel_size={data.size}"
            raise FieldError("num_experts", f"a multiple of {sizes}", num_experts)
        count = num_experts // (self.size * data.size)
        first = (data.rank * self.size + self.rank) * count
        return range(first, first + count)

    def slice(self, total: int) -> slice:
        """Return this rank's part of `total` items, rounded up; the last are short or empty."""
        part = -(-total // self.size)
        start = min(self.rank * part, total)
        return slice(start, min(start + part, total))

    def all_reduce(self, t: torch.Tensor) -> torch.Tensor:
        """Return the sum of `t` over the ranks. `t` is overwritten."""
        if self.size > 1:
            all_reduce(t, self.group_name)
        return t

    def gather(self, t: torch.Tensor, dim: int) -> torch.Tensor | None:
        """Return the ranks' tensors of equal shapes joined along `dim` in rank order, on rank 0;
        else None."""
        if self.size == 1:
            return t
        t = t.contiguous()
        parts = t.new_empty((self.size, *t.shape) if self.rank == 0 else 0)
        gather(t, parts, self.group_name)
        return torch.cat(parts.unbind(0), dim=dim) if self.rank == 0 else None

    def broadcast(self, t: torch.Tensor) -> torch.Tensor:
        """Return rank 0's `t`, which has the same shape on all ranks. Others' are overwritten."""
        if self.group is not None:
            near = _communicators.get(self.group)
            if near is None or not near.broadcast(t):
                dist.broadcast(t, group=self.group, group_src=0)
        return t

    def all_gather(self, t: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        """Return the ranks' tensors joined along `dim` in rank order; rank i's has `sizes[i]`."""
        if self.size == 1:
            return t
        joined: torch.Tensor = all_gather(t, sizes, dim, self.group_name)
        return joined

    def reduce_scatter(self, t: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return this rank's `sizes[rank]` rows of the sum of `t` over the ranks, which may
        overwrite `t`."""
        return t if self.size == 1 else reduce_scatter(t, sizes, self.group_name)


@dataclass(frozen=True)
class Placement:
    """Where one rank's part of a model is computed, and the dtype of parameters and activations."""

    dtype: torch.dtype
    device: torch.device
    shard: Shard = Shard()
    quantization: WeightFormat = "none"
    """What linear layers hold."""
