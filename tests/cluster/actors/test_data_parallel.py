"""Groups of tp x dp real actors: one step for all of them, or one for each leader."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_ranks import config_of

pytestmark = pytest.mark.ray

NUM_TOKENS = 24


def prompts_for(oracle: Any) -> list[list[int]]:
    rng = random.Random(5)
    vocab = oracle.model.config.vocab_size
    return [[rng.randrange(vocab) for _ in range(rng.randint(1, 60))] for _ in range(8)]


def check(oracle: Any, prompts: list[list[int]], results: list[list[int]]) -> None:
    for prompt, tokens in zip(prompts, results, strict=True):
        assert len(tokens) == NUM_TOKENS
        oracle.check_greedy(prompt, tokens)
    oracle.report_ties()


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


@pytest.mark.feature("P01", "P02", "P04", "P11", "P12", "P19", "P20", "P21")
@pytest.mark.parametrize(
    ("shape", "compiler"),
    [
        ("one kv head", "eager"),
        pytest.param("one kv head", "inductor", marks=pytest.mark.slow),
        pytest.param("mixtral tied eight experts", "inductor", marks=pytest.mark.slow),
    ],
)
def test_actors_of_a_2x2_group_run_one_step_through_the_same_graphs(
    running_group: Any,
    generate: Any,
    make_oracle: Callable[[str], Any],
    tmp_path: Path,
    shape: str,
    compiler: str,
) -> None:
    oracle = make_oracle(shape)
    prompts = prompts_for(oracle)
    engine = config_of(
        oracle.path,
        128,
        num_kv_blocks=80,
        parallel=(2, 2),
        sealed="strict",
        level=3,
        compiler=compiler,
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
                results += (await generate(inboxes, some, NUM_TOKENS, pause_s=0.02))[0]
            check(oracle, prompts, results)
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
            assert (sum(rank["cpp_builds"] for rank in told) > 0) == (compiler == "inductor")
            for name in ("compilations", "loaded", "cpp_builds", "captures"):
                assert [rank[name] for rank in told] == [rank[name] for rank in ready]
            assert not any(rank["late_compilations"] + rank["late_captures"] for rank in told)
            logs = [rank["agreements"] for rank in told]
            decodes = [step for step in logs[0] if step["kind"] == 1]
            mixed = [step for step in logs[0] if step["kind"] == 2]
            assert len(decodes) > NUM_TOKENS
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


@pytest.mark.feature("P19")
def test_without_lockstep_each_leader_steps_for_itself(
    running_group: Any, generate: Any, oracle: Any
) -> None:
    prompts = prompts_for(oracle)[:3]
    apart: dict[str, Any] = {"parallel": (1, 2, False), "level": 0, "cudagraph_mode": "NONE"}
    engine = config_of(oracle.path, 128, num_kv_blocks=80, sealed="strict", **apart)

    async def scenario() -> None:
        async with running_group(engine, epoch=0) as group:
            inboxes = [group.inboxes[1]] * 3
            results, _ = await generate(inboxes, prompts, NUM_TOKENS)
            check(oracle, prompts, results)
            idle, busy = (rank["agreements"] for rank in await debug(group))
            assert not idle
            # The other rank is in none of the steps, neither with sequences nor with padding.
            assert busy and all(len(step["num_tokens_across_dp"]) == 1 for step in busy)
            assert sum(step["num_scheduled_tokens"][0] for step in busy) == sum(
                len(prompt) + NUM_TOKENS - 1 for prompt in prompts
            )
            await group.stop()

    asyncio.run(scenario())
