"""A replica of a pool, as Serve keeps it: started, and stopped in the order that was measured.

Real are its states, the rebuild under a new epoch, its reports and its drain (`PoolCore`).
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING

from sim_check import check_scheduler
from sim_ingress import LEARN_S
from sim_loop import Violation
from sim_schedule import Fault, Shape

from cluster.actors.rank_group import RankGroup
from cluster.actors.reports import PushAnswer, ReplicaReport, ScalingTargets
from serve.pools.pool_core import PoolCore

if TYPE_CHECKING:
    from sim_group import SimGroup
    from sim_world import World


class SimReplica:
    """The `PoolShell` of a real core."""

    def __init__(self, world: World, shape: Shape, number: int) -> None:
        self.shape, self.pool, self.number = shape, shape.pool, number
        self.replica_id = f"replica{number}"
        self.healthy_from = inf
        """Since when requests can be sent here: nothing that struck it is left."""
        self.troubled_until = 0.0
        """Until what struck it last is over."""
        self.is_replaced = False
        """Whether Serve has decided to stop it."""
        self.drains_from = inf
        self._world, self._loop = world, world.loop
        self.core: PoolCore = world.plants.pool_core(
            shape.pool,
            self.replica_id,
            world.plants.hashes(shape.weights, shape.block_times),
            self,
            _targets(world, shape),
        )

    @property
    def kind(self) -> tuple[str, int]:
        """Its pool and weights: another one of that kind can go on with what it runs."""
        return self.pool, self.shape.weights

    @property
    def group(self) -> SimGroup:
        group = self.core.group
        assert hasattr(group, "leaders")
        return group  # type: ignore[return-value]

    async def start(self) -> None:
        """Do what the constructor of `Pool` does."""
        self.core.spawn(self.core.report())
        await self.core.start()

    async def stop(self, grace_s: float) -> None:
        """Do what Serve does once it has decided to stop a replica: call its `__del__`, a bit
        later, and kill it at the end of its grace."""
        decided_at = self._loop.now
        await asyncio.sleep(0.1 + 0.2 * self._world.rng.random())
        try:
            async with asyncio.timeout(decided_at + grace_s - self._loop.now):
                await self._del()
        except TimeoutError:
            self._kill()

    async def _del(self) -> None:
        """Do what `Pool.__del__` does."""
        self.drains_from, self.healthy_from = self._loop.now, inf
        is_drained = self.core.state == "ready"
        await self.core.drain()
        if is_drained and self.core.state in ("ready", "draining"):
            self._check_drained()
            self._world.on_drained(self)
        await self.core.stop()
        self._world.board.remove(self.pool, self.replica_id)

    def _check_drained(self) -> None:
        """Assert that nobody is cut off, if the ingress could know in time."""
        world = self._world
        if world.board.trouble_until + LEARN_S > self.drains_from:
            return
        if world.calls_lost_until > self.drains_from:
            return  # it is prefilled again, where nothing was left of it for a while
        for leader in self.group.leaders:
            check_scheduler(leader.scheduler)
            stats = leader.scheduler.stats()
            if stats.num_running or stats.num_waiting or stats.num_handoffs:
                raise Violation("stopped too early", f"{leader.name}: {stats}")

    def _kill(self) -> None:
        """Do what SIGKILL does to its process and, by Ray, to its ranks."""
        for task in self.core._tasks:
            task.cancel()
        self.group.on_replica_killed()
        self.core.group.kill()

    def strike(self, fault: Fault, *, is_fatal: bool, lasts_s: float) -> None:
        """Something happens here: requests may be lost until it is over."""
        over_at = inf if is_fatal else self._loop.now + fault.delay_s + lasts_s + LEARN_S
        self.healthy_from = max(self.healthy_from, over_at)
        self.troubled_until = max(self.troubled_until, over_at)

    def on_board_trouble(self) -> None:
        """What the ingress does not know of it yet takes longer."""
        if self.healthy_from > self._loop.now:
            self.healthy_from = max(self.healthy_from, self._world.board.trouble_until + LEARN_S)

    # --- what the core asks for -------------------------------------------------------------------

    def new_group(self, epoch: int) -> RankGroup:
        group: RankGroup = self._world.plants.group(self._world, self, epoch)
        return group

    async def push(self, report: ReplicaReport, group: RankGroup) -> PushAnswer:
        return PushAnswer(await self._world.board.push(report))

    async def final_failure(self) -> str:
        return ""

    async def note_failure(self, reason: str, is_final: bool) -> None:
        """Nobody asks."""

    async def note_recovery(self) -> None:
        """It serves from now on."""
        if self._loop.now < self.drains_from:
            self.healthy_from = max(self._loop.now, self._world.board.trouble_until) + LEARN_S


def _targets(world: World, shape: Shape) -> ScalingTargets | None:
    if (scaling := world.schedule.scaling) is None:
        return None
    return ScalingTargets(
        scaling.ttft_target_s, scaling.tpot_target_s, world.schedule.max_num_seqs, shape.dp_size
    )
