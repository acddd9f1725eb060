"""A router over real connections to leaders that need no board to be known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from local_ranks import CREDENTIALS, REPLICA

from cluster.actors.reports import LeaderReport
from cluster.wire.credentials import Hashes
from serve.event_loop import StreamBatcher
from serve.pools.chooser import Routing
from serve.pools.directory import Directory
from serve.pools.links import LeaderLinks
from serve.pools.router import Router


@asynccontextmanager
async def routing(
    inboxes: Mapping[str, Sequence[str]], epoch: int = 0, kind: type[Directory] = Directory
) -> AsyncIterator[Router]:
    """Connect to the leaders at these inboxes, by pool the first one first; yield a router once all
    have answered."""
    links = LeaderLinks(CREDENTIALS)
    routings = dict.fromkeys(inboxes, Routing.LEAST_REQUESTS)
    directory = kind(routings, links.connect, numerics_hash="test", max_wait_s=60.0)
    directory.see(
        LeaderReport(pool, REPLICA, dp_rank, epoch, "ready", inbox, Hashes("test"), "")
        for pool, of_pool in inboxes.items()
        for dp_rank, inbox in enumerate(of_pool)
    )
    try:
        async with asyncio.timeout(60):
            while not all(leader.can_take() for leader in directory._leaders.values()):
                await asyncio.sleep(0.005)
        yield Router(directory, next(iter(inboxes)), StreamBatcher())
    finally:
        directory.close()
        links.shutdown()
