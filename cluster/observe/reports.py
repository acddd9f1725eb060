"""What pool replicas and ingresses report to the status board."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cluster.observe.counts import Counts
from cluster.observe.load_progress import LoadProgress
from cluster.rank.status import RankStats

OUTDATED = "outdated"
"""The state of a replica of another deployment under the same name."""


class BoardSilent(Exception):
    """The status board did not answer; the message says in a word why."""


@dataclass(frozen=True)
class GroupReport:
    """All ranks' figures, and the progress of those that are not ready or compile."""

    ranks: list[RankStats]
    loading: list[LoadProgress]
    counts: list[Counts] = field(default_factory=list)
    """What each rank has counted since it was started, in the order of `ranks`."""

    def aged(self, seconds: float) -> GroupReport:
        """Return it with the times of what loads as they are so long after."""
        return replace(self, loading=[progress.aged(seconds) for progress in self.loading])


@dataclass(frozen=True)
class ReplicaReport:
    """One pool replica: its state, its ranks and what it is loading."""

    pool: str
    replica_id: str
    state: str
    """loading, ready, stuck (its ranks do not answer), restarting (under a new epoch) or failed."""
    group: GroupReport
    error: str = ""
    config_hash: str = ""
    """Of its deployment."""
    is_stuck: bool = False
    """The watchdog ended its group, which does not serve again yet."""
    counts: Counts = field(default_factory=dict)
    """What the replica itself has counted."""
    in_state_s: float = 0.0
    """How long it has been in this state."""


@dataclass(frozen=True)
class IngressReport:
    """One ingress: what it loads, how many sequences it has, and what it counted."""

    ingress_id: str
    pid: int
    node: str
    config_hash: str
    loading: tuple[LoadProgress, ...]
    """Empty once it can answer."""
    num_live: int
    """Sequences that it has admitted."""
    is_watched: bool
    """Somebody looks at its status page."""
    counts: Counts | None
    """None: as it said last."""
