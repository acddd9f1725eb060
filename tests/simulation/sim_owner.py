"""The owner's side: what stands around the real `PoolCore`, `RankGroup` and `TokenMailboxes`.

Real are the accounts of open requests, the rebuild under a new epoch, and where outputs go.
Simulated are the sockets, and the actors (a rank's process with its calls).

Frames that were under way when a process died still arrive, and arrive late, as they do over
sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING

from sim_rank import SimLeader, SimRank
from sim_schedule import Shape

from cluster.actors.rank_group import CallEnd, RankGroup
from cluster.actors.reports import ReplicaReport
from cluster.group.rendezvous import Rendezvous
from cluster.observe.logs import last_line
from cluster.wire.messages import Abort, encode
from serve.pools.pool_core import PoolCore, hold_s
from serve.pools.routing import Routing

if TYPE_CHECKING:
    from sim_world import World

CONFIG_HASH = "simulated"


class SimHandle:
    """The owner's `RankHandle` of one rank."""

    def __init__(self, rank: SimRank) -> None:
        self._rank = rank
        self._group = rank.group
        self._loop, self._rng = rank.group.loop, rank.group.rng
        self._end: asyncio.Future[CallEnd] = self._loop.create_future()
        """Of `run`."""
        self._calls = [self._end]

    def on_death(self) -> None:
        """Ray tells that the process is gone: every call fails."""
        for call in self._calls:
            _end(call, CallEnd(cause="its process died", is_death=True))

    def on_end(self, error: Exception | None) -> None:
        """Ray tells that `run` returned or raised."""
        _end(self._end, CallEnd(None, last_line(error), error) if error else CallEnd())

    async def meet(self) -> CallEnd:
        nobody = ("",) * self._group.dp_size
        return CallEnd(Rendezvous("10.0.0.1", 0, "", nobody, nobody))  # type: ignore[arg-type]

    async def load(self, rendezvous: Rendezvous | None) -> CallEnd:
        await asyncio.sleep(0.2 + 0.4 * self._rng.random())
        if self._rank.process.is_dead or self._group.fails_to_start(self._rank):
            return CallEnd(cause="its process died", is_death=True)
        return CallEnd(f"{self._group.pool}/{self._rank.epoch}/{self._rank.dp_rank}")

    def run(self) -> Awaitable[CallEnd]:
        self._loop.after(self._rng.random() * 0.01, self._rank.start)
        return self._end

    def heartbeat(self) -> Awaitable[CallEnd]:
        """Ask the process, which answers as soon as it is not stopped."""
        answer: asyncio.Future[CallEnd] = self._loop.create_future()
        self._calls = [call for call in self._calls if not call.done()] + [answer]
        self._loop.after(
            0.001 + 0.01 * self._rng.random(), self._rank.process.call, self._tell, answer
        )
        return answer

    def _tell(self, answer: asyncio.Future[CallEnd]) -> None:
        _end(answer, CallEnd(self._rank.step_stats.heartbeat()))

    def stats(self) -> Awaitable[CallEnd]:
        raise NotImplementedError

    def stop(self) -> None:
        """Tell the rank, a bit later."""
        assert isinstance(self._rank, SimLeader), "stop: wanted a leader, found a follower"
        self._loop.after(0.05 * self._rng.random(), self._rank.tell_to_stop)

    def kill(self) -> None:
        self._rank.kill()
        self.on_death()


def _end(call: asyncio.Future[CallEnd], end: CallEnd) -> None:
    if not call.done():
        call.set_result(end)


class SimEngineLinks:
    """The ingress's ways to engines."""

    def __init__(self, world: World) -> None:
        self._world = world

    def send_aborts(self, inbox: str, request_ids: list[str]) -> None:
        self._world.send_to_leader("ingress", inbox, encode(Abort(request_ids)))

    def forget(self, inbox: str) -> None:
        """There is nothing to close."""

    async def caught_up(self) -> None:
        """Return at once: frames wait nowhere but on their way."""


class SimLeaderLink:
    """The pool's way to a leader."""

    def __init__(self, world: World, inbox: str) -> None:
        self.is_closed = False
        self._world = world
        self._inbox = inbox

    async def submit(self, frame: bytes) -> None:
        self._world.send_to_leader(f"{self._inbox} pool", self._inbox, frame)

    def abort(self, request_id: str) -> None:
        if not self.is_closed:
            frame = encode(Abort([request_id]))
            self._world.send_to_leader(f"{self._inbox} pool", self._inbox, frame)


class SimPool:
    """A replica of a pool: the `PoolShell` of a real core."""

    def __init__(self, world: World, shape: Shape) -> None:
        self._world = world
        self._shape = shape
        self._links: list[SimLeaderLink] = []
        self.core: PoolCore = world.plants.pool_core(
            shape.pool,
            "replica",
            CONFIG_HASH,
            self,
            routing=Routing(world.schedule.routing),
            hold_s=hold_s(world.schedule.lease_s),
        )

    def generate(self, request_id: str, frame: bytes) -> asyncio.Task[str]:
        if self._shape.pool != "decode":
            self._world.on_attempt(request_id)
        return self._world.loop.create_task(self.core.generate(request_id, frame, CONFIG_HASH))

    def new_group(self, epoch: int) -> RankGroup:
        group: RankGroup = self._world.plants.group(self._world, self._shape, epoch)
        return group

    async def connect(self, inboxes: Sequence[str]) -> list[SimLeaderLink]:
        for link in self._links:
            link.is_closed = True
        self._links = [SimLeaderLink(self._world, inbox) for inbox in inboxes]
        return self._links

    async def push(self, report: ReplicaReport, group: RankGroup) -> None:
        """Nobody looks."""

    async def final_failure(self) -> str:
        return ""

    async def note_failure(self, reason: str, is_final: bool) -> None:
        """Nobody asks."""

    async def note_recovery(self) -> None:
        """Nothing was noted."""
