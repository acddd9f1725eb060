"""`RankStats`: what a rank tells of itself."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from cluster.group.context import RankContext, RankPlace
from cluster.observe.metrics import IN_METRICS_ALONE, SchedulerStats


@dataclass(frozen=True)
class RankStats:
    """One rank's figures; sizes are bytes, counts blocks.

    Invariant: a cached block that no sequence uses counts as free.
    """

    place: RankPlace
    pid: int
    node: str
    state: str
    """starting, loading, ready or stopped."""
    step: int = 0
    """The last one that the rank began. Steps in which no rank has work are not counted here:
    followers hear nothing of them."""
    scheduler: SchedulerStats = field(default_factory=SchedulerStats)
    """A follower has none: it reports `held_tickets` alone."""
    kv_bytes_sent: int = 0
    kv_bytes_received: int = 0
    compiling: bool = False
    """It serves, and its group will go over to what is being compiled."""
    compile_error: str = ""
    """Why it goes on without compiled pieces."""

    @classmethod
    def of(cls, rank: RankContext, state: str, **figures: Any) -> RankStats:
        return cls(rank.place, os.getpid(), rank.node, state, **figures)

    def to_dict(self) -> dict[str, Any]:
        """Return what `/ready` shows of the rank, without nesting."""
        figures: dict[str, Any] = asdict(self)
        nested: dict[str, Any] = figures.pop("place") | figures.pop("scheduler")
        for each in fields(SchedulerStats):
            if each.metadata == IN_METRICS_ALONE:
                del nested[each.name]
        return nested | figures
