"""What pool replicas and ingresses report to the status board, and what it shows of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cluster.group.context import RankStats
from cluster.observe.counts import Counts
from cluster.observe.load_progress import LoadProgress
from cluster.observe.metrics import INGRESS

OUTDATED = "outdated"


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
class ReplicaReport:
    pool: str
    replica_id: str
    state: str
    """loading, ready, stuck (its ranks do not answer), restarting (under a new epoch) or failed."""
    group: GroupReport
    error: str = ""
    config_hash: str = ""
    is_stuck: bool = False
    """The watchdog ended its group, which does not serve again yet."""
    counts: Counts = field(default_factory=dict)
    in_state_s: float = 0.0


@dataclass(frozen=True)
class IngressReport:
    ingress_id: str
    pid: int
    node: str
    config_hash: str
    loading: tuple[LoadProgress, ...]
    """Empty once it can answer."""
    num_live: int
    is_watched: bool
    counts: Counts | None
    """None: as it said last."""


def ready_body(
    reports: Mapping[str, Sequence[ReplicaReport]],
    ingresses: Sequence[IngressReport],
    config_hash: str | None,
) -> dict[str, Any]:
    """Return the body of `/ready`; replicas of a deployment with another hash are outdated."""
    pools = {
        pool: {"replicas": [_replica_body(report, config_hash) for report in found]}
        for pool, found in reports.items()
    }
    ours = [report for report in ingresses if config_hash in (None, report.config_hash)]
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


_INGRESS_FIGURES = ("generation_tokens_total", "prompt_tokens_total", "request_success_total")
_ENGINE_FIGURES = (
    *("scheduled_tokens_total", "padding_tokens_total", "prompt_tokens_computed_total"),
    *("votes_total", "dp_wait_seconds_total", "compilations_total", "late_compilations_total"),
    *("num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("kv_transfers_total", "kv_transfer_failures_total", "rank_restarts_total"),
)


def _flat(counts: Counts, names: tuple[str, ...]) -> dict[str, float]:
    sums = dict.fromkeys(names, 0.0)
    for (name, *_), value in counts.items():
        if name in sums:
            sums[name] += value
    return sums


def _engine_figures(counts: Counts) -> dict[str, Any]:
    steps: dict[str, float] = {}
    replays: dict[str, float] = {}
    for (name, *labels), value in counts.items():
        if name == "steps_total":
            steps[labels[0]] = steps.get(labels[0], 0.0) + value
        elif name == "graph_replays_total":
            replays[labels[1]] = replays.get(labels[1], 0.0) + value
    return {**_flat(counts, _ENGINE_FIGURES), "steps": steps, "replays": replays}


def _replica_body(report: ReplicaReport, config_hash: str | None) -> dict[str, Any]:
    is_ours = config_hash in (None, report.config_hash)
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
    """Ready: every pool has a ready replica and all are; degraded: some are not."""
    states = [
        [r["state"] for r in pool["replicas"] if r["state"] != OUTDATED] for pool in pools.values()
    ]
    if not all("ready" in replicas for replicas in states):
        return "loading"
    return "ready" if all(s == "ready" for replicas in states for s in replicas) else "degraded"
