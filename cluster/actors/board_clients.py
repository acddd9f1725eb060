"""The ways of ingresses and of pool replicas to the status board."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray

from cluster.actors.gcs_store import KeptTotals
from cluster.actors.placement import free_resources
from cluster.actors.reports import BoardSilent, IngressReport, ReplicaReport
from cluster.actors.status_board import LOST_AFTER_S, NAMESPACE, RayMetrics, StatusBoard, board_name
from cluster.observe.counts import Counts
from cluster.observe.metrics import Described, MetricsSnapshot

ANSWER_S = 3.0
"""How long the board may take to answer an ingress."""
DEBUG_S = 3.0
"""How long ranks have to answer `/debug/ranks`."""


class IngressBoard:
    """An ingress's way to the board, which it makes where there is none.

    What it is asked raises BoardSilent where nobody answers.
    """

    def __init__(self, app_name: str, pools: list[str], described: Described) -> None:
        self._app_name = app_name
        try:
            ray.get_actor(board_name(app_name), namespace=NAMESPACE)
            self.is_first = False
        except ValueError:
            self.is_first = True
            """There was no board, and so no other ingress."""
        self._arguments = pools, KeptTotals(app_name), RayMetrics(described)
        self._lost_at = -math.inf
        self._told: Counts = {}
        """What the board was told last; empty if it was made anew."""
        self._board = self._found()

    @property
    def is_new(self) -> bool:
        """Whether it was made in place of one that was lost, and may not have heard of all yet."""
        return time.monotonic() - self._lost_at < LOST_AFTER_S

    async def poll(self, report: IngressReport) -> dict[str, Any]:
        """Report, and return what the board knows of all."""

        def call() -> Any:
            is_known = report.counts == self._told
            return self._board.poll.remote(replace(report, counts=None) if is_known else report)

        body: dict[str, Any] = await self._answer(call)
        self._told = report.counts or {}
        return body

    async def metrics(self, ingress_id: str, counts: Counts) -> MetricsSnapshot:
        """Tell what was counted, and return what all have."""
        snapshot: MetricsSnapshot = await self._answer(
            lambda: self._board.metrics.remote(ingress_id, counts)
        )
        return snapshot

    async def free_resources(self) -> dict[str, float]:
        try:
            return await asyncio.to_thread(free_resources)
        except ray.exceptions.RayError as error:
            raise BoardSilent(type(error).__name__) from error

    async def debug_ranks(self) -> dict[str, Any]:
        """Return the body of `/debug/ranks`: what every rank says of itself.

        One that does not answer in `DEBUG_S` has an `error` instead.
        """
        pools = {}
        for pool, replicas in (await self._answer(lambda: self._board.actors.remote())).items():
            asked = [(name, await _debug_of(actors)) for name, actors in replicas.items()]
            pools[pool] = {"replicas": [{"id": name, "ranks": ranks} for name, ranks in asked]}
        return {"pools": pools}

    async def _answer(self, call: Callable[[], Any]) -> Any:
        """Make a call, once more if the board died, or its ingress did."""
        try:
            try:
                return await asyncio.wait_for(call(), ANSWER_S)
            except ray.exceptions.RayActorError:
                self._lost_at, self._told = time.monotonic(), {}
                self._board = self._found()
                return await asyncio.wait_for(call(), ANSWER_S)
        # A board that dies while another is made raises ValueError, not a RayError.
        except (TimeoutError, ValueError, ray.exceptions.RayError) as error:
            raise BoardSilent(type(error).__name__) from error

    def _found(self) -> Any:
        remote = ray.remote(num_cpus=0, max_restarts=-1)(StatusBoard)
        return remote.options(
            name=board_name(self._app_name), namespace=NAMESPACE, get_if_exists=True
        ).remote(*self._arguments)


class ReplicaBoard:
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
        if self._board is not None:
            self._board.remove.remote(pool, replica_id)


async def _debug_of(actors: list[Any]) -> list[dict[str, Any]]:
    """Ask all ranks of a replica at once."""

    async def ask(actor: Any) -> dict[str, Any]:
        try:
            call = actor.debug.options(concurrency_group="ctl").remote()
            return dict(await asyncio.wait_for(call, DEBUG_S))
        except TimeoutError:
            return {"error": f"wanted an answer in {DEBUG_S:g} s, found none"}
        except ray.exceptions.RayError as error:
            return {"error": str(error).splitlines()[0]}

    return list(await asyncio.gather(*map(ask, actors)))
