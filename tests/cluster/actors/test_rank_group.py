"""Rank groups as real actors: placement, census, and who is named when one dies."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from cluster.config import CacheConfig, EngineConfig, Role, SchedulerConfig
from cluster.wire.credentials import Credentials

pytestmark = pytest.mark.ray

CREDENTIALS = Credentials("test", b"s" * 32)


def config(oracle: Any) -> EngineConfig:
    return EngineConfig(
        model_path=str(oracle.path),
        max_model_len=64,
        role=Role.MIXED,
        cache=CacheConfig(block_size=4, num_kv_blocks=100),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
    )


@pytest.mark.feature("P19")
def test_one_actor_is_one_rank_in_a_bundle_of_its_own(
    ray_cluster: Any, reported: Any, make_oracle: Callable[[str], Any]
) -> None:
    import ray

    from cluster.actors.placement import create_placement_group
    from cluster.actors.rank_group import RankGroup

    engine = config(make_oracle("tied"))
    placement = create_placement_group(engine)
    group = RankGroup(
        engine, placement, first_bundle=0, engine_id="test", credentials=CREDENTIALS, epoch=3
    )

    async def scenario() -> None:
        await group.start()
        report = await reported(group)
        # Census: as many actors as places, each with a process, a place and a bundle of its own.
        places = [(r.place.dp_rank, r.place.tp_rank, r.place.epoch) for r in report.ranks]
        assert places == [(0, 0, 3)]
        assert len({r.pid for r in report.ranks}) == len(places) == placement.bundle_count
        assert os.getpid() not in {r.pid for r in report.ranks}
        assert [r.state for r in report.ranks] == ["ready"]
        scheduler = report.ranks[0].scheduler
        assert scheduler.num_blocks == scheduler.num_free_blocks == 100
        assert len(group.inboxes) == engine.parallel.data_parallel_size

        # The sentinel tells who died, at once.
        pid = report.ranks[0].pid
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        async with asyncio.timeout(5):
            ended = await group.wait_for_end()
        assert ended.startswith("rank dp=0 tp=0 epoch=3 ended:")
        group.kill()

    asyncio.run(scenario())
    ray.util.remove_placement_group(placement)


def test_a_group_that_is_stopped_ends_its_ranks(
    ray_cluster: Any, make_oracle: Callable[[str], Any]
) -> None:
    import ray

    from cluster.actors.placement import create_placement_group
    from cluster.actors.rank_group import RankGroup

    engine = config(make_oracle("tied"))
    placement = create_placement_group(engine)
    group = RankGroup(engine, placement, first_bundle=0, engine_id="test", credentials=CREDENTIALS)

    async def scenario() -> None:
        await group.start()
        ended = asyncio.create_task(group.wait_for_end())
        await group.stop()
        assert await ended == "rank dp=0 tp=0 epoch=0 ended: stopped"

    asyncio.run(scenario())
    ray.util.remove_placement_group(placement)


def test_a_rank_that_cannot_load_is_named_with_the_reason(
    ray_cluster: Any, make_oracle: Callable[[str], Any], tmp_path: Any
) -> None:
    import shutil

    import ray

    from cluster.actors.placement import create_placement_group
    from cluster.actors.rank_group import RankDied, RankGroup

    shutil.copytree(make_oracle("tied").path, tmp_path / "broken")
    with open(tmp_path / "broken" / "model.safetensors", "r+b") as weights:
        weights.truncate(1000)
    oracle = type("Broken", (), {"path": tmp_path / "broken"})
    engine = config(oracle)
    placement = create_placement_group(engine)
    group = RankGroup(engine, placement, first_bundle=0, engine_id="test", credentials=CREDENTIALS)
    with pytest.raises(RankDied, match=r"rank dp=0 tp=0 epoch=0 .*model\.safetensors"):
        asyncio.run(group.start())
    ray.util.remove_placement_group(placement)


def test_a_placement_that_cannot_be_had_tells_what_is_free(
    ray_cluster: Any, make_oracle: Callable[[str], Any]
) -> None:
    from cluster.actors.placement import PlacementError, create_placement_group

    engine = config(make_oracle("tied"))
    with pytest.raises(PlacementError, match=r"wanted \[\{'CPU': 1000\}\] within 1 s, found free"):
        create_placement_group(engine, num_cpus=1000, timeout_s=1)


class _Answering:
    """A rank's actor whose calls end as the test says, or never."""

    def __init__(self, end: object) -> None:
        self._end = end
        self.meet = self.heartbeat = self

    def options(self, **_: object) -> _Answering:
        return self

    def remote(self) -> asyncio.Future[object]:
        future = asyncio.get_running_loop().create_future()
        if isinstance(self._end, BaseException):
            future.set_exception(self._end)
        elif self._end is not None:
            future.set_result(self._end)
        return future


@pytest.mark.feature("P09")
@pytest.mark.parametrize(("lockstep", "named"), [(False, "dp=1"), (True, "dp=0")])
def test_engines_that_step_apart_are_judged_apart(
    lockstep: bool, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sleeps at step 12 while the other stands in its own step 5000."""
    from cluster.actors import rank_group
    from cluster.config import ParallelConfig
    from cluster.engine.watchdog import Heartbeat, Phase
    from cluster.group.context import RankPlace

    monkeypatch.setattr(rank_group, "HEARTBEAT_PERIOD_S", 0.05)
    beats = [
        Heartbeat(12, Phase.WAITING, 600.0, 0.0, True),
        Heartbeat(5000, Phase.RUNNING, 11.0, 0.0, False),
    ]

    class Group(rank_group.RankGroup):
        def __init__(self) -> None:
            self._parallel = ParallelConfig(1, 2, lockstep)
            self._watchdog_s = 10.0
            self._is_stopping = False
            self.places = [RankPlace(dp_rank, 0, 2) for dp_rank in range(2)]
            self._actors = [_Answering(beat) for beat in beats]

    found = asyncio.run(asyncio.wait_for(Group()._watch(), 5))
    assert found.startswith(f"rank {named} tp=0 epoch=2: does not advance in step")


class _Loading(_Answering):
    """It answers, and has no heartbeat yet."""

    def remote(self) -> asyncio.Future[object]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future


@pytest.mark.feature("P09")
def test_a_rank_that_loads_is_not_silent_while_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cluster.actors import rank_group
    from cluster.config import ParallelConfig
    from cluster.group.context import RankPlace

    monkeypatch.setattr(rank_group, "HEARTBEAT_PERIOD_S", 0.02)
    monkeypatch.setattr(rank_group, "FIRST_WORD_S", 0.5)
    monkeypatch.setattr(rank_group, "LOADING_TIMES", 0.1)  # of three seconds

    class Group(rank_group.RankGroup):
        def __init__(self, *actors: _Answering) -> None:
            self._parallel = ParallelConfig(2, 1)
            self._watchdog_s = 1.0
            self._is_stopping = False
            self.places = [RankPlace(0, tp_rank, 2) for tp_rank in range(2)]
            self._actors = list(actors)

    with pytest.raises(TimeoutError):  # nobody is named for twice as long as a rank may be silent
        asyncio.run(asyncio.wait_for(Group(_Loading(None), _Loading(None))._watch_loading(), 2.0))
    found = asyncio.run(Group(_Loading(None), _Answering(None))._watch_loading())
    assert found.startswith("rank dp=0 tp=1 epoch=2: no heartbeat for 0.")


@pytest.mark.feature("P09")
@pytest.mark.parametrize(
    ("ends", "named"),
    [
        (("met", "died"), "rank dp=1 tp=0 epoch=2 ended before loading: gone"),
        ((None, "died"), "rank dp=1 tp=0 epoch=2 ended before loading: gone"),
        (("died", None), "rank dp=0 tp=0 epoch=2 ended before loading: gone"),
        (("met", None), "rank dp=1 tp=0 epoch=2: no word of it for 2.3 s before loading"),
    ],
)
def test_a_leader_that_does_not_open_its_endpoints_is_named(
    ends: tuple[str | None, str | None], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from cluster.actors import rank_group
    from cluster.config import ParallelConfig
    from cluster.group.context import RankPlace

    monkeypatch.setattr(rank_group, "FIRST_WORD_S", 2.0)
    monkeypatch.setattr(rank_group, "LOADING_TIMES", 0.1)  # of three seconds
    killed: list[bool] = []

    class Group(rank_group.RankGroup):
        def __init__(self) -> None:
            self._parallel = ParallelConfig(1, 2)
            self._watchdog_s = 1.0
            self.places = [RankPlace(dp_rank, 0, 2) for dp_rank in range(2)]
            errors = {"died": ray.exceptions.RayError("gone")}
            self._actors = [_Answering(errors.get(end or "", end)) for end in ends]

        def kill(self) -> None:
            killed.append(True)

    with pytest.raises(rank_group.RankDied, match=named):
        asyncio.run(Group().start())
    assert killed


@pytest.mark.feature("P19")
@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        ("aaaaa", [1, 2, 3, 4]),
        ("baaaa", [1, 2, 3, 4]),
        ("ababa", [1, 3, 2, 4]),  # b comes first: bundle 0 is the owner's
        ("aabba", [1, 4, 2, 3]),
        ("a", [1, 2, 3, 4]),  # not placed yet
    ],
)
def test_ranks_of_one_node_stand_in_a_row(
    nodes: str, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cluster.actors import placement

    table = {"bundles_to_node_id": dict(enumerate(nodes))}
    monkeypatch.setattr(placement.ray.util, "placement_group_table", lambda group: table)
    found = placement.bundles_by_node(None, 1, 4)  # type: ignore[arg-type]
    assert found == wanted
    is_near = placement.is_on_one_node(None, found)  # type: ignore[arg-type]
    assert is_near == (nodes[1:] == "aaaa")  # the owner's may be another


def test_replicas_of_another_deployment_are_outdated() -> None:
    """While one replaces another both push to the board of their common name."""
    from cluster.actors.rank_group import GroupReport
    from cluster.actors.status_board import ReplicaReport, StatusBoard

    board = StatusBoard(["mixed"])

    def push(replica: str, state: str, config_hash: str) -> None:
        nothing = GroupReport([], [])
        board.push(ReplicaReport("mixed", replica, state, nothing, "", config_hash))

    def seen(config_hash: str | None) -> tuple[str, list[str]]:
        body = board.snapshot(config_hash)
        return body["status"], [r["state"] for r in body["pools"]["mixed"]["replicas"]]

    push("1", "ready", "old")
    assert seen("old") == ("ready", ["ready"]) and seen("new") == ("loading", ["outdated"])
    push("2", "ready", "new")
    assert seen("old") == ("ready", ["ready", "outdated"])
    assert seen("new") == ("ready", ["outdated", "ready"])
    assert seen(None) == ("ready", ["ready", "ready"])
