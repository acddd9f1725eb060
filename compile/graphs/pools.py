"""Step graphs: a step is captured once and replayed from fixed addresses, on CPU or on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeVar

import torch

from compile.config import PoolPolicy
from compile.context import BatchDescriptor, ReplayPart
from compile.errors import CaptureError
from compile.graphs.cpu.pool import CpuGraphPool
from compile.graphs.cpu.recorder import CpuStepGraph
from compile.graphs.cuda import CudaGraphPool, CudaStepGraph

T = TypeVar("T")


class StepGraph(Protocol):
    """A step that can be repeated. Invariant: a replay owns none of the addresses that it uses."""

    def capture(self, fn: Callable[[], T]) -> T:
        """Run `fn`, in effect once, and keep it; return its result."""

    def replay(self, run: ReplayPart = ...) -> None:
        """Run it again on what its tensors hold now; `run` calls each part that was captured."""


class GraphPool(Protocol):
    """Memory that graphs share: what one of them releases, the next may use."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are reserved."""

    def trim(self) -> None:
        """Free what only garbage holds; called before a capture, never inside one."""

    def release_cache(self) -> None:
        """Give the device what its allocator keeps and nothing uses, which a capture cannot take.
        Allocating it anew waits for the device, so this is not for every graph."""

    def weak_ref(self, value: Any) -> Any:
        """Return `value` with aliases for its tensors, which keep no memory in use."""


def new_graph_pool(device: torch.device, *, poison: bool = True) -> GraphPool:
    """Return an empty pool; with `poison` one on CPU overwrites freed memory."""
    if device.type == "cpu":
        return CpuGraphPool(poison=poison)
    if device.type == "cuda":
        return CudaGraphPool(device)
    raise CaptureError("graph pool", "a device of type cpu or cuda", str(device))


def new_step_graph(pool: GraphPool, breaks: Collection[str] = ()) -> StepGraph:
    """Return a graph whose memory comes from `pool`; nothing is captured yet. Ops named in `breaks`
    run in every replay as they do in an eager step, with that step's forward context, between the
    parts that are captured. They write into tensors that they are given."""
    if isinstance(pool, CpuGraphPool):
        return CpuStepGraph(pool, breaks)
    assert isinstance(pool, CudaGraphPool), f"graph pool: wanted one of ours, found {pool!r}"
    return CudaStepGraph(pool, breaks)


class GraphPools:
    """A process's pools: one for all graphs, or one for each padded number of tokens."""

    def __init__(self, new_pool: Callable[[], GraphPool], *, policy: PoolPolicy = "shared") -> None:
        self._new_pool = new_pool
        self._is_shared = policy == "shared"
        self._pools: dict[int, GraphPool] = {}
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def num_bytes(self) -> int:
        return sum(pool.num_bytes for pool in self._pools.values())

    def of(self, descriptor: BatchDescriptor) -> GraphPool:
        bucket = 0 if self._is_shared else descriptor.num_tokens
        if bucket not in self._pools:
            self._pools[bucket] = self._new_pool()
        return self._pools[bucket]

    def add_user(self, user: Any) -> None:
        """Remember who keeps graphs that lie in these pools: its `forget` lets go of them."""
        self._users.add(user)

    def forget_graphs(self) -> None:
        """Drop all graphs. Their pools stay and are used again."""
        for user in self._users:
            user.forget()

    def forget(self) -> None:
        """Drop all pools, and all graphs in them: they were captured for trial."""
        self.forget_graphs()
        for pool in self._pools.values():
            pool.trim()
            pool.release_cache()
        self._pools.clear()
