"""What a leader counts of its steps: how they ran, how long they were and how much was padding.

The step thread adds integers, a handful a step; whoever reads makes names of them.
"""

from __future__ import annotations

from collections import Counter

from cluster.counts import Counts, Histogram
from cluster.messages import StepAgreement, StepKind, StepPlan
from cluster.metrics import BY_NAME
from compile.config import CUDAGraphMode

_KINDS = {StepKind.NOTHING: "dummy", StepKind.DECODE: "decode", StepKind.MIXED: "mixed"}
"""What this rank's own sequences do, whatever those of others."""


class StepCounts:
    """One rank's steps. Invariant: the step thread adds, any thread may read."""

    def __init__(self) -> None:
        self._steps: Counter[tuple[int, StepKind]] = Counter()
        """By mode and kind."""
        self._replays: Counter[tuple[int, int]] = Counter()
        """By mode and tokens, of those that replayed something."""
        self._num_tokens = 0
        self._num_padding = 0
        bounds = BY_NAME["iteration_tokens_total"].bounds
        self._tokens_of_step = Histogram("iteration_tokens_total", bounds)

    def add(self, plan: StepPlan, agreed: StepAgreement, num_padding: int) -> None:
        """Count a step of this rank's plan."""
        num_tokens, kind = plan.num_tokens, StepKind.NOTHING
        if num_tokens:
            is_decode = plan.num_decodes == plan.num_seqs
            kind = StepKind.DECODE if is_decode else StepKind.MIXED
            self._tokens_of_step.observe(num_tokens)
        self._steps[agreed.mode, kind] += 1
        if agreed.mode:
            self._replays[agreed.mode, agreed.batch.num_tokens] += 1
        self._num_tokens += num_tokens
        self._num_padding += num_padding

    def counts(self) -> Counts:
        """Return what was counted by now. Any thread may call it."""
        counts: Counts = {
            ("scheduled_tokens_total",): self._num_tokens,
            ("padding_tokens_total",): self._num_padding,
        }
        for (mode, kind), times in [*self._steps.items()]:
            counts["steps_total", _mode(mode), _KINDS[kind]] = times
        for (mode, size), times in [*self._replays.items()]:
            counts["graph_replays_total", _mode(mode), str(size)] = times
        self._tokens_of_step.put_into(counts)
        return counts


def _mode(mode: int) -> str:
    return CUDAGraphMode(mode).name.lower()
