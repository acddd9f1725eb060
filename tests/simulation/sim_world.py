"""One simulation: clients, router, pool and ranks from a schedule, and what must hold of them.

1. Everything ends, in bounded time.
2. Each request's tokens are the oracle's, or a head of them where its client left.
3. All ranks of an epoch go by the same agreements, in the same order, through the same
   collectives, each with the tokens that were agreed on.
4. A group ends only by a fault, and then the rank is named that it struck.
5. An aborted request gets no token any more, and in the end all blocks are free.

The one thing to know: the first `Violation` ends a simulation; `run_schedule` never raises.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from sim_group import SimGroup, SimPool, SimTokens
from sim_loop import SimLoop, Violation
from sim_rank import SimLeader, SimRunner, continuation, shape_of
from sim_schedule import FATAL, MIN_STEPS, Arrival, Fault, Schedule, draw_arrival

from cluster.engine.lockstep import LockstepMachine, num_tokens_to_run
from cluster.engine.scheduler import Scheduler
from cluster.engine.watchdog import Phase
from cluster.messages import EngineOutput, GenerateRequest, OutputFrame, Sampling, StepAgreement
from serve.router import Router

END_S = 180.0
"""Of simulated time: no schedule has more to do than half a minute."""
MAX_EXTRA = 64
"""Requests beyond the schedule's, for steps and for faults that have not struck."""
SETTLE_S = 1.5
"""Until the last abort has reached its engine."""
NAMED = {
    "kill": " ended: ",
    "stop": ": no heartbeat for ",
    "stall": ": does not advance in step ",
    "drain": " ended: stopped",
    "diverge": ": wanted ",
}
"""What a group's end says of a fault."""


class Plants:
    """What a simulation is made of; a planted bug puts something else in a place."""

    scheduler: Any = Scheduler
    machine: Any = LockstepMachine
    runner: Any = SimRunner
    leader: Any = SimLeader
    group: Any = SimGroup
    pool: Any = SimPool
    router: Any = Router


@dataclass
class Outcome:
    """What came of a schedule."""

    schedule: Schedule
    finding: Violation | None = None
    num_steps: int = 0
    num_epochs: int = 0
    num_requests: int = 0
    num_aborted: int = 0
    num_resubmitted: int = 0
    """Attempts beyond the first of each request, those that a pool refused included."""
    num_preemptions: int = 0
    struck: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    """Why groups ended."""
    simulated_s: float = 0.0
    trace: int = 0
    """A hash of all agreements and outputs with their times."""


def run_schedule(schedule: Schedule, plants: Plants | None = None) -> Outcome:
    """Run one simulation to its end, or to the first violation."""
    with _quiet():
        return World(schedule, plants or Plants()).run()


class World:
    """All of one simulation."""

    def __init__(self, schedule: Schedule, plants: Plants) -> None:
        self.schedule = schedule
        self.plants = plants
        self.loop = SimLoop()
        self.rng = random.Random(schedule.seed + 1)
        self.diverged_at = 0
        self.outcome = Outcome(schedule)
        self._groups: list[SimGroup] = []
        self._faults = list(schedule.faults)
        self._arrives_at: dict[tuple[str, str], float] = {}
        self._is_done = False

    def run(self) -> Outcome:
        """Run to the end."""
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
        for group in self._groups:
            for leader in group.leaders:
                leader.process.kill()
        outcome.simulated_s = self.loop.now
        self.loop.close()
        outcome.num_epochs = len(self._groups)
        return outcome

    def _begin(self) -> None:
        self.tokens = SimTokens(self)
        self.pool = self.plants.pool(self)
        self.router = self.plants.router({"mixed": self}, self.tokens)
        self._main_task = self.loop.create_task(self._main())
        self._main_task.add_done_callback(self._on_main_done)

    def _on_main_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.loop.fail(error)
        self._is_done = True

    def _where(self) -> str:
        group = self._groups[-1]
        ranks = [f"{each.name} in step {each.pulse.heartbeat().step}" for each in group.leaders]
        return f"pool {self.pool._state}, {', '.join(ranks)}, struck {self.outcome.struck}"

    # --- the story --------------------------------------------------------------------------------

    async def _main(self) -> None:
        await self.pool.start()
        await asyncio.gather(*map(self._client, self.schedule.arrivals))
        num_extra = 0
        while self.outcome.num_steps < MIN_STEPS or (self._faults and num_extra < MAX_EXTRA):
            arrivals = [self._extra(num_extra + i) for i in range(3)]
            num_extra += len(arrivals)
            await asyncio.gather(*map(self._client, arrivals))
        self._faults = []
        await asyncio.sleep(SETTLE_S)
        while self.pool._state != "ready" or self._fatal(self.pool._group):
            await asyncio.sleep(0.5)
        self._check_rest()
        await self.pool.shut_down()

    def _extra(self, i: int) -> Arrival:
        arrival = draw_arrival(self.rng, i, 8, has_aborts=False)
        return Arrival(f"x{i}", 0.0, arrival.prompt, arrival.max_tokens, arrival.stop, None)

    async def _client(self, arrival: Arrival) -> None:
        """Be one client: take the stream, compare it with the oracle, or leave."""
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
        wanted = continuation(arrival.prompt, arrival.max_tokens, arrival.stop)
        reason = ""
        async with aclosing(self.router.generate(_request(arrival))) as outputs:
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

    def _check_rest(self) -> None:
        """Check that nothing is left of any request."""
        for leader in self.pool._group.leaders:
            scheduler = leader.scheduler
            scheduler.check()
            if scheduler.has_unfinished or scheduler.blocks.num_free_blocks != (
                self.schedule.num_blocks
            ):
                found = f"{scheduler.blocks.num_free_blocks} of {self.schedule.num_blocks} free"
                raise Violation("something is left", f"{leader.name}: {found}")

    # --- ways between processes -------------------------------------------------------------------

    def generate(self, request_id: str, frame: bytes) -> asyncio.Task[str]:
        """Start a handle call: what the router asks of a pool."""
        if not request_id.endswith(".0"):
            self.outcome.num_resubmitted += 1
        return self.loop.create_task(self.pool.generate(request_id, frame))

    def send_to_leader(self, sender: str, inbox: str, body: bytes) -> None:
        """Put a frame on its way to a leader's inbox."""
        epoch, dp_rank = map(int, inbox.split("/"))
        leader = self._groups[epoch].leaders[dp_rank]
        self.loop.at(self._arrival(sender, inbox), leader.receive, body)

    def send_outputs(self, inbox: str, epoch: int, outputs: list[EngineOutput]) -> None:
        """Put a step's outputs on their way to the ingress, and the last ones to the pool."""
        num_tokens = sum(len(output.token_ids) for output in outputs)
        self._note(self.loop.now, epoch, num_tokens)
        frame = OutputFrame(epoch, "mixed", inbox, outputs)
        self.loop.at(self._arrival(inbox, "ingress"), self.tokens._deliver, frame)
        if ended := [output for output in outputs if output.finish_reason]:
            self.loop.at(self._arrival(inbox, "pool"), self.pool.on_ends, ended)

    def _arrival(self, sender: str, receiver: str) -> float:
        """Return when a frame arrives; those between two do in order."""
        key = (sender, receiver)
        at = max(self.loop.now + self.rng.expovariate(1000), self._arrives_at.get(key, 0.0))
        self._arrives_at[key] = at
        return at

    # --- what groups tell -------------------------------------------------------------------------

    def on_group(self, group: SimGroup) -> None:
        """A group was made."""
        self._groups.append(group)

    def on_step(self, agreed: StepAgreement) -> None:
        """A group goes by a new agreement."""
        self.outcome.num_steps += agreed.has_work
        self._note(self.loop.now, agreed.step, agreed.max_tokens, agreed.epoch)

    def tokens_to_run(self, agreed: StepAgreement) -> tuple[int, ...]:
        """Return what every rank must run in a step."""
        return num_tokens_to_run(agreed, shape_of(agreed))

    @property
    def next_fault(self) -> Fault | None:
        """The fault that strikes next."""
        return self._faults[0] if self._faults else None

    def on_strike(self, group: SimGroup, fault: Fault) -> None:
        """The next fault struck."""
        self._faults.remove(fault)
        self.outcome.struck.append(fault.kind)

    def on_group_end(self, group: SimGroup, reason: str) -> None:
        """A group ended: by a fault, and with the right name, or by order."""
        self.outcome.ends.append(reason)
        for leader in group.leaders:
            self.outcome.num_preemptions += leader.scheduler.stats().num_preemptions
        if self.pool._state == "stopping":
            return
        fatal = self._fatal(group)
        if not fatal:
            self.loop.fail(Violation("named without a fault", reason))
        elif not any(_is_named(fault, group.epoch, reason) for fault in fatal):
            where = [f"{fault.kind} of rank {fault.rank} {fault.phase.name}" for fault in fatal]
            self.loop.fail(Violation("wrong rank named", f"{reason}; struck {where}"))

    def _fatal(self, group: SimGroup) -> list[Fault]:
        return [fault for fault in group.struck if fault.kind in FATAL]

    def _note(self, *values: float) -> None:
        self.outcome.trace = hash((self.outcome.trace, *values))


def _is_named(fault: Fault, epoch: int, reason: str) -> bool:
    """Tell whether a group's end is what a fault must look like."""
    # Nobody can tell who of a collective has not entered it, and of two votes which one is wrong.
    is_in_collective = fault.kind == "stall" and fault.phase is Phase.RUNNING
    is_any_rank = is_in_collective or fault.kind in ("drain", "diverge")
    name = "rank dp=" if is_any_rank else f"rank dp={fault.rank} tp=0 epoch={epoch}"
    return reason.startswith(name) and NAMED[fault.kind] in reason


def _request(arrival: Arrival) -> GenerateRequest:
    sampling = Sampling(0.0, 0, 1.0, 0.0, 0, arrival.max_tokens, arrival.stop, -1, -1, None)
    return GenerateRequest(arrival.request_id, arrival.prompt, [], sampling, "")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep restarts out of the log: they are what simulations are about."""
    logger = logging.getLogger("lockstep")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
