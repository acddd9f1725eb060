"""Rank groups of real actors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from local_ranks import CREDENTIALS

from cluster.config import PLACEMENT_TIMEOUT_S, EngineConfig, Placement
from cluster.wire.credentials import Credentials


@pytest.fixture
def running_group(ray_cluster: Any) -> Callable[..., Any]:
    return _running_group


@asynccontextmanager
async def _running_group(
    engine: EngineConfig,
    epoch: int = 0,
    credentials: Credentials = CREDENTIALS,
    is_started: bool = True,
) -> AsyncIterator[Any]:
    import ray

    from cluster.actors.ray_ranks import create_group

    bundles = Placement().bundles(engine.parallel)
    placement = ray.util.placement_group(bundles, strategy=Placement.strategy)
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
