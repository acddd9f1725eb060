"""Ranks that share no disk compile each piece once, and nobody depends on it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config import EngineConfig

pytestmark = pytest.mark.ray

NUM_PIECES = 3


def config(oracle: Any, **compilation: Any) -> EngineConfig:
    from local_ranks import config_of  # which Ray's workers, that import this file, do not find

    return config_of(oracle.path, level=3, cudagraph_mode="NONE", **compilation)


def start(engine: EngineConfig, board: Any) -> dict[str, Any]:
    """Start a rank as a node of its own would: on an empty disk."""
    from cluster.actors.artifact_board import RayExchange
    from cluster.group.context import RankContext
    from cluster.rank.runner import ModelRunner

    return ModelRunner(RankContext(engine, exchange=RayExchange(board))).debug()


@pytest.mark.feature("P12")
@pytest.mark.parametrize(
    ("compiler", "is_shared", "num_compilations"),
    [
        ("eager", True, 3),
        pytest.param("eager", False, 6, marks=pytest.mark.slow),
        pytest.param("inductor", True, 3, marks=pytest.mark.slow),
    ],
)
def test_nodes_fetch_what_one_of_them_compiles(
    ray_cluster: Any,
    oracle: Any,
    tmp_path: Path,
    compiler: str,
    is_shared: bool,
    num_compilations: int,
) -> None:
    import ray

    from cluster.actors.artifact_board import create_artifact_board

    engine = config(oracle, compiler=compiler, share_artifacts=is_shared)
    board = create_artifact_board()
    remote = ray.remote(num_cpus=1, max_calls=1)(start)  # each in a process of its own
    disks = [str(tmp_path / name) for name in ("first", "second")]
    nodes = [
        replace(engine, compilation=replace(engine.compilation, cache_dir=disk)) for disk in disks
    ]
    told = ray.get([remote.remote(node, board) for node in nodes], timeout=600)
    assert sum(rank["compilations"] for rank in told) == num_compilations
    assert sum(rank["loaded"] for rank in told) == 2 * NUM_PIECES - num_compilations
    # Each has all artifacts on its own disk: its next start asks nobody.
    for again in ray.get([remote.remote(node, None) for node in nodes], timeout=600):
        assert (again["compilations"], again["cpp_builds"]) == (0, 0)
        assert again["loaded"] == NUM_PIECES
    ray.kill(board)


def test_a_claim_ends_with_what_was_published_or_with_nothing(ray_cluster: Any) -> None:
    import ray

    from cluster.actors.artifact_board import RayExchange, create_artifact_board

    board = create_artifact_board()
    first, second = RayExchange(board), RayExchange(board)
    assert first.claim("a") is None
    first.publish("a", b"machine code")
    assert second.claim("a") == b"machine code"
    assert second.claim("b") is None
    waiting = ray.remote(lambda board: RayExchange(board).claim("b")).remote(board)
    second.publish("b", None)  # its compiler failed: who waits compiles for itself
    assert ray.get(waiting, timeout=60) is None
    ray.kill(board)
    assert first.claim("c") is None  # nobody to ask


def test_the_board_tells_one_asker_to_compile() -> None:
    from cluster.actors.artifact_board import ArtifactBoard

    async def scenario() -> list[Any]:
        board = ArtifactBoard()
        asked = [asyncio.create_task(board.claim("a")) for _ in range(4)]
        await asyncio.sleep(0)
        board.publish("a", ["reference"])
        board.publish("a", ["another"])  # too late: some have the first
        return await asyncio.gather(*asked)

    assert asyncio.run(scenario()) == [None, *[["reference"]] * 3]


def test_an_artifact_that_cannot_be_put_ends_its_claim_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever waits for it compiles too, instead of waiting until its time is over."""
    import ray

    from cluster.actors.artifact_board import RayExchange

    told: list[tuple[str, list[Any]]] = []

    class Board:
        class publish:
            @staticmethod
            def remote(key: str, references: list[Any]) -> None:
                told.append((key, references))

    def put(data: bytes) -> Any:
        raise ray.exceptions.ObjectStoreFullError("full")

    monkeypatch.setattr(ray, "put", put)
    RayExchange(Board).publish("key", b"artifact")
    assert told == [("key", [])]
