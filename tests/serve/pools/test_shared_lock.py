"""The lock of all ingresses is one actor, made when it is first asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytestmark = pytest.mark.ray


def test_ingresses_share_a_lock_and_go_on_where_its_actor_dies(ray_cluster: Any) -> None:
    import ray

    from serve.ingress import ActorLock

    a, b = (ActorLock("quarantined", name) for name in "ab")

    def actor() -> Any:
        return ray.get_actor("quarantine:quarantined", namespace="lockstep")

    async def scenario() -> None:
        a.give_back()  # of what was never taken
        with pytest.raises(ValueError):
            actor()
        assert await a.take() and not await b.take()
        a.give_back()
        assert await b.take() and not await a.take()
        ray.kill(actor())
        async with asyncio.timeout(60):
            while not (await a.take() and not await b.take()):
                await asyncio.sleep(0.1)
        ray.kill(actor())

    asyncio.run(scenario())
