"""`ArtifactBoard`: the small actor through which a group's nodes compile each piece once.

1. A rank that would compile a piece claims it. The first one is told to compile.
2. It puts the artifact into Ray's object store and publishes the reference.
3. The others wait in their claims, and fetch the bytes from the object store of its node.

If a claim waits for too long, a compiler dies or an object is lost, the asking rank compiles
itself.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray

log = logging.getLogger("lockstep.compile")

CLAIM_TIMEOUT_S = 600.0
"""Longer than a piece takes with autotuning."""
FETCH_TIMEOUT_S = 60.0


class ArtifactBoard:
    """Which rank compiles what, and where it is. Invariant: a key has one claim at a time."""

    def __init__(self) -> None:
        self._claims: dict[str, asyncio.Future[list[Any]]] = {}

    async def claim(self, key: str) -> list[Any] | None:
        """Return the reference to an artifact in a list, or an empty one; None: compile it."""
        claim = self._claims.get(key)
        if claim is None:
            self._claims[key] = asyncio.get_running_loop().create_future()
            return None
        return await asyncio.shield(claim)

    def publish(self, key: str, references: list[Any]) -> None:
        """End a claim, with the reference to the artifact or without one."""
        claim = self._claims.get(key)
        if claim is not None and not claim.done():
            claim.set_result(references)


def create_artifact_board() -> Any:
    # Every rank may wait in a claim, and one more call must get through to publish.
    return ray.remote(num_cpus=0, max_concurrency=1000)(ArtifactBoard).remote()


class RayExchange:
    """An `ArtifactExchange` over Ray's object store; what it has published lives as long as it."""

    def __init__(self, board: Any) -> None:
        self._board = board
        self._published: list[Any] = []

    def claim(self, key: str) -> bytes | None:
        """Return another rank's artifact, waiting for it; None if this one is to compile."""
        try:
            references = ray.get(self._board.claim.remote(key), timeout=CLAIM_TIMEOUT_S)
            if not references:
                return None
            data: bytes = ray.get(references[0], timeout=FETCH_TIMEOUT_S)
            return data
        except (ray.exceptions.RayError, TimeoutError) as error:
            log.warning("artifact %s is not to be had, and compiled here too: %s", key, error)
            return None

    def publish(self, key: str, data: bytes | None) -> None:
        references: list[Any] = []
        try:
            if data is not None:
                references = [ray.put(data)]
        except ray.exceptions.RayError as error:
            log.warning("artifact %s is not handed out: %s", key, error)
        self._published += references
        self._board.publish.remote(key, references)
