"""What graphs will cost, before the KV cache takes all that is left.

The one thing to know: nobody can tell but by capturing. The two largest graphs of each mode are
captured for trial into pools that are dropped again; the rest is arithmetic.

1. `capture_trials` captures them, on a KV cache of one block, and measures.
2. `estimate_graph_bytes` adds up, and so much is left out of the KV cache.
3. Later the real ones are captured, and the log says what they took beside what was reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from compile.capture import CaptureCase, capture_all
from compile.config import CUDAGraphMode
from compile.graphs import GraphPools

MIN_GRAPH_BYTES = 1 << 20
"""What a graph costs at least beside its tensors: its nodes and their arguments on the device."""


@dataclass(frozen=True)
class CaptureTrial:
    """What the largest graphs of a mode took when they were captured for trial.

    Invariant: `sizes` are the token counts of all graphs of the mode, descending; `second_bytes`
    is 0 where there is one alone.
    """

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
    """Capture the two largest graphs of each mode, measure, and forget them.

    All ranks of a group call it with the same cases: graphs may hold collectives.

    Args:
        cases: all graphs that are wanted, those of a mode side by side, largest first.
        used_bytes: what the device, or the pools, hold now.
    """
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


def estimate_graph_bytes(trials: Iterable[CaptureTrial], *, policy: str = "shared") -> int:
    """Return the memory to reserve for graphs before the rest goes to the KV cache.

    In a shared pool the largest graph of any mode pays for tensors, and each further one for
    itself alone, which the second one shows (vLLM). Separate pools hold tensors for each size,
    in proportion to it.
    """
    held = [trial for trial in trials if trial.sizes]
    further = sum((len(t.sizes) - 1) * max(t.second_bytes, MIN_GRAPH_BYTES) for t in held)
    if policy == "shared":
        return max((t.first_bytes for t in held), default=0) + further
    return sum(-(-t.first_bytes * sum(t.sizes) // t.sizes[0]) for t in held)
