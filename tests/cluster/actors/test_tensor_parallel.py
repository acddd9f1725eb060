"""Tensor-parallel groups of real actors: they generate what one rank does, and name who dies."""

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
from local_ranks import config_of

pytestmark = pytest.mark.ray

NUM_TOKENS = 32


def prompts_for(oracle: Any) -> list[list[int]]:
    """Return prompts of which half begin alike."""
    rng = random.Random(21)
    vocab = oracle.model.config.vocab_size
    head = [rng.randrange(vocab) for _ in range(20)]
    tails = [[rng.randrange(vocab) for _ in range(rng.randint(1, 60))] for _ in range(8)]
    return [head + tail if i % 2 else tail for i, tail in enumerate(tails)]


@pytest.mark.feature("P01", "P19")
@pytest.mark.parametrize(("shape", "size"), [("odd vocabulary", 2), ("one kv head", 4)])
def test_ranks_of_a_group_generate_what_transformers_does(
    running_group: Any,
    generate: Any,
    reported: Any,
    make_oracle: Callable[[str], Any],
    shape: str,
    size: int,
) -> None:
    """Three long sequences fill the pool: some are pre-empted. Prompts come in chunks."""
    oracle = make_oracle(shape)
    prompts = prompts_for(oracle)
    engine = config_of(oracle.path, 128, num_kv_blocks=80, max_num_seqs=8, parallel=(size,))

    async def scenario() -> None:
        async with running_group(engine) as group:
            first, _ = await generate(group.inboxes * len(prompts), prompts, NUM_TOKENS)
            again, num_cached = await generate(group.inboxes * 3, prompts[:3], NUM_TOKENS)
            for prompt, tokens in zip(prompts + prompts[:3], first + again, strict=True):
                assert len(tokens) == NUM_TOKENS
                oracle.check_greedy(prompt, tokens)
            oracle.report_ties()
            assert num_cached > 0

            report = await reported(group)
            assert [(r.place.dp_rank, r.place.tp_rank, r.state) for r in report.ranks] == [
                (0, rank, "ready") for rank in range(size)
            ]
            assert len({r.pid for r in report.ranks}) == size
            [step] = {r.step for r in report.ranks}
            assert step > 0
            scheduler = report.ranks[0].scheduler
            assert scheduler.num_free_blocks == scheduler.num_blocks == 80

            ended = asyncio.create_task(group.wait_for_end())
            await group.stop()
            assert (await ended).endswith("ended: stopped")

    asyncio.run(scenario())


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_follower_that_is_killed_is_named_as_soon_as_ray_knows(
    running_group: Any,
    generate: Any,
    reported: Any,
    oracle: Any,
    monkeypatch: pytest.MonkeyPatch,
    busy: bool,
) -> None:
    """Also while its leader, pulled out of a collective, ends with an error of its own."""
    from cluster.actors import rank_group

    monkeypatch.setattr(rank_group, "BLAME_S", 5.0)  # Ray may be late on a busy machine
    engine = config_of(oracle.path, 128, num_kv_blocks=80, parallel=(2,))

    async def scenario() -> None:
        async with running_group(engine) as group:
            report = await reported(group)
            ended = asyncio.create_task(group.wait_for_end())
            load: asyncio.Task[Any] | None = None
            if busy:
                prompts = [list(range(i, i + 30)) for i in range(8)]
                load = asyncio.create_task(generate(group.inboxes * 8, prompts, 90))
                await asyncio.sleep(0.15)
            killed_at = time.monotonic()
            os.kill(report.ranks[1].pid, signal.SIGKILL)
            await group.runs[1]
            died_at = time.monotonic()
            name = await ended
            named_at = time.monotonic()
            print(f"{name!r} after {died_at - killed_at:.3f} s and {named_at - died_at:.3f} s")
            assert name.startswith("rank dp=0 tp=1 epoch=0 ended:")
            assert named_at - died_at < 10
            if load is not None:
                load.cancel()
            # The leader is of no use any more: it was killed too.
            async with asyncio.timeout(60):
                while os.path.exists(f"/proc/{report.ranks[0].pid}"):
                    await asyncio.sleep(0.02)

    asyncio.run(scenario())


def test_a_follower_that_cannot_load_is_named_with_the_reason(
    running_group: Any, oracle: Any
) -> None:
    """Three ranks cannot share four heads; nobody waits for the others' collectives."""
    from cluster.actors.rank_group import RankDied

    async def scenario() -> None:
        async with running_group(config_of(oracle.path, num_kv_blocks=80, parallel=(3,))):
            pass

    began = time.monotonic()
    with pytest.raises(RankDied, match=r"rank dp=0 tp=\d epoch=0 ended while loading: .*heads"):
        asyncio.run(scenario())
    assert time.monotonic() - began < 55


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
    assert took < 60
