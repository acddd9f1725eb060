"""One epoch of a group: the real `RankGroup` over simulated ranks, and what its ranks share.

Real are loading together, the watch over heartbeats and ends, and who is blamed. Simulated are
actors (a rank's process with its calls), collectives, and the faults that strike ranks.

What all ranks must do alike is checked here, as they do it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from sim_ingress import BEAT_S, RESET_S, SILENT_S
from sim_loop import Process, Violation
from sim_rank import SimFollower, SimLeader, SimRank
from sim_replica import SimReplica
from sim_schedule import BOARD, DRAINS, FAILED_START, FATAL, IN_STEP, WATCHDOG_S, Fault

from cluster.actors.rank_group import BLAME_S, HEARTBEAT_PERIOD_S, CallEnd, RankGroup
from cluster.config import ParallelConfig, Role
from cluster.engine.divergence import StepDivergence
from cluster.engine.watchdog import EXPECTED_TIMES
from cluster.group.context import RankStats
from cluster.group.rendezvous import Rendezvous
from cluster.observe.counts import Counts
from cluster.observe.logs import last_line
from cluster.observe.metrics import SchedulerStats
from cluster.wire.messages import EngineOutput, StepAgreement

if TYPE_CHECKING:
    from sim_world import World

NEWS_S = 0.01
"""Until an owner hears that a process died, and a rank in a collective that its peer did."""


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
        return CallEnd(self._rank.inbox_address if isinstance(self._rank, SimLeader) else "")

    def run(self) -> Awaitable[CallEnd]:
        self._loop.after(self._rng.random() * 0.01, self._rank.start)
        return self._end

    def heartbeat(self) -> Awaitable[CallEnd]:
        return self._asked(self._rank.step_stats.heartbeat)

    def _asked(self, question: Callable[[], Any]) -> Awaitable[CallEnd]:
        """Ask the process, which answers as soon as it is not stopped."""
        answer: asyncio.Future[CallEnd] = self._loop.create_future()
        self._calls = [call for call in self._calls if not call.done()] + [answer]
        late_s = 0.001 + 0.01 * self._rng.random()
        self._loop.after(late_s, self._rank.process.call, _answer, answer, question)
        return answer

    def stats(self, prefixes_since: int | None) -> Awaitable[CallEnd]:
        return self._asked(partial(self._figures, prefixes_since))

    def _figures(self, prefixes_since: int | None) -> tuple[RankStats, None, Counts]:
        rank = self._rank
        load, prefixes, counts = SchedulerStats(), None, Counts()
        if isinstance(rank, SimLeader):
            load = rank.scheduler.stats()
            if self._group.schedule.scaling is not None:
                counts = rank.counts()
            if prefixes_since is not None:
                prefixes = rank.prefix_feed.since(prefixes_since)
        state = "ready" if rank.is_running else "loading"
        place = self._group.places[rank.index]
        token_s = rank.step_stats.token_s()
        stats = RankStats(place, rank.index, "node", state, 0, load, token_s, prefixes)
        return stats, None, counts

    def stop(self) -> None:
        assert isinstance(self._rank, SimLeader), "stop: wanted a leader, found a follower"
        self._loop.after(0.05 * self._rng.random(), self._rank.tell_to_stop)

    def kill(self) -> None:
        self._rank.kill()
        self.on_death()


def _answer(call: asyncio.Future[CallEnd], question: Callable[[], Any]) -> None:
    _end(call, CallEnd(question()))


def _end(call: asyncio.Future[CallEnd], end: CallEnd) -> None:
    if not call.done():
        call.set_result(end)


class SimGroup(RankGroup):
    """The ranks of one epoch."""

    def __init__(self, world: World, replica: SimReplica, epoch: int) -> None:
        shape = replica.shape
        parallel = ParallelConfig(shape.tp_size, shape.dp_size)
        super().__init__(parallel, (), watchdog_s=WATCHDOG_S, epoch=epoch)
        self.world, self.replica = world, replica
        self.loop, self.rng = world.loop, world.rng
        self.schedule, self.plants = world.schedule, world.plants
        self.pool, self.dp_size, self.tp_size = shape.pool, shape.dp_size, shape.tp_size
        self.role = Role(shape.pool)
        self.leaders: list[SimLeader] = []
        self.ranks: list[SimRank] = []
        for index, place in enumerate(self.places):
            if place.tp_rank:
                self.ranks.append(self.plants.follower(self, index))
            else:
                self.leaders.append(self.plants.leader(self, index))
                self.ranks.append(self.leaders[-1])
        self._connect()
        self.handles += [self.plants.handle(rank) for rank in self.ranks]
        self.struck: list[Fault] = []
        """Faults that struck this epoch."""
        self._strikes: list[tuple[int, float, Fault | None]] = []
        """The rank that was struck, when, and by what; None: the replica was killed."""
        self.diverged_at = 0
        """The step for which a rank was told something else, if one was."""
        self._agreed: dict[int, StepAgreement] = {}
        self._num_agreed = [0] * shape.dp_size
        self._sampled: dict[tuple[int, int], list[int]] = {}
        self._num_collectives = [0] * len(self.ranks)
        self._collectives: dict[int, dict[int, tuple[str, int]]] = {}
        self._in_collective: list[SimRank] = []
        world.on_group(self)

    def _connect(self) -> None:
        for leader in self.leaders:
            leader.peers.connect()
            if leader.sender is not None:
                mine = [rank for rank in self.ranks if rank.dp_rank == leader.dp_rank]
                leader.sender.connect([rank for rank in mine if isinstance(rank, SimFollower)])

    # --- the owner's calls --------------------------------------------------------------------

    def fails_to_start(self, rank: SimRank) -> bool:
        """Return whether the next fault ends this rank while it loads; one does in a start."""
        fault = self.world.fault
        if not self.epoch or self.struck or fault is None or fault.kind != FAILED_START:
            return False
        if fault.pool != self.pool or fault.rank != rank.index:
            return False
        self.strike(fault)
        return True

    async def wait_for_end(self) -> str:
        """Wait as the real one does, and let the world judge who is named."""
        reason = await super().wait_for_end()
        self.world.on_group_end(self, reason)
        return reason

    # --- what ranks do to each other ------------------------------------------------------------

    def collective(self, rank: SimRank, step: int, name: str, num_tokens: int) -> None:
        """Wait until every rank is in its collective of the same number."""
        name = f"step {step} {name}"
        index = rank.index
        k = self._num_collectives[index]
        self._num_collectives[index] = k + 1
        met = self._collectives.setdefault(k, {})
        for other, (found, _) in met.items():
            if found != name:
                text = f"number {k}: {rank.name} is in {name}, {self.ranks[other].name} in {found}"
                raise Violation("collectives differ", text)
        met[index] = (name, num_tokens)
        self._in_collective.append(rank)
        if len(met) == len(self.ranks):
            self._check_padding(step, name, self._collectives.pop(k))
            self._end_collective()
        rank.device.process.wait()

    def _check_padding(self, step: int, name: str, met: dict[int, tuple[str, int]]) -> None:
        across = self._agreed[step].num_tokens_across_dp
        wanted = [num_tokens for num_tokens in across for _ in range(self.tp_size)]
        found = [met[index][1] for index in range(len(self.ranks))]
        if wanted != found:
            raise Violation("padding differs", f"{name}: wanted {wanted} by rank, found {found}")

    def _end_collective(self) -> None:
        delay = 0.001 + 0.002 * self.rng.random()
        processes = [rank.device.process for rank in self._in_collective]
        met = [(process, process.ticket) for process in processes]
        self.loop.after(delay, _wake_all, met)
        self._in_collective = []

    def on_agreement(self, dp_rank: int, agreed: StepAgreement) -> None:
        step = self._num_agreed[dp_rank] = self._num_agreed[dp_rank] + 1
        first = self._agreed.setdefault(step, agreed)
        if first is agreed:
            self.world.on_step(agreed)
        if agreed.step != step or agreed.epoch != self.epoch or first != agreed:
            text = f"rank {dp_rank}, agreement {step}: wanted {first}, found {agreed}"
            raise Violation("agreements differ", text)
        if agreed.draining and not all(leader.is_told_to_stop for leader in self.leaders):
            raise Violation("ended too early", f"step {step}: not all ranks were told to stop")

    def on_sampled(self, rank: SimRank, step: int, sampled: list[int]) -> None:
        """A rank has run a step: the ranks under one leader draw alike."""
        if self.tp_size == 1:
            return
        first = self._sampled.setdefault((rank.dp_rank, step), sampled)
        if first != sampled:
            text = f"{rank.name} step {step}: wanted {first}, found {sampled}"
            raise Violation("samples differ", text)

    def on_outputs(self, leader: SimLeader, outputs: list[EngineOutput]) -> None:
        step, ended_step = self.diverged_at, leader.runner.ended_step
        if step and ended_step >= step and any(output.token_ids for output in outputs):
            raise Violation("divergence ignored", f"{leader.name}: a token of step {step} left")
        self.world.on_outputs(self.epoch, outputs)

    # --- how ranks end --------------------------------------------------------------------------

    def on_end(self, rank: SimRank, error: Exception | None) -> None:
        """A rank's `run` has ended by itself, in its own process."""
        rank.process.is_dead = True
        self.loop.after(0.0, rank.device.kill)
        if error is not None and not isinstance(error, StepDivergence | ConnectionError):
            self.loop.fail(Violation("rank failed", f"{rank.name}: {error!r}"))
        self.loop.after(NEWS_S, self.handles[rank.index].on_end, error)
        if error is not None:
            self._pull_others(rank)
        elif not self._agreed[self._num_agreed[rank.dp_rank]].draining:
            text = f"{rank.name}: in step {rank.last_step}, without an agreement to end"
            self.loop.fail(Violation("ended too early", text))

    def die(self, rank: SimRank) -> None:
        """Kill one rank's process from outside. Called from the loop."""
        if rank.process.is_dead:
            return
        rank.kill()
        self.loop.after(NEWS_S * self.rng.random(), self.handles[rank.index].on_death)
        self._pull_others(rank)

    def _pull_others(self, rank: SimRank) -> None:
        self.loop.after(NEWS_S * self.rng.random(), self._break_collectives, rank.name)

    def _break_collectives(self, name: str) -> None:
        broken, self._in_collective = self._in_collective, []
        for rank in broken:
            rank.device.process.interrupt(ConnectionError(f"collective: {name} is gone"))

    # --- faults -----------------------------------------------------------------------------------

    def is_target(self, fault: Fault) -> bool:
        return fault.pool == self.pool and self.world.target(fault) is self.replica

    def strike(self, fault: Fault, rank: SimRank | None = None) -> None:
        """Note that a fault strikes, its own rank or the one that it met."""
        index = fault.rank if rank is None else rank.index
        self.struck.append(replace(fault, rank=index))
        _, others_s = found_within(fault)
        self._strikes.append((index, self.loop.now, fault))
        if fault.kind not in BOARD:
            self.replica.strike(fault, is_fatal=fault.kind in FATAL, lasts_s=others_s)
        if fault.kind not in DRAINS:
            self.world.on_trouble(self.loop.now + fault.delay_s + max(others_s, fault.duration_s))
        self.world.on_strike(fault)

    def on_replica_killed(self) -> None:
        self._strikes.append((0, self.loop.now, None))

    def found_by(self, rank: SimRank) -> float:
        """Return by when requests of a leader must know of all that has struck."""
        expected_s = max(each.step_stats.heartbeat().expected_s for each in self.ranks)
        found_by = 0.0
        for index, at, fault in self._strikes:
            own_s, others_s = found_within(fault, expected_s)
            found_by = max(found_by, at + (own_s if rank.index == index else others_s))
        return found_by

    def on_phase(self, rank: SimRank, fault: Fault) -> None:
        """A rank comes to the phase of the next fault: let it strike if it is due here."""
        if fault.kind not in IN_STEP or fault.in_transfer or not self.is_target(fault):
            return
        if rank.last_step + 1 < fault.step:
            return
        self.strike(fault)
        process = rank.process
        match fault.kind:
            case "slow":
                process.sleep(fault.duration_s)
            case "stall":
                while True:
                    process.wait()
            case _:
                self._signal(rank, fault)
                process.sleep(0.0)

    def on_transfer(self, rank: SimRank, peer: SimRank) -> None:
        """A rank's transfer makes or takes a call: let the next fault strike if it is due here."""
        fault = self.world.fault
        if fault is None or not fault.in_transfer or rank.process.is_dead:
            return
        if fault.in_move:
            is_due = fault.pool == self.pool == peer.group.pool
        else:
            is_due = self.is_target(fault) and fault.rank == rank.index
            is_due = is_due and rank.last_step + 1 >= fault.step
        if is_due:
            self.strike(fault, rank)
            self._signal(rank, fault)

    def _signal(self, rank: SimRank, fault: Fault) -> None:
        process = rank.process
        match fault.kind:
            case "kill":
                self.loop.after(fault.delay_s, self.die, rank)
            case "stop":
                self.loop.after(fault.delay_s, self._stop, rank, inf)
            case "pause":
                self.loop.after(fault.delay_s, self._stop, rank, fault.duration_s)
                self.loop.after(fault.delay_s + fault.duration_s, process.resume)
            case "told to stop":
                for other in self.leaders:
                    self.loop.after(0.05 * self.rng.random(), other.tell_to_stop)
            case "lost calls":
                self.world.lose_calls(fault.duration_s)
            case "cut":
                for connection in self.world.connections_to(self._leader_of(rank)):
                    connection.lose_next()
            case "partition":
                leader = self._leader_of(rank)
                leader.unreachable_until = self.loop.now + fault.duration_s
                self._silence(leader, fault.duration_s)
            case "drain":
                self.world.serve.drain([self.replica], fault)
            case "drain all":
                self.world.serve.drain(self.world.replicas_of(self.pool), fault)
            case "rollout" | "rollout of other blocks" | "rollout of other weights":
                self.world.serve.roll_out(fault)
            case _:
                self.world.board.strike(fault)
                for replica in self.world.replicas:
                    replica.on_board_trouble()

    def _leader_of(self, rank: SimRank) -> SimLeader:
        return self.leaders[rank.dp_rank]

    def _stop(self, rank: SimRank, for_s: float) -> None:
        rank.process.stop()
        if isinstance(rank, SimLeader):
            self._silence(rank, for_s)

    def _silence(self, leader: SimLeader, for_s: float) -> None:
        for connection in self.world.connections_to(leader):
            connection.on_silence(self.loop.now + for_s)


def found_within(fault: Fault | None, expected_s: float = 0.0) -> tuple[float, float]:
    """Return how long it takes at most until the ingress knows of a fault by the connection to the
    rank that it strikes, if that is a leader, and by those to the others of its group. The watchdog
    expects a step to take `expected_s`: it waits for long where one before was held up."""
    if fault is None:
        return NEWS_S, NEWS_S
    by_watchdog_s = max(WATCHDOG_S, EXPECTED_TIMES * expected_s) + 2 * HEARTBEAT_PERIOD_S
    s = fault.delay_s + fault.duration_s
    silent_s = fault.delay_s + SILENT_S + BEAT_S + RESET_S
    match fault.kind:
        case "kill":
            return fault.delay_s + NEWS_S + RESET_S, fault.delay_s + BLAME_S + 2 * NEWS_S
        case "stop":
            return silent_s, by_watchdog_s
        case "pause":
            return min(s, silent_s), s
        case "partition":
            return silent_s, silent_s
        case "stall" | "lost link" | "lost frame":
            return by_watchdog_s, by_watchdog_s
        case "told to stop" | "diverge" | "altered plan" | "cut":
            return BLAME_S + 0.5, BLAME_S + 0.5
        case "slow" | "held link" | "lost calls":
            return s, s
    return RESET_S, RESET_S


def _wake_all(waits: list[tuple[Process, int]]) -> None:
    for process, ticket in waits:
        process.wake(ticket)
