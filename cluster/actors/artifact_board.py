"""`ArtifactBoard`: the small actor through which all nodes compile each piece once.

1. A rank that would compile a piece claims it. The first one is told to compile.
2. It publishes the artifact, which the board keeps on the disk of the cluster's head node.
3. The others wait in their claims, and get the bytes. Whoever comes later gets them too, when the
   ranks that compiled have ended, the application is started anew, or the board itself is.

All ranks of the cluster that name the same cache directory share one board, whatever group, pool,
application or job they belong to: keys are hashes of all that decides the code. The first rank that
would compile makes it, and when it ends with that rank, the next that asks makes another.
If a claim waits for too long, or the board does not start, the asking rank compiles itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import dataclass, field
from typing import Any

import ray

from cluster.actors.status_board import NAMESPACE
from compile.cache.artifacts import write_atomic
from compile.environment import root_directory
from compile.machine import PrivateDirectoryError, make_private

log = logging.getLogger("lockstep.compile")

BOARD_PREFIX = "artifacts:"
"""Of the actor's name, before the cache directory of the configuration, if it names one."""
DIRECTORY = "exchange"
"""Below the cache directory. Pieces take some 10 to 600 KB each."""
HEAD = {"node:__internal_head__": 0.001}
"""What Ray's head node alone has: it lasts as long as the cluster."""
CLAIM_TIMEOUT_S = 600.0
"""Longer than a piece takes with autotuning."""
START_TIMEOUT_S = 60.0
"""The board imports torch, on a head node that may be busy."""
WATCH_PERIOD_S = 1.0
"""How often the ranks that compile are looked at."""
RETRY_S = 0.5
"""After which a board that died is made anew."""


@dataclass
class _Claim:
    rank: Any
    """The actor that compiles."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    has_failed: bool = False
    """There is nothing to hand out, and who waits compiles too."""
    watch: asyncio.Task[None] | None = None


class ArtifactBoard:
    """Which rank compiles what, and where artifacts are. Invariant: a key has one claim at a time,
    and that of a rank that died passes to one of those who wait."""

    def __init__(self, cache_dir: str) -> None:
        self._directory = root_directory(cache_dir) / DIRECTORY
        self._claims: dict[str, _Claim] = {}

    async def claim(self, key: str, rank: Any) -> bytes | None:
        """Return an artifact, waiting for it; None: the asking actor, `rank`, is to compile."""
        while (data := self._kept(key)) is None:
            claim = self._claims.get(key)
            if claim is None:
                claim = self._claims[key] = _Claim(rank)
                claim.watch = asyncio.create_task(self._watch(key, claim))
                return None
            await claim.ended.wait()
            if claim.has_failed:
                return None
        return data

    async def publish(self, key: str, data: bytes | None) -> None:
        """Keep an artifact and end the claim; None if there is nothing to keep."""
        has_failed = data is None
        if data is not None:
            try:
                write_atomic(make_private(self._directory) / _name(key), data)
            except (OSError, PrivateDirectoryError) as error:
                has_failed = True
                log.warning("artifact %s is not handed out: %s", key, error)
        self._end(key, has_failed=has_failed)

    def _kept(self, key: str) -> bytes | None:
        try:
            return (make_private(self._directory) / _name(key)).read_bytes()
        except (OSError, PrivateDirectoryError):
            return None

    def _end(self, key: str, *, has_failed: bool) -> None:
        if (claim := self._claims.pop(key, None)) is not None:
            claim.has_failed = has_failed
            claim.ended.set()

    async def _watch(self, key: str, claim: _Claim) -> None:
        while not claim.ended.is_set():
            await asyncio.sleep(WATCH_PERIOD_S)
            if await _is_dead(claim.rank) and self._claims.get(key) is claim:
                log.warning("artifact %s: the rank that compiled it died", key)
                self._end(key, has_failed=False)


# Every rank may wait in a claim, and one more call must get through to publish. A replica's
# placement group takes in what its ranks start, and no bundle has what the head node has.
RemoteBoard = ray.remote(
    num_cpus=0, resources=HEAD, max_concurrency=1000, scheduling_strategy="DEFAULT"
)(ArtifactBoard)


def _name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def _is_dead(rank: Any) -> bool:
    """Return whether an actor has died, of a rank that may not answer while it compiles."""
    try:
        await rank.heartbeat.options(concurrency_group="ctl").remote()
    except ray.exceptions.ActorDiedError:
        return True
    except ray.exceptions.RayError:
        return False
    return False


class RayExchange:
    """An `ArtifactExchange` of all actors that name the same cache directory, on any node."""

    def __init__(self, cache_dir: str) -> None:
        self._cache_dir = cache_dir
        self._board: Any = None
        """Kept: a board ends with the handle of the rank that made it."""
        self._is_off = False
        """No board could be started, and none is asked for again."""

    def claim(self, key: str) -> bytes | None:
        """Return another rank's artifact, waiting for it; None if this one is to compile."""
        data: bytes | None = self._ask("claim", key, ray.get_runtime_context().current_actor)
        return data

    def publish(self, key: str, data: bytes | None) -> None:
        self._ask("publish", key, data)

    def _ask(self, method: str, key: str, given: Any) -> Any:
        for is_last in (False, False, True):
            try:
                self._board = self._board or self._find()
                if self._is_off:
                    return None
                call = getattr(self._board, method).remote(key, given)
                return ray.get(call, timeout=CLAIM_TIMEOUT_S)
            # A board that dies while another is made raises ValueError, not a RayError.
            except (ValueError, ray.exceptions.RayError, TimeoutError) as error:
                is_lost = isinstance(error, ValueError | ray.exceptions.RayActorError)
                if is_last or not is_lost:
                    log.warning("artifact %s is compiled for this node alone: %s", key, error)
                    return None
                self._board = None
                time.sleep(RETRY_S)

    def _find(self) -> Any:
        """Return the board once it runs, which is made where there is none. One that does not start
        would cost each claim its whole time."""
        name = BOARD_PREFIX + self._cache_dir
        named = RemoteBoard.options(name=name, namespace=NAMESPACE, get_if_exists=True)
        board = named.remote(self._cache_dir)
        try:
            ray.get(board.__ray_ready__.remote(), timeout=START_TIMEOUT_S)
        except TimeoutError:
            wanted = f"wanted it to start on the cluster's head node in {START_TIMEOUT_S:g} s"
            log.warning("%s: %s, found it pending: this node compiles for itself", name, wanted)
            self._is_off = True
        return board
