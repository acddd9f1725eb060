"""`Pool`: the Serve deployment class of prefill, decode and mixed pools, a shell of `PoolCore`. A
replica owns one rank group: it sits in bundle 0 of its placement group, the ranks in the bundles
after it. It loads in its constructor, so that Serve reports its true state."""

from __future__ import annotations

import asyncio

import ray
from ray import serve as ray_serve

from cluster.actors.gcs_store import FailedStart, FailedStarts, application_secret
from cluster.actors.placement import num_nodes
from cluster.actors.rank_group import RankGroup
from cluster.actors.ray_ranks import RayRank, create_group
from cluster.actors.reports import PushAnswer, ReplicaReport
from cluster.actors.status_board import ReplicaBoard
from cluster.observe.logs import configure_logs
from cluster.wire.credentials import Credentials, Hashes
from serve.config import PoolConfig, check_num_nodes
from serve.pools.pool_core import PoolCore


class Pool:
    # Ray Serve awaits constructors: this one returns when the ranks are ready.
    async def __init__(  # type: ignore[misc]
        self, pool: PoolConfig, config_hash: str, numerics_hash: str
    ) -> None:
        context = ray_serve.get_replica_context()
        configure_logs(pool.engine.log_format)
        check_num_nodes(pool.placement, num_nodes())
        self._pool = pool
        self._replica_id = context.replica_id.unique_id
        self._board = ReplicaBoard(context.app_name)
        self._failed_starts = FailedStarts(config_hash)
        secret = await asyncio.to_thread(application_secret, context.app_name)
        self._credentials = Credentials(config_hash, secret)
        hashes = Hashes(numerics_hash, pool.engine.kv_hash)
        self._core = PoolCore(pool.name, self._replica_id, hashes, self, pool.targets)
        self._core.spawn(self._core.report())
        await self._core.start()

    # What Serve calls.

    async def check_health(self) -> None:
        self._core.check_health()

    async def __del__(self) -> None:
        """Drain, and stop the ranks. Serve calls this once it has decided to stop the replica,
        since no call is open here, and kills it after `graceful_shutdown_timeout_s`."""
        await self._core.drain()
        await self._core.stop()
        self._board.remove(self._pool.name, self._replica_id)

    # What the core calls (`PoolShell`).

    def new_group(self, epoch: int) -> RankGroup:
        placement_group = ray.util.get_current_placement_group()
        assert placement_group is not None, "pool: wanted a placement group, found none"
        here = ray.get_runtime_context().get_node_id()
        return create_group(
            self._pool.engine,
            placement_group,
            first_bundle=1,
            engine_id=f"{self._pool.name}/{self._replica_id}",
            credentials=self._credentials,
            epoch=epoch,
            clients_node=here if self._pool.placement.is_single_node else "",
        )

    async def push(self, report: ReplicaReport, group: RankGroup) -> PushAnswer:
        actors = [handle.actor for handle in group.handles if isinstance(handle, RayRank)]
        return await self._board.push(report, actors)

    async def final_failure(self) -> str:
        failed = await asyncio.to_thread(self._failed_starts.of, self._pool.name)
        return failed.reason if failed is not None and failed.is_final else ""

    async def note_failure(self, reason: str, is_final: bool) -> None:
        failed = FailedStart(reason, is_final)
        await asyncio.to_thread(self._failed_starts.note, self._pool.name, failed)

    async def note_recovery(self) -> None:
        await asyncio.to_thread(self._failed_starts.recover, self._pool.name)
