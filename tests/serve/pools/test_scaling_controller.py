"""Serve's controller scales a pool whose replicas run no ranks, by what the board is told here."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from cluster.actors.reports import GroupReport, ReplicaReport
from cluster.actors.status_board import NAMESPACE, StatusBoard, board_name
from cluster.group.context import RankPlace, RankStats
from cluster.observe.metrics import SchedulerStats
from serve.app import _pool_deployment
from serve.config import PoolConfig, deploy_config

pytestmark = pytest.mark.ray


class Nothing:
    """A replica without ranks."""


class Told:
    """The status board of an application, and what replicas tell it."""

    def __init__(self, app_name: str, pool: PoolConfig) -> None:
        import ray

        name, namespace = board_name(app_name), NAMESPACE
        with suppress(ValueError):
            while ray.get_actor(name, namespace):  # one that was killed
                time.sleep(0.1)
        actor = ray.remote(num_cpus=0)(StatusBoard)
        self.board = actor.options(name=name, namespace=namespace).remote(["mixed"])
        self._ask, self._app_name, self._targets = ray.get, app_name, pool.targets

    def tell(self, num_running: int) -> tuple[int, int]:
        """Tell of as many replicas as run, each with so many sequences; return how many run and how
        many the policy wants."""
        from ray import serve as ray_serve

        deployments = ray_serve.status().applications[self._app_name].deployments
        num = int(deployments["MixedPool"].replica_states.get("RUNNING", 0))
        for i in range(num):
            load = SchedulerStats(num_running)
            rank = RankStats(RankPlace(0, 0, 0), i, "node", "ready", scheduler=load)
            group = GroupReport([rank], [], [{}])
            report = ReplicaReport("mixed", str(i), "ready", group, targets=self._targets)
            self._ask(self.board.push.remote(report))
        if num == 1:
            self._ask(self.board.remove.remote("mixed", "1"))
        scaling = self._ask(self.board.snapshot.remote())["pools"]["mixed"].get("scaling")
        return num, scaling["wanted"] if scaling else 0

    def until(self, num_running: int, num: int) -> None:
        deadline = time.monotonic() + 300
        while (found := self.tell(num_running)) != (num, num):
            assert time.monotonic() < deadline, found
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.feature("R16")
def test_serves_controller_scales_a_pool_by_what_the_board_says(http_port: int) -> None:
    import ray
    from ray import serve as ray_serve

    raw = {"pools": "mixed", "max_num_seqs": 4, "mixed.max_replicas": 2, "scale_down_after_s": 2}
    config = deploy_config({**raw, "O": 0})
    scaling = _pool_deployment(config, config.pools[0])._deployment_config.autoscaling_config
    deployment = ray_serve.deployment(
        name="MixedPool", autoscaling_config=scaling, ray_actor_options={"num_cpus": 0}
    )(Nothing)
    told = Told("told", config.pools[0])
    ray_serve.run(deployment.bind(), name="told", route_prefix=None)
    try:
        told.until(num_running=1, num=1)
        told.until(num_running=4, num=2)
        told.until(num_running=0, num=1)
        told.until(num_running=4, num=2)
        ray.kill(told.board)
        told = Told("told", config.pools[0])  # the next ingress makes one
        told.until(num_running=4, num=2)
        told.until(num_running=0, num=1)
    finally:
        ray_serve.delete("told")
        ray.kill(told.board)
