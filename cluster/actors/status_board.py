"""`StatusBoard`: the small named actor where pools tell how they are.

The ingress owns it and answers `/ready` from it; pool replicas push to it ten times a second
from their first line on, so that loading shows progress before anything can be asked.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import ray

from cluster.actors.rank_group import GroupReport

NAMESPACE = "lockstep"
OUTDATED = "outdated"
"""The state of a replica of another deployment under the same name."""
LOST_AFTER_S = 5.0
"""A replica that is silent this long is gone. One whose ranks do not answer still pushes, at least
once in `STATS_TIMEOUT_S`."""


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


class StatusBoard:
    """The last report of every pool replica, by pool and replica id."""

    def __init__(self, pools: list[str]) -> None:
        self._reports: dict[str, dict[str, tuple[float, ReplicaReport]]] = {p: {} for p in pools}
        self._actors: dict[str, dict[str, list[Any]]] = {}

    def push(self, report: ReplicaReport) -> None:
        """Replace the replica's last report."""
        self._reports.setdefault(report.pool, {})[report.replica_id] = (time.monotonic(), report)

    def remove(self, pool: str, replica_id: str) -> None:
        """Forget a replica that ended on purpose."""
        self._reports.get(pool, {}).pop(replica_id, None)
        self._actors.get(pool, {}).pop(replica_id, None)

    def register(self, pool: str, replica_id: str, actors: list[Any]) -> None:
        """Remember a replica's rank actors: those of its newest epoch."""
        self._actors.setdefault(pool, {})[replica_id] = actors

    def actors(self) -> dict[str, dict[str, list[Any]]]:
        """Return the rank actors by pool and replica."""
        return self._actors

    def snapshot(self, config_hash: str | None = None) -> dict[str, Any]:
        """Return the body of `/ready` as the deployment with this hash sees it.

        A replica of another one, which it replaces or is replaced by, is outdated.
        """
        now = time.monotonic()
        self._forget_lost(now)
        pools = {
            pool: {"replicas": [_replica(r, config_hash) for _, r in by_id.values()]}
            for pool, by_id in self._reports.items()
        }
        loading = [
            {"what": f"{pool}: {p.what}", "done": p.done, "total": p.total}
            for pool, by_id in self._reports.items()
            for _, report in by_id.values()
            for p in report.group.loading
        ]
        status = {"status": _status(pools), "compiling": _is_compiling(pools)}
        return {**status, "pools": pools, "loading": loading}

    def _forget_lost(self, now: float) -> None:
        for by_id in self._reports.values():
            for replica_id, (pushed_at, _) in list(by_id.items()):
                if now - pushed_at > LOST_AFTER_S:
                    del by_id[replica_id]
                    for actors in self._actors.values():
                        actors.pop(replica_id, None)


def board_name(app_name: str) -> str:
    """Return the name under which an application's board is found."""
    return f"status:{app_name}"


def create_board(app_name: str, pools: list[str]) -> Any:
    """Create the application's board, or return the one that exists."""
    remote = ray.remote(num_cpus=0, max_restarts=-1)(StatusBoard)
    return remote.options(
        name=board_name(app_name), namespace=NAMESPACE, get_if_exists=True
    ).remote(pools)


class BoardClient:
    """A pool replica's way to the board, which may not exist yet or have been restarted."""

    def __init__(self, app_name: str) -> None:
        self._app_name = app_name
        self._board: Any = None
        self._registered: list[Any] = []

    async def push(self, report: ReplicaReport, actors: list[Any]) -> None:
        """Push a report, or nothing while there is no board; its actors when they are new there.

        Waits for the answer, because only that shows whether the board died with its ingress.
        """
        try:
            if self._board is None:
                self._board = ray.get_actor(board_name(self._app_name), namespace=NAMESPACE)
                self._registered = []
            if actors != self._registered:
                await self._board.register.remote(report.pool, report.replica_id, actors)
                self._registered = actors
            await self._board.push.remote(report)
        except (ValueError, ray.exceptions.RayError):
            self._board = None

    def remove(self, pool: str, replica_id: str) -> None:
        """Take a replica off the board."""
        if self._board is not None:
            self._board.remove.remote(pool, replica_id)


def _replica(report: ReplicaReport, config_hash: str | None) -> dict[str, Any]:
    is_ours = config_hash in (None, report.config_hash)
    entry: dict[str, Any] = {
        "id": report.replica_id,
        "state": report.state if is_ours else OUTDATED,
        "ranks": [asdict(rank) for rank in report.group.ranks],
    }
    if report.error:
        entry["error"] = report.error
    return entry


def _is_compiling(pools: dict[str, Any]) -> bool:
    """Return whether a replica serves and compiles."""
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
