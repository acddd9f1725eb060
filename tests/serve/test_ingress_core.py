"""An ingress without Ray: when it takes requests, and what it says where nobody answers it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cluster.actors.reports import BoardSilent, IngressReport
from cluster.observe.metrics import MetricsSnapshot
from serve.config import deploy_config
from serve.event_loop import StreamBatcher
from serve.ingress_core import IngressCore
from serve.openai.errors import ApiError
from serve.pools.mailboxes import TokenMailboxes
from serve.pools.router import Router


class Board:
    """Says that a mixed pool serves, and that another ingress has two sequences."""

    is_new = False

    def __init__(self) -> None:
        self.is_silent = False
        self.reports: list[IngressReport] = []

    async def poll(self, report: IngressReport) -> dict[str, Any]:
        if self.is_silent:
            raise BoardSilent("RayActorError")
        self.reports.append(report)
        return {
            "status": "ready",
            "compiling": False,
            "pools": {"mixed": {"replicas": [{"id": "r", "state": "ready", "ranks": []}]}},
            "ingresses": [
                {"id": "other", "state": "ready", "num_live": 2},
                {"id": "mine", "state": "loading" if report.loading else "ready", "num_live": 0},
            ],
            "loading": [],
            "figures": {"at": 1.0} if report.is_watched else None,
        }

    async def metrics(self, ingress_id: str, counts: Any) -> MetricsSnapshot:
        if self.is_silent:
            raise BoardSilent("RayActorError")
        return MetricsSnapshot({ingress_id: counts}, {})

    async def free_resources(self) -> dict[str, float]:
        return {}

    async def debug_ranks(self) -> dict[str, Any]:
        return {"pools": {}}


@asynccontextmanager
async def started() -> AsyncIterator[tuple[IngressCore, Board, asyncio.Event]]:
    """An ingress that has started, its board, and an event with which its receiving ends."""
    board, is_broken = Board(), asyncio.Event()
    tick = StreamBatcher()
    tokens = TokenMailboxes("tcp://10.0.0.1:1", None, tick)  # type: ignore[arg-type]
    core = IngressCore(
        deploy_config({"pools": "mixed", "O": 0, "ingress.replicas": 2}),
        board,
        Router({}, tokens),
        tick,
        ingress_id="mine",
        node="10.0.0.1",
        secret=b"s" * 32,
    )

    async def receive() -> None:
        await is_broken.wait()
        raise ConnectionError("the socket is gone")

    try:
        await core.start(asyncio.create_task(receive()), is_first=False)
        try:
            yield core, board, is_broken
        finally:
            await core.close()
    finally:
        gc.unfreeze()


async def test_an_ingress_beside_others_is_there_when_it_can_answer() -> None:
    async with started() as (core, board, _):
        assert core.is_ready() and (await core.status())[0] == 200
        assert board.reports[0].loading and not board.reports[-1].loading


async def test_figures_come_while_somebody_looks_and_count_what_all_have() -> None:
    async with started() as (core, _, _):
        first = await core.figures()
        assert (first["figures"], first["num_live"], first["max_live"]) == (None, 2, 320)
        async with asyncio.timeout(60):
            while (await core.figures())["figures"] is None:
                await asyncio.sleep(0.01)


async def test_an_ingress_that_drains_takes_nothing_and_counts_what_others_answer() -> None:
    async with started() as (core, _, _):
        assert await core.drain() == 2
        assert not core.is_ready()
        assert (await core.status())[1]["status"] == "draining"


async def test_a_board_that_is_silent_costs_figures_and_no_requests() -> None:
    async with started() as (core, board, _):
        board.is_silent = True
        with pytest.raises(ApiError, match="wanted its figures, found RayActorError"):
            await core.metrics({})
        await asyncio.sleep(0.3)
        assert core.is_ready()
        core.check_health()


async def test_an_ingress_that_receives_no_more_tokens_is_not_well() -> None:
    async with started() as (core, _, is_broken):
        assert not core.failure()
        is_broken.set()
        await asyncio.sleep(0.01)
        assert core.failure().startswith("ingress: a background task ended")
        with pytest.raises(RuntimeError, match="a background task ended"):
            core.check_health()
