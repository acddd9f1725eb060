"""Step graphs on a GPU: CUDA graphs in a private memory pool."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

from compile.errors import ReplayError
from compile.graphs.boundary import map_tensors

T = TypeVar("T")


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream all pools capture on: for each, cuBLAS keeps 32 MiB (Hopper)."""
    return torch.cuda.Stream(device)


class CudaGraphPool:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle: Any = torch.cuda.graph_pool_handle()
        """Torch's identifier of the pool."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are reserved. Walks the allocator's state: not for every step."""
        segments = torch.cuda.memory_snapshot()
        own = [s for s in segments if tuple(s["segment_pool_id"]) == tuple(self.handle)]
        return sum(s["total_size"] for s in own)

    def trim(self) -> None:
        torch.cuda.synchronize(self.device)
        gc.collect()

    def release_cache(self) -> None:
        """Give the device what the allocator keeps, in this pool or not, and nothing uses."""
        torch.cuda.empty_cache()

    def weak_ref(self, value: Any) -> Any:
        return map_tensors(lambda t: alias(t) if t.is_cuda else t, value)

    def capture_stream(self) -> torch.cuda.Stream:
        """Return the current stream, or if that is the default, which cannot capture, another."""
        current = torch.cuda.current_stream(self.device)
        if current != torch.cuda.default_stream(self.device):
            return current
        return _side_stream(self.device)


class CudaStepGraph:
    """One captured step. Invariant: its tensors lie in the pool and are not owned by it."""

    def __init__(self, pool: CudaGraphPool) -> None:
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self, fn: Callable[[], T]) -> T:
        """Capture `fn`, which runs nothing, replay it once and return its result."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._pool.device)
        with torch.cuda.stream(self._pool.capture_stream()):
            # NCCL's watchdog polls events in its thread, which a global capture forbids.
            graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")
            try:
                result = fn()
            except BaseException:
                # An invalid capture cannot end well, and what made it invalid says more.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        self._graph = graph
        graph.replay()
        return result

    def replay(self) -> None:
        if self._graph is None:
            raise ReplayError("replay", "a captured step", "none")
        self._graph.replay()


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same elements that owns nothing."""
    if tensor.numel() == 0:
        return tensor
    storage = tensor.untyped_storage()
    bare = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(bare, tensor.storage_offset(), tensor.shape, tensor.stride())
