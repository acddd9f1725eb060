"""One simulation: clients, router, pool and ranks from a schedule, and what must hold of them.

1. Everything ends, in bounded time.
2. Each request's tokens are the oracle's, or a head of them where its client left.
3. All ranks of an epoch go by the same agreements, in the same order, through the same
   collectives, each with the tokens that were agreed on; the ranks under one leader draw alike.
4. A group ends only by a fault, and then a rank is named that it struck.
5. A group that serves while it compiles has gone over to its graphs, all ranks at the same steps.
6. An aborted request gets no token any more, no token of a step leaves that ranks were told
   different things about, and in the end all blocks are free and no handoff is held.

The first `Violation` ends a simulation; `run_schedule` never raises.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from math import log
from typing import Any

from sim_check import check_scheduler
from sim_group import SimGroup, SimHandle
from sim_kv import place_of
from sim_loop import SimLoop, Violation
from sim_model import GRAPHS, continuation
from sim_rank import SimFollower, SimLeader, SimRank, SimRunner
from sim_schedule import (
    FATAL,
    LOST,
    MAX_MODEL_LEN,
    MIN_STEPS,
    VOCAB,
    Arrival,
    Fault,
    Schedule,
    Shape,
    draw_arrival,
)

from cluster.actors.rank_group import RankGroup
from cluster.actors.reports import ReplicaReport
from cluster.engine.engine import OverlappedEngine
from cluster.engine.lockstep import LockstepMachine
from cluster.engine.scheduler import Scheduler
from cluster.engine.watchdog import Phase
from cluster.group.context import RankPlace
from cluster.kv.handoff import GroupHolder, GroupReader, KVHolder
from cluster.kv.reads import KVPulls
from cluster.rank.follower import FollowerLoop
from cluster.wire.messages import (
    Abort,
    EngineOutput,
    FrameError,
    GenerateRequest,
    Sampling,
    StepAgreement,
    decode,
    encode,
)
from serve.event_loop import StreamBatcher
from serve.pools.mailboxes import TokenMailboxes
from serve.pools.pool_core import PoolCore, hold_s
from serve.pools.router import Router
from serve.pools.routing import Routing

CONFIG_HASH = "simulated"
NUM_STREAMS = 16
"""Among which a stream's tokens wait for ticks of some 45 ms."""
END_S = 180.0
"""Of simulated time: no schedule has more to do than half a minute."""
MAX_EXTRA = 64
"""Requests beyond the schedule's, for steps and for faults that have not struck."""
SETTLE_S = 1.5
"""Until the last abort has reached its engine."""
REST_S = 12.0
"""Until the last lease has ended, and the last read from a dead holder."""
LONGEST_DELAY = 4.0
"""Of the mean. A frame that is later is held up by a fault: else the shortest lease may end by bad
luck alone, and a request be lost once more than its schedule's faults account for."""


NAMED = {
    "kill": (" ended: ",),
    "stop": (": no heartbeat for ", ": does not advance in step "),
    "stall": (": does not advance in step ",),
    "drain": (" ended: stopped",),
    "diverge": (": wanted ",),
    "altered plan": (": wanted ",),
    "lost link": (": does not advance in step ", ": wanted "),
    "lost frame": (": does not advance in step ", ": wanted "),
}
"""What a group's end says of a fault."""


# --- the owner's side ---------------------------------------------------------------------------
# Real are the accounts of open requests, the rebuild under a new epoch, and where outputs go.
# Frames that were under way when a process died still arrive, and arrive late, as over sockets.


class SimEngineLinks:
    def __init__(self, world: World) -> None:
        self._world = world

    def send_aborts(self, inbox: str, request_ids: list[str]) -> None:
        self._world.send_to_leader("ingress", inbox, encode(Abort(request_ids)))

    def forget(self, inbox: str) -> None:
        """There is nothing to close."""

    async def caught_up(self) -> None:
        """Return at once: frames wait nowhere but on their way."""


class SimLeaderLink:
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
        return self._world.plants.group(self._world, self._shape, epoch)

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


# --- a simulation -------------------------------------------------------------------------------


class Plants:
    """What a simulation is made of; a planted bug puts something else in a place."""

    scheduler: Any = Scheduler
    machine: Any = LockstepMachine
    runner: Any = SimRunner
    overlapped_engine: Any = OverlappedEngine
    leader: Any = SimLeader
    follower: Any = SimFollower
    follower_loop: Any = FollowerLoop
    kv_holder: Any = KVHolder
    kv_pulls: Any = KVPulls
    group_holder: Any = GroupHolder
    group_reader: Any = GroupReader
    group: Any = SimGroup
    handle: Any = SimHandle
    pool: Any = SimPool
    pool_core: Any = PoolCore
    router: Any = Router


@dataclass
class Outcome:
    schedule: Schedule
    finding: Violation | None = None
    num_steps: int = 0
    num_restarts: int = 0
    num_requests: int = 0
    num_aborted: int = 0
    num_resubmitted: int = 0
    """Attempts beyond the first of each request, those that a pool refused included."""
    num_preemptions: int = 0
    num_handoffs: int = 0
    """Handoffs that prefill ranks issued."""
    struck: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    simulated_s: float = 0.0
    trace: int = 0
    """A hash of all agreements and outputs with their times."""


def run_schedule(schedule: Schedule, plants: Plants | None = None) -> Outcome:
    with _quiet():
        return World(schedule, plants or Plants()).run()


class World:
    def __init__(self, schedule: Schedule, plants: Plants) -> None:
        self.schedule = schedule
        self.plants = plants
        self.loop = SimLoop()
        self.rng = random.Random(schedule.seed + 1)
        self.outcome = Outcome(schedule)
        self.pools: dict[str, Any] = {}
        self._groups: dict[tuple[str, int], SimGroup] = {}
        self._faults = list(schedule.faults)
        self.fault = self._faults[0] if self._faults else None
        """The one that strikes next."""
        self._arrives_at: dict[tuple[str, str], float] = {}
        self._calls_lost_until = 0.0
        self._is_done = False

    def run(self) -> Outcome:
        outcome = self.outcome
        try:
            self.loop.after(0.0, self._begin)
            has_ended = self.loop.run(END_S)
            if not has_ended or not self._is_done:
                raise Violation("hang", f"after {self.loop.now:.1f} s; {self._where()}")
        except Violation as error:
            outcome.finding = error
        except AssertionError as error:
            outcome.finding = Violation("assertion", str(error))
        except Exception as error:
            outcome.finding = Violation("error", repr(error))
        for group in self._groups.values():
            for rank in group.ranks:
                rank.kill()
        outcome.simulated_s = self.loop.now
        self.loop.close()
        outcome.num_restarts = len(self._groups) - len(self.pools)
        return outcome

    def _begin(self) -> None:
        tick = StreamBatcher()
        # In half of the schedules tokens wait for ticks, as among many streams.
        tick.num_streams = NUM_STREAMS * (self.schedule.seed % 2)
        self.tokens = TokenMailboxes("tcp://10.0.0.1:1", SimEngineLinks(self), tick)
        for shape in self.schedule.groups:
            self.pools[shape.pool] = self.plants.pool(self, shape)
        self.router = self.plants.router(self.pools, self.tokens)
        self._main_task = self.loop.create_task(self._main())
        self._main_task.add_done_callback(self._on_main_done)

    def _on_main_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.loop.fail(error)
        self._is_done = True
        self.loop.stop()

    def _where(self) -> str:
        texts = [f"struck {self.outcome.struck}"]
        for name, pool in self.pools.items():
            beats = [(rank.name, rank.step_stats.heartbeat()) for rank in pool.core.group.ranks]
            ranks = [f"{who} {beat.phase.name} step {beat.step}" for who, beat in beats]
            texts.append(f"{name} {pool.core.state}: {', '.join(ranks)}")
        return "; ".join(texts)

    # --- the story --------------------------------------------------------------------------------

    async def _main(self) -> None:
        await asyncio.gather(*(pool.core.start() for pool in self.pools.values()))
        await asyncio.gather(*map(self._client, self.schedule.arrivals))
        num_extra = 0
        while self.outcome.num_steps < MIN_STEPS or (self._faults and num_extra < MAX_EXTRA):
            arrivals = [self._extra(num_extra + i) for i in range(3)]
            num_extra += len(arrivals)
            await asyncio.gather(*map(self._client, arrivals))
        self._faults, self.fault = [], None
        await asyncio.sleep(SETTLE_S)
        for pool in self.pools.values():
            while pool.core.state != "ready" or self._fatal(pool.core.group):
                await asyncio.sleep(0.5)
        began = self.loop.now
        while self._is_busy() and self.loop.now < began + REST_S:
            await asyncio.sleep(0.5)
        for pool in self.pools.values():
            self._check_rest(pool.core.group)
        await asyncio.gather(*(pool.core.stop() for pool in self.pools.values()))

    def _extra(self, i: int) -> Arrival:
        arrival = draw_arrival(self.rng, i, 8, has_aborts=False)
        return Arrival(f"x{i}", 0.0, arrival.prompt, arrival.max_tokens, arrival.stop, None)

    async def _client(self, arrival: Arrival) -> None:
        await asyncio.sleep(arrival.at)
        self.outcome.num_requests += 1
        if arrival.abort_after_s is None:
            await self._consume(arrival, [])
            return
        tokens: list[int] = []
        try:
            await asyncio.wait_for(self._consume(arrival, tokens), arrival.abort_after_s)
        except TimeoutError:
            self.outcome.num_aborted += 1

    async def _consume(self, arrival: Arrival, tokens: list[int]) -> None:
        request, reason = _request(arrival), ""
        wanted = continuation(request, VOCAB, MAX_MODEL_LEN)
        async with aclosing(self.router.generate(request)) as outputs:
            async for output in outputs:
                tokens += output.token_ids
                reason = output.finish_reason
                if tokens != wanted[: len(tokens)] or reason == "error":
                    text = f"wanted {wanted}, found {tokens} {reason} {output.error}"
                    raise Violation("tokens differ", f"{arrival.request_id}: {text}")
        is_stop = bool(wanted) and wanted[-1] in arrival.stop
        if tokens != wanted or reason != ("stop" if is_stop else "length"):
            text = f"wanted {wanted}, found {tokens} {reason}"
            raise Violation("tokens differ", f"{arrival.request_id}: {text}")

    def _is_busy(self) -> bool:
        leaders = [leader for pool in self.pools.values() for leader in pool.core.group.leaders]
        return any(
            leader.scheduler.has_unfinished or not leader.switch.is_over for leader in leaders
        )

    def _check_rest(self, group: SimGroup) -> None:
        for leader in group.leaders:
            scheduler = leader.scheduler
            check_scheduler(scheduler)
            if not leader.switch.is_over or leader.switch.captured != GRAPHS:
                text = f"{leader.name}: at stage {leader.switch.stage}"
                raise Violation("not gone over", text)
            if scheduler.has_unfinished or scheduler.blocks.num_free_blocks != (
                self.schedule.num_blocks
            ):
                found = f"{scheduler.blocks.num_free_blocks} of {self.schedule.num_blocks} free"
                raise Violation("something is left", f"{leader.name}: {found}")

    # --- ways between processes -------------------------------------------------------------------

    def on_attempt(self, request_id: str) -> None:
        if not request_id.endswith(".0"):
            self.outcome.num_resubmitted += 1

    def send_to_leader(self, sender: str, inbox: str, body: bytes) -> None:
        is_abort = self.schedule.loses_aborts and decode(body, Any)[0] == "Abort"
        if is_abort and self.rng.random() < 0.5:
            return  # it is lost
        pool, epoch, dp_rank = inbox.split("/")
        leader = self._groups[pool, int(epoch)].leaders[int(dp_rank)]
        self.loop.at(self._arrival(sender, inbox), leader.receive, body)

    def send_outputs(
        self, pool: str, dp_rank: int, epoch: int, outputs: list[EngineOutput]
    ) -> None:
        num_tokens = sum(len(output.token_ids) for output in outputs)
        self._note(self.loop.now, epoch, num_tokens)
        inbox = f"{pool}/{epoch}/{dp_rank}"
        self.loop.at(self._arrival(inbox, "ingress"), self._receive, inbox, outputs)
        if ended := [output for output in outputs if output.finish_reason]:
            self.outcome.num_handoffs += sum(output.handoff is not None for output in ended)
            self.loop.at(self._arrival(inbox, "pool"), self.pools[pool].core.on_ended, ended)

    def _receive(self, inbox: str, outputs: list[EngineOutput]) -> None:
        pool, epoch, dp_rank = inbox.split("/")
        with suppress(FrameError):
            self.tokens.begin_frame(f"{pool}/{dp_rank}", int(epoch), inbox)
            for output in outputs:
                self.tokens.deliver(inbox, output)

    def rank_at(self, address: str) -> SimRank:
        """Return the rank whose KV is read there, dead or alive."""
        pool, epoch, index = place_of(address)
        return self._groups[pool, epoch].ranks[index]

    def send_kv(self, sender: str, receiver: str, call: Callable[..., Any], *args: Any) -> None:
        at = self._arrival(sender, receiver, self.schedule.kv_delay_s)
        if self.loop.now >= self._calls_lost_until:
            self.loop.at(at, call, *args)

    def lose_calls(self, duration_s: float) -> None:
        self._calls_lost_until = self.loop.now + duration_s

    def _arrival(self, sender: str, receiver: str, mean_s: float = 0.001) -> float:
        """Return when a frame arrives; those between two do in order."""
        key = (sender, receiver)
        late_s = mean_s * min(-log(1.0 - self.rng.random()), LONGEST_DELAY)
        at = max(self.loop.now + late_s, self._arrives_at.get(key, 0.0))
        self._arrives_at[key] = at
        return at

    # --- what groups tell -------------------------------------------------------------------------

    def on_group(self, group: SimGroup) -> None:
        self._groups[group.pool, group.epoch] = group

    def on_step(self, agreed: StepAgreement) -> None:
        self.outcome.num_steps += agreed.has_work
        self._note(self.loop.now, agreed.step, max(agreed.num_scheduled_tokens), agreed.epoch)

    def on_strike(self, fault: Fault) -> None:
        self._faults.remove(fault)
        self.fault = self._faults[0] if self._faults else None
        self.outcome.struck.append(fault.name)

    def on_group_end(self, group: SimGroup, reason: str) -> None:
        self.outcome.ends.append(reason)
        for leader in group.leaders:
            self.outcome.num_preemptions += leader.scheduler.stats().num_preemptions
        if self.pools[group.pool].core.state == "stopping":
            return
        fatal = self._fatal(group)
        if not fatal:
            self.loop.fail(Violation("named without a fault", reason))
        elif not any(_is_named(fault, group.places, reason) for fault in fatal):
            where = [f"{fault.kind} of rank {fault.rank} {fault.phase.name}" for fault in fatal]
            self.loop.fail(Violation("wrong rank named", f"{reason}; struck {where}"))

    def _fatal(self, group: SimGroup) -> list[Fault]:
        return [fault for fault in group.struck if fault.kind in FATAL]

    def _note(self, *values: float) -> None:
        self.outcome.trace = hash((self.outcome.trace, *values))


def _is_named(fault: Fault, places: Sequence[RankPlace], reason: str) -> bool:
    """Tell whether a group's end is what a fault must look like, of any rank that it may name."""
    names = [f"rank dp={at.dp_rank} tp={at.tp_rank} epoch={at.epoch}" for at in places]
    is_rank_right = any(reason.startswith(names[i]) for i in _suspects(fault, len(places)))
    return is_rank_right and any(text in reason for text in NAMED[fault.kind])


def _suspects(fault: Fault, num_ranks: int) -> Iterable[int]:
    if fault.kind in LOST:
        return fault.rank, fault.peer
    if fault.kind == "altered plan":
        return (fault.peer,)
    # Nobody can tell who of a collective has not entered it, and of two votes which one is wrong.
    is_in_collective = fault.kind == "stall" and fault.phase is Phase.RUNNING
    return (
        range(num_ranks)
        if is_in_collective or fault.kind in ("drain", "diverge")
        else (fault.rank,)
    )


def _request(arrival: Arrival) -> GenerateRequest:
    sampling = Sampling(0.0, 0, 1.0, 0.0, 0, arrival.max_tokens, arrival.stop, -1, -1, None, None)
    return GenerateRequest(arrival.request_id, arrival.prompt, [], sampling, "", b"")


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("lockstep")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
