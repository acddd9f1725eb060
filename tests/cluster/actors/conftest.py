"""Rank groups of real actors, and requests to their leaders."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import zmq
import zmq.asyncio
from local_ranks import CREDENTIALS, HANDSHAKE
from wire_structs import submit_of

from cluster.config import DEFAULT_NUM_CPUS, PLACEMENT_TIMEOUT_S, EngineConfig, rank_bundles
from cluster.wire.credentials import Credentials
from cluster.wire.messages import EngineOutput, OutputFrame, decode, encode
from cluster.wire.sockets import connecting_socket, end_context, join, pack

Function = Callable[..., Any]


@pytest.fixture
def running_group(ray_cluster: Any) -> Function:
    return _running_group


@pytest.fixture
def generate() -> Function:
    return _generate


@pytest.fixture
def reported() -> Function:
    return _reported


async def _reported(group: Any) -> Any:
    """Return a group's report, asked for again while its ranks are late, as right after a start."""
    async with asyncio.timeout(600):
        while True:
            with suppress(TimeoutError):
                return await group.report()


@asynccontextmanager
async def _running_group(
    engine: EngineConfig,
    epoch: int = 0,
    credentials: Credentials = CREDENTIALS,
    is_started: bool = True,
) -> AsyncIterator[Any]:
    """Make a group, which is killed at the end."""
    import ray

    from cluster.actors.ray_ranks import create_group

    bundles = rank_bundles(engine, DEFAULT_NUM_CPUS)
    placement = ray.util.placement_group(bundles, strategy="PACK")
    assert placement.wait(PLACEMENT_TIMEOUT_S), f"not placed: {bundles}"
    group = create_group(
        engine, placement, first_bundle=0, engine_id="test", credentials=credentials, epoch=epoch
    )
    try:
        if is_started:
            await group.start()
        yield group
    finally:
        group.kill()
        ray.util.remove_placement_group(placement)


async def _generate(
    inboxes: list[str], prompts: list[list[int]], num_tokens: int, pause_s: float = 0.0
) -> tuple[list[list[int]], int]:
    """Submit the prompts, each to the inbox of its place, with a pause behind each.

    Returns their greedy tokens, and how many tokens of prompts were cached.
    """
    context = zmq.asyncio.Context()
    tokens: list[list[int]] = [[] for _ in prompts]
    leaders = {
        inbox: connecting_socket(context, zmq.DEALER, HANDSHAKE, max_waiting=1000)
        for inbox in set(inboxes)
    }
    poller = zmq.asyncio.Poller()
    try:
        for inbox, leader in leaders.items():
            leader.connect(inbox)
            poller.register(leader, zmq.POLLIN)
        for i, (inbox, prompt) in enumerate(zip(inboxes, prompts, strict=True)):
            frame = encode(submit_of(str(i), prompt, max_tokens=num_tokens))
            await leaders[inbox].send_multipart(pack(frame, CREDENTIALS))
            await asyncio.sleep(pause_s)
        num_left, num_cached = len(prompts), 0
        async with asyncio.timeout(600):
            while num_left:
                [(leader, _), *_] = await poller.poll()
                frame = join(await leader.recv_multipart(), 1 << 20)
                for data in decode(frame, OutputFrame).outputs:
                    output = decode(data, EngineOutput)
                    assert not output.error, output
                    tokens[int(output.request_id)] += output.token_ids
                    if output.finish_reason:
                        num_left -= 1
                        num_cached += output.num_cached_tokens
    finally:
        for leader in leaders.values():
            leader.close(linger=0)
        end_context(context, "test")
    return tokens, num_cached
