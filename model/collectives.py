"""Collectives as opaque ops that find their group by a name.

A traced graph holds a group's name, never the group, and the name is the same in every rank's
process. So the graphs of all ranks are equal, and so is what is compiled from them.

An op that sums writes into its argument: copying it first would cost a tenth of the collective.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from compile.custom_op import direct_register_custom_op

# A name is free again when its group is gone.
_groups: weakref.WeakValueDictionary[str, dist.ProcessGroup] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def register_group(kind: str, group: dist.ProcessGroup) -> str:
    """Return the name by which ops find `group`, the same one for the same group.

    A process's only group of a kind is called `kind`. Ranks that share a process, as threads, have
    groups of their own: `kind.1` and so on.
    """
    names = itertools.chain([kind], (f"{kind}.{number}" for number in itertools.count(1)))
    with _lock:
        return next(name for name in names if _groups.setdefault(name, group) is group)


def find_group(name: str) -> dist.ProcessGroup:
    """Return the group that ops call `name`.

    Raises:
        LookupError: no group has this name.
    """
    try:
        return _groups[name]
    except KeyError:
        known = ", ".join(sorted(_groups)) or "none"
        message = f"group_name: wanted a registered group ({known}), found {name!r}"
        raise LookupError(message) from None


def _all_reduce(x: torch.Tensor, group_name: str) -> None:
    """Sum `x` over the ranks, in place."""
    dist.all_reduce(x, group=find_group(group_name))


def _all_gather(x: torch.Tensor, sizes: Sequence[int], dim: int, group_name: str) -> torch.Tensor:
    """Join the ranks' tensors along `dim` in rank order; rank i's has `sizes[i]` there."""
    group = find_group(group_name)
    if len(sizes) != group.size() or x.shape[dim] != sizes[group.rank()]:
        wanted = f"{group.size()} with {x.shape[dim]} at rank {group.rank()}"
        raise ValueError(f"sizes: wanted {wanted}, found {list(sizes)}")
    longest = max(sizes)
    shape = list(x.shape)
    shape[dim] = longest
    # Backends gather equal shapes alone.
    padded = x.contiguous() if x.shape[dim] == longest else _padded(x, shape, dim)
    parts = [x.new_empty(shape) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, sizes, strict=True)], dim)


def _padded(x: torch.Tensor, shape: Sequence[int], dim: int) -> torch.Tensor:
    padded = x.new_zeros(shape)
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    return padded


def _all_gather_fake(
    x: torch.Tensor, sizes: Sequence[int], dim: int, group_name: str
) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    return x.new_empty(shape)


def reduce_scatter(x: torch.Tensor, sizes: Sequence[int], group_name: str) -> torch.Tensor:
    """Return this rank's rows of the sum of `x` over the ranks; rank i's are `sizes[i]`.

    A plain function for the inside of opaque ops. x: [sum of sizes, ...].
    """
    group = find_group(group_name)
    if len(sizes) != group.size() or x.shape[0] != sum(sizes):
        wanted = f"{group.size()} with the sum {x.shape[0]}"
        raise ValueError(f"sizes: wanted {wanted}, found {list(sizes)}")
    shape = [max(sizes), *x.shape[1:]]
    # Backends scatter equal shapes alone.
    parts = [
        part if len(part) == shape[0] else _padded(part, shape, 0)
        for part in x.contiguous().split(list(sizes))
    ]
    found = x.new_empty(shape)
    dist.reduce_scatter(found, parts, group=group)
    return found[: sizes[group.rank()]]


all_reduce = direct_register_custom_op("all_reduce", _all_reduce, mutates_args=["x"])
all_gather = direct_register_custom_op("all_gather", _all_gather, fake_impl=_all_gather_fake)
