"""What a rank knows before it loads anything, and what it tells of itself."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from cluster.config import EngineConfig
from cluster.engine.prefix_index import PrefixUpdate
from cluster.group.device import RankDevice
from cluster.observe.metrics import IN_METRICS_ALONE, SchedulerStats
from cluster.wire.credentials import SECRET_BYTES, Credentials

if TYPE_CHECKING:
    from compile.scope import ArtifactExchange  # which imports torch


LOOPBACK = "127.0.0.1"

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much."""


@dataclass(frozen=True)
class RankPlace:
    """Which rank of an engine's group this is. Invariant: no two ranks of one epoch share a place.
    `dp_rank` counts all data-parallel ranks, those that do not step together included."""

    dp_rank: int = 0
    tp_rank: int = 0
    epoch: int = 0

    @property
    def name(self) -> str:
        return f"rank dp={self.dp_rank} tp={self.tp_rank} epoch={self.epoch}"


def num_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class RankContext:
    """The facts that a rank starts from. Never sent: each process makes its own."""

    config: EngineConfig
    place: RankPlace = RankPlace()
    host: str = LOOPBACK
    """Where ingresses and readers of KV reach this rank; the loopback interface if all of them are
    on its node."""
    credentials: Credentials = field(
        default_factory=lambda: Credentials("", secrets.token_bytes(SECRET_BYTES))
    )
    """By default those of a rank that no other process may talk to."""
    engine_id: str = ""
    node: str = ""
    """Ray's id of the node, for statistics."""
    gpu: str = ""
    """Which GPU of its node Ray gave this rank; see `RankDevice`."""
    is_on_one_node: bool = False
    num_cores: int = field(default_factory=num_cores)
    """Of its node, for all ranks there."""
    ranks_on_node: int = 1
    """Of the application, when this one started, itself included."""
    progress: Progress | None = None
    exchange: ArtifactExchange | None = None
    """Where ranks that share no disk have from one another what one of them compiles."""

    @property
    def device(self) -> RankDevice:
        """What this rank computes on; nothing else says which GPU it is."""
        return RankDevice.of(self.config.device, self.gpu)

    @property
    def threads(self) -> int:
        """How many threads this rank's tensor operations have."""
        return self.config.threads or max(1, self.num_cores // self.ranks_on_node)

    @property
    def lockstep_place(self) -> tuple[int, int]:
        """Rank and size among the data-parallel ranks that step together."""
        dp_size = self.config.parallel.lockstep_size
        return (self.place.dp_rank if dp_size > 1 else 0), dp_size


@dataclass(frozen=True)
class LoadedAdapters:
    """What a leader's group has of the adapters that it was told to load while it serves."""

    ids: frozenset[int] = frozenset()
    """Those that a request may have: every rank of the group has read its part."""
    errors: dict[int, str] = field(default_factory=dict)
    """Why an adapter could not be read, and by which rank, by its id."""


@dataclass(frozen=True)
class RankStats:
    """One rank's figures. Invariant: a cached block that no sequence uses counts as free."""

    place: RankPlace
    pid: int
    node: str
    state: str
    """starting, loading, ready or stopped."""
    step: int = 0
    """The last one that the rank began; followers hear nothing of steps without work."""
    scheduler: SchedulerStats = field(default_factory=SchedulerStats)
    """A follower has none: it reports `num_handoffs` alone."""
    token_s: dict[int, float] = field(default_factory=dict)
    """As its `StepStats` say; for those who choose a leader alone."""
    prefixes: PrefixUpdate | None = None
    """What of its cache changed since it was asked last; None if nothing did, or was asked for."""
    kv_bytes_sent: int = 0
    kv_bytes_received: int = 0
    compiling: bool = False
    """It serves, and its group will go over to what is being compiled."""
    compile_error: str = ""
    """Why it goes on without compiled pieces."""
    adapters: LoadedAdapters = LoadedAdapters()
    """Of a leader; a follower has none."""

    @classmethod
    def of(cls, rank: RankContext, state: str, **figures: Any) -> RankStats:
        return cls(rank.place, os.getpid(), rank.node, state, **figures)

    def to_dict(self) -> dict[str, Any]:
        """Return what `/ready` shows of the rank, without nesting."""
        figures: dict[str, Any] = asdict(self)
        nested: dict[str, Any] = figures.pop("place") | figures.pop("scheduler")
        del figures["token_s"], figures["prefixes"], figures["adapters"]
        for each in fields(SchedulerStats):
            if each.metadata == IN_METRICS_ALONE:
                del nested[each.name]
        return nested | figures
