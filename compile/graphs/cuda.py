"""Step graphs on a GPU: CUDA graphs in a private memory pool."""

from __future__ import annotations

import functools
import gc
import operator
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch

from compile.context import ReplayPart
from compile.errors import ReplayError
from compile.graphs.boundary import CaptureMode, map_tensors

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


class _Part(NamedTuple):
    call: Callable[[], None]
    is_captured: bool


class CudaStepGraph:
    """One captured step: a CUDA graph, or several with calls of ops between them. Invariant: its
    tensors lie in the pool, and it owns none but those that the ops between are given."""

    def __init__(self, pool: CudaGraphPool, breaks: Collection[str] = ()) -> None:
        self._pool = pool
        self._breaks = breaks
        self._parts: list[_Part] = []

    def capture(self, fn: Callable[[], T]) -> T:
        """Capture `fn`, which runs nothing, replay it once and return its result. What is captured
        before a break is replayed there, and the op runs on that."""
        parts: list[_Part] = []
        graph = torch.cuda.CUDAGraph()

        def begin() -> None:
            nonlocal graph
            graph = torch.cuda.CUDAGraph()
            # NCCL's watchdog polls events in its thread, which a global capture forbids.
            graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")

        def end() -> None:
            graph.capture_end()
            parts.append(_Part(graph.replay, is_captured=True))
            graph.replay()

        def run_between(call: Callable[[], None]) -> None:
            end()
            call()
            parts.append(_Part(call, is_captured=False))
            begin()

        torch.cuda.synchronize(self._pool.device)
        with torch.cuda.stream(self._pool.capture_stream()):
            begin()
            try:
                with _Breaks(self._breaks, run_between) if self._breaks else nullcontext():
                    result = fn()
            except BaseException:
                # An invalid capture cannot end well, and what made it invalid says more.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            end()
        self._parts = parts
        return result

    def replay(self, run: ReplayPart = operator.call) -> None:
        if not self._parts:
            raise ReplayError("replay", "a captured step", "none")
        for part in self._parts:
            if part.is_captured:
                run(part.call)
            else:
                part.call()


class _Breaks(CaptureMode):
    """Hands on the calls of some ops, with what they are given: it stays where it is as long as the
    call is kept. All other ops run."""

    def __init__(self, names: Collection[str], take: Callable[[Callable[[], None]], None]) -> None:
        super().__init__()
        self._names = names
        self._take = take

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name().partition(".")[0] not in self._names:
            return func(*args, **(kwargs or {}))
        self._take(functools.partial(func, *args, **(kwargs or {})))
        return None


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
