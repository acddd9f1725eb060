"""An ingress without Ray: when it takes requests, and what it says where nobody answers it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cluster.actors.reports import BoardSilent, IngressReport, LeaderReport
from cluster.observe.metrics import MetricsSnapshot
from cluster.wire.credentials import Hashes
from serve.config import deploy_config
from serve.event_loop import StreamBatcher
from serve.ingress_core import IngressCore
from serve.openai.errors import ApiError
from serve.pools.chooser import Routing
from serve.pools.directory import ConnectedLeader, Connection, Directory
from serve.pools.router import Router

CONFIG = deploy_config({"pools": "mixed", "O": 0, "ingress.replicas": 2})
OURS = Hashes(CONFIG.numerics_hash)
INBOX, OTHER = "tcp://10.0.0.1:1", "tcp://10.0.0.1:2"


class Unused:
    """A connection over which nothing comes; notes whether it is open."""

    def __init__(self) -> None:
        self.is_open = True

    def send(self, body: bytes) -> None:
        assert self.is_open

    def close(self) -> None:
        self.is_open = False


class Board:
    """Says that a mixed pool of one leader serves, and that another ingress has two sequences."""

    is_new = False

    def __init__(self) -> None:
        self.is_silent = False
        self.reports: list[IngressReport] = []
        self.replicas = [{"id": "r", "state": "ready", "ranks": []}]
        self.leaders = [LeaderReport("mixed", "r", 0, 0, "ready", INBOX, OURS, "")]

    async def poll(self, report: IngressReport) -> dict[str, Any]:
        if self.is_silent:
            raise BoardSilent("RayActorError")
        self.reports.append(report)
        return {
            "status": "ready",
            "compiling": False,
            "pools": {"mixed": {"replicas": [*self.replicas]}},
            "ingresses": [
                {"id": "other", "state": "ready", "num_live": 2},
                {"id": "mine", "state": "loading" if report.loading else "ready", "num_live": 0},
            ],
            "loading": [],
            "figures": {"at": 1.0} if report.is_watched else None,
            "leaders": self.leaders,
        }

    async def metrics(self, ingress_id: str, counts: Any) -> MetricsSnapshot:
        if self.is_silent:
            raise BoardSilent("RayActorError")
        return MetricsSnapshot({ingress_id: counts}, {})

    async def free_resources(self) -> dict[str, float]:
        return {}

    async def debug_ranks(self) -> dict[str, Any]:
        return {"pools": {}}


@dataclass
class Started:
    """An ingress that has started, its board, and its connections by the address they lead to."""

    core: IngressCore
    board: Board
    connections: dict[str, Unused]


@asynccontextmanager
async def started(board: Board | None = None) -> AsyncIterator[Started]:
    board, tick, connections = board or Board(), StreamBatcher(), dict[str, Unused]()

    def connect(inbox: str, leader: ConnectedLeader) -> Connection:
        connections[inbox] = Unused()
        asyncio.get_running_loop().call_soon(leader.on_welcome)
        return connections[inbox]

    directory = Directory(
        {"mixed": Routing.LEAST_REQUESTS},
        connect,
        numerics_hash=OURS.numerics,
        max_wait_s=60.0,
    )
    core = IngressCore(
        CONFIG,
        board,
        directory,
        Router(directory, "mixed", tick),
        tick,
        ingress_id="mine",
        node="10.0.0.1",
        secret=b"s" * 32,
    )
    try:
        await core.start(is_first=False)
        try:
            yield Started(core, board, connections)
        finally:
            await core.close()
            assert not any(each.is_open for each in connections.values())
    finally:
        gc.unfreeze()


async def test_an_ingress_beside_others_is_there_when_it_can_answer() -> None:
    async with started() as made:
        core, board = made.core, made.board
        assert core.is_ready() and (await core.status())[0] == 200
        assert board.reports[0].loading and not board.reports[-1].loading


async def test_an_ingress_is_there_once_those_that_it_replaces_cannot_answer_any_more() -> None:
    board = Board()
    [old] = board.leaders = [replace(board.leaders[0], hashes=Hashes("theirs"))]

    async def drain() -> None:
        while sum(not report.loading for report in board.reports) < 5:
            await asyncio.sleep(0)
        board.leaders = [replace(old, state="draining")]

    draining = asyncio.ensure_future(drain())
    async with asyncio.timeout(60), started(board):
        assert draining.done()


@pytest.mark.feature("R13", "R16")
async def test_an_ingress_has_its_share_of_the_places_of_all_replicas_that_serve() -> None:
    async with started() as made:
        core, replicas = made.core, made.board.replicas
        for num, state in ((2, "loading"), (2, "ready"), (1, "ready")):
            replicas[1:] = [{"id": "s", "state": state, "ranks": []}] * (num - 1)
            places = 64 * (num if state == "ready" else 1)
            async with asyncio.timeout(60):
                while (await core.figures())["max_live"] != places + 256:
                    await asyncio.sleep(0.01)
            assert (await core.status())[0] == 200


async def test_an_ingress_whose_end_comes_with_the_board_s_answer_reads_it_no_more() -> None:
    """A loop that closes waits for what it has cancelled, once."""

    class LastAnswer(Board):
        ended: asyncio.Task[Any] | None = None

        async def poll(self, report: IngressReport) -> dict[str, Any]:
            body = await super().poll(report)
            if len(self.reports) == 3:
                [self.ended] = (
                    task
                    for task in asyncio.all_tasks()
                    if getattr(task.get_coro(), "__qualname__", "") == "IngressCore._poll"
                )
                self.ended.cancel()
            return body

    board = LastAnswer()
    async with started(board):
        async with asyncio.timeout(60):
            while board.ended is None:
                await asyncio.sleep(0.01)
        await asyncio.wait([board.ended], timeout=60)
        assert board.ended.cancelled()


async def test_figures_come_while_somebody_looks_and_count_what_all_have() -> None:
    async with started() as made:
        core = made.core
        first = await core.figures()
        assert (first["figures"], first["num_live"], first["max_live"]) == (None, 2, 320)
        async with asyncio.timeout(60):
            while (await core.figures())["figures"] is None:
                await asyncio.sleep(0.01)


async def test_an_ingress_that_drains_takes_nothing_and_counts_what_others_answer() -> None:
    async with started() as made:
        core = made.core
        assert await core.drain() == 2
        assert not core.is_ready()
        assert (await core.status())[1]["status"] == "draining"


async def test_a_board_that_is_silent_costs_figures_and_no_requests() -> None:
    async with started() as made:
        core, board = made.core, made.board
        board.is_silent = True
        with pytest.raises(ApiError, match="wanted its figures, found RayActorError"):
            await core.metrics({})
        await asyncio.sleep(0.3)
        assert core.is_ready()
        core.check_health()


async def test_leaders_that_the_board_reports_are_connected_to_and_stay_if_it_is_silent() -> None:
    async with started() as made:
        assert [*made.connections] == [INBOX]
        made.board.is_silent = True
        await asyncio.sleep(0.3)
        assert made.connections[INBOX].is_open
        made.board.leaders = [replace(made.board.leaders[0], epoch=1, inbox=OTHER)]
        made.board.is_silent = False
        async with asyncio.timeout(60):
            while OTHER not in made.connections:
                await asyncio.sleep(0.01)
        assert not made.connections[INBOX].is_open


async def test_an_ingress_that_sees_no_board_any_more_is_not_well() -> None:
    """Its leaders would be those of once."""
    async with started() as made:
        assert not made.core.failure()
        made.board.leaders = [None]  # type: ignore[list-item]
        async with asyncio.timeout(60):
            while not made.core.failure():
                await asyncio.sleep(0.01)
        assert made.core.failure().startswith("ingress: a background task ended")
        with pytest.raises(RuntimeError, match="a background task ended"):
            made.core.check_health()
