"""Counters that outlive the processes that count. A process counts from zero and says how far it
has come. `Ledger` adds to its totals what is new each time, so a total neither jumps back when a
process ends, nor counts twice what one says again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import msgspec

Counts = dict[tuple[str, ...], float]
"""What was counted, by the metric's name and the values of its labels. A histogram's keys end with
`SUM`, or with `BUCKET` and a bucket's upper bound; a bucket does not hold those below it."""

SUM, BUCKET = "sum", "le"
INFINITE = "+Inf"
MAX_SOURCES = 4096
"""Processes whose last counts a ledger remembers; those that were silent longest give way."""


class Histogram:
    """How often a value fell into each bucket. One thread observes, any may read."""

    def __init__(self, name: str, bounds: Sequence[float]) -> None:
        """`bounds` are the upper ones of buckets, ascending; what lies above has one of its own."""
        self._bounds = tuple(bounds)
        self._name = name
        self._bound_texts = [bound_text(bound) for bound in (*bounds, float("inf"))]
        self._times = [0] * len(self._bound_texts)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._times[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def put_into(self, counts: Counts, name: str | None = None) -> None:
        """Add what was observed, if anything was; under another name if one is given."""
        if not any(self._times):
            return
        name = name or self._name
        counts[name, SUM] = self._sum
        for bound, times in zip(self._bound_texts, self._times, strict=True):
            if times:
                counts[name, BUCKET, bound] = times


def bound_text(bound: float) -> str:
    return INFINITE if bound == float("inf") else repr(float(bound))


class Ledger(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Totals by owner of processes that come and go. Invariant: no total ever falls."""

    totals: dict[str, Counts] = {}
    last: dict[str, Counts] = {}

    def add(self, source: str, owner: str, counts: Mapping[tuple[str, ...], float]) -> bool:
        """Add what a process has counted since it said so last; return whether that is anything.
        What it has not counted yet has a total of zero, so that whoever watches it sees it begin.
        `source` identifies the process: no other one is ever called so. What it said earlier may
        come later."""
        last = self.last[source] = self.last.pop(source, {})
        while len(self.last) > MAX_SOURCES:
            del self.last[next(iter(self.last))]
        totals = self.totals.setdefault(owner, {})
        has_grown = False
        for key, value in counts.items():
            totals.setdefault(key, 0.0)
            if (grown := value - last.get(key, 0.0)) > 0:
                totals[key] += grown
                last[key] = value
                has_grown = True
        return has_grown
