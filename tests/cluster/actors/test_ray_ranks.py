"""Groups of tp x dp real actors: they generate what one rank does, and name who dies.

All step together, or each leader for itself. Ranks of one node stand in a row.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from local_ranks import config_of, generate

from cluster.group.context import RankContext, num_cores
from cluster.group.device import HUGE_PAGES
from cluster.wire.messages import FIRST_LOADED_ID, LoraAdapter
from model.config import fingerprint

pytestmark = pytest.mark.ray

TP_TOKENS, DP_TOKENS = 32, 24
"""Of each answer."""


def prompts_for(oracle: Any, seed: int, num_shared: int = 0) -> list[list[int]]:
    """Return eight prompts; every other one begins with the same tokens, so many."""
    rng = random.Random(seed)
    vocab = oracle.model.config.vocab_size
    head = [rng.randrange(vocab) for _ in range(num_shared)]
    tails = [[rng.randrange(vocab) for _ in range(rng.randint(1, 60))] for _ in range(8)]
    return [head + tail if i % 2 else tail for i, tail in enumerate(tails)]


def check(oracle: Any, prompts: list[list[int]], results: list[list[int]], num_tokens: int) -> None:
    for prompt, tokens in zip(prompts, results, strict=True):
        assert len(tokens) == num_tokens
        oracle.check_greedy(prompt, tokens)
    oracle.report_ties()


async def reported(group: Any) -> Any:
    """Return a group's report, asked for again while its ranks are late, as right after a start."""
    async with asyncio.timeout(600):
        while True:
            with suppress(TimeoutError):
                return await group.report()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray may be late on a busy machine."""
    from cluster.actors import rank_group

    monkeypatch.setattr(rank_group, "BLAME_S", 5.0)


async def kill_a_follower(group: Any, report: Any) -> None:
    """It is named as soon as Ray knows, whatever its leader, pulled out of a collective, raises."""
    ended = asyncio.create_task(group.wait_for_end())
    killed_at = time.monotonic()
    os.kill(report.ranks[1].pid, signal.SIGKILL)
    await group.runs[1]
    died_at = time.monotonic()
    name = await ended
    named_at = time.monotonic()
    print(f"{name!r} after {died_at - killed_at:.3f} s and {named_at - died_at:.3f} s")
    assert name.startswith("rank dp=0 tp=1 epoch=0 ended:")
    assert named_at - died_at < 10
    # The leader is of no use any more: it was killed too.
    async with asyncio.timeout(60):
        while os.path.exists(f"/proc/{report.ranks[0].pid}"):
            await asyncio.sleep(0.02)


@pytest.mark.usefixtures("patient")
@pytest.mark.feature("P01", "P19")
@pytest.mark.parametrize(
    ("shape", "size", "end"), [("odd vocabulary", 2, "killed"), ("one kv head", 4, "stopped")]
)
def test_ranks_of_a_group_generate_what_transformers_does(
    running_group: Any, make_oracle: Callable[[str], Any], shape: str, size: int, end: str
) -> None:
    """Three long sequences fill the pool: some are pre-empted. Prompts come in chunks.

    In the end an idle follower is killed, and named; or all are stopped.
    """
    import ray

    oracle = make_oracle(shape)
    prompts = prompts_for(oracle, 21, num_shared=20)
    engine = config_of(oracle.path, 128, num_kv_blocks=80, max_num_seqs=8, parallel=(size,))

    async def scenario() -> None:
        async with running_group(engine) as group:
            first, _ = await generate(group.inboxes * len(prompts), prompts, TP_TOKENS)
            again, num_cached = await generate(group.inboxes * 3, prompts[:3], TP_TOKENS)
            check(oracle, prompts + prompts[:3], first + again, TP_TOKENS)
            assert num_cached > 0

            report = await reported(group)
            assert [(r.place.dp_rank, r.place.tp_rank, r.state) for r in report.ranks] == [
                (0, rank, "ready") for rank in range(size)
            ]
            # Census: as many processes as places and bundles.
            placed = ray.util.placement_group_table().values()
            [bundles] = [each["bundles"] for each in placed if each["state"] == "CREATED"]
            pids = {r.pid for r in report.ranks}
            assert len(pids) == len(bundles) == size and os.getpid() not in pids
            assert len(group.inboxes) == 1
            [step] = {r.step for r in report.ranks}
            assert step > 0
            scheduler = report.ranks[0].scheduler
            assert scheduler.num_free_blocks == scheduler.num_blocks == 80

            if end == "killed":
                await kill_a_follower(group, report)
                return
            ended = asyncio.create_task(group.wait_for_end())
            await group.stop()
            assert (await ended).endswith("ended: stopped")

    asyncio.run(scenario())


@pytest.mark.usefixtures("patient")
def test_a_follower_that_is_killed_in_the_middle_of_steps_is_named(
    running_group: Any, oracle: Any
) -> None:
    engine = config_of(oracle.path, 128, num_kv_blocks=80, parallel=(2,))

    async def scenario() -> None:
        async with running_group(engine) as group:
            report = await reported(group)
            prompts = [list(range(i, i + 30)) for i in range(8)]
            load = asyncio.create_task(generate(group.inboxes * 8, prompts, 90))
            await asyncio.sleep(0.15)
            await kill_a_follower(group, report)
            load.cancel()

    asyncio.run(scenario())


def test_a_follower_that_cannot_load_is_named_with_the_reason(
    running_group: Any, make_oracle: Callable[[str], Any]
) -> None:
    """Two ranks cannot share five heads; nobody waits for the others' collectives."""
    from cluster.actors.rank_group import RankDied

    engine = config_of(make_oracle("biases").path, num_kv_blocks=80, parallel=(2,))

    async def scenario() -> None:
        async with running_group(engine):
            pass

    began = time.monotonic()
    with pytest.raises(RankDied, match=r"rank dp=0 tp=\d epoch=0 ended while loading: .*heads"):
        asyncio.run(scenario())
    assert time.monotonic() - began < 600


@pytest.mark.slow
@pytest.mark.feature("P09")
def test_a_follower_that_stops_while_it_loads_is_named(
    running_group: Any, oracle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leader would wait for it for half an hour."""
    from cluster.actors import rank_group

    monkeypatch.setattr(rank_group, "FIRST_WORD_S", 20.0)
    level_3: dict[str, Any] = {"level": 3, "compiler": "eager", "cache_dir": str(tmp_path)}
    engine = config_of(oracle.path, num_kv_blocks=80, parallel=(2,), **level_3)
    engine = replace(engine, watchdog_s=1.0)

    async def scenario() -> tuple[str, float]:
        async with running_group(engine, is_started=False) as group:
            start = asyncio.create_task(group.start())
            # The leader compiles, and the follower waits for what it compiles.
            while not start.done():
                await asyncio.sleep(0.02)
                with suppress(TimeoutError):
                    report = await group.report()
                    if [load.what for load in report.loading] == ["compiling"] * 2:
                        break
            os.kill(report.ranks[1].pid, signal.SIGSTOP)
            stopped_at = time.monotonic()
            with pytest.raises(rank_group.RankDied) as raised:
                await start
            return str(raised.value), time.monotonic() - stopped_at

    named, took = asyncio.run(scenario())
    print(f"{named!r} after {took:.1f} s")
    assert re.fullmatch(r"rank dp=0 tp=1 epoch=0: no heartbeat for .* s while loading", named)
    assert took < 300


@pytest.mark.feature("S10")
def test_a_group_that_is_told_of_adapters_before_it_is_ready_has_them_soon_after(
    running_group: Any, make_oracle: Callable[[str], Any]
) -> None:
    oracle = make_oracle("one kv head")
    oracle.write_adapters()
    engine = replace(config_of(oracle.path, parallel=(2,)), max_loras=2, max_lora_rank=9)
    adapters = [
        LoraAdapter(FIRST_LOADED_ID + i, path.name, str(path), fingerprint(path))
        for i, path in enumerate(oracle.adapters)
    ]

    async def tell(group: Any, told: list[LoraAdapter]) -> None:
        """Tell a group as long as it is late."""
        async with asyncio.timeout(600):
            while True:
                with suppress(TimeoutError):
                    return await group.set_adapters(told)

    async def loaded(group: Any, wanted: set[int]) -> None:
        async with asyncio.timeout(300):
            while (report := await reported(group)).ranks[0].adapters.ids != wanted:
                assert not report.ranks[0].adapters.errors
                await asyncio.sleep(0.05)

    async def scenario() -> None:
        async with running_group(engine, is_started=False) as group:
            await tell(group, adapters)
            await group.start()
            await loaded(group, {adapter.id for adapter in adapters})
            await tell(group, adapters[1:])
            await loaded(group, {adapters[1].id})

    asyncio.run(scenario())


async def debug(group: Any) -> list[dict[str, Any]]:
    """Return what each actor's rank has compiled, captured, replayed and agreed on.

    The last step of a group may still run when its last tokens are there: what is returned is the
    same twice in a row, so that no step stands between the ranks' answers.
    """
    told: list[dict[str, Any]] = []
    async with asyncio.timeout(60):
        while True:
            before = told
            told = list(
                await asyncio.gather(*(handle.actor.debug.remote() for handle in group.handles))
            )
            if [_steps(rank) for rank in told] == [_steps(rank) for rank in before]:
                return told
            await asyncio.sleep(0.2)


def _steps(rank: dict[str, Any]) -> tuple[Any, ...]:
    return rank["agreements"], rank["replays"], rank["piecewise_steps"]


@pytest.mark.slow
@pytest.mark.feature("P01", "P02", "P04", "P11", "P12", "P19", "P20", "P21")
def test_actors_of_a_2x2_group_run_one_step_through_the_same_graphs(
    running_group: Any, make_oracle: Callable[[str], Any], tmp_path: Path
) -> None:
    oracle = make_oracle("mixtral tied eight experts")
    prompts = prompts_for(oracle, 5)
    engine = config_of(
        oracle.path,
        128,
        num_kv_blocks=80,
        parallel=(2, 2),
        sealed="strict",
        level=3,
        compiler="inductor",
        cudagraph_mode="FULL_AND_PIECEWISE",
        cudagraph_capture_sizes=(1, 2, 4),
        capture_num_tokens=(16, 32),
        cache_dir=str(tmp_path),
    )

    async def scenario() -> None:
        async with running_group(engine, epoch=4) as group:
            ready = await debug(group)
            # Two thirds to the first leader, then all to the second.
            first, second = group.inboxes
            results = []
            for inboxes, some in (
                ([first, second, first, first, second], prompts[:5]),
                ([second] * 3, prompts[5:]),
            ):
                results += (await generate(inboxes, some, DP_TOKENS, pause_s=0.02))[0]
            check(oracle, prompts, results, DP_TOKENS)
            report = await group.report()
            found = [
                (r.place.dp_rank, r.place.tp_rank, r.place.epoch, r.state) for r in report.ranks
            ]
            assert found == [(dp, tp, 4, "ready") for dp in range(2) for tp in range(2)]
            assert len({r.pid for r in report.ranks}) == 4
            # Ranks of one node take what one of them has compiled: three pieces in all.
            told = await debug(group)
            assert sum(rank["compilations"] for rank in told) == 3
            assert sum(rank["loaded"] for rank in told) == 3 * 3
            # Of what Inductor makes, each piece is one build of C++ at least.
            assert sum(rank["cpp_builds"] for rank in told) > 0
            for name in ("compilations", "loaded", "cpp_builds", "captures"):
                assert [rank[name] for rank in told] == [rank[name] for rank in ready]
            assert not any(rank["late_compilations"] + rank["late_captures"] for rank in told)
            logs = [rank["agreements"] for rank in told]
            decodes = [step for step in logs[0] if step["kind"] == 1]
            mixed = [step for step in logs[0] if step["kind"] == 2]
            assert len(decodes) > DP_TOKENS
            assert all(step["mode"] == 2 for step in decodes)
            assert all(step["mode"] == 1 for step in mixed)
            assert all(log == logs[0] for log in logs)
            # Of each kind of step, every rank replayed as many as there were.
            for rank in told:
                assert sum(rank["replays"].values()) == len(decodes)
                assert rank["piecewise_steps"] == len(mixed)
            for step in decodes:  # the next captured size, of whoever decodes most
                most = max(step["num_scheduled_tokens"])
                assert step["graph_bs"] == min(bs for bs in (1, 2, 4) if bs >= most)
            across = [step["num_scheduled_tokens"] for step in decodes]
            assert any(0 in tokens for tokens in across)
            assert any(0 not in tokens and len(set(tokens)) > 1 for tokens in across)
            ended = asyncio.create_task(group.wait_for_end())
            await group.stop()
            assert (await ended).endswith("ended: stopped")

    asyncio.run(scenario())
    # Each rank has a directory of its own, named by its place and not by its device.
    names = {path.name for path in tmp_path.glob("*/rank_*")}
    assert names == {"rank_0_0", "rank_1_0", "rank_0_1", "rank_1_1"}


@pytest.mark.feature("R15")
def test_ranks_answer_after_a_request_was_cancelled_that_asked_while_they_were_made(
    ray_cluster: Any, tmp_path: Path
) -> None:
    """Ray cancels, with a request, the calls that it made and that were not sent yet."""
    import ray

    from cluster.actors.rank_actor import RANK_OPTIONS

    may_be_made = tmp_path / "may_be_made"

    class Late:
        def __init__(self) -> None:
            while not may_be_made.exists():
                time.sleep(0.01)

        def debug(self) -> str:
            return "answered"

    class Asking:
        def __init__(self) -> None:
            self.rank = ray.remote(num_cpus=0, **RANK_OPTIONS)(Late).remote()
            self.num_asked = 0

        async def ask(self) -> str:
            self.num_asked += 1
            answer = self.rank.debug.options(concurrency_group="ctl").remote()
            return str(await answer)

        async def has_asked(self, times: int) -> None:
            while self.num_asked < times:
                await asyncio.sleep(0.01)

    asking = ray.remote(num_cpus=0)(Asking).remote()
    first = asking.ask.remote()
    ray.get(asking.has_asked.remote(1))
    asked = asking.ask.remote()
    ray.get(asking.has_asked.remote(2))
    ray.cancel(asked)
    with pytest.raises(ray.exceptions.TaskCancelledError):
        ray.get(asked)
    time.sleep(1)  # Ray tells nobody when it has cancelled the call, too
    may_be_made.touch()
    assert ray.get(first) == "answered"
    assert ray.get(asking.ask.remote()) == "answered"


@pytest.mark.feature("P19")
def test_without_lockstep_each_leader_steps_for_itself(running_group: Any, oracle: Any) -> None:
    prompts = prompts_for(oracle, 5)[:3]
    apart: dict[str, Any] = {"parallel": (1, 2, False), "level": 0, "cudagraph_mode": "NONE"}
    engine = config_of(oracle.path, 128, num_kv_blocks=80, sealed="strict", **apart)

    async def scenario() -> None:
        async with running_group(engine, epoch=0) as group:
            inboxes = [group.inboxes[1]] * 3
            results, _ = await generate(inboxes, prompts, DP_TOKENS)
            check(oracle, prompts, results, DP_TOKENS)
            idle, busy = (rank["agreements"] for rank in await debug(group))
            assert not idle
            # The other rank is in none of the steps, neither with sequences nor with padding.
            assert busy and all(len(step["num_tokens_across_dp"]) == 1 for step in busy)
            assert sum(step["num_scheduled_tokens"][0] for step in busy) == sum(
                len(prompt) + DP_TOKENS - 1 for prompt in prompts
            )
            await group.stop()

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
    from cluster.actors import placement

    table = {"bundles_to_node_id": dict(enumerate(nodes))}
    monkeypatch.setattr(placement.ray.util, "placement_group_table", lambda group: table)
    found = placement.bundles_by_node(None, 1, 4)  # type: ignore[arg-type]
    assert found == [(bundle, nodes[bundle] if len(nodes) > 1 else "") for bundle in wanted]


def test_threads_follow_from_the_cores_and_ranks_of_a_node() -> None:
    context = RankContext(replace(config_of(Path()), threads=None), num_cores=8, ranks_on_node=3)
    assert context.threads == 2
    assert replace(context, ranks_on_node=9).threads == 1
    assert RankContext(replace(config_of(Path()), threads=5), num_cores=8).threads == 5


def test_ranks_of_the_application_are_counted_on_a_node() -> None:
    """Bundle 0 is the owner's; other applications and groups that are gone do not count."""
    from cluster.actors.placement import count_ranks

    def placed(name: str, nodes: str, state: str = "CREATED") -> dict[str, Any]:
        return {"name": name, "state": state, "bundles_to_node_id": dict(enumerate(nodes))}

    table = {
        "1": placed("SERVE_REPLICA::app#DecodePool#x", "aaa"),
        "2": placed("SERVE_REPLICA::app#PrefillPool#y", "bab"),
        "3": placed("SERVE_REPLICA::app2#PrefillPool#z", "aaa"),
        "4": placed("SERVE_REPLICA::app#DecodePool#v", "aaa", "REMOVED"),
        "5": placed("", "aa"),
    }
    assert [count_ranks(table, "1", node, 1) for node in "ab"] == [3, 1]
    assert count_ranks(table, "5", "a", 0) == 2


def test_a_rank_takes_its_threads_from_its_node_and_asks_for_huge_pages(
    running_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)

    def told(rank: Any) -> tuple[int, int, str, str]:
        context, found = rank._context, os.environ
        threads = found["OMP_NUM_THREADS"]
        return context.num_cores, context.ranks_on_node, threads, found["GLIBC_TUNABLES"]

    async def scenario(size: int) -> list[tuple[int, int, str, str]]:
        engine = replace(config_of(Path(), parallel=(size,)), threads=None)
        async with running_group(engine, is_started=False) as group:
            calls = [handle.actor.__ray_call__.remote(told) for handle in group.handles]
            return list(ray.get(calls))

    cores = num_cores()
    for size in (1, 2):
        wanted = (cores, size, str(max(1, cores // size)), HUGE_PAGES)
        assert asyncio.run(scenario(size)) == [wanted] * size
