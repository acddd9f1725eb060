"""What Inductor autotunes: every candidate of an op with its time, kept beside the code.

Candidates are compiled and timed on this device, and the fastest one is generated into the piece,
so a piece that is loaded is not tuned again. What was found travels inside its artifact, for people
and for `python -m compile.explain`:

    AUTOTUNE mm(8x2048, 2048x3072)
      triton_mm_4 0.0130 ms 100.0% BLOCK_K=128, BLOCK_M=16, BLOCK_N=32, num_stages=5, num_warps=2
      mm 0.0160 ms 81.2%
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from compile.cache.inductor_private import feedback
from compile.counters import counter

TUNING = "tuning.txt"
"""The member of an artifact."""
HEADER = "AUTOTUNE"
"""Begins the report of an op."""

logger = logging.getLogger(__name__)


@contextmanager
def watched() -> Iterator[list[str]]:
    """Yield a list that grows by the report of each op that is autotuned inside, which is logged
    as well."""
    reports: list[str] = []

    def take(timings: Mapping[Any, float], op: str, inputs: Sequence[Any], *_: Any) -> None:
        counter.num_autotuned += 1
        reports.append(report(timings, op, inputs))
        logger.info("%s", reports[-1])

    with feedback(take):
        yield reports


def report(timings: Mapping[Any, float], op: str, inputs: Sequence[Any]) -> str:
    """Return a line for an op and one for each of Inductor's candidates, the fastest one first:
    its name, its milliseconds, the best one's as a share of them, and its parameters."""
    shapes = ("x".join(map(str, node.get_size())) for node in inputs)
    lines = [f"{HEADER} {op}({', '.join(shapes)})"]
    best = min(timings.values(), default=0.0)
    for candidate, took in sorted(timings.items(), key=lambda each: each[1]):
        share = best / took if took > best else 1.0
        line = f"  {candidate.name} {took:.4f} ms {share:.1%} {candidate.description}"
        lines.append(line.rstrip())
    return "\n".join(lines)
