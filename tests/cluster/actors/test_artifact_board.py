"""Ranks that share no disk compile each piece once, and nobody depends on it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config import EngineConfig
from model.kernels.cpu.native import PARTS, Part

pytestmark = pytest.mark.ray

NUM_PIECES = 3


class Node:
    """An actor on a node of its own, in that its disk is."""

    def __init__(self, shared: str) -> None:
        self.join(shared)

    def join(self, shared: str) -> None:
        from cluster.actors.artifact_board import RayExchange

        self._exchange = RayExchange(shared)

    def heartbeat(self) -> None:
        pass

    def start(self, engine: EngineConfig) -> dict[str, Any]:
        from cluster.group.context import RankContext
        from cluster.rank.runner import ModelRunner

        return ModelRunner(RankContext(engine, exchange=self._exchange)).debug()

    def claim(self, key: str) -> bytes | None:
        return self._exchange.claim(key)

    def publish(self, key: str, data: bytes | None) -> None:
        self._exchange.publish(key, data)


@pytest.fixture
def make_node(ray_cluster: Any) -> Iterator[Callable[[Path], Any]]:
    """What makes a node, in a placement group that takes in whatever is started there, as Serve
    makes those of replicas."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    made: list[tuple[Any, Any]] = []

    def make(shared: Path) -> Any:
        group = ray.util.placement_group([{"CPU": 1}])
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
        remote = ray.remote(num_cpus=1, concurrency_groups={"ctl": 1})(Node)
        node = remote.options(scheduling_strategy=strategy).remote(str(shared))
        made.append((node, group))
        return node

    yield make
    for node, group in made:
        ray.kill(node)
        ray.util.remove_placement_group(group)


@pytest.mark.feature("P12")
@pytest.mark.parametrize(
    ("is_shared", "num_compilations"),
    [(True, 3), pytest.param(False, 6, marks=pytest.mark.slow)],
)
def test_nodes_fetch_what_one_of_them_compiles(
    make_node: Callable[[Path], Any],
    oracle: Any,
    tmp_path: Path,
    is_shared: bool,
    num_compilations: int,
) -> None:
    """As bytes, whatever is in them: what Inductor compiles is found in a cache that has moved."""
    import ray
    from local_ranks import config_of  # which Ray's workers, that import this file, do not find

    compilation = {"compiler": "eager", "share_artifacts": is_shared, "cudagraph_mode": "NONE"}
    engine = config_of(oracle.path, level=3, **compilation)
    disks = [
        replace(engine, compilation=replace(engine.compilation, cache_dir=str(tmp_path / name)))
        for name in ("first", "second")
    ]
    nodes = [make_node(tmp_path / "shared") for _ in disks]
    told = ray.get([node.start.remote(disk) for node, disk in zip(nodes, disks, strict=True)])
    assert sum(rank["compilations"] for rank in told) == num_compilations
    assert sum(rank["loaded"] for rank in told) == 2 * NUM_PIECES - num_compilations
    # Each has all artifacts on its own disk: its next start asks nobody.
    ray.get([node.join.remote(str(tmp_path / "another")) for node in nodes])
    again = ray.get([node.start.remote(disk) for node, disk in zip(nodes, disks, strict=True)])
    for before, after in zip(told, again, strict=True):
        for name, number in (("compilations", 0), ("cpp_builds", 0), ("loaded", NUM_PIECES)):
            assert after[name] - before[name] == number


@pytest.mark.feature("P12")
def test_a_claim_outlives_who_compiles_and_what_was_published_all_of_them(
    make_node: Callable[[Path], Any], tmp_path: Path
) -> None:
    import ray

    first, second, third = (make_node(tmp_path) for _ in range(3))
    assert ray.get(first.claim.remote("a")) is None  # and so it has made the board
    ray.get(first.publish.remote("a", b"machine code"))
    assert ray.get(second.claim.remote("a")) == b"machine code"
    assert ray.get(second.claim.remote("b")) is None
    waiting = third.claim.remote("b")
    ray.get(second.publish.remote("b", None))  # its compiler failed: who waits compiles as well
    assert ray.get(waiting) is None
    # Of those who wait for one that dies, one compiles, and the other goes on waiting.
    assert ray.get(second.claim.remote("c")) is None
    waiting = {node.claim.remote("c"): node for node in (first, third)}
    assert not ray.wait([*waiting], timeout=1)[0]
    ray.kill(second)
    [told], [other] = ray.wait([*waiting], timeout=60)
    assert ray.get(told) is None
    assert not ray.wait([other], timeout=1)[0]
    ray.get(waiting[told].publish.remote("c", b"more code"))
    assert ray.get(other) == b"more code"
    ray.kill(first)
    assert ray.get(third.claim.remote("a")) == b"machine code"


@pytest.mark.feature("P12")
def test_a_board_that_does_not_start_is_told_once_and_waited_for_once(
    ray_cluster: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    import ray

    from cluster.actors import artifact_board

    nowhere = ray.remote(num_cpus=0, resources={"nowhere": 1}, scheduling_strategy="DEFAULT")
    monkeypatch.setattr(artifact_board, "RemoteBoard", nowhere(artifact_board.ArtifactBoard))
    monkeypatch.setattr(artifact_board, "START_TIMEOUT_S", 1.0)
    exchange = artifact_board.RayExchange(str(tmp_path))
    for key in ("a", "b", "c"):
        exchange.publish(key, b"machine code")
    wanted = "wanted it to start on the cluster's head node in 1 s, found it pending"
    assert caplog.messages == [f"artifacts:{tmp_path}: {wanted}: this node compiles for itself"]


def test_what_the_disk_refuses_ends_its_claim_all_the_same(tmp_path: Path) -> None:
    """Whoever waits for it compiles too, instead of waiting until its time is over."""
    from cluster.actors.artifact_board import ArtifactBoard

    (tmp_path / "file").touch()

    async def scenario() -> list[Any]:
        board = ArtifactBoard(str(tmp_path / "file"))
        asked = [asyncio.create_task(board.claim("a", None)) for _ in range(4)]
        await asyncio.sleep(0)
        assert [each.done() for each in asked] == [True, False, False, False]
        await board.publish("a", b"artifact")
        return await asyncio.gather(*asked)

    assert asyncio.run(scenario()) == [None] * 4


SCRIPT = """
import asyncio, json, shutil, sys
from contextlib import asynccontextmanager
import ray
from ray.cluster_utils import Cluster
from cluster.actors.ray_ranks import create_group
from cluster.config import CacheConfig, EngineConfig, SchedulerConfig
from cluster.wire.credentials import Credentials
from compile.config import CompilationConfig

MODEL, *ROOTS = sys.argv[1:]
cluster = Cluster()
for i, root in enumerate(ROOTS):
    options = dict(num_cpus=1, resources={f"node{i}": 1}, object_store_memory=100 * 2**20)
    cluster.add_node(**options, env_vars={"LOCKSTEP_CACHE_ROOT": root})
ray.init(cluster.address, log_to_driver=False)

@asynccontextmanager
async def replica_on(node, serve_while_compiling):
    engine = EngineConfig(
        MODEL, 64, cache=CacheConfig(4, 40), scheduler=SchedulerConfig(4, 32),
        compilation=CompilationConfig(
            level=3, use_inductor=False, cudagraph_mode="NONE",
            serve_while_compiling=serve_while_compiling,
        ),
    )
    placement = ray.util.placement_group([{"CPU": 0.4, f"node{node}": 0.4}])
    assert placement.wait(60)
    credentials = Credentials("test", b"s" * 32)
    group = create_group(
        engine, placement, first_bundle=0, engine_id=f"mixed/{node}", credentials=credentials
    )
    try:
        await group.start()
        yield group
    finally:
        group.kill()
        ray.util.remove_placement_group(placement)

async def told(group):
    while True:
        rank = await group.handles[0].actor.debug.options(concurrency_group="ctl").remote()
        if rank["loaded"] or rank["compilations"]:
            names = ("compilations", "cpp_builds")
            ahead = rank["compiled_ahead"]
            return [rank[name] + ahead.get(name, 0) for name in names], rank["loaded"]
        await asyncio.sleep(0.2)

async def scenario():
    async with replica_on(0, "on") as first, replica_on(1, "off") as second:
        both = await asyncio.gather(told(first), told(second))
    for kept in ("compile", "native"):
        shutil.rmtree(f"{ROOTS[1]}/{kept}")
    async with replica_on(1, "off") as later:
        return [*both, await told(later)]

print(json.dumps(asyncio.run(scenario())))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.feature("P12")
def test_replicas_on_two_nodes_compile_each_piece_once_and_one_that_comes_later_none(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """So they do with the kernels in C++. One compiles while it serves, in a process beside its
    rank, the other before. The later one's disk is empty, and all that had compiled before it have
    ended."""
    roots = [tmp_path / name for name in ("first", "second")]
    for root in roots:
        root.mkdir()
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    command = [sys.executable, "-c", SCRIPT, str(tiny_checkpoint), *map(str, roots)]
    environment = {**os.environ, "CXX": str(compiler)}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    *both, later = json.loads(ended.stdout.splitlines()[-1])
    assert sum(compilations for (compilations, _), _ in both) == NUM_PIECES, both
    assert later == [[0, 0], NUM_PIECES]
    built = [line for line in calls.read_text().splitlines() if line.endswith(".o")]
    parts: list[Part] = ["kernels", "drawing"]
    assert len(built) == sum(len(PARTS[part]) for part in parts)
    for part in parts:
        libraries = [[path.read_bytes() for path in root.rglob(f"{part}-*.so")] for root in roots]
        assert len(libraries[0]) == 1 and libraries[0] == libraries[1]
