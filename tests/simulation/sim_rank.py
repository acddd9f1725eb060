"""A simulated rank: the real engine and lockstep over a model whose tokens one can do by hand.

Real are `Engine.step` with scheduler and blocks, `JoinedLockstep` with its machine, `Pulse`, and
every frame on its way. Simulated are the model, the time that it takes, and what carries frames.

The one thing to know: a token is the hash of all tokens before it, read back out of a paged cache.
One that is lost, repeated or computed from a wrong block changes all that follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from sim_loop import Process, Violation
from sim_schedule import VOCAB, Fault

from cluster.config import Role, SchedulerConfig
from cluster.engine.blocks import SCRATCH, BlockManager
from cluster.engine.engine import Engine
from cluster.engine.lockstep import PURE_DECODE, num_tokens_to_run
from cluster.engine.scheduler import Scheduler
from cluster.engine.watchdog import Phase
from cluster.lockstep_messages import StepShape
from cluster.messages import (
    Abort,
    EngineOutput,
    Inbound,
    SampledTokens,
    StepAgreement,
    StepPlan,
    Submit,
    Vote,
    decode,
    encode,
)
from cluster.rank.channel import NoFollowers
from cluster.rank.lockstep import Lockstep
from cluster.rank.pulse import Pulse

if TYPE_CHECKING:
    from sim_group import SimGroup

MAX_MODEL_LEN = 64
MAX_SLEEP_S = 1.0
GRAPH_SIZES = (1, 2, 4, 8)
COLLECTIVES = 1
"""Of a forward: one a layer."""


def shape_of(agreed: StepAgreement) -> StepShape:
    """Dispatch over a few captured sizes: all ranks padded alike, or each as it is."""
    is_decode = agreed.kind == PURE_DECODE and agreed.graph_allowed
    sizes = [size for size in GRAPH_SIZES if size >= agreed.max_tokens]
    if not is_decode or not sizes:
        return StepShape(0, agreed.max_tokens, agreed.max_seqs, agreed.kind == PURE_DECODE)
    return StepShape(2, sizes[0], sizes[0], True)


def extend(context: int, token: int) -> int:
    """Return the hash of a context with one more token."""
    return hash((context, token))


def next_token(context: int) -> int:
    """Return what the model draws after a context."""
    return context % VOCAB


def continuation(prompt: list[int], max_tokens: int, stop: tuple[int, ...]) -> list[int]:
    """Return all output tokens of a request: the oracle."""
    context, output = 0, list[int]()
    for token in prompt:
        context = extend(context, token)
    while len(output) < max_tokens and len(prompt) + len(output) < MAX_MODEL_LEN:
        token = next_token(context)
        output.append(token)
        context = extend(context, token)
        if token in stop:
            break
    return output


class PagedModel:
    """Rows and KV of one rank: a cell holds the hash of its whole context."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        self._block_size = block_size
        self._tables: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._cells = [[0] * block_size for _ in range(num_blocks + 1)]

    def run(self, plan: StepPlan) -> list[int]:
        """Compute a plan; return what it sampled."""
        for new in plan.new_blocks:
            self._tables[new.row][new.start :] = new.block_ids
        size, start, drawn = self._block_size, 0, list[int]()
        for i, row in enumerate(plan.rows):
            table, position = self._tables[row], plan.num_computed[i]
            context = 0
            if position:
                context = self._cells[table[(position - 1) // size]][(position - 1) % size]
            for token in plan.token_ids[start : start + plan.num_new[i]]:
                context = extend(context, token)
                block = table[position // size]
                assert block != SCRATCH, "KV was written to the scratch block"
                self._cells[block][position % size] = context
                position += 1
            start += plan.num_new[i]
            if plan.output_index[i] >= 0:
                drawn.append(next_token(context))
        return drawn


class SimRunner:
    """The executor: takes time, waits for all ranks in collectives, and checks what they run."""

    def __init__(self, leader: SimLeader) -> None:
        schedule = leader.group.schedule
        self._leader = leader
        self._model = PagedModel(schedule.num_blocks, schedule.block_size, schedule.max_num_seqs)

    def execute(
        self, plan: StepPlan, agreed: StepAgreement, confirm: Callable[[], None]
    ) -> SampledTokens:
        """Do what `ModelRunner.execute` does, in its order."""
        leader = self._leader
        across = num_tokens_to_run(agreed, leader.shape_of(agreed))
        leader.pulse.build(agreed.step, across[leader.dp_rank])
        leader.pass_time(Phase.BUILDING, 0.0005)
        self.confirm(confirm)
        leader.group.on_agreement(leader.dp_rank, agreed)
        leader.pulse.run()
        leader.pass_time(Phase.RUNNING, 0.0)
        self.forward(plan, agreed, self.num_tokens(plan, across))
        sampled = self._model.run(plan)
        leader.pulse.book()
        leader.pass_time(Phase.BOOKING, 0.0)
        return SampledTokens(sampled, [], [])

    def confirm(self, confirm: Callable[[], None]) -> None:
        """Wait until all hold the step for the same."""
        confirm()

    def num_tokens(self, plan: StepPlan, across: tuple[int, ...]) -> int:
        """Return how many tokens this rank runs, padding included."""
        return across[self._leader.dp_rank]

    def forward(self, plan: StepPlan, agreed: StepAgreement, num_tokens: int) -> None:
        """Run the collectives of a step."""
        for layer in range(COLLECTIVES):
            self.collective(f"step {agreed.step} layer {layer}", num_tokens)

    def collective(self, name: str, num_tokens: int) -> None:
        """Wait for all ranks."""
        self._leader.group.collective(self._leader.dp_rank, name, num_tokens)


class SimChannel:
    """A leader's connections to the others: ordered frames that take their time."""

    def __init__(self, leader: SimLeader) -> None:
        self._leader = leader
        dp_size = leader.group.schedule.num_ranks
        self._frames: list[deque[bytes]] = [deque() for _ in range(dp_size)]
        self._arrives_at = [0.0] * dp_size
        self._awaited = -1

    def send(self, body: bytes) -> None:
        """Send a frame to every peer."""
        group, me = self._leader.group, self._leader.dp_rank
        divergence = group.armed(me, "diverge")
        for peer in group.leaders:
            if peer.dp_rank != me:
                found = body
                if divergence is not None and divergence.peer == peer.dp_rank:
                    found = _alter(body, divergence, group)
                self._send_to(peer, found)

    def _send_to(self, peer: SimLeader, body: bytes) -> None:
        group, me = self._leader.group, self._leader.dp_rank
        at = group.loop.now + group.rng.expovariate(1 / group.schedule.delay_s)
        held = group.armed(me, "held link")
        if held is not None and held.peer == peer.dp_rank:
            group.strike(held)
            at += held.duration_s
        at = self._arrives_at[peer.dp_rank] = max(at, self._arrives_at[peer.dp_rank])
        group.loop.at(at, peer.channel.deliver, me, body)

    def deliver(self, sender: int, body: bytes) -> None:
        """A frame is there. Called from the loop."""
        self._frames[sender].append(body)
        process = self._leader.process
        if self._awaited == sender or self._leader.is_asleep:
            process.wake(process.ticket)

    def receive(self, dp_rank: int) -> bytes | None:
        """Wait for the next frame of a peer."""
        self._awaited = dp_rank
        while not self._frames[dp_rank]:
            self._leader.process.wait()
        self._awaited = -1
        return self._frames[dp_rank].popleft()

    @property
    def has_frames(self) -> bool:
        """Whether a peer has sent what was not received."""
        return any(self._frames)


def _alter(body: bytes, fault: Fault, group: SimGroup) -> bytes:
    """Return another vote in place of the first one from the fault's step on."""
    frame = decode(body, Any)
    vote = decode(body, Vote) if frame[0] == "Vote" else None
    if vote is None or vote.step < fault.step or not vote.has_work:
        return body
    group.strike(fault)
    group.world.diverged_at = vote.step
    value = getattr(vote, fault.vote_field) + 1
    return encode(msgspec.structs.replace(vote, **{fault.vote_field: value}))


class SimLeader:
    """The loop around the step, as in `cluster/rank/leader.py`, in a simulated process."""

    def __init__(self, group: SimGroup, dp_rank: int) -> None:
        self.group = group
        self.dp_rank = dp_rank
        self.epoch = group.epoch
        self.name = f"rank dp={dp_rank} tp=0 epoch={group.epoch}"
        self.pulse = Pulse(group.loop.time)
        self.channel = SimChannel(self)
        self.inbox: deque[bytes] = deque()
        self.is_asleep = False
        self.is_told_to_stop = False
        self.has_rung = False
        self.aborted: dict[str, int] = {}
        """Requests whose abort was in the inbox before this step."""
        self.process = Process(group.loop, self._main)
        self.scheduler = self._scheduler()

    def _scheduler(self) -> Scheduler:
        schedule = self.group.schedule
        scheduler: Scheduler = self.group.plants.scheduler(
            SchedulerConfig(schedule.max_num_seqs, schedule.budget),
            max_model_len=MAX_MODEL_LEN,
            role=Role.MIXED,
            blocks=BlockManager(schedule.num_blocks, schedule.block_size, schedule.is_caching),
            epoch=self.epoch,
            holder=None,
            terms=None,
            reader=None,
            vocab_size=VOCAB,
        )
        return scheduler

    def shape_of(self, agreed: StepAgreement) -> StepShape:
        """Dispatch."""
        return shape_of(agreed)

    def start(self) -> None:
        """Make the engine and run. Called from the loop."""
        schedule, plants = self.group.schedule, self.group.plants
        machine = plants.machine(
            dp_rank=self.dp_rank,
            dp_size=schedule.num_ranks,
            epoch=self.epoch,
            shape_of=self.shape_of,
        )
        lockstep = Lockstep.joined(machine, self.channel, self.pulse)
        self.engine = Engine(self.scheduler, lockstep, NoFollowers(), plants.runner(self))
        self.process.wake(self.process.ticket)

    def receive(self, body: bytes) -> None:
        """A frame of the world is there. Called from the loop."""
        self.inbox.append(body)
        self.ring()

    def tell_to_stop(self) -> None:
        """Do what `Leader.stop` does. Called from the loop."""
        self.is_told_to_stop = self.has_rung = True
        self.ring()

    def ring(self) -> None:
        """Wake the leader if it sleeps. Called from the loop."""
        if self.is_asleep:
            self.process.wake(self.process.ticket)

    def pass_time(self, phase: Phase, mean_s: float) -> None:
        """Spend time in a phase of the step; faults strike here."""
        self.group.on_phase(self, phase)
        if mean_s and self.group.rng.random() < 0.5:
            self.process.sleep(mean_s * self.group.rng.random() * 4)

    def _main(self) -> None:
        try:
            self.run()
        except Violation as error:
            self.group.loop.fail(error)
        except Exception as error:
            self.group.on_end(self, error)
        else:
            self.group.on_end(self, None)

    def run(self) -> None:
        """Step until all leaders are stopped."""
        while not self.engine.has_ended:
            self.step()
            if self.engine.is_idle and not self.engine.has_ended:
                self.sleep()

    def sleep(self) -> None:
        """Wait until something is to be done, here or on a peer."""
        self.pulse.wait(self.last_step, is_asleep=True)
        if not (self.inbox or self.channel.has_frames or self.has_rung):
            self.is_asleep = True
            self.process.sleep(MAX_SLEEP_S)
            self.is_asleep = False
        self.has_rung = False

    @property
    def last_step(self) -> int:
        """The last step that all agreed on."""
        return self.engine.agreed.step if self.engine.agreed else 0

    def step(self) -> None:
        """Take what waits in the inbox, run one step and send its outputs."""
        self.pulse.plan(self.last_step + 1)
        self.pass_time(Phase.PLANNING, 0.0002)
        self.take_inbox()
        self.engine.is_draining = self.is_told_to_stop
        outputs = self.engine.step()
        agreed = self.engine.agreed
        if agreed is not None and not agreed.has_work:
            self.group.on_agreement(self.dp_rank, agreed)
        self._check_aborts(outputs)
        if outputs:
            self.group.on_outputs(self, outputs)

    def take_inbox(self) -> None:
        """Give the engine what waits."""
        while self.inbox:
            message = decode(self.inbox.popleft(), Inbound)
            match message:
                case Submit():
                    self.engine.submit(message)
                case Abort():
                    self.aborted.update(dict.fromkeys(message.request_ids, self.last_step + 1))
                    self.abort(message.request_ids)

    def abort(self, request_ids: list[str]) -> None:
        """Give the engine an abort."""
        self.engine.abort(request_ids)

    def _check_aborts(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            if output.token_ids and output.request_id in self.aborted:
                step = self.aborted[output.request_id]
                text = f"{output.request_id} got a token in step {self.last_step}"
                raise Violation("abort ignored", f"{self.name}: {text}, aborted before step {step}")
