"""Ingresses, and between them and leaders: connections, a leader's end of them, the status board.

Real are the directory with its leaders, what they send, how a leader greets and who its outputs go
to. Simulated are sockets: frames of a connection arrive in order each way, none is lost but with
it, and it ends as libzmq ends one:

1. soon after the leader's process has died or closed its inbox;
2. `SILENT_S` after heartbeats are not answered any more, of a process that is stopped or cannot be
   reached, and never since it is busy;
3. soon after a frame of it was lost.

Either side learns of the end for itself: for a while a leader may send to nobody, or an ingress.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from errno import EHOSTUNREACH
from math import inf
from typing import TYPE_CHECKING, Any

import zmq
from sim_loop import Violation
from sim_schedule import Fault

from cluster.actors.reports import (
    CachedPrefixes,
    LeaderReport,
    ReplicaReport,
    leaders_of,
    scaling_body,
)
from cluster.config import CacheConfig
from cluster.observe.counts import BUCKET, Ledger
from cluster.observe.metrics import INGRESS
from cluster.rank.leader import Inbox
from cluster.rank.output_sender import OutputSender
from cluster.wire.credentials import Hashes
from cluster.wire.messages import (
    Abort,
    EngineOutput,
    Hello,
    Inbound,
    Leave,
    OutputFrame,
    Submit,
    decode,
)
from serve.event_loop import StreamBatcher
from serve.pools.chooser import Routing
from serve.pools.directory import ConnectedLeader, Directory
from serve.pools.quarantine import Quarantine
from serve.pools.router import Router

if TYPE_CHECKING:
    from sim_rank import SimLeader
    from sim_world import World

RESET_S = 0.01
"""Until one side hears that the other's process died, or that a frame was lost."""
SILENT_S, BEAT_S = 1.0, 0.25
"""How long heartbeats go unanswered until the ingress gives up, and how often it sends one."""
POLL_S = 0.25
"""How often an ingress reads the board."""
ROUTED_S = 0.2
"""Until no client comes to an ingress any more that Serve replaces."""
NUM_STREAMS = 16
"""Among which a stream's tokens wait for ticks of some 45 ms."""
FORGOTTEN_S = 5.0
"""Until the board forgets a replica that it does not hear of."""
HEARD_S = 0.7
"""Until the ingress knows what a replica is, with a board that is well."""
TRIAL_S = 0.002
"""Until whoever asks for the lock of suspects knows whether it has it."""
LEARN_S = 1.0
"""Until it has its answer as well."""


def hashes(weights: int, block_times: int = 1) -> Hashes:
    """Return what engines of these weights and blocks tell of themselves."""
    return Hashes(f"simulated {weights}", f"KV {weights} {block_times}")


class SimIngress:
    """One ingress: what it knows of leaders, and the router over that. Those of a deployment that
    is replaced answer their clients to the end."""

    def __init__(self, world: World, weights: int, block_times: int) -> None:
        self.world, self.weights, self.block_times = world, weights, block_times
        self.replaced_from = inf
        """When Serve began to replace it."""
        self.num_clients = 0
        self.is_closed = False
        schedule, tick = world.schedule, StreamBatcher()
        # In half of the schedules tokens wait for ticks, as among many streams.
        tick.num_streams = NUM_STREAMS * (schedule.seed % 2)
        pools = [shape.pool for shape in schedule.groups]
        self.directory: Directory = world.plants.directory(
            dict.fromkeys(pools, Routing(schedule.routing)),
            lambda inbox, leader: world.plants.connection(self, inbox, leader),
            numerics_hash=hashes(weights).numerics,
            max_wait_s=schedule.max_wait_s,
            # In half of the schedules that count in seconds prompts may run where they decode.
            max_on_decode=schedule.budget * (schedule.seed // 2 % 2)
            if schedule.routing == "cost"
            else 0,
        )
        block_size = schedule.block_size * block_times
        cache = CacheConfig(block_size, enable_prefix_caching=schedule.is_caching)
        quarantine = Quarantine(SimTrials(world, self))
        self.router: Router = world.plants.router(
            self.directory, pools[0], tick, quarantine, cache=cache
        )
        self._polling = world.spawn(self._poll())

    async def start(self) -> None:
        """Return when clients may come, as `IngressCore.start` does."""
        await self._refresh()
        while self.directory.is_replacing:
            await asyncio.sleep(POLL_S)

    async def end(self) -> None:
        """Answer who has come, and stop."""
        await asyncio.sleep(ROUTED_S)
        while self.num_clients:
            await asyncio.sleep(POLL_S)
        self.close()

    def close(self) -> None:
        self.is_closed = True
        self._polling.cancel()
        self.directory.close()

    async def _poll(self) -> None:
        """Take the board's answers in any order."""
        while True:
            self.world.spawn(self._refresh())
            await asyncio.sleep(POLL_S)

    async def _refresh(self) -> None:
        with suppress(TimeoutError):
            reports = await self.world.board.poll(self.directory.known_prefixes)
            if not self.is_closed:
                self.directory.see(reports)


class SimTrials:
    """An ingress's way to the lock of all: it takes a moment, and is never lost."""

    def __init__(self, world: World, ingress: SimIngress) -> None:
        self._world, self._name = world, str(id(ingress))

    async def take(self) -> bool:
        await asyncio.sleep(TRIAL_S)
        return self._world.trials.take(self._name)

    def give_back(self) -> None:
        self._world.trials.give_back(self._name)


class SimConnection:
    """The way of an ingress to one leader and back; it connects once."""

    def __init__(self, ingress: SimIngress, inbox: str, leader: ConnectedLeader) -> None:
        self.ingress, world = ingress, ingress.world
        self.rank = world.leader_at(inbox)
        self.peer = world.new_peer(self)
        self.ends: dict[str, str] = {}
        """By request that was submitted here the finish reason that has come."""
        self.aborted: set[str] = set()
        self.is_open = True
        """At the ingress."""
        self.ended_at = inf
        self._is_accepted = self._is_forgotten = False
        """At the leader."""
        self._will_lose = self.is_cut = False
        self._world, self._loop, self.directory_leader = world, world.loop, leader
        self._early: list[bytes] = []
        if self._held_s > SILENT_S:
            self._loop.after(SILENT_S, self.end)
        else:
            self._loop.at(self._arrival(is_back=False), self._reach)

    # --- at the ingress ---------------------------------------------------------------------------

    def send(self, body: bytes) -> None:
        if not self.is_open:
            return
        match decode(body, Inbound):
            case Submit(request=request):
                self._world.on_submit(self, request.request_id)
                self.ends[request.request_id] = ""
            case Abort(request_ids=request_ids):
                self.aborted.update(request_ids)
            case Leave():
                self._world.on_leave(self)
        if not self._loses():
            self._loop.at(self._arrival(is_back=False), self._arrive, body)

    def close(self) -> None:
        if self.is_open:
            self._world.on_close(self)
            self._lose_all()
        self.is_open = False
        self.ended_at = self._loop.now
        if not self.is_cut:
            call = self.rank.process.call
            self._loop.at(self._arrival(is_back=False), call, self._forget)

    def end(self) -> None:
        """The ingress hears of its end."""
        if self.is_open:
            self.is_open = False
            self._lose_all()
            self.directory_leader.on_end("its connection ended")

    def _lose_all(self) -> None:
        """What runs here is taken to die with its ranks."""
        self._world.on_deaths([each for each, end in self.ends.items() if not end])

    def _take(self, body: bytes) -> None:
        if not self.is_open:
            return
        frame: OutputFrame = decode(body, OutputFrame)
        self.directory_leader.on_welcome()
        for encoded in frame.outputs:
            output: EngineOutput = decode(encoded, EngineOutput)
            self.ends[output.request_id] = output.finish_reason
            if output.finish_reason and output.request_id not in self.aborted:
                self._world.on_stage_end(self, output)
            elif output.token_ids:
                self._world.on_token(self, output)
            self.deliver(output)

    def deliver(self, output: EngineOutput) -> None:
        self.directory_leader.deliver(output)

    # --- at the leader ----------------------------------------------------------------------------

    def _reach(self) -> None:
        if self.rank.is_gone:
            self._loop.after(RESET_S * self._world.rng.random(), self.end)
        else:
            self.rank.process.call(self._accept)

    def _accept(self) -> None:
        if self.is_open:
            self._is_accepted = True
            early, self._early = self._early, []
            for body in early:
                self.rank.receive(self.peer, body)

    def _arrive(self, body: bytes) -> None:
        if self._is_accepted:
            self.rank.receive(self.peer, body)
        else:
            self._early.append(body)

    def _forget(self) -> None:
        self._is_forgotten = True

    def put(self, body: bytes) -> None:
        """Send to the ingress; raises as a ROUTER socket that must deliver does."""
        if not self._is_accepted or self._is_forgotten:
            raise zmq.ZMQError(EHOSTUNREACH)
        if not self._loses():
            self._loop.at(self._arrival(is_back=True), self._take, body)

    # --- what happens to it -----------------------------------------------------------------------

    def lose_next(self) -> None:
        """Lose the next frame, of whichever side."""
        self._will_lose = True

    def _loses(self) -> bool:
        if self._will_lose:
            self._will_lose, self.is_cut = False, True
            random, call = self._world.rng.random, self.rank.process.call
            self._loop.after(RESET_S * random(), self.end)
            self._loop.after(RESET_S * random(), call, self._forget)
        return self.is_cut

    def on_gone(self) -> None:
        """Its leader's process has died."""
        self._loop.after(RESET_S * self._world.rng.random(), self.end)

    def on_inbox_closed(self) -> None:
        """Its leader has closed its inbox; what it sent before still arrives."""
        self._loop.at(self._arrival(is_back=True), self.end)

    def on_silence(self, until: float) -> None:
        """No heartbeat is answered from now on until then; each side has its own patience."""
        late_s = BEAT_S * self._world.rng.random()
        if self._is_accepted and self._loop.now + SILENT_S + late_s < until:
            self._loop.after(SILENT_S + late_s, self.end)
            if self._loop.now + 2 * SILENT_S + late_s < until:
                self._loop.after(2 * SILENT_S + late_s, self.rank.process.call, self._forget)

    @property
    def _held_s(self) -> float:
        return self.rank.unreachable_until - self._loop.now

    def _arrival(self, *, is_back: bool) -> float:
        way = ("leader", self.peer) if is_back else (self.peer, "leader")
        return self._world.arrival(way, not_before=self.rank.unreachable_until)


class SimInbox(Inbox):
    """A leader's inbox: the real one but for its socket, which it is itself."""

    def __init__(self, leader: SimLeader) -> None:
        self._leader, self._world = leader, leader.group.world
        self._hello = Hello(leader.engine_id, leader.epoch)
        self.socket: Any = self
        self.address = leader.inbox_address
        self.frames: deque[tuple[bytes, bytes]] = deque()

    def take(self) -> Iterator[tuple[bytes, Any]]:
        while self.frames:
            peer, body = self.frames.popleft()
            message: Inbound = decode(body, Inbound)
            if isinstance(message, Hello):
                self._greet(peer, message)
                continue
            if isinstance(message, Abort):
                self._leader.on_abort(message.request_ids)
            elif isinstance(message, Leave):
                self._leader.on_leave(message.request_ids)
            yield peer, message

    def send_multipart(self, parts: tuple[bytes, bytes], flags: int) -> None:
        peer, body = parts
        self._world.connections[peer].put(body)

    def close(self) -> None:
        self._leader.is_gone = True
        for connection in self._world.connections_to(self._leader):
            connection.on_inbox_closed()


class SimOutputSender(OutputSender):
    """The real one; what leaves is judged here."""

    def __init__(self, leader: SimLeader, inbox: SimInbox) -> None:
        super().__init__(inbox.socket)
        self._leader = leader

    def send(self, outputs: list[EngineOutput]) -> list[str]:
        self._leader.on_outputs(outputs)
        for output in outputs:
            if output.token_ids and not self.expects(output.request_id):
                text = f"{self._leader.name}: {output.request_id} got one more token"
                raise Violation("runs for nobody", text)
        return super().send(outputs)


class SimBoard:
    """The status board: what replicas push, and what the ingress reads of it."""

    def __init__(self, world: World) -> None:
        self._loop, self._random = world.loop, world.rng.random
        self._reports: dict[tuple[str, str], tuple[float, ReplicaReport]] = {}
        self._prefixes = CachedPrefixes()
        self._ledger = Ledger()
        self.num_first_tokens = 0
        """That clients got."""
        self._silent_until = self._late_until = 0.0
        self.trouble_until = 0.0
        """What happened before it may not be known yet at the ingress."""

    async def push(self, report: ReplicaReport) -> dict[int, int]:
        await self._on_the_way()
        report, known_prefixes = self._prefixes.take(report)
        self._reports[report.pool, report.replica_id] = self._loop.now, report
        for rank, counts in zip(report.group.ranks, report.group.counts, strict=True):
            if not counts:
                continue
            engine = f"{report.pool}/{report.replica_id}/{rank.place.dp_rank}"
            self._ledger.add(f"{engine}/{report.epoch}/{rank.place.tp_rank}", engine, counts)
        await self._on_the_way()
        return known_prefixes

    def remove(self, pool: str, replica_id: str) -> None:
        self._reports.pop((pool, replica_id), None)
        self._prefixes.forget(pool, replica_id)

    async def poll(self, known: Mapping[str, tuple[int, int]]) -> list[LeaderReport]:
        """Return all leaders; TimeoutError if it does not answer."""
        if self._loop.now < self._silent_until:
            await asyncio.sleep(POLL_S)
            raise TimeoutError
        await self._on_the_way()
        found = self._known()
        if self._loop.now < self._late_until:
            await asyncio.sleep(0.2 + self._random())
        await self._on_the_way()
        leaders = [leader for report in found for leader in leaders_of(report)]
        return [self._prefixes.add_to(leader, known) for leader in leaders]

    async def scale(self, pool: str) -> dict[str, Any]:
        """Return what a pool's scaling is decided by; TimeoutError if it does not answer."""
        if self._loop.now < self._silent_until:
            await asyncio.sleep(POLL_S)
            raise TimeoutError
        await self._on_the_way()
        reports = [report for report in self._known() if report.pool == pool]
        engines = {
            f"{pool}/{report.replica_id}/{rank.place.dp_rank}": rank.scheduler
            for report in reports
            for rank in report.group.ranks
            if rank.place.tp_rank == 0 and rank.state == "ready"
        }
        totals = dict(self._ledger.totals)
        totals[INGRESS] = {("time_to_first_token_seconds", BUCKET, "+Inf"): self.num_first_tokens}
        return scaling_body(pool, reports, engines, totals)

    def _known(self) -> list[ReplicaReport]:
        return [
            report
            for pushed_at, report in self._reports.values()
            if self._loop.now - pushed_at < FORGOTTEN_S
        ]

    async def _on_the_way(self) -> None:
        late_s = max(0.0, self._silent_until - self._loop.now)
        await asyncio.sleep(late_s + 0.001 + 0.02 * self._random())

    def strike(self, fault: Fault) -> None:
        until = self._loop.now + fault.duration_s
        match fault.kind:
            case "silent board":
                self._silent_until = until
            case "late board":
                self._late_until = until
                until += 1.2
            case "new board":
                self._reports.clear()
                self._prefixes = CachedPrefixes()
                until = self._loop.now
        self.trouble_until = max(self.trouble_until, until)
