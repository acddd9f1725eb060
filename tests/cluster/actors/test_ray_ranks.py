"""Rank groups as real actors: placement, census, and who is named when one dies."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import pytest
from local_ranks import config_of

pytestmark = pytest.mark.ray


@pytest.mark.feature("P19")
def test_one_actor_is_one_rank_in_a_bundle_of_its_own(
    running_group: Any, reported: Any, oracle: Any
) -> None:
    import ray

    engine = config_of(oracle.path, num_kv_blocks=100)

    async def scenario() -> None:
        async with running_group(engine, epoch=3) as group:
            report = await reported(group)
            # Census: as many actors as places, each with a process, a place and a bundle.
            places = [(r.place.dp_rank, r.place.tp_rank, r.place.epoch) for r in report.ranks]
            assert places == [(0, 0, 3)]
            placed = ray.util.placement_group_table().values()
            [bundles] = [each["bundles"] for each in placed if each["state"] == "CREATED"]
            assert len({r.pid for r in report.ranks}) == len(places) == len(bundles)
            assert os.getpid() not in {r.pid for r in report.ranks}
            assert [r.state for r in report.ranks] == ["ready"]
            scheduler = report.ranks[0].scheduler
            assert scheduler.num_blocks == scheduler.num_free_blocks == 100
            assert len(group.inboxes) == engine.parallel.data_parallel_size

            # The sentinel tells who died, at once.
            pid = report.ranks[0].pid
            threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
            async with asyncio.timeout(60):
                ended = await group.wait_for_end()
            assert ended.startswith("rank dp=0 tp=0 epoch=3 ended:")

    asyncio.run(scenario())


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
    from cluster.actors import ray_ranks

    table = {"bundles_to_node_id": dict(enumerate(nodes))}
    monkeypatch.setattr(ray_ranks.ray.util, "placement_group_table", lambda group: table)
    found, is_near = ray_ranks.bundles_by_node(None, 1, 4)  # type: ignore[arg-type]
    assert found == wanted
    assert is_near == (nodes[1:] == "aaaa")  # the owner's may be another
