"""The process group of the ranks that step together: gloo on CPU, NCCL on CUDA. Ranks on the CPU of
one node exchange what they can through memory that they share, and so do GPUs (`peer_memory`).

The first leader's process keeps a store, on a listener that it opened before. All ranks that step
together join through it and wait for one another in it. Its first entry is the first leader's
hello, with which each rank compares its own.

Every wait here has a bound in seconds: torch's own is half an hour, and a rank inside a collective
can only be freed by ending its process. The store and gloo never ask for a secret, so if one node
holds all ranks they listen on the loopback alone.
"""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    Backend,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from cluster.group.links import check_hello
from cluster.group.peer_memory import share_gpu_memory
from cluster.group.rendezvous import Rendezvous
from cluster.wire.group_messages import LeaderHello
from cluster.wire.messages import FrameError, decode, encode
from cluster.wire.shared_memory import SharedMemory, open_shared
from cluster.wire.sockets import node_id
from model.kernels.cpu.communicator import ShmCommunicator, can_share, memory_bytes
from model.parallel import Shard, share_memory

JOIN_TIMEOUT_S = 120.0
"""Ranks are started together; the slowest has to import torch on a busy machine."""
LOAD_TIMEOUT_S = 1800.0
"""From the first rank that has read its weights to the last."""
COLLECTIVE_TIMEOUT_S = 60.0
"""The last resort against a rank that hangs inside a step. No step computes for this long."""
END_TIMEOUT_S = 2.0


class GroupMembership:
    """One rank's membership. Invariant: `rank` of `size` counts all ranks that step together, those
    of one data-parallel rank in a row."""

    def __init__(
        self, store: TCPStore | None, shard: Shard, *, dp_rank: int = 0, dp_size: int = 1
    ) -> None:
        self._store = store
        self.shard = shard
        self.rank = dp_rank * shard.size + shard.rank
        self.size = dp_size * shard.size
        self.dp_rank = dp_rank
        self.dp_size = dp_size

    @classmethod
    def join(
        cls,
        where: Rendezvous,
        tp_rank: int,
        device: str,
        host: str,
        *,
        hello: LeaderHello,
        listener: socket.socket | None = None,
        dp_rank: int = 0,
        dp_size: int = 1,
        shares_experts: bool = False,
        maps_gpu_memory: bool = True,
    ) -> GroupMembership:
        """Join those that meet here; a `FrameError` names the field by which the store is another
        group's. `host` is this node's address, `hello` what the first leader's must equal, and
        `listener` the store's, on the rank that keeps it."""
        size = len(where.channels) + 1
        # The store listens on the group's address only, and closes the descriptor at its end.
        listen_fd = listener.detach() if listener is not None else None
        store = _open_store(where, size * dp_size, listen_fd, hello)
        joined = cls(store, Shard(tp_rank, size), dp_rank=dp_rank, dp_size=dp_size)
        # Making a group waits as long as a collective, and a process that starts late may take
        # longer. The owner names a rank that never comes, long before this wait ends.
        joined.all_reduce_min("joining", 0)
        new_group = partial(_group, store, device=device, host=where.host_of(host))
        tensor = new_group(f"tensors/{dp_rank}", tp_rank, size)
        data = None
        if shares_experts and dp_size > 1:
            # Ranks that stand at the same place in their tensor-parallel groups.
            experts = new_group(f"experts/{tp_rank}", dp_rank, dp_size)
            data = Shard(dp_rank, dp_size, experts, kind="dp")
        joined.shard = Shard(tp_rank, size, tensor, data=data)
        if maps_gpu_memory and device == "cuda" and size > 1:
            share_gpu_memory(PrefixStore(f"peers/{dp_rank}", store), joined.shard)
        return joined

    def all_reduce_min(self, name: str, value: int) -> int:
        """Return the smallest of all ranks' values; each name can be used once. It goes through the
        store: ranks may come minutes apart. A `TimeoutError` names those that do not."""
        store = self._store
        if store is None:
            return value
        store.set(f"{name}/{self.rank}", str(value))
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        try:
            store.wait(keys, timedelta(seconds=LOAD_TIMEOUT_S))
        except dist.DistStoreError as error:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            wanted = f"wanted all {self.size} ranks in {LOAD_TIMEOUT_S:g} s"
            raise TimeoutError(f"{name}: {wanted}, found none of {missing}") from error
        return min(int(store.get(key)) for key in keys)

    def barrier(self, name: str) -> None:
        """Wait until every rank that steps together is here; each name can be used once."""
        self.all_reduce_min(f"barrier/{name}", 0)

    def close(self) -> None:
        """Leave the group. Rank 0 waits a moment for the others: the store ends with it."""
        if self._store is None:
            return
        # The store of a rank that was killed answers with an error, and so does a wait in vain.
        with contextlib.suppress(dist.DistError):
            self._store.set(f"ended/{self.rank}", "")
            if self.rank == 0:
                keys = [f"ended/{rank}" for rank in range(self.size)]
                self._store.wait(keys, timedelta(seconds=END_TIMEOUT_S))
        for shard in (self.shard, self.shard.data):
            if shard is not None and shard.group is not None:
                shard.group.shutdown()
        self._store = None


def _open_store(
    where: Rendezvous, size: int, listen_fd: int | None, hello: LeaderHello
) -> TCPStore:
    store = TCPStore(
        where.store_host,
        where.store_port,
        size,
        is_master=listen_fd is not None,
        timeout=timedelta(seconds=JOIN_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )
    if listen_fd is not None:
        store.set("hello", encode(hello).hex())
    found: LeaderHello = decode(bytes.fromhex(store.get("hello").decode()), LeaderHello)
    check_hello(found, hello)
    if found.nonce != hello.nonce:
        raise FrameError("nonce: wanted the store of this group, found another group's")
    return store


def _group(
    store: TCPStore, name: str, rank: int, size: int, *, device: str, host: str
) -> ProcessGroup | None:
    if size == 1:
        return None
    own = PrefixStore(name, store)
    group = make_group(own, rank, size, device=device, host=host)
    memory = None if device == "cuda" else _common_memory(own, rank, size)
    if memory is not None:
        share_memory(group, ShmCommunicator(memory, rank, size, COLLECTIVE_TIMEOUT_S))
    return group


def make_group(store: Store, rank: int, size: int, *, device: str, host: str) -> ProcessGroup:
    """Return a group that torch can find by the name which `register_group` gives it, as ops over
    symmetric memory do: a backend alone, which has the same methods, torch does not take. All that
    is global is that name, until the group ends."""
    group, kinds = ProcessGroup(store, rank, size), ProcessGroup.BackendType
    make, kind = (_nccl, kinds.NCCL) if device == "cuda" else (_gloo, kinds.GLOO)
    group._register_backend(torch.device(device), kind, make(store, rank, size, host))
    group._set_default_backend(kind)
    return group


def _common_memory(store: Store, rank: int, size: int) -> memoryview | None:
    """Return memory that all ranks have mapped; None, on all of them, if one of them cannot."""
    shared, view = None, None
    if rank == 0:
        if can_share():
            shared = SharedMemory(memory_bytes(size))
            view = shared.view
        store.set("memory", f"{node_id()} {shared.pid} {shared.fd}" if shared else "")
    elif (where := store.get("memory").decode()) and can_share():
        node, pid, fd = where.split()
        if node == node_id():
            # Another user's process may not be looked into.
            with contextlib.suppress(OSError):
                view = open_shared(int(pid), int(fd))
    store.set(f"has memory/{rank}", "" if view is None else "1")
    have_it = [store.get(f"has memory/{each}") for each in range(size)]
    if shared is not None:
        os.close(shared.fd)
    return view if all(have_it) else None


def _gloo(store: Store, rank: int, size: int, host: str) -> Backend:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    # By address: a host name may resolve to what no other node reaches.
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, host: str) -> Backend:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    return dist.ProcessGroupNCCL(store, rank, size, options)
