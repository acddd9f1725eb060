"""Memory that the GPUs of a group's ranks all have mapped (torch's symmetric memory), through which
`PeerMemory` sums what is too small for NCCL to be fast.

A rank allocates its part when it joins, before anything else, and only there: this is a collective,
so its order is the same on all ranks. Where one rank cannot, none does, and the log says which way
sums go and why. What touches a GPU here has never run on one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from model.parallel import Shard, share_peer_memory

if TYPE_CHECKING:
    from model.kernels.triton.all_reduce import PeerMemory

log = logging.getLogger("lockstep.group")


def gpus_within_reach() -> dict[str, str]:
    """Return this process's GPUs by their UUIDs, its own first, each with why its memory cannot be
    used; empty: it can."""
    found = {_uuid(0): ""}
    detect: Any = getattr(c10d, "_detect_dma_connectivity")  # noqa: B009 (torch declares it nowhere)
    num_links = detect(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix[0]
    for index in range(1, torch.cuda.device_count()):
        missing = "" if torch.cuda.can_device_access_peer(0, index) else "no access to its memory"
        found[_uuid(index)] = missing or ("" if num_links[index] else "no NVLink to it")
    return found


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def map_memory(shard: Shard) -> PeerMemory:
    """Return this rank's end of memory that all ranks of the group map, each at the same time."""
    from torch.distributed._symmetric_memory import rendezvous

    from model.kernels.triton.all_reduce import MEMORY_BYTES, PeerMemory

    assert shard.group is not None
    # Not from a pool: it begins where the allocation does, which is what peers are told.
    memory = c10d._SymmetricMemory.empty_strided_p2p(
        (MEMORY_BYTES,), (1,), torch.uint8, torch.device("cuda", 0)
    ).zero_()
    # Peers write flags from their first call on, which may come before this rank's own.
    torch.cuda.synchronize()
    handle = rendezvous(memory, shard.group)
    addresses = handle.buffer_ptrs
    if addresses[shard.rank] != memory.data_ptr():
        raise RuntimeError("symmetric memory does not begin where its tensor does")
    return PeerMemory(memory, addresses, shard.rank, handle)


def share_gpu_memory(
    store: Store,
    shard: Shard,
    reach: Callable[[], Mapping[str, str]] = gpus_within_reach,
    map_all: Callable[[Shard], PeerMemory] = map_memory,
) -> None:
    """Let sums of the group go through memory that all its GPUs map, if all ranks can. `store` is
    the group's own."""
    found: Mapping[str, str] = {}
    why = ""
    try:
        found = reach()
    except Exception as error:  # whatever a driver or another torch may say
        why = f"{type(error).__name__}: {error}"
    store.set(f"gpu/{shard.rank}", next(iter(found), ""))
    gpus = [store.get(f"gpu/{each}").decode() for each in range(shard.size)]
    why = _of_any_rank(store, shard, "reach", why or _what_is_missing(gpus, shard.rank, found))
    memory = None
    if not why:
        try:
            memory = map_all(shard)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        why = _of_any_rank(store, shard, "map", why)
    if not why and memory is not None and shard.group is not None:
        share_peer_memory(shard.group, memory)
    if shard.rank == 0:
        way = f"NCCL, because {why}" if why else "memory that their GPUs map, if they are small"
        log.info("sums of %d ranks that a norm follows go through %s", shard.size, way)


def _what_is_missing(gpus: list[str], rank: int, found: Mapping[str, str]) -> str:
    """Return why one of the ranks' GPUs cannot be used by a rank; empty: all can."""
    for each, gpu in enumerate(gpus):
        if each != rank and gpu == gpus[rank]:
            return f"rank {each} has the same GPU"
        missing = found.get(gpu, "not on this node, or hidden")
        if missing:
            return f"the GPU of rank {each}: {missing}"
    return ""


def _of_any_rank(store: Store, shard: Shard, name: str, why: str) -> str:
    """Return the first rank's reason, the same on all ranks; empty: none has any."""
    store.set(f"{name}/{shard.rank}", why)
    reasons = [store.get(f"{name}/{each}").decode() for each in range(shard.size)]
    return next((f"rank {each}: {it}" for each, it in enumerate(reasons) if it), "")
