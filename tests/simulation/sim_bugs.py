"""Planted bugs: what the simulator must find, each in place of one part of a simulation.

Nothing of the code under test is edited. A bug is a subclass or a wrapper
that does what a plausible slip in that code would do.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from sim_group import SimGroup, SimHandle
from sim_ingress import SimConnection, SimInbox, SimOutputSender, hashes
from sim_rank import MAX_SLEEP_S, SimFollower, SimLeader, SimRunner
from sim_schedule import MAX_MODEL_LEN, NEW_BLOCKS, NEW_WEIGHTS, Schedule
from sim_world import Plants

from cluster.actors.rank_group import CallEnd
from cluster.actors.reports import LeaderReport
from cluster.engine import sequence
from cluster.engine.engine import OverlappedEngine
from cluster.engine.lockstep import LockstepMachine, agree
from cluster.engine.scheduler import Scheduler
from cluster.engine.sequence import SampledTokens
from cluster.engine.watchdog import Phase
from cluster.kv.handoff import GroupHolder, GroupReader, KVHolder
from cluster.kv.reads import KVPulls
from cluster.rank.follower import FollowerLoop
from cluster.wire.credentials import Hashes
from cluster.wire.group_messages import StepFrame
from cluster.wire.messages import (
    PENDING,
    Abort,
    EngineOutput,
    FinishReason,
    Inbound,
    KVAnswer,
    KVSource,
    Leave,
    StepAgreement,
    StepKind,
    StepPlan,
    Submit,
    Vote,
    decode,
    encode,
)
from serve.pools.directory import ChosenLeader, ConnectedLeader, Directory
from serve.pools.leader_load import Stage
from serve.pools.pool_core import PoolCore
from serve.pools.scaling import Meter, Signals

BUGS: dict[str, Plants] = {}


def is_scaled(schedule: Schedule) -> bool:
    return schedule.scaling is not None


def is_rolled_out(schedule: Schedule) -> bool:
    return any(fault.kind == NEW_WEIGHTS for fault in schedule.faults)


def has_new_blocks(schedule: Schedule) -> bool:
    return any(fault.kind == NEW_BLOCKS for fault in schedule.faults)


def is_by_cost(schedule: Schedule) -> bool:
    return schedule.routing == "cost"


def planted(
    part: str, name: str, is_met: Callable[[Schedule], bool] = Plants.is_met
) -> Callable[[Any], Any]:
    """Let the bug of this name be a simulation with the class, or function, in place of a part;
    `is_met`: whether a schedule can show it."""

    def plant(made: Any) -> Any:
        plants = Plants()
        plants.is_met = is_met
        setattr(plants, part, made)
        BUGS[name] = plants
        return made

    return plant


@planted("runner", "a skipped dummy step")
class _SkipsDummies(SimRunner):
    def forward(self, plan: StepPlan, agreed: StepAgreement, num_tokens: int) -> None:
        if plan.num_seqs:
            super().forward(plan, agreed, num_tokens)


@planted("runner", "a local branch before a collective")
class _BranchesLocally(SimRunner):
    def forward(self, plan: StepPlan, agreed: StepAgreement, num_tokens: int) -> None:
        if plan.num_decodes < plan.num_seqs:
            self.collective(agreed.step, "prompts", num_tokens)
        super().forward(plan, agreed, num_tokens)


@planted("runner", "an unpadded dummy")
class _RunsUnpaddedDummies(SimRunner):
    def num_tokens(self, plan: StepPlan, across: tuple[int, ...]) -> int:
        return super().num_tokens(plan, across) if plan.num_seqs else 1


@planted("runner", "an unpadded decode")
class _RunsUnpaddedDecodes(SimRunner):
    def num_tokens(self, plan: StepPlan, across: tuple[int, ...]) -> int:
        is_decode = plan.num_seqs and plan.num_decodes == plan.num_seqs
        return plan.num_tokens if is_decode else super().num_tokens(plan, across)


@planted("runner", "a collective before the confirms")
class _NeverConfirms(SimRunner):
    def confirm(self, confirm: Callable[[], None]) -> None:
        """Go on at once."""


@planted("leader", "an epoch off by one")
class _StaysInItsEpoch(SimLeader):
    def __init__(self, group: SimGroup, index: int) -> None:
        super().__init__(group, index)
        if self.dp_rank == 1 and group.epoch:
            self.epoch -= 1
            self.scheduler = self._scheduler()


@planted("inbox", "a dropped abort")
class _DropsAborts(SimInbox):
    def take(self) -> Iterator[tuple[bytes, Any]]:
        for peer, message in super().take():
            if not isinstance(message, Abort):
                yield peer, message


@planted("inbox", "a dropped leave")
class _DropsLeaves(SimInbox):
    def take(self) -> Iterator[tuple[bytes, Any]]:
        for peer, message in super().take():
            if not isinstance(message, Leave):
                yield peer, message


@planted("machine", "dispatch on a rank's own batch")
class _DispatchesOnItsBatch(LockstepMachine):
    def _agree(self, votes: Sequence[Vote]) -> StepAgreement:
        agreed, mine = super()._agree(votes), agree([votes[self._dp_rank]], self._switch.captured)
        across = mine.num_tokens_across_dp * len(votes)
        return msgspec.structs.replace(agreed, batch=mine.batch, num_tokens_across_dp=across)


@planted("leader", "dispatch on a rank's own clock")
class _DispatchesOnItsClock(SimLeader):
    def start(self) -> None:
        super().start()
        if (machine := self.machine) is not None:
            agree = machine._agree
            machine._agree = lambda votes: agree(self._if_early(votes))  # type: ignore[method-assign]

    def _if_early(self, votes: Sequence[Vote]) -> Sequence[Vote]:
        if self.group.loop.now % 1.0 <= 0.9:
            return votes
        return [msgspec.structs.replace(vote, kind=StepKind.MIXED) for vote in votes]


@planted("leader", "a rank that goes over on its own")
class _GoesOverAlone(SimLeader):
    def on_compiled(self) -> None:
        super().on_compiled()
        self.switch.stage = 1


@planted("follower", "a follower that goes over before its leader")
class _GoesOverBeforeItsLeader(SimFollower):
    def on_compiled(self) -> None:
        super().on_compiled()
        self.switch.stage = 2


@planted("runner", "a graph captured a step early")
class _CapturesEarly(SimRunner):
    def enter(self, agreed: StepAgreement, num_tokens: int) -> None:
        super().enter(agreed, num_tokens)
        if agreed.stage == 2 and self._rank.index == 1:
            super().enter(msgspec.structs.replace(agreed, stage=3), num_tokens)


@planted("leader", "a leader that goes over without its followers")
class _ForgetsFollowers(SimLeader):
    def on_compiled(self) -> None:
        self.switch._num_awaited = 0
        super().on_compiled()


@planted("leader", "a sleep that compiled pieces do not end")
class _SleepsUntilARequest(SimLeader):
    def on_compiled(self) -> None:
        self.switch.is_loaded = True

    def _sleep(self) -> None:
        self.step_stats.wait(self.last_step, is_asleep=True)
        while not (
            self._inbox.frames or self.peers.has_frames or self.has_rung or self._has_reports
        ):
            self.is_asleep = True
            self.process.sleep(MAX_SLEEP_S)
        self.is_asleep = self.has_rung = False

    @property
    def _has_reports(self) -> bool:
        return self.sender is not None and bool(self.sender.reports)


@planted("leader", "a vote that heartbeats do not tell of")
class _HidesItsVote(SimLeader):
    def __init__(self, group: SimGroup, index: int) -> None:
        super().__init__(group, index)
        self.step_stats.vote = lambda: None  # type: ignore[method-assign]


@planted("leader", "a sleep that votes do not end")
class _SleepsThroughVotes(SimLeader):
    def _sleep(self) -> None:
        self.step_stats.wait(self.last_step, is_asleep=True)
        while not (self._inbox.frames or self.has_rung):
            self.is_asleep = True
            self.process.wait()
            self.is_asleep = False
        self.has_rung = False


@planted("leader", "a rank that ends before the others")
class _EndsWithTheFirst(SimLeader):
    def run(self) -> None:
        while not self.is_told_to_stop and not self.engine.has_ended:
            self.step()
            if self.engine.is_idle and not self.is_told_to_stop:
                self._sleep()


@planted("connection", "a resubmission that forgets its outputs")
class _ForgetsOutputs(SimConnection):
    def send(self, body: bytes) -> None:
        match decode(body, Inbound):
            case Submit(request, handoff):
                request = msgspec.structs.replace(request, output_token_ids=[])
                body = encode(Submit(request, handoff))
        super().send(body)


@planted("connection", "a connection's end that is ignored")
class _NeverEnds(SimConnection):
    def end(self) -> None:
        self.is_open = False


@planted("connection", "an abort that is not sent")
class _SendsNoAborts(SimConnection):
    def send(self, body: bytes) -> None:
        if not isinstance(decode(body, Inbound), Abort):
            super().send(body)


@planted("connection", "a leave that is not sent")
class _SendsNoLeaves(SimConnection):
    def send(self, body: bytes) -> None:
        if not isinstance(decode(body, Inbound), Leave):
            super().send(body)


@planted("connection", "a move that is taken for a loss")
class _TakesMovesForLosses(SimConnection):
    def deliver(self, output: EngineOutput) -> None:
        if output.finish_reason == FinishReason.MOVED:
            output = msgspec.structs.replace(output, finish_reason=FinishReason.ABORT)
        super().deliver(output)


@planted("connection", "a loss that is taken for a move")
class _TakesLossesForMoves(SimConnection):
    def deliver(self, output: EngineOutput) -> None:
        if output.finish_reason == FinishReason.KV_LOST:
            output = msgspec.structs.replace(output, finish_reason=FinishReason.MOVED)
        super().deliver(output)


@planted("connection", "a heartbeat that nobody misses")
class _MissesNoHeartbeat(SimConnection):
    def on_silence(self, until: float) -> None:
        """Wait for whatever else ends it."""


@planted("output_sender", "outputs for an ingress that is gone")
class _RunsForNobody(SimOutputSender):
    def send(self, outputs: list[EngineOutput]) -> list[str]:
        super().send(outputs)
        return []


@planted("directory", "a stale entry of the directory that is used")
class _UsesStaleEntries(Directory):
    def _able(self, pool: str) -> list[ConnectedLeader]:
        return [each for each in self._leaders.values() if each.report.pool == pool]


@planted("directory", "a bound on queues that is removed", is_by_cost)
class _BoundsNoQueue(Directory):
    def _chosen(self, pool: str, leaders: list[ConnectedLeader], stage: Stage) -> ChosenLeader:
        offers = [leader.offer(stage) for leader in leaders]
        num_outputs = 0 if pool == "prefill" else stage.max_outputs
        place, why = self._choosers[pool].choose(
            offers, stage.request.request_id, MAX_MODEL_LEN**2, num_outputs
        )
        return ChosenLeader(leaders[place], why, 0)


@planted("directory", "a leader chosen that drains")
class _ChoosesWhoDrains(Directory):
    def _able(self, pool: str) -> list[ConnectedLeader]:
        leaders = [each for each in self._leaders.values() if each.report.pool == pool]
        return [each for each in leaders if each._is_welcome]


@planted("directory", "a report of an epoch that is over")
class _GoesBack(Directory):
    def see(self, reports: Iterable[LeaderReport]) -> None:
        for report in reports:
            known = self._leaders.get(report.engine_id)
            if known is not None and report.epoch < known.report.epoch:
                del self._leaders[report.engine_id]
                known.on_end("it is older")
            super().see([report])


@planted("directory", "a report of a replica from before it drained")
class _BelievesOldReports(Directory):
    def see(self, reports: Iterable[LeaderReport]) -> None:
        known = {each.report.engine_id: each.report for each in self._leaders.values()}
        draining = (each for each in reports if each.state == "draining")
        old = {each.engine_id: known.get(each.engine_id, each) for each in draining}
        super().see([old.get(each.engine_id, each) for each in reports])


@planted("directory", "a leave for nobody")
class _LetsAllLeave(Directory):
    def see(self, reports: Iterable[LeaderReport]) -> None:
        super().see(reports)
        for leader in self._leaders.values():
            if leader.report.state == "draining":
                leader.leave()


@planted("directory", "news that wake nobody")
class _WakesNobody(Directory):
    def _wake(self) -> None:
        """Let them wait."""


@planted("directory", "engines of other weights taken for one's own", is_rolled_out)
class _TakesAllForItsOwn(Directory):
    def see(self, reports: Iterable[LeaderReport]) -> None:
        mine = Hashes(self._numerics_hash)
        super().see([replace(each, hashes=mine) for each in reports])


@planted("directory", "a successor that takes over too early", is_rolled_out)
class _ExpectsNobody(Directory):
    def _have_others(self) -> bool:
        return False


@planted("hashes", "KV of other blocks taken for one's own", has_new_blocks)
def _knows_no_blocks(weights: int, block_times: int) -> Hashes:
    return hashes(weights)


@planted("meter", "a replica that drains counted as gone", is_scaled)
class _ForgetsWhoDrains(Meter):
    def see(self, told: Mapping[str, Any], now: float) -> Signals:
        left = {name: state for name, state in told["replicas"].items() if state != "draining"}
        return super().see({**told, "replicas": left}, now)


@planted("pool_core", "a drain that nobody hears of")
class _DrainsInSecret(PoolCore):
    def _enter(self, state: str, error: str = "") -> None:
        if state != "draining":
            super()._enter(state, error)

    async def drain(self) -> None:
        await asyncio.sleep(1.5)


@planted("pool_core", "a drain that waits for nothing")
class _DrainsAtOnce(PoolCore):
    async def drain(self) -> None:
        self._enter("draining")


@planted("group", "a watchdog that never ticks")
class _NeverTicks(SimGroup):
    async def watch(self) -> str:
        never: asyncio.Future[str] = self.loop.create_future()
        return await never


@planted("group", "a watchdog without its second clock")
class _HasOneClock(SimGroup):
    async def watch(self) -> str:
        while "does not advance" in (named := await super().watch()):
            pass
        return named


@planted("scheduler", "an abort that leaks blocks")
class _LeaksOnAbort(Scheduler):
    def _abort(self, seq: sequence.Sequence) -> bool:
        held, seq.block_table = seq.block_table, []
        is_waiting = super()._abort(seq)
        seq.block_table = held
        return is_waiting


@planted("scheduler", "a leaver that is planned once more")
class _PlansLeaversAgain(Scheduler):
    def _may_end(self, seq: sequence.Sequence) -> bool:
        is_leaving, seq.is_leaving = seq.is_leaving, False
        may_end = super()._may_end(seq)
        seq.is_leaving = is_leaving
        return may_end

    def _is_in_flight(self, seq: sequence.Sequence) -> bool:
        return not seq.is_leaving and super()._is_in_flight(seq)


@planted("scheduler", "a pre-emption that forgets its outputs")
class _PreemptsToThePrompt(Scheduler):
    def _preempt(self, seq: sequence.Sequence) -> None:
        del seq.token_ids[seq.num_prompt_tokens :]
        super()._preempt(seq)


@planted("scheduler", "a token of the host in place of a device's")
class _FeedsStaleTokens(Scheduler):
    def schedule(self) -> StepPlan:
        plan = super().schedule()
        token_ids = plan.token_ids.copy()
        for i, seq in enumerate(self._in_flight.get(plan.step, [])[: plan.num_decodes]):
            if token_ids[i] == PENDING:
                token_ids[i] = seq.token_ids[-1]
        return msgspec.structs.replace(plan, token_ids=token_ids)


@planted("scheduler", "blocks that are freed in flight")
class _FreesWhatIsInFlight(Scheduler):
    def _is_in_flight(self, seq: sequence.Sequence) -> bool:
        return False


@planted("overlapped_engine", "a pre-emption of what is in flight")
class _PreemptsWhatIsInFlight(OverlappedEngine):
    def step(self) -> list[EngineOutput]:
        self.scheduler.schedule_ahead = self.scheduler.schedule  # type: ignore[method-assign]
        return super().step()


def _drafts(schedule: Schedule) -> bool:
    return schedule.num_drafts > 0


@planted("scheduler", "a draft that is kept whatever was drawn", _drafts)
class _KeepsDrafts(Scheduler):
    def _accept(self, seq: sequence.Sequence, draft: list[int], drawn: list[int]) -> list[int]:
        return super()._accept(seq, draft, draft + drawn[-1:])


@planted("scheduler", "KV of a wrong draft that counts as computed", _drafts)
class _KeepsWrongKV(Scheduler):
    def _accept(self, seq: sequence.Sequence, draft: list[int], drawn: list[int]) -> list[int]:
        kept = super()._accept(seq, draft, drawn)
        # The token that was drawn in place of a draft is never computed.
        seq.num_computed_tokens += len(kept) <= len(draft) and len(kept) > 1
        return kept


@planted("runner", "a follower that draws something else")
class _DrawsApart(SimRunner):
    def wait(self, launched: Any) -> SampledTokens:
        sampled = super().wait(launched)
        if self._rank.tp_rank == 0 or self.ended_step < 8:
            return sampled
        return msgspec.structs.replace(
            sampled, token_ids=[token + 1 for token in sampled.token_ids]
        )


@planted("machine", "an agreement of the wrong votes")
class _TakesOldVotes(LockstepMachine):
    def conclude(self) -> Any:
        first = next(iter(self._peers))
        if self._dp_rank == 1 and self._mine is not None and self._mine.num_seqs:
            self._peers[first].votes = deque([self._mine])
        return super().conclude()


@planted("follower_loop", "a plan whose digest is not checked")
class _SkipsTheDigest(FollowerLoop):
    def _execute(self, frame: StepFrame) -> None:
        self.step = frame.plan.step
        self._runner.execute(frame.plan, frame.agreed)


@planted("follower", "a wait for a plan that looks like work")
class _HidesItsWait(SimFollower):
    def __init__(self, group: SimGroup, index: int) -> None:
        super().__init__(group, index)
        phases = self.step_stats
        phases.wait = lambda step, *, is_asleep: phases._enter(step, Phase.BOOKING)  # type: ignore[method-assign]


@planted("handle", "a follower that nobody watches")
class _IsHeardAsALeaderAlone(SimHandle):
    def run(self) -> Awaitable[CallEnd]:
        end = super().run()
        return end if isinstance(self._rank, SimLeader) else self._loop.create_future()


@planted("leader", "a wait for peers that looks like sleep")
class _WaitsAsIfAsleep(SimLeader):
    def __init__(self, group: SimGroup, index: int) -> None:
        super().__init__(group, index)
        phases = self.step_stats
        phases.vote = lambda: phases.wait(self.last_step, is_asleep=True)  # type: ignore[method-assign]
        phases.agree = phases.vote  # type: ignore[method-assign]
        phases.build = lambda step, num_tokens: phases.wait(step, is_asleep=True)  # type: ignore[method-assign]


@planted("group_holder", "a handoff that is freed with the first of two readers")
class _FreesWithTheFirstReader(GroupHolder):
    def on_handoffs_ended(self, handoff_ids: list[int]) -> None:
        for handoff_id in handoff_ids:
            if self._num_alive.pop(handoff_id, 0):
                self._ended.append(handoff_id)


@planted("group_reader", "a read that is good on half of its ranks")
class _BelievesHalfARead(GroupReader):
    def on_read_ended(self, request_id: str, error: str) -> None:
        super().on_read_ended(request_id, "")


@planted("kv_pulls", "a release that is not listened to")
class _BelievesAnyRelease(KVPulls):
    def on_answer(self, source: KVSource, answer: KVAnswer, blocks: list[memoryview]) -> None:
        alive = msgspec.structs.replace(answer, alive=answer.alive or answer.call == "KVRelease")
        super().on_answer(source, alive, blocks)


@planted("kv_holder", "a handoff that ends with its first read")
class _EndsLeasesEarly(KVHolder):
    def covers(self, handoff_id: int, block_ids: list[int], generations: list[int]) -> bool:
        is_held = super().covers(handoff_id, block_ids, generations)
        if is_held:
            self._ended.append(handoff_id)
        return is_held


@planted("kv_holder", "a handoff whose lease never ends")
class _KeepsAbandonedHandoffs(KVHolder):
    def tick(self) -> list[int]:
        return []

    def next_deadline(self) -> float | None:
        return None
