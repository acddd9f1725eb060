"""The owner's side: the real `Pool` and `TokenSocket`, and a group's owner's handles of its ranks.

Real are the accounts of open requests, the rebuild under a new epoch, and where outputs go.
Simulated are the sockets, and the actors (a rank's process with its calls).

Frames that were under way when a process died still arrive, and arrive late, as they do over
sockets.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from sim_rank import SimLeader, SimRank
from sim_schedule import Shape

from cluster.actors.failed_starts import FailedStart
from cluster.actors.rank_group import RankGroup
from cluster.wire.credentials import Credentials
from cluster.wire.messages import Abort, EngineOutput, encode
from serve.event_loop import StreamBatcher
from serve.pools.mailboxes import TokenSocket
from serve.pools.pool import Pool, hold_s
from serve.pools.routing import LeaderRouter, Routing

if TYPE_CHECKING:
    from sim_world import World


class SimActor:
    """The owner's handle of one rank, with the calls that `RankGroup` makes."""

    def __init__(self, rank: SimRank) -> None:
        self._rank = rank
        self._loop = rank.group.loop
        self._rng = rank.group.rng
        self.sentinel = self._loop.create_future()
        self._calls: list[asyncio.Future[Any]] = [self.sentinel]
        self.heartbeat = _Method(self._heartbeat)
        self.stop = _Method(self._stop)

    def on_death(self) -> None:
        """Ray tells that the process is gone: every call fails."""
        error = ray.exceptions.RayActorError()
        for call in self._calls:
            _set_exception(call, error)

    def on_end(self, error: Exception | None) -> None:
        """Ray tells that `run` returned or raised."""
        if error is not None:
            lost = ray.exceptions.RayError(str(error))
            lost.cause = error  # as a `RayTaskError` has it: who diverged is read from there
            _set_exception(self.sentinel, lost)
        elif not self.sentinel.done():
            self.sentinel.set_result(None)

    def _heartbeat(self) -> asyncio.Future[Any]:
        answer = self._loop.create_future()
        self._calls = [call for call in self._calls if not call.done()] + [answer]
        self._loop.after(0.001 + 0.01 * self._rng.random(), self._answer, answer)
        return answer

    def _answer(self, answer: asyncio.Future[Any]) -> None:
        self._rank.process.call(self._tell, answer)

    def _tell(self, answer: asyncio.Future[Any]) -> None:
        if not answer.done():
            answer.set_result(self._rank.step_stats.heartbeat())

    def _stop(self) -> None:
        assert isinstance(self._rank, SimLeader), "stop: wanted a leader, found a follower"
        self._loop.after(0.05 * self._rng.random(), self._rank.tell_to_stop)


def _set_exception(call: asyncio.Future[Any], error: Exception) -> None:
    if not call.done():
        call.set_exception(error)
        call.exception()  # whether anyone still waits for it or not


class _Method:
    """A remote method."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.remote = call

    def options(self, **_: Any) -> _Method:
        return self


CONFIG_HASH = "simulated"
NUM_STREAMS = 16
"""Among which a stream's tokens wait for ticks of some 45 ms."""


class SimTokens(TokenSocket):
    """The ingress's token socket, without the socket."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.tick = StreamBatcher()
        # In half of the schedules tokens wait for ticks, as among many streams.
        self.tick.num_streams = NUM_STREAMS * (world.schedule.seed % 2)
        self.address = "tcp://10.0.0.1:1"
        self._newest = {}
        self._mailboxes = {}
        self._aborts = defaultdict(list)
        self._heard_at = {}

    def on_outputs(self, inbox: str, outputs: list[EngineOutput]) -> None:
        """Do what `_receive` does with a frame."""
        for output in outputs:
            self._deliver(inbox, output)

    def _send_aborts(self) -> None:
        aborts, self._aborts = self._aborts, defaultdict(list)
        for inbox, request_ids in aborts.items():
            self._world.send_to_leader("ingress", inbox, encode(Abort(request_ids)))


class _LeaderSocket:
    """The pool's end of a connection to a leader."""

    def __init__(self, world: World, inbox: str) -> None:
        self.closed = False
        self._world = world
        self._inbox = inbox

    def send_multipart(self, parts: list[bytes]) -> asyncio.Future[None]:
        _, body = parts
        self._world.send_to_leader(f"{self._inbox} pool", self._inbox, body)
        sent: asyncio.Future[None] = self._world.loop.create_future()
        sent.set_result(None)
        return sent

    def close(self, linger: int) -> None:
        self.closed = True


class SimPool(Pool):
    """A replica of a pool."""

    def __init__(self, world: World, shape: Shape) -> None:  # type: ignore[misc]
        self._world = world
        self._shape = shape
        self._replica_id, self._config_hash = "replica", CONFIG_HASH
        self._is_ready = asyncio.Event()
        self._hold_s = hold_s(world.schedule.lease_s)
        self._enter("loading")
        self._credentials = Credentials(CONFIG_HASH, b"s" * 32)
        self._open = {}
        self._restarts = Counter()
        self._is_stuck = False
        self._leaders = []
        self._tasks = []
        routing = Routing(world.schedule.routing)
        self._pool = _PoolConfig(shape.pool, routing)  # type: ignore[assignment]
        self._router = LeaderRouter(routing, shape.dp_size)
        self._group = self._new_group(0)
        self._board = _Board()  # type: ignore[assignment]
        self._failed_starts = _FailedStarts()  # type: ignore[assignment]

    async def start(self) -> None:
        """Do what the real constructor does."""
        await self._group.start()
        await self._connect()
        self._spawn(self._watch_group())
        self._serve()

    async def shut_down(self) -> None:
        """Do what Serve does when a replica goes."""
        await Pool.__del__(self)

    async def _connect(self) -> None:
        for leader in self._leaders:
            leader.close(linger=0)
        inboxes = self._group.inboxes
        self._leaders = [_LeaderSocket(self._world, inbox) for inbox in inboxes]  # type: ignore[misc]

    def on_ends(self, outputs: list[EngineOutput]) -> None:
        """Do what `_receive_ends` does with a frame."""
        for output in outputs:
            future = self._open.get(output.request_id)
            if future is not None and not future.done():
                future.set_result(output)

    def _new_group(self, epoch: int) -> RankGroup:
        group: RankGroup = self._world.plants.group(self._world, self._shape, epoch)
        return group

    @property
    def is_first(self) -> bool:
        """Whether requests start here."""
        return self._pool.name != "decode"

    @property
    def group(self) -> RankGroup:
        """The group of the latest epoch."""
        return self._group

    def __del__(self) -> None:  # type: ignore[override]
        """Nothing is left when Python forgets it."""


class PoolHandle:
    """What the router has of a pool: a call is a task."""

    def __init__(self, world: World, pool: SimPool) -> None:
        self._world = world
        self._pool = pool

    def generate(self, request_id: str, frame: bytes) -> asyncio.Task[str]:
        """Start the call."""
        if self._pool.is_first:
            self._world.on_attempt(request_id)
        call = self._pool.generate(request_id, frame, CONFIG_HASH)
        return self._world.loop.create_task(call)


class _PoolConfig:
    def __init__(self, name: str, routing: Routing) -> None:
        self.name = name
        self.routing = routing


class _Board:
    def remove(self, pool: str, replica_id: str) -> None:
        """Nobody asks."""


class _FailedStarts:
    def recover(self, pool: str) -> None:
        """Nothing was noted."""

    def note(self, pool: str, failed: FailedStart) -> None:
        """Nobody asks."""
