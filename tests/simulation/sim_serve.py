"""What Ray Serve does about an application's replicas: starts, stops, replaces and scales them.

Simulated is Serve, in the order that was measured: it decides; a replica's `__del__` begins some
0.2 s later (`SimReplica.stop`); at the end of its grace it is killed. A deployment that is replaced
stops before or after its successors are there, and an ingress after. Serve picks who goes.

Real are what a pool is scaled by (`Meter` over the board's answer) and how (`ScalingPolicy`).
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sim_ingress import LEARN_S, POLL_S, SimIngress
from sim_loop import Violation
from sim_replica import SimReplica
from sim_schedule import NEW_BLOCKS, NEW_WEIGHTS, Fault, Scaling, Shape

from cluster.actors.rank_group import RankDied
from serve.pools.scaling import PERIOD_S, Meter, ScalingPolicy

if TYPE_CHECKING:
    from sim_world import World

CONTROL_S = 0.1
"""How often Serve's controller asks a policy."""
GRACE_S = 35.0
"""Of a replica that goes because its pool is scaled down."""


class SimServe:
    def __init__(self, world: World) -> None:
        self._world, self._rng = world, world.rng
        self._acts: list[asyncio.Task[None]] = []
        self._controls: list[asyncio.Task[None]] = []
        self._num_weights = 1

    @property
    def is_busy(self) -> bool:
        """Whether it starts or stops anything."""
        return not all(task.done() for task in self._acts)

    async def start_replica(self, shape: Shape) -> None:
        replica = SimReplica(self._world, shape, self._world.outcome.num_replicas)
        self._world.outcome.num_replicas += 1
        self._world.replicas.append(replica)
        try:
            await replica.start()
        except RankDied:
            if not replica.is_replaced:
                raise

    async def stop_replica(self, replica: SimReplica, grace_s: float) -> None:
        await replica.stop(grace_s)
        self._world.replicas.remove(replica)

    # --- replicas that are replaced ---------------------------------------------------------------

    def drain(self, replicas: list[SimReplica], fault: Fault) -> None:
        """Stop replicas of a pool, with as many others that start before, after them, or not at
        all."""
        if old := _taken([each for each in replicas if each.core.state != "loading"]):
            self._act(self._replace(old, fault, [replica.shape for replica in old]))

    def roll_out(self, fault: Fault) -> None:
        """Replace all pools and the ingress at once."""
        world = self._world
        old = _taken(world.replicas)
        [newest, *_] = world.ingresses
        weights, block_times = newest.weights, newest.block_times
        if fault.kind == NEW_WEIGHTS:
            weights, self._num_weights = self._num_weights, self._num_weights + 1
        if fault.kind == NEW_BLOCKS:
            block_times *= 2
        for pool in {replica.pool: None for replica in old}:
            of_pool = [replica for replica in old if replica.pool == pool]
            shapes = [
                replace(replica.shape, weights=weights, block_times=block_times)
                for replica in of_pool
            ]
            self._act(self._replace(of_pool, fault, shapes))
        for number in range(len(world.ingresses)):
            self._act(self._replace_ingress(number, weights, block_times))

    async def _replace(self, old: list[SimReplica], fault: Fault, shapes: list[Shape]) -> None:
        world = self._world
        while any(replica.core.state == "loading" for replica in old):
            await asyncio.sleep(POLL_S)  # the first ones, where others serve already
        if fault.successor == "before":
            await asyncio.gather(*map(self.start_replica, shapes))
        await asyncio.gather(*(self.stop_replica(replica, fault.grace_s) for replica in old))
        if fault.successor == "after":
            await asyncio.gather(*map(self.start_replica, shapes))
        elif not world.replicas_of(shapes[0].pool):
            await self.start_replica(shapes[0])

    async def _replace_ingress(self, number: int, weights: int, block_times: int) -> None:
        world = self._world
        ingress = SimIngress(world, weights, block_times)
        await ingress.start()
        old, world.ingresses[number] = world.ingresses[number], ingress
        self._check_successor(old, ingress)
        await old.end()

    def _check_successor(self, old: SimIngress, new: SimIngress) -> None:
        """Assert that no ingress takes over while engines of the old weights alone serve."""
        world = self._world
        if old.weights == new.weights or world.board.trouble_until + LEARN_S > world.loop.now:
            return
        pools = [shape.pool for shape in world.schedule.groups]
        since = max(world.healthy_from(pool, old.weights) for pool in pools)
        if since + LEARN_S < world.loop.now and not all(map(new.directory._able, pools)):
            raise Violation("replaced too early", f"by weights {new.weights}")

    # --- pools that are scaled --------------------------------------------------------------------

    def scale(self, shape: Shape, scaling: Scaling) -> None:
        pool = _ScaledPool(self, self._world, shape, scaling)
        self._controls += map(self._world.spawn, (pool.read(), pool.control()))

    def end_scaling(self) -> None:
        for task in self._controls:
            task.cancel()

    def start(self, shape: Shape) -> None:
        self._act(self.start_replica(shape))

    def stop_one(self, pool: str) -> None:
        """Stop a replica, one that starts if there is any."""
        running = [each for each in self._world.replicas_of(pool) if not each.is_replaced]
        starting = [each for each in running if each.core.state == "loading"]
        victim = starting[-1] if starting else self._rng.choice(running)
        victim.is_replaced = True
        self._act(self.stop_replica(victim, GRACE_S))

    def _act(self, act: Any) -> None:
        self._acts.append(self._world.spawn(act))


def _taken(replicas: list[SimReplica]) -> list[SimReplica]:
    """Return those that Serve stops from now on, of those that it has not begun to."""
    old = [replica for replica in replicas if not replica.is_replaced]
    for replica in old:
        replica.is_replaced = True
    return old


class _ScaledPool:
    """A pool with its policy, its thread that reads the board, and the controller that asks it."""

    def __init__(self, serve: SimServe, world: World, shape: Shape, scaling: Scaling) -> None:
        self._serve, self._world, self._shape, self._scaling = serve, world, shape, scaling
        self._meter: Meter = world.plants.meter()
        self._policy = ScalingPolicy(scaling.cool_down_s)
        self._wanted = shape.num_replicas

    async def read(self) -> None:
        """Do what the policy's thread does."""
        world, news = self._world, self._policy._news
        while True:
            await asyncio.sleep(PERIOD_S)
            with suppress(TimeoutError):
                told = await world.board.scale(self._shape.pool)
                if told["targets"] is not None:
                    news.signals, news.at = self._meter.see(told, world.loop.now), world.loop.now

    async def control(self) -> None:
        scaling = self._scaling
        while True:
            await asyncio.sleep(CONTROL_S)
            context: Any = SimpleNamespace(
                deployment_name=self._shape.pool,
                target_num_replicas=self._wanted,
                capacity_adjusted_min_replicas=scaling.least,
                capacity_adjusted_max_replicas=scaling.most,
            )
            wanted = self._policy._decide(context, self._wanted, self._world.loop.now)
            if wanted != self._wanted:
                self._change(wanted)

    def _change(self, wanted: int) -> None:
        pool, scaling, world = self._shape.pool, self._scaling, self._world
        if not scaling.least <= wanted <= scaling.most:
            raise Violation("scaled out of bounds", f"{pool}: to {wanted}")
        if wanted < self._wanted:
            self._check_down()
        world.outcome.scaled["up" if wanted > self._wanted else "down"] += 1
        for _ in range(wanted - self._wanted):
            self._serve.start(self._shape)
        for _ in range(self._wanted - wanted):
            self._serve.stop_one(pool)
        self._wanted = wanted

    def _check_down(self) -> None:
        """Assert that no replica goes while another one must be known to drain."""
        for replica in self._world.replicas_of(self._shape.pool):
            if replica.core.state == "draining" and self._world.must_know(replica, PERIOD_S):
                raise Violation("scaled down while one drains", replica.replica_id)
