"""What pool replicas and ingresses report to the status board, and what it shows of that. Processes
of two releases do: a field that is added has a plain default, which a report without it has too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cluster.engine.prefix_index import PrefixIndex, PrefixUpdate
from cluster.group.context import LoadedAdapters, RankStats
from cluster.observe.counts import BUCKET, Counts
from cluster.observe.load_progress import LoadProgress
from cluster.observe.metrics import INGRESS, SchedulerStats
from cluster.wire.credentials import Hashes
from cluster.wire.messages import LoraAdapter

OUTDATED = "outdated"
NO_ADAPTERS = LoadedAdapters()


class BoardSilent(Exception):
    """The status board did not answer; the message says in a word why."""


@dataclass(frozen=True)
class GroupReport:
    """All ranks' figures, and the progress of those that are not ready or compile."""

    ranks: list[RankStats]
    loading: list[LoadProgress]
    counts: list[Counts] = field(default_factory=list)

    def aged(self, seconds: float) -> GroupReport:
        """Return it with the times of what loads as they are so long after."""
        return replace(self, loading=[progress.aged(seconds) for progress in self.loading])


@dataclass(frozen=True)
class ScalingTargets:
    """What a pool is to keep if it is scaled, and what its engines may run."""

    ttft_target_s: float
    tpot_target_s: float
    max_num_seqs: int
    """In one engine."""
    data_parallel_size: int
    """Engines of a replica."""


@dataclass(frozen=True)
class ReplicaReport:
    pool: str
    replica_id: str
    state: str
    """loading, ready, stuck (its ranks do not answer), restarting (under a new epoch), draining,
    stopping or failed."""
    group: GroupReport
    epoch: int = 0
    inboxes: tuple[str, ...] = ()
    """Of its leaders, once they serve."""
    last_end: str = ""
    """How the group before this one ended."""
    error: str = ""
    hashes: Hashes = field(default=Hashes(""))
    is_stuck: bool = False
    """The watchdog ended its group, which does not serve again yet."""
    counts: Counts = field(default_factory=dict)
    in_state_s: float = 0.0
    targets: ScalingTargets | None = None
    takes_answer: bool = False
    """Whether it takes a `PushAnswer`; one of a release before takes the known prefixes alone."""


@dataclass(frozen=True)
class PushAnswer:
    """What the board answers to a replica's report."""

    known_prefixes: Mapping[int, int] = field(default_factory=dict)
    """By data-parallel rank which number of the changes in its leader's prefix cache is known."""
    adapters: tuple[LoraAdapter, ...] | None = None
    """Those that its engines are to have, beside those that they started with; None: unknown."""


@dataclass(frozen=True)
class LeaderReport:
    """One leader, as ingresses choose among all of a pool."""

    pool: str
    replica_id: str
    dp_rank: int
    epoch: int
    state: str
    """Of its replica."""
    inbox: str
    hashes: Hashes
    last_end: str
    """How its group ended last, in the epoch before; empty if none has."""
    load: SchedulerStats = field(default_factory=SchedulerStats)
    token_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds that a token takes there, by the number of binary digits of its step's tokens."""
    prefixes: PrefixUpdate | None = None
    """What of its prefix cache the ingress that asks does not know yet."""
    adapters: LoadedAdapters = NO_ADAPTERS

    @property
    def engine_id(self) -> str:
        return f"{self.pool}/{self.replica_id}/{self.dp_rank}"


def leaders_of(report: ReplicaReport) -> list[LeaderReport]:
    ranks = {
        rank.place.dp_rank: rank
        for rank in report.group.ranks
        if rank.place.tp_rank == 0 and rank.place.epoch == report.epoch
    }
    leaders = [
        LeaderReport(
            report.pool,
            report.replica_id,
            dp_rank,
            report.epoch,
            report.state,
            inbox,
            report.hashes,
            report.last_end,
        )
        for dp_rank, inbox in enumerate(report.inboxes)
    ]
    return [
        replace(leader, load=rank.scheduler, token_s=rank.token_s, adapters=rank.adapters)
        if (rank := ranks.get(leader.dp_rank)) is not None
        else leader
        for leader in leaders
    ]


class CachedPrefixes:
    """The prefix caches of all leaders, as the board knows them."""

    def __init__(self) -> None:
        self._indices: dict[tuple[str, str], tuple[int, dict[int, PrefixIndex]]] = {}
        """By pool and replica: its epoch, and by data-parallel rank what is cached there."""

    def take(self, report: ReplicaReport) -> tuple[ReplicaReport, dict[int, int]]:
        """Take what a replica reports of its caches; return the report without, and by
        data-parallel rank which number of changes is known."""
        replica = report.pool, report.replica_id
        epoch, indices = self._indices.get(replica, (-1, {}))
        if epoch != report.epoch:
            indices = {}
            self._indices[replica] = report.epoch, indices
        ranks: list[RankStats] = []
        for rank in report.group.ranks:
            if rank.place.tp_rank == 0 and rank.place.epoch == report.epoch:
                index = indices.setdefault(rank.place.dp_rank, PrefixIndex())
                if rank.prefixes is not None:
                    index.apply(rank.prefixes)
                    rank = replace(rank, prefixes=None)
            ranks.append(rank)
        numbers = {dp_rank: index.number for dp_rank, index in indices.items()}
        return replace(report, group=replace(report.group, ranks=ranks)), numbers

    def add_to(self, leader: LeaderReport, known: Mapping[str, tuple[int, int]]) -> LeaderReport:
        """Return a report for an ingress that knows so much: by engine id its epoch, and the number
        of its changes."""
        epoch, indices = self._indices.get((leader.pool, leader.replica_id), (-1, {}))
        index = indices.get(leader.dp_rank)
        known_epoch, number = known.get(leader.engine_id, (-1, 0))
        if index is None or not leader.epoch == epoch == known_epoch:
            return leader
        return replace(leader, prefixes=index.since(number))

    def forget(self, pool: str, replica_id: str) -> None:
        self._indices.pop((pool, replica_id), None)


@dataclass(frozen=True)
class IngressReport:
    ingress_id: str
    pid: int
    node: str
    numerics_hash: str
    loading: tuple[LoadProgress, ...]
    """Empty once it can answer."""
    num_live: int
    is_watched: bool
    counts: Counts | None
    """None: as it said last."""
    known_prefixes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By the id of each engine whose prefix cache it wants to know: its epoch, and the number of
    the changes that it knows."""
    adapters_revision: int | None = None
    """Of the `AdapterSet` that it goes by; None: it knows of none, being of a release before."""
    used_adapters: frozenset[int] = frozenset()
    """By id those that its live requests have."""


def ready_body(
    reports: Mapping[str, Sequence[ReplicaReport]],
    ingresses: Sequence[IngressReport],
    numerics_hash: str | None,
    scaling: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    """Return the body of `/ready`; replicas that requests of these numerics cannot go to are
    outdated.
    `scaling`: by pool what its policy decided last, of those that are scaled."""
    pools: dict[str, dict[str, Any]] = {
        pool: {"replicas": [_replica_body(report, numerics_hash) for report in found]}
        | ({"scaling": scaling[pool]} if pool in scaling else {})
        for pool, found in reports.items()
    }
    ours = [report for report in ingresses if numerics_hash in (None, report.numerics_hash)]
    loading = [
        {**asdict(p), "what": f"{pool}: {p.what}", "pool": pool, "replica": report.replica_id}
        for pool, found in reports.items()
        for report in found
        for p in report.group.loading
    ]
    loading += [
        {**asdict(p), "pool": None, "replica": report.ingress_id}
        for report in ours
        for p in report.loading
    ]
    return {
        "status": _status(pools),
        "compiling": _is_compiling(pools),
        "pools": pools,
        "ingresses": [
            {
                "id": report.ingress_id,
                "state": "loading" if report.loading else "ready",
                "pid": report.pid,
                "node": report.node,
                "num_live": report.num_live,
            }
            for report in ours
        ],
        "loading": loading,
    }


def figures_body(
    totals: Mapping[str, Counts], engines: Mapping[str, tuple[str, str, int]]
) -> dict[str, Any]:
    """Return what was counted of the ingresses and of each engine, of which `engines` has by name
    the pool, the replica and the data-parallel rank."""
    return {
        "ingress": _flat(totals.get(INGRESS, {}), _INGRESS_FIGURES),
        "choices": _choices(totals.get(INGRESS, {})),
        "engines": [
            {
                "pool": pool,
                "replica": replica_id,
                "dp_rank": dp_rank,
                **_engine_figures(totals.get(engine, {})),
            }
            for engine, (pool, replica_id, dp_rank) in engines.items()
        ],
    }


def scaling_body(
    pool: str,
    reports: Sequence[ReplicaReport],
    engines: Mapping[str, SchedulerStats],
    totals: Mapping[str, Counts],
) -> dict[str, Any]:
    """Return what a pool's scaling is decided by, in types that need no module of ours: where it is
    decided there may be none. `engines`: those of the pool that serve, by name."""
    targets = next((report.targets for report in reports if report.targets), None)
    firsts = "time_to_first_token_seconds", BUCKET
    return {
        "pool": pool,
        "targets": targets and asdict(targets),
        "replicas": {report.replica_id: report.state for report in reports},
        "engines": {
            name: {"load": asdict(load), "counts": _step_counts(totals.get(name, {}))}
            for name, load in engines.items()
        },
        "first_tokens": sum(
            value for key, value in totals.get(INGRESS, {}).items() if key[:2] == firsts
        ),
    }


def _step_counts(counts: Counts) -> dict[str, float]:
    def total(name: str, kind: str = "") -> float:
        return sum(
            value for key, value in counts.items() if key[0] == name and kind in ("", key[-1])
        )

    return {
        "tokens": total("scheduled_tokens_total"),
        "prompt_tokens": total("prompt_tokens_computed_total"),
        "prompt_steps": total("steps_total", "mixed"),
        "prompt_step_seconds": total("step_seconds_total", "mixed"),
        "decode_steps": total("steps_total", "decode"),
        "decode_step_seconds": total("step_seconds_total", "decode"),
    }


_INGRESS_FIGURES = ("generation_tokens_total", "prompt_tokens_total", "request_success_total")
_ENGINE_FIGURES = (
    *("scheduled_tokens_total", "padding_tokens_total", "prompt_tokens_computed_total"),
    *("votes_total", "dp_wait_seconds_total", "compilations_total", "late_compilations_total"),
    *("num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    *("kv_transfers_total", "kv_transfer_failures_total", "rank_restarts_total"),
)


def _choices(counts: Counts) -> dict[str, dict[str, float]]:
    """Return why engines were chosen, how often: by pool and reason."""
    found: dict[str, dict[str, float]] = {}
    for (name, *labels), value in counts.items():
        if name == "choices_total":
            found.setdefault(labels[0], {})[labels[1]] = value
    return found


def _flat(counts: Counts, names: tuple[str, ...]) -> dict[str, float]:
    sums = dict.fromkeys(names, 0.0)
    for (name, *_), value in counts.items():
        if name in sums:
            sums[name] += value
    return sums


def _engine_figures(counts: Counts) -> dict[str, Any]:
    steps: dict[str, float] = {}
    replays: dict[str, float] = {}
    padding: dict[str, float] = {}
    for (name, *labels), value in counts.items():
        if name == "steps_total":
            steps[labels[0]] = steps.get(labels[0], 0.0) + value
        elif name == "graph_replays_total":
            replays[labels[1]] = replays.get(labels[1], 0.0) + value
        elif name == "graph_padding_tokens_total":
            padding[labels[1]] = padding.get(labels[1], 0.0) + value
    by_size = {"replays": replays, "replay_padding": padding}
    return {**_flat(counts, _ENGINE_FIGURES), "steps": steps, **by_size}


def _replica_body(report: ReplicaReport, numerics_hash: str | None) -> dict[str, Any]:
    is_ours = numerics_hash is None or report.hashes.can_serve(numerics_hash)
    entry: dict[str, Any] = {
        "id": report.replica_id,
        "state": report.state if is_ours else OUTDATED,
        "in_state_s": report.in_state_s,
        "ranks": [rank.to_dict() for rank in report.group.ranks],
    }
    if report.is_stuck:
        entry["stuck"] = True
    if report.error:
        entry["error"] = report.error
    return entry


def _is_compiling(pools: dict[str, Any]) -> bool:
    replicas = [replica for pool in pools.values() for replica in pool["replicas"]]
    return any(rank["compiling"] for replica in replicas for rank in replica["ranks"])


def _status(pools: dict[str, Any]) -> str:
    """Ready: every pool has a replica that is. Whether these are enough, ingresses know."""
    return "ready" if all(map(num_ready, pools.values())) else "loading"


def num_ready(pool: Mapping[str, Any]) -> int:
    """Return how many replicas of a pool in the body of `/ready` serve."""
    return num_in(pool, ("ready",))


def num_in(pool: Mapping[str, Any], states: Iterable[str]) -> int:
    return sum(replica["state"] in states for replica in pool["replicas"])
