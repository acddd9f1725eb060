"""Capturing before a process serves, in the same order on every rank, and the seal that ends it.

1. `capture_trials` measures the two largest graphs of each mode before the KV cache takes what
   memory is left, and `estimate_graph_bytes` adds up the rest.
2. `graphs_to_capture` lists the graphs of a configuration.
3. `capture_all` warms each one up and captures it, largest first, so that the smaller ones find
   their memory in the pool.
4. `seal` ends it: from now on what compiles or captures is counted, named, and refused if strict.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from compile.config import CompilationConfig, CUDAGraphMode, PoolPolicy, SealPolicy
from compile.context import BatchDescriptor, ForwardContext, forward_context
from compile.counters import counter
from compile.errors import LateCapture, LateCompilation
from compile.graphs.pools import GraphPools

logger = logging.getLogger(__name__)

Graph = tuple[CUDAGraphMode, BatchDescriptor]
"""A captured graph by its runtime mode and its key."""


class _PerThread(threading.local):
    """Ranks of one process may be threads: each opens a window of its own."""

    num_windows = 0


_thread = _PerThread()


@dataclass
class _Seal:
    """What this process still may do. Invariant: `policy` is None until it is sealed."""

    policy: SealPolicy | None = None
    named: set[str] = field(default_factory=set)


_seal = _Seal()


@contextmanager
def capture_window() -> Iterator[None]:
    """Let wrappers on this thread capture what they meet; LateCapture: a strict seal forbids it."""
    if is_sealed():
        note_late_capture("a capture window")
    _thread.num_windows += 1
    try:
        yield
    finally:
        _thread.num_windows -= 1


def is_in_capture_window() -> bool:
    return _thread.num_windows > 0


def seal(policy: SealPolicy = "warn") -> None:
    """End the start-up of this process: nothing new is compiled or captured from now on."""
    _seal.policy = policy
    _seal.named.clear()


def unseal() -> None:
    """Allow both again: another model is loaded into this process."""
    _seal.policy = None


def is_sealed() -> bool:
    return _seal.policy is not None


def note_late_compile(what: str) -> None:
    """Count and name a compilation after the seal, and refuse it if that is strict."""
    if not is_sealed():
        return
    counter.num_late_compilations += 1
    _warn_once(f"compiled after the start: {what}")
    if _seal.policy == "strict":
        raise LateCompilation("compilation", "none after the process was sealed", what)


def note_late_capture(what: str) -> None:
    """Count and name what may not be captured now, and refuse it if a seal is strict."""
    counter.num_late_captures += 1
    _warn_once(f"runs eagerly, as it was not captured at the start: {what}")
    if _seal.policy == "strict":
        raise LateCapture("capture", "none after the process was sealed", what)


def _warn_once(line: str) -> None:
    """An unknown shape may come with every step."""
    if line not in _seal.named:
        _seal.named.add(line)
        logger.warning(line)


def graphs_to_capture(
    config: CompilationConfig, max_num_seqs: int, query_len: int = 1
) -> list[Graph]:
    """Return the graphs that a resolved configuration replays, in capture order. Decode steps have
    one of one token a sequence for each batch size, and one of `query_len` if that is more."""
    mode, sizes, full = config.graph_mode, config.capture_num_tokens or (), []
    if mode.decode_mode() is CUDAGraphMode.FULL:
        lengths = {1, query_len}
        full += [BatchDescriptor(bs * n, bs, True) for bs in config.graph_bs for n in lengths]
    if mode.mixed_mode() is CUDAGraphMode.FULL:
        full += [BatchDescriptor(n, min(n, max_num_seqs), False) for n in sizes]
    graphs = [(CUDAGraphMode.FULL, key) for key in full]
    if mode.requires_piecewise_compilation():
        graphs += [(CUDAGraphMode.PIECEWISE, BatchDescriptor(n, None, False)) for n in sizes]
    return sorted(graphs, key=_order)


def _order(graph: Graph) -> tuple[int, int, int]:
    """Piecewise graphs first, then by size, descending: the same on every rank."""
    mode, key = graph
    return mode.value, -key.num_tokens, -(key.num_seqs or 0)


@dataclass(frozen=True)
class CaptureCase:
    """One graph to capture. `prepare` fills the static inputs and returns its forward's context."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    prepare: Callable[[], ForwardContext]


@dataclass(frozen=True)
class CaptureReport:
    """What a start captured. Invariant: keys are ascending, piecewise graphs first."""

    elapsed_s: float
    captured: tuple[Graph, ...]
    skipped: tuple[Graph, ...]
    """Graphs that some rank had no memory for."""
    num_bytes: int
    """What the pools grew by."""

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return tuple(key.num_tokens for _, key in self.captured if not key.has_chunks)

    @property
    def draft_batch_sizes(self) -> tuple[int, ...]:
        drafting = [key for _, key in self.captured if key.uniform_decode and key.has_chunks]
        return tuple(key.num_seqs or 0 for key in drafting)

    @property
    def mixed(self) -> tuple[BatchDescriptor, ...]:
        full = CUDAGraphMode.FULL
        return tuple(k for mode, k in self.captured if mode is full and not k.uniform_decode)

    @property
    def token_counts(self) -> tuple[int, ...]:
        piecewise = CUDAGraphMode.PIECEWISE
        return tuple(key.num_tokens for mode, key in self.captured if mode is piecewise)


def capture_all(
    cases: Iterable[CaptureCase],
    run: Callable[[CaptureCase], object],
    *,
    rank: int,
    pools: GraphPools,
    warmups: Mapping[CUDAGraphMode, int],
    synchronize: Callable[[], None],
    fits_on_all_ranks: Callable[[BatchDescriptor], bool] | None = None,
    progress: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> CaptureReport:
    """Capture every case, the same on all ranks, largest first, and report. `synchronize` waits for
    the device after each graph, `fits_on_all_ranks` before it for the other ranks; `progress` is
    called on rank 0 alone."""
    started, num_bytes = clock(), pools.num_bytes
    ordered = sorted(cases, key=lambda case: _order((case.mode, case.descriptor)))
    captured, skipped = [], []
    with torch.inference_mode(), paused_gc(), capture_window():
        begun: set[CUDAGraphMode] = set()
        for num_done, case in enumerate(ordered, 1):
            graph = (case.mode, case.descriptor)
            if fits_on_all_ranks is None or fits_on_all_ranks(case.descriptor):
                is_first = case.mode not in begun
                _capture(case, run, warmups[case.mode], pools, is_first=is_first)
                synchronize()
                begun.add(case.mode)
                captured.append(graph)
            else:
                skipped.append(graph)
            if progress is not None and rank == 0:
                progress(num_done, len(ordered))
    report = CaptureReport(
        clock() - started, _ascending(captured), _ascending(skipped), pools.num_bytes - num_bytes
    )
    numbers = (len(captured), report.elapsed_s, report.num_bytes, len(skipped))
    logger.info("captured %d graphs in %.1f s, %d bytes; no room for %d", *numbers)
    return report


def joined(reports: Sequence[CaptureReport]) -> CaptureReport:
    return CaptureReport(
        sum(report.elapsed_s for report in reports),
        _ascending([graph for report in reports for graph in report.captured]),
        _ascending([graph for report in reports for graph in report.skipped]),
        sum(report.num_bytes for report in reports),
    )


def warmups_of(config: CompilationConfig) -> dict[CUDAGraphMode, int]:
    """Return how often a forward runs before it is captured, by mode; `config` is resolved."""
    full, piecewise = config.num_warmups_full, config.num_warmups_piecewise
    assert full is not None and piecewise is not None, "warm-ups: wanted a resolved configuration"
    return {CUDAGraphMode.FULL: full, CUDAGraphMode.PIECEWISE: piecewise}


@contextmanager
def paused_gc() -> Iterator[None]:
    """Collect now and not inside: a finalizer there may undo a capture. What exists now is set
    aside; otherwise each collection inside would take 100 ms."""
    was_enabled, has_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    gc.disable()
    if not has_frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not has_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _capture(
    case: CaptureCase,
    run: Callable[[CaptureCase], object],
    num_warmups: int,
    pools: GraphPools,
    *,
    is_first: bool,
) -> None:
    """Run a case eagerly, then once as the step that it is captured for. What the warm-ups of a
    mode's first and largest case took is released before it fills the pool."""
    context = case.prepare()
    eager = replace(context, cudagraph_runtime_mode=CUDAGraphMode.NONE, batch_descriptor=None)
    captured = replace(context, cudagraph_runtime_mode=case.mode, batch_descriptor=case.descriptor)
    for _ in range(num_warmups):
        with forward_context(eager):
            run(case)
    if is_first:
        pools.of(case.descriptor).release_cache()
    with forward_context(captured):
        run(case)


def _ascending(graphs: list[Graph]) -> Any:
    return tuple(sorted(reversed(graphs), key=lambda graph: (graph[0].value, graph[1].num_tokens)))


MIN_GRAPH_BYTES = 1 << 20
"""The least that a graph costs besides its tensors: its nodes and their arguments on the device."""


@dataclass(frozen=True)
class CaptureTrial:
    """What the largest graphs of a mode took when they were captured for trial. Invariant: `sizes`
    are the token counts of all graphs of the mode, descending."""

    sizes: tuple[int, ...]
    first_bytes: int
    second_bytes: int


def capture_trials(
    cases: Iterable[CaptureCase],
    run: Callable[[CaptureCase], object],
    *,
    pools: GraphPools,
    warmups: Mapping[CUDAGraphMode, int],
    synchronize: Callable[[], None],
    used_bytes: Callable[[], int],
) -> list[CaptureTrial]:
    """Capture the two largest graphs of each mode, measure them, and forget them. `cases`: those of
    a mode side by side, largest first."""
    trials = []
    for _, same_mode in groupby(cases, key=lambda case: case.mode):
        graphs, grown, before = list(same_mode), [0, 0], used_bytes()
        for i, case in enumerate(graphs[:2]):
            capture_all([case], run, rank=0, pools=pools, warmups=warmups, synchronize=synchronize)
            grown[i] = max(0, used_bytes() - before - sum(grown))
        trials.append(CaptureTrial(tuple(case.descriptor.num_tokens for case in graphs), *grown))
        pools.forget()
        synchronize()
    return trials


def estimate_graph_bytes(trials: Iterable[CaptureTrial], *, policy: PoolPolicy = "shared") -> int:
    """Return the memory to reserve for graphs before the rest goes to the KV cache. In a shared
    pool the largest graph of any mode pays for tensors, and each further one for itself alone,
    which the second one shows (vLLM). Separate pools grow with each size."""
    held = [trial for trial in trials if trial.sizes]
    further = sum((len(t.sizes) - 1) * max(t.second_bytes, MIN_GRAPH_BYTES) for t in held)
    if policy == "shared":
        return max((t.first_bytes for t in held), default=0) + further
    return sum(-(-t.first_bytes * sum(t.sizes) // t.sizes[0]) for t in held)
