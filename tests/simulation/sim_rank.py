"""Simulated ranks: the real engine, lockstep and follower's loop over the simulated model.

Real are the leader's loop, `Engine.step`, plain or overlapped, with scheduler and blocks,
`JoinedLockstep` with its machine and dispatch, `FollowerLoop` with its digests, `StepStats`, the
step channel, and every frame on its way.
Simulated are the model, the time that it takes, and what carries frames.

Code of a rank runs in its `Process` and blocks there; what is said to be called from the loop must
not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from sim_ingress import SimInbox
from sim_kv import SimPuller, SimServer, handoff_terms
from sim_links import SimPeers, SimReceiver, SimSender
from sim_loop import Process, Violation
from sim_model import GRAPHS, PagedModel, SimDrafter
from sim_schedule import MAX_MODEL_LEN, VOCAB, Fault

from cluster.config import Role, SchedulerConfig
from cluster.engine.adapters import AdapterSlots
from cluster.engine.blocks import BlockManager
from cluster.engine.compile_switch import CompileSwitch
from cluster.engine.divergence import StepDigester
from cluster.engine.engine import Engine
from cluster.engine.kv_handover import KVHandover
from cluster.engine.lockstep import AloneLockstep, JoinedLockstep, LockstepMachine
from cluster.engine.prefix_index import PrefixFeed
from cluster.engine.request_limits import RequestLimits
from cluster.engine.scheduler import Scheduler
from cluster.engine.sequence import SampledTokens
from cluster.engine.step_stats import StepStats
from cluster.engine.watchdog import Phase
from cluster.kv.handoff import GroupHolder, GroupReader
from cluster.observe.counts import Counts
from cluster.rank.adapters import GroupAdapters
from cluster.rank.follower import FollowerLoop
from cluster.rank.leader import Leader
from cluster.wire.group_messages import StepFrame
from cluster.wire.messages import EngineOutput, StepAgreement, StepPlan

if TYPE_CHECKING:
    from sim_group import SimGroup

MAX_SLEEP_S = 1.0
LAST_STAGE = 4
"""Compiled pieces, and three graphs to capture."""


class SimRank:
    """What all ranks are: a process whose phases are recorded, where faults strike.

    Leaders and followers add `run`, `last_step`, and `ring`, which wakes one that sleeps.
    """

    def __init__(self, group: SimGroup, index: int) -> None:
        self.group = group
        self.index = index
        place = group.places[index]
        self.dp_rank, self.tp_rank = place.dp_rank, place.tp_rank
        self.epoch = group.epoch
        self.name = f"rank dp={self.dp_rank} tp={self.tp_rank} epoch={self.epoch}"
        self.step_stats = StepStats(group.loop.time)
        self.step_stats.learn(8, 0.004)  # as a rank that has timed a step before it is ready
        self.process = Process(group.loop, self._main)
        self.is_running = False
        schedule = group.schedule
        self.block_size = schedule.block_size * group.replica.shape.block_times
        is_leader = not self.tp_rank
        num_followers = group.tp_size - 1 if is_leader else 0
        self.switch = (
            CompileSwitch(GRAPHS)
            if schedule.compile_s is None
            else CompileSwitch(last_stage=LAST_STAGE, num_followers=num_followers)
        )
        device = AsyncDevice if schedule.has_device else HostDevice
        self.device: AsyncDevice | HostDevice = device(self)
        self.model = PagedModel(
            schedule.num_blocks,
            self.block_size,
            schedule.max_num_seqs,
            VOCAB,
            weights=group.replica.shape.weights,
        )
        self.server = SimServer(self, self.ring)
        self.puller = SimPuller(self, self.ring)

    def start(self) -> None:
        """Run, and compile elsewhere. Called from the loop."""
        self.is_running = True
        self.process.wake(self.process.ticket)
        if not self.switch.is_over:
            within_s = self.group.schedule.compile_s or 0.0
            self.group.loop.after(self.group.rng.random() * within_s, self.on_compiled)

    def on_compiled(self) -> None:
        """What was compiled is loaded. Called from the loop."""
        self.switch.is_loaded = True
        self.ring()

    def kill(self) -> None:
        """Do what SIGKILL does. Called from the loop."""
        self.process.kill()
        self.device.kill()

    def due(self, kinds: tuple[str, ...]) -> Fault | None:
        fault = self.group.world.fault
        if fault is None or fault.rank != self.index or fault.kind not in kinds:
            return None
        is_due = self.last_step >= fault.step - 1 and self.group.is_target(fault)
        return fault if is_due else None

    def pass_time(self, phase: Phase, mean_s: float) -> None:
        """Spend time in a phase of the step; faults strike here."""
        fault = self.group.world.fault
        if fault is not None and fault.rank == self.index and fault.phase is phase:
            self.group.on_phase(self, fault)
        if mean_s:
            random = self.group.rng.random
            if random() < 0.5:
                self.process.sleep(mean_s * random() * 4)

    def _main(self) -> None:
        try:
            self.run()
        except Violation as error:
            self.group.loop.fail(error)
        except Exception as error:
            self.group.on_end(self, error)
        else:
            self.group.on_end(self, None)


# --- what runs a rank's steps ---------------------------------------------------------------------


class Job:
    def __init__(self, run: Callable[[], list[int]]) -> None:
        self.run = run
        self.drawn: list[int] | None = None
        """What was drawn, once it has ended."""
        self.error: Exception | None = None


class HostDevice:
    """Runs a step within its launch: in the rank's own process, as on a CPU."""

    def __init__(self, rank: SimRank) -> None:
        self.process = rank.process
        """Where collectives block."""

    def launch(self, job: Job) -> None:
        job.drawn = job.run()

    def wait(self, job: Job) -> list[int]:
        return job.drawn

    def kill(self) -> None:
        """It is the rank's process."""


class AsyncDevice:
    """Runs steps in order in a process of its own, as CUDA does, also while the rank is stopped.

    It ends with the rank, which hears of whatever fails here when it waits for the step.
    """

    def __init__(self, rank: SimRank) -> None:
        self._rank = rank
        self._loop, self._rng = rank.group.loop, rank.group.rng
        self._jobs: deque[Job] = deque()
        self._is_idle = False
        self._is_awaited = False
        self.process = Process(self._loop, self._main)
        """Where collectives block."""
        self._loop.after(0.0, self.process.wake, 0)

    def launch(self, job: Job) -> None:
        self._jobs.append(job)
        if self._is_idle:
            self._is_idle = False
            self._loop.after(0.0, self.process.wake, self.process.ticket)

    def wait(self, job: Job) -> list[int]:
        self._is_awaited = True
        while job.drawn is None and job.error is None:
            self._rank.process.wait()
        self._is_awaited = False
        if job.error is not None:
            raise job.error
        return job.drawn

    def kill(self) -> None:
        self.process.kill()

    def _main(self) -> None:
        while True:
            while not self._jobs:
                self._is_idle = True
                self.process.wait()
            job = self._jobs.popleft()
            # Now and then it is far behind the host.
            if self._rng.random() < 0.5:
                self.process.sleep(self._rng.random() * 0.003)
            try:
                job.drawn = job.run()
            except Violation as error:
                self._loop.fail(error)
                return
            except Exception as error:
                job.error = error
            self._loop.after(0.0, self._tell)
            if job.error is not None:
                return

    def _tell(self) -> None:
        if self._is_awaited:
            self._rank.process.wake(self._rank.process.ticket)


# --- what launches them ---------------------------------------------------------------------------


class SimRunner:
    """The runner: takes time, waits for all ranks in collectives, and checks what they run."""

    def __init__(self, rank: SimRank) -> None:
        self._rank = rank
        self.step_stats = rank.step_stats
        self.switch = rank.switch
        self.ended_step = 0

    def execute(
        self, plan: StepPlan, agreed: StepAgreement, confirm: Callable[[], None] | None = None
    ) -> SampledTokens:
        return self.wait(self.launch(plan, agreed, confirm))

    def launch(
        self, plan: StepPlan, agreed: StepAgreement, confirm: Callable[[], None] | None = None
    ) -> tuple[int, Job]:
        """Do what `ModelRunner.launch` does, in its order."""
        rank, phases = self._rank, self.step_stats
        across = agreed.num_tokens_across_dp
        if agreed.stage != self.switch.stage:
            phases.build(agreed.step, 0)
            self._confirm(agreed, confirm)
            confirm = None
            phases.run(agreed.step)
            self.enter(agreed, across[rank.dp_rank])
        phases.build(agreed.step, across[rank.dp_rank])
        rank.pass_time(Phase.BUILDING, 0.0005)
        self._confirm(agreed, confirm)
        if rank.group.schedule.scaling is None:
            phases.run(agreed.step)
        else:
            phases.begin(plan, agreed, 0)
        rank.pass_time(Phase.RUNNING, 0.0)
        job = Job(lambda: self._compute(plan, agreed))
        rank.device.launch(job)
        return agreed.step, job

    def _compute(self, plan: StepPlan, agreed: StepAgreement) -> list[int]:
        rank = self._rank
        # KV is written before the last collective: whoever knows a token may read all ranks' KV.
        sampled = rank.model.run(plan)
        if rank.group.schedule.step_s:
            rank.device.process.sleep(rank.group.schedule.step_s)
        self.forward(plan, agreed, self.num_tokens(plan, agreed.num_tokens_across_dp))
        rank.group.on_sampled(rank, agreed.step, sampled)
        return sampled

    def wait(self, launched: tuple[int, Job]) -> SampledTokens:
        step, job = launched
        self.step_stats.run(step)
        sampled = self._rank.device.wait(job)
        self.ended_step = step
        self.step_stats.end_step(step)
        self._rank.pass_time(Phase.BOOKING, 0.0)
        return SampledTokens(sampled, [], [], [])

    def _confirm(self, agreed: StepAgreement, confirm: Callable[[], None] | None) -> None:
        if confirm is not None:
            self.confirm(confirm)
            self._rank.group.on_agreement(self._rank.dp_rank, agreed)

    def load_piece(self) -> None:
        """What was compiled is loaded at once; see `SimRank.on_compiled`."""

    def enter(self, agreed: StepAgreement, num_tokens: int) -> None:
        stage, device = agreed.stage, self._rank.device
        if stage > 1:
            capture = Job(lambda: self._capture(agreed.step, f"graph {stage - 1}", num_tokens))
            device.launch(capture)
            device.wait(capture)
        self.switch.enter(stage, GRAPHS if stage == LAST_STAGE else None)

    def _capture(self, step: int, name: str, num_tokens: int) -> list[int]:
        self.collective(step, name, num_tokens)
        return []

    def confirm(self, confirm: Callable[[], None]) -> None:
        confirm()

    def num_tokens(self, plan: StepPlan, across: tuple[int, ...]) -> int:
        return across[self._rank.dp_rank]

    def forward(self, plan: StepPlan, agreed: StepAgreement, num_tokens: int) -> None:
        self.collective(agreed.step, "layer 0", num_tokens)

    def collective(self, step: int, name: str, num_tokens: int) -> None:
        self._rank.group.collective(self._rank, step, name, num_tokens)


class SimLeader(SimRank):
    """A leader with the real loop (`cluster/rank/leader.py`)."""

    def __init__(self, group: SimGroup, index: int) -> None:
        super().__init__(group, index)
        self.peers = SimPeers(self)
        self.sender = self._channel = SimSender(self) if group.tp_size > 1 else None
        self.engine_id = f"{group.pool}/{group.replica.replica_id}/{self.dp_rank}"
        self.inbox_address = f"{group.pool}/{group.replica.number}/{self.epoch}/{self.dp_rank}"
        self._inbox: SimInbox = group.plants.inbox(self)
        self._output_sender = group.plants.output_sender(self, self._inbox)
        self._look_at = inf
        self.is_gone = False
        """Whether its process has died, or closed its inbox."""
        self.unreachable_until = 0.0
        """For the ingress."""
        self.is_asleep = False
        self.is_told_to_stop = self._is_stopping = False
        self.has_rung = False
        self.aborted: dict[str, int] = {}
        """Requests whose abort was in the inbox before this step."""
        self._leaving: set[str] = set()
        """Requests that were told to leave."""
        tell = self.sender.tell if self.sender is not None else None
        num_followers = group.tp_size - 1
        self._holder: GroupHolder = group.plants.group_holder(self.server, num_followers, tell)
        self._reader: GroupReader = group.plants.group_reader(self.puller, num_followers, tell)
        self._adapters = GroupAdapters(AdapterSlots())
        self.machine: LockstepMachine | None = None
        self.scheduler = self._scheduler()

    def _scheduler(self) -> Scheduler:
        schedule = self.group.schedule
        self.prefix_feed = PrefixFeed()
        blocks = BlockManager(
            schedule.num_blocks,
            self.block_size,
            schedule.is_caching,
            changes=self.prefix_feed.changes,
        )
        terms = handoff_terms(self.group, self.dp_rank)
        scheduler: Scheduler = self.group.plants.scheduler(
            SchedulerConfig(schedule.max_num_seqs, schedule.budget),
            RequestLimits(blocks, MAX_MODEL_LEN, self.group.role, VOCAB),
            epoch=self.epoch,
            handover=KVHandover(blocks, terms, holder=self._holder, reader=self._reader),
            drafter=self._drafter(),
        )
        return scheduler

    def _drafter(self) -> SimDrafter | None:
        num_drafts, role = self.group.schedule.num_drafts, self.group.role
        if not num_drafts or role is Role.PREFILL:
            return None
        return SimDrafter(num_drafts, VOCAB, MAX_MODEL_LEN, self.group.replica.shape.weights)

    def start(self) -> None:
        """Make the engine and run. Called from the loop."""
        plants, lockstep = self.group.plants, None
        if self.group.dp_size > 1:
            self.machine = plants.machine(
                dp_rank=self.dp_rank,
                dp_size=self.group.dp_size,
                epoch=self.epoch,
                switch=self.switch,
            )
            lockstep = JoinedLockstep(self.machine, self.peers, self.step_stats)
        self.runner: SimRunner = plants.runner(self)
        loop = plants.overlapped_engine if self.group.schedule.is_overlapped else Engine
        self.engine = loop(
            self.scheduler, lockstep or AloneLockstep(self.switch), self.sender, self.runner
        )
        super().start()

    def receive(self, peer: bytes, body: bytes) -> None:
        """A frame of the ingress is there. Called from the loop."""
        self._inbox.frames.append((peer, body))
        self.wake()

    def kill(self) -> None:
        super().kill()
        if not self.is_gone:
            self.is_gone = True
            for connection in self.group.world.connections_to(self):
                connection.on_gone()

    def tell_to_stop(self) -> None:
        """Do what `Leader.stop` does. Called from the loop."""
        self.is_told_to_stop = self._is_stopping = True
        self.ring()

    def ring(self) -> None:
        """Ring the doorbell. Called from the loop."""
        self.has_rung = True
        self.wake()

    def wake(self) -> None:
        """Wake the leader if it sleeps. Called from the loop."""
        if self.is_asleep:
            self.process.wake(self.process.ticket)

    run, _take_reports, _book = Leader.run, Leader._take_reports, Leader._book
    _expect = Leader._expect
    last_step = _last_step = Leader._last_step

    def step(self) -> None:
        Leader.step(self)  # type: ignore[arg-type]
        agreed = self.engine.agreed
        if agreed is not None and not agreed.has_work:
            self.group.on_agreement(self.dp_rank, agreed)

    def _sleep(self) -> None:
        self.step_stats.wait(self.last_step, is_asleep=True)
        has_report = self.sender is not None and self.sender.reports
        if not (self._inbox.frames or self.peers.has_frames or self.has_rung or has_report):
            self.is_asleep = True
            self.process.sleep(MAX_SLEEP_S)
            self.is_asleep = False
        self.has_rung = False

    def _close(self) -> None:
        if self.sender is not None:
            self.sender.close()
        self._inbox.close()

    def _take_inbox(self) -> None:
        self.pass_time(Phase.PLANNING, 0.0002)
        Leader._take_inbox(self)  # type: ignore[arg-type]

    def counts(self) -> Counts:
        """Return what scaling is decided by of all that `Leader.counts` does."""
        computed = self.scheduler.stats().prompt_tokens_computed
        return {("prompt_tokens_computed_total",): computed, **self.step_stats.counts()}

    def on_abort(self, request_ids: list[str]) -> None:
        self.aborted.update(dict.fromkeys(request_ids, self.last_step + 1))

    def on_leave(self, request_ids: list[str]) -> None:
        self._leaving.update(request_ids)

    def on_outputs(self, outputs: list[EngineOutput]) -> None:
        """They are about to leave."""
        if self.aborted:
            self._check_aborts(outputs)
        if self._leaving:
            self._check_leavers(outputs)
        self.group.on_outputs(self, outputs)

    def _check_aborts(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            if output.token_ids and output.request_id in self.aborted:
                step = self.aborted[output.request_id]
                text = f"{output.request_id} got a token in step {self.last_step}"
                raise Violation("abort ignored", f"{self.name}: {text}, aborted before step {step}")

    def _check_leavers(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            if output.request_id not in self._leaving:
                continue
            if output.finish_reason:
                self._leaving.remove(output.request_id)
            elif output.token_ids:
                text = f"{output.request_id} goes on after step {self.last_step}"
                raise Violation("leave ignored", f"{self.name}: {text}")

    def check_handoffs(self) -> None:
        """Assert that no handoff is held for this leader on any of its ranks, and none is read."""
        num_held, num_read = self._holder.num_held, len(self._reader._num_reading)
        for rank in self.group.ranks:
            if rank.dp_rank == self.dp_rank:
                num_held += rank.server.num_held
                num_read += len(rank.puller.reads._pulls)
        if num_held or num_read:
            text = f"{num_held} handoffs held, {num_read} read"
            raise Violation("a handoff is left", f"{self.name}: {text}")


class SimFollower(SimRank):
    """A tensor-parallel rank that runs its leader's plans, with the real loop."""

    def __init__(self, group: SimGroup, index: int) -> None:
        super().__init__(group, index)
        self.receiver = SimReceiver(self)
        self.loop: FollowerLoop = group.plants.follower_loop(
            self.name,
            receiver=self.receiver,
            runner=group.plants.runner(self),
            digester=StepDigester(is_overlapped=group.schedule.is_overlapped),
            holder=self.server,
            reader=self.puller,
            adapters=None,
            is_overlapped=group.schedule.is_overlapped,
        )

    def ring(self) -> None:
        """Ring the doorbell. Called from the loop."""
        self.receiver.ring()

    def run(self) -> None:
        self.loop.run()

    def on_plan(self, frame: StepFrame) -> None:
        self.pass_time(Phase.PLANNING, 0.0)

    @property
    def last_step(self) -> int:
        return self.loop.step
