"""The owner's side: the real `RankGroup`, `Pool` and `TokenSocket` over simulated processes.

Real are the watch over heartbeats and sentinels, who is blamed, the rebuild under a new epoch, the
accounts of open requests, and where outputs go. Simulated are the actors (a rank's process with
its calls) and every way between processes.

The one thing to know: frames that were under way when a process died still arrive, and arrive
late, as they do over sockets.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from sim_loop import Process, Violation
from sim_rank import SimLeader
from sim_schedule import FAILED_START, WATCHDOG_S, Fault

from cluster.actors.rank_actor import RankPlace
from cluster.actors.rank_group import RankDied, RankGroup
from cluster.config import ParallelConfig
from cluster.engine.step_digest import StepDivergence
from cluster.engine.watchdog import Phase
from cluster.messages import Abort, EngineOutput, StepAgreement, encode
from serve.pools import Pool
from serve.routing import LeaderRouter, Routing
from serve.tokens import TokenSocket

if TYPE_CHECKING:
    from sim_world import World

NEWS_S = 0.01
"""Until an owner hears that a process died, and a rank in a collective that its peer did."""


class SimGroup(RankGroup):
    """The ranks of one epoch."""

    def __init__(self, world: World, epoch: int) -> None:
        self.world = world
        self.loop, self.rng = world.loop, world.rng
        self.schedule, self.plants = world.schedule, world.plants
        self.epoch = epoch
        self._watchdog_s = WATCHDOG_S
        self._is_stopping = False
        self.inboxes = []
        dp_size = self.schedule.num_ranks
        self._parallel = ParallelConfig(1, dp_size)
        self.places = [RankPlace(dp_rank, 0, epoch) for dp_rank in range(dp_size)]
        self.leaders: list[SimLeader] = []
        for dp_rank in range(dp_size):
            self.leaders.append(self.plants.leader(self, dp_rank))
        self._actors = [SimActor(leader) for leader in self.leaders]
        self._sentinels = []
        self.struck: list[Fault] = []
        """Faults that struck this epoch."""
        self._agreed: dict[int, StepAgreement] = {}
        self._num_agreed = [0] * dp_size
        self._num_collectives = [0] * dp_size
        self._collectives: dict[int, dict[int, tuple[str, int]]] = {}
        self._in_collective: list[SimLeader] = []
        world.on_group(self)

    # --- the owner's calls --------------------------------------------------------------------

    async def start(self) -> None:
        """Load for a while, and run."""
        await asyncio.sleep(0.5 + self.rng.random())
        fault = self.world.next_fault
        if fault is not None and fault.kind == FAILED_START and self.epoch:
            self.strike(fault)
            self.kill()
            raise RankDied(f"{self.leaders[fault.rank].name} ended while loading")
        self.inboxes = [f"{self.epoch}/{leader.dp_rank}" for leader in self.leaders]
        self._sentinels = [actor.sentinel for actor in self._actors]
        for leader in self.leaders:
            self.loop.after(self.rng.random() * 0.01, leader.start)

    async def wait_for_end(self) -> str:
        """Wait as the real one does, and let the world judge who is named."""
        reason = await super().wait_for_end()
        self.world.on_group_end(self, reason)
        return reason

    def kill(self) -> None:
        """Do what `ray.kill` does to each."""
        for leader, actor in zip(self.leaders, self._actors, strict=True):
            leader.process.kill()
            actor.on_death()

    # --- what ranks do to each other ------------------------------------------------------------

    def collective(self, dp_rank: int, name: str, num_tokens: int) -> None:
        """Wait until every rank is in its collective of the same number."""
        k = self._num_collectives[dp_rank]
        self._num_collectives[dp_rank] += 1
        met = self._collectives.setdefault(k, {})
        met[dp_rank] = (name, num_tokens)
        for other, (found, _) in met.items():
            if found != name:
                text = f"number {k}: rank {dp_rank} is in {name}, rank {other} in {found}"
                raise Violation("collectives differ", text)
        self._in_collective.append(self.leaders[dp_rank])
        if len(met) == len(self.leaders):
            self._check_padding(name, self._collectives.pop(k))
            self._end_collective()
        self.leaders[dp_rank].process.wait()

    def _check_padding(self, name: str, met: dict[int, tuple[str, int]]) -> None:
        wanted = self.world.tokens_to_run(self._agreed[max(self._num_agreed)])
        found = tuple(met[rank][1] for rank in sorted(met))
        if wanted != found:
            raise Violation("padding differs", f"{name}: wanted {wanted} by rank, found {found}")

    def _end_collective(self) -> None:
        delay = 0.001 + 0.002 * self.rng.random()
        met = [(leader.process, leader.process.ticket) for leader in self._in_collective]
        self.loop.after(delay, _wake_all, met)
        self._in_collective = []

    def on_agreement(self, dp_rank: int, agreed: StepAgreement) -> None:
        """A rank goes by this agreement."""
        step = self._num_agreed[dp_rank] = self._num_agreed[dp_rank] + 1
        first = self._agreed.setdefault(step, agreed)
        if agreed.step != step or agreed.epoch != self.epoch or first != agreed:
            text = f"rank {dp_rank}, agreement {step}: wanted {first}, found {agreed}"
            raise Violation("agreements differ", text)
        if first is agreed:
            self.world.on_step(agreed)
        if agreed.draining and not all(leader.is_told_to_stop for leader in self.leaders):
            raise Violation("ended too early", f"step {step}: not all ranks were told to stop")

    def on_outputs(self, leader: SimLeader, outputs: list[EngineOutput]) -> None:
        """What a step produced goes to ingress and pool."""
        if any(fault.kind == "diverge" for fault in self.struck):
            self._check_divergence(leader, outputs)
        self.world.send_outputs(f"{self.epoch}/{leader.dp_rank}", self.epoch, outputs)

    def _check_divergence(self, leader: SimLeader, outputs: list[EngineOutput]) -> None:
        step = self.world.diverged_at
        if leader.last_step >= step and any(output.token_ids for output in outputs):
            raise Violation("divergence ignored", f"{leader.name}: a token of step {step} left")

    # --- how ranks end --------------------------------------------------------------------------

    def on_end(self, leader: SimLeader, error: Exception | None) -> None:
        """A rank's `run` has ended by itself, in its own process."""
        leader.process.is_dead = True
        if error is not None and not isinstance(error, StepDivergence | ConnectionError):
            self.loop.fail(Violation("rank failed", f"{leader.name}: {error!r}"))
        self.loop.after(NEWS_S, self.actor_of(leader).on_end, error)
        if error is not None:
            self._pull_others(leader)
        elif not self._agreed[self._num_agreed[leader.dp_rank]].draining:
            text = f"{leader.name}: in step {leader.last_step}, without an agreement to end"
            self.loop.fail(Violation("ended too early", text))

    def die(self, leader: SimLeader) -> None:
        """Kill one rank's process from outside. Called from the loop."""
        if leader.process.is_dead:
            return
        leader.process.kill()
        self.loop.after(NEWS_S * self.rng.random(), self.actor_of(leader).on_death)
        self._pull_others(leader)

    def _pull_others(self, leader: SimLeader) -> None:
        self.loop.after(NEWS_S * self.rng.random(), self._break_collectives, leader.name)

    def _break_collectives(self, name: str) -> None:
        broken, self._in_collective = self._in_collective, []
        for leader in broken:
            leader.process.interrupt(ConnectionError(f"collective: {name} is gone"))

    def actor_of(self, leader: SimLeader) -> SimActor:
        """Return the owner's handle of a rank."""
        actor: SimActor = self._actors[leader.dp_rank]
        return actor

    # --- faults -----------------------------------------------------------------------------------

    def armed(self, dp_rank: int, kind: str) -> Fault | None:
        """Return the next fault if it is this rank's and of this kind."""
        fault = self.world.next_fault
        if fault is None or fault.kind != kind or fault.rank != dp_rank:
            return None
        return fault if self._num_agreed[dp_rank] >= fault.step - 1 else None

    def strike(self, fault: Fault) -> None:
        """Note that a fault struck; the next one is armed."""
        self.struck.append(fault)
        self.world.on_strike(self, fault)

    def on_phase(self, leader: SimLeader, phase: Phase) -> None:
        """A rank comes to a phase of its step: let the next fault strike if it is due here."""
        fault = self.world.next_fault
        if (
            fault is None
            or fault.rank != leader.dp_rank
            or fault.phase is not phase
            or fault.kind in ("diverge", "held link", FAILED_START)
            or leader.last_step + 1 < fault.step
        ):
            return
        self.strike(fault)
        process = leader.process
        match fault.kind:
            case "kill":
                self.loop.after(fault.delay_s, self.die, leader)
                process.sleep(0.0)
            case "stop" | "pause":
                self.loop.after(fault.delay_s, process.stop)
                if fault.kind == "pause":
                    self.loop.after(fault.delay_s + fault.duration_s, process.resume)
                process.sleep(0.0)
            case "slow":
                process.sleep(fault.duration_s)
            case "stall":
                while True:
                    process.wait()
            case "drain":
                for other in self.leaders:
                    self.loop.after(0.05 * self.rng.random(), other.tell_to_stop)


class SimActor:
    """The owner's handle of one rank, with the calls that `RankGroup` makes."""

    def __init__(self, leader: SimLeader) -> None:
        self._leader = leader
        self._loop = leader.group.loop
        self._rng = leader.group.rng
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
            _set_exception(self.sentinel, ray.exceptions.RayError(str(error)))
        elif not self.sentinel.done():
            self.sentinel.set_result(None)

    def _heartbeat(self) -> asyncio.Future[Any]:
        answer = self._loop.create_future()
        self._calls = [call for call in self._calls if not call.done()] + [answer]
        self._loop.after(0.001 + 0.01 * self._rng.random(), self._answer, answer)
        return answer

    def _answer(self, answer: asyncio.Future[Any]) -> None:
        process: Process = self._leader.process
        if process.is_stopped and not process.is_dead:
            process.on_continue.append(lambda: self._answer(answer))
        elif not answer.done():
            answer.set_result(self._leader.pulse.heartbeat())

    def _stop(self) -> None:
        self._loop.after(0.05 * self._rng.random(), self._leader.tell_to_stop)


def _wake_all(waits: list[tuple[Process, int]]) -> None:
    for process, ticket in waits:
        process.wake(ticket)


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


class SimTokens(TokenSocket):
    """The ingress's token socket, without the socket."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.address = "ingress"
        self._mailboxes = {}
        self._aborts = defaultdict(list)
        self._heard_at = {}

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
        self._world.send_to_leader("pool", self._inbox, parts[1])
        sent: asyncio.Future[None] = self._world.loop.create_future()
        sent.set_result(None)
        return sent

    def close(self, linger: int) -> None:
        self.closed = True


class SimPool(Pool):
    """A replica of the mixed pool. Its handle is itself."""

    def __init__(self, world: World) -> None:  # type: ignore[misc]
        self._world = world
        self._state, self._error, self._replica_id = "loading", "", "replica"
        self._header = b""
        self._open = {}
        self._leaders = []
        self._tasks = []
        self._pool = _PoolConfig(Routing(world.schedule.routing))  # type: ignore[assignment]
        self._router = LeaderRouter(self._pool.routing, world.schedule.num_ranks)
        self._group = self._new_group(0)
        self._board = _Board()  # type: ignore[assignment]

    async def start(self) -> None:
        """Do what the real constructor does."""
        await self._group.start()
        await self._connect()
        self._spawn(self._watch_group())
        self._state = "ready"

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
        group: RankGroup = self._world.plants.group(self._world, epoch)
        return group

    def __del__(self) -> None:  # type: ignore[override]
        """Nothing is left when Python forgets it."""


class _PoolConfig:
    name = "mixed"

    def __init__(self, routing: Routing) -> None:
        self.routing = routing


class _Board:
    def remove(self, pool: str, replica_id: str) -> None:
        """Nobody asks."""
