"""Around a forward, or a piece of one: capture it, replay it, or just call it.

1. The step's mode is another one: the runnable is called.
2. Its key is known: addresses are compared, the graph is replayed, its output returned.
3. In a capture window the call is captured: each piece when the forward reaches it.
4. Otherwise it runs eagerly and is counted. It is not captured now, because ranks that capture at
   different times would deadlock.

Only the arguments' addresses are compared. A FULL graph also reads block tables, slot mapping and
KV caches by the forward context; who allocates those keeps them in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from compile.config import CompilationConfig, CUDAGraphMode
from compile.context import BatchDescriptor, ReplayPart, get_forward_context
from compile.counters import counter
from compile.errors import CaptureError, ReplayError
from compile.graphs.boundary import map_tensors, tensors_of
from compile.graphs.capture import is_in_capture_window, note_late_capture
from compile.graphs.pools import GraphPools, StepGraph, new_step_graph


@dataclass
class _Entry:
    """One captured graph. Invariant: `output` keeps no memory in use."""

    graph: StepGraph
    addresses: list[int]
    output: Any
    num_replays: int = 0


class CUDAGraphWrapper:
    """Captures and replays a runnable, once per key: the forward context's batch descriptor. The
    caller puts inputs where they were at the capture, and reads an output before another graph of
    the pool runs."""

    def __init__(
        self,
        runnable: Callable[..., Any],
        mode: CUDAGraphMode,
        pools: GraphPools,
        *,
        breaks: Collection[str] = (),
        trims_pool: bool = True,
    ) -> None:
        """Wrap `runnable`, to be captured and replayed in steps of `mode`: PIECEWISE or FULL. Ops
        named in `breaks` run between what is captured. With `trims_pool` garbage is collected
        before a capture, which takes longer than that."""
        assert mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL), mode
        self.runnable = runnable
        self.mode = mode
        self._breaks = breaks
        self._trims_pool = trims_pool
        self._pools = pools
        self._entries: dict[BatchDescriptor, _Entry] = {}
        self._forgotten: dict[BatchDescriptor, int] = {}
        """How often each graph was replayed that it no longer holds."""
        pools.add_user(self)

    @property
    def num_replays(self) -> Mapping[BatchDescriptor, int]:
        """How often each graph was replayed, those that it no longer holds included."""
        return self._forgotten | {key: entry.num_replays for key, entry in self._entries.items()}

    def forget(self) -> None:
        """Let go of every graph: at the end, or of what was captured for trial."""
        self._forgotten = {key: times for key, times in self.num_replays.items() if times}
        self._entries.clear()

    def __call__(self, *args: Any) -> Any:
        """Capture, replay or call; ReplayError: a tensor lies elsewhere than at the capture."""
        context = get_forward_context()
        if context.cudagraph_runtime_mode is not self.mode:
            return self.runnable(*args)
        key = context.batch_descriptor
        if key is None:
            raise CaptureError("batch_descriptor", f"the key of a {self.mode.name} graph", "None")
        entry = self._entries.get(key)
        if entry is not None:
            return self._replay(key, entry, args, context.replay)
        if is_in_capture_window():
            return self._capture(key, args)
        note_late_capture(f"{self.mode.name} graph for {key}")
        return self.runnable(*args)

    def _replay(
        self,
        key: BatchDescriptor,
        entry: _Entry,
        args: tuple[Any, ...],
        replay: ReplayPart,
    ) -> Any:
        addresses = [tensor.data_ptr() for tensor in tensors_of(args)]
        if addresses != entry.addresses:
            wanted, found = (str([hex(a) for a in each]) for each in (entry.addresses, addresses))
            raise ReplayError(f"inputs of the {self.mode.name} graph for {key}", wanted, found)
        entry.graph.replay(replay)
        entry.num_replays += 1
        counter.num_cudagraph_replayed += 1
        return entry.output

    def _capture(self, key: BatchDescriptor, args: tuple[Any, ...]) -> Any:
        pool = self._pools.of(key)
        if self._trims_pool:
            pool.trim()
        graph = new_step_graph(pool, self._breaks)
        output = graph.capture(lambda: self.runnable(*args))
        addresses = [tensor.data_ptr() for tensor in tensors_of(args)]
        self._entries[key] = _Entry(graph, addresses, pool.weak_ref(output))
        counter.num_cudagraph_captured += 1
        return output

    def __reduce__(self) -> NoReturn:
        raise TypeError("CUDAGraphWrapper: wanted a capture in each process, found a copy of one")


def wrap_forward(
    runnable: Callable[..., Any], config: CompilationConfig, pools: GraphPools
) -> Callable[..., Any]:
    """Return a forward that replays full graphs if the configuration has any, and piecewise ones if
    no compiler makes pieces: then captures end at the splitting ops, and begin again."""
    if config.has_breakable_graphs:
        breaks = config.splitting_ops or ()
        runnable = CUDAGraphWrapper(runnable, CUDAGraphMode.PIECEWISE, pools, breaks=breaks)
    if config.graph_mode.has_full_cudagraphs():
        return CUDAGraphWrapper(runnable, CUDAGraphMode.FULL, pools)
    return runnable


class StableOutputs:
    """Calls an op between captured pieces and copies what it returns to where the next reads it.
    Invariant: a key's slots are made while graphs are captured and live as long as this object."""

    def __init__(self, runnable: Callable[..., Any]) -> None:
        self.runnable = runnable
        self._slots: dict[BatchDescriptor, list[torch.Tensor]] = {}

    def __call__(self, *args: Any) -> Any:
        """Call the op; return its outputs in their slots. One that aliases an input stays there."""
        output = self.runnable(*args)
        context = get_forward_context()
        key = context.batch_descriptor
        if context.cudagraph_runtime_mode is not CUDAGraphMode.PIECEWISE or key is None:
            return output
        inputs = {t.untyped_storage().data_ptr() for t in tensors_of(args)}
        fresh = [t for t in tensors_of(output) if t.untyped_storage().data_ptr() not in inputs]
        if key not in self._slots and is_in_capture_window():
            # `empty_like` would close gaps in the strides that readers expect.
            self._slots[key] = [
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
                for t in fresh
            ]
        if key not in self._slots:
            return output
        slots = dict(zip(map(id, fresh), self._slots[key], strict=True))
        return map_tensors(lambda t: slots[id(t)].copy_(t) if id(t) in slots else t, output)
