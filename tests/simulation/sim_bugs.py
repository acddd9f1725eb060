"""Planted bugs: what the simulator must find, each in place of one part of a simulation.

Nothing of the code under test is edited. A bug is a subclass or a wrapper
that does what a plausible slip in that code would do.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from sim_group import SimGroup
from sim_owner import SimHandle, SimPool
from sim_rank import MAX_SLEEP_S, SimFollower, SimLeader, SimRunner
from sim_world import Plants

from cluster.actors.rank_group import CallEnd
from cluster.engine import sequence
from cluster.engine.lockstep import LockstepMachine, agree
from cluster.engine.overlap import OverlappedEngine
from cluster.engine.scheduler import Scheduler
from cluster.engine.watchdog import Phase
from cluster.kv.group import GroupReader
from cluster.kv.handoff import KVHolder
from cluster.kv.reads import KVPulls
from cluster.rank.follower_loop import FollowerLoop
from cluster.wire.group_messages import StepFrame
from cluster.wire.messages import (
    PENDING,
    EngineOutput,
    KVAnswer,
    KVSource,
    SampledTokens,
    StepAgreement,
    StepKind,
    StepPlan,
    Submit,
    Vote,
    decode,
    encode,
)
from serve.pools.pool_core import PoolCore


class _SkipsDummies(SimRunner):
    def forward(self, plan: StepPlan, agreed: StepAgreement, num_tokens: int) -> None:
        if plan.num_seqs:
            super().forward(plan, agreed, num_tokens)


class _BranchesLocally(SimRunner):
    def forward(self, plan: StepPlan, agreed: StepAgreement, num_tokens: int) -> None:
        if plan.num_decodes < plan.num_seqs:
            self.collective(agreed.step, "prompts", num_tokens)
        super().forward(plan, agreed, num_tokens)


class _RunsUnpaddedDummies(SimRunner):
    def num_tokens(self, plan: StepPlan, across: tuple[int, ...]) -> int:
        return super().num_tokens(plan, across) if plan.num_seqs else 1


class _RunsUnpaddedDecodes(SimRunner):
    def num_tokens(self, plan: StepPlan, across: tuple[int, ...]) -> int:
        is_decode = plan.num_seqs and plan.num_decodes == plan.num_seqs
        return plan.num_tokens if is_decode else super().num_tokens(plan, across)


class _NeverConfirms(SimRunner):
    def confirm(self, confirm: Callable[[], None]) -> None:
        """Go on at once."""


class _StaysInItsEpoch(SimLeader):
    """Rank 1 of a rebuilt group is told the epoch before."""

    def __init__(self, group: SimGroup, index: int) -> None:
        super().__init__(group, index)
        if self.dp_rank == 1 and group.epoch:
            self.epoch -= 1
            self.scheduler = self._scheduler()


class _DropsAborts(SimLeader):
    def abort(self, request_ids: list[str]) -> None:
        """Forget it."""


class _DispatchesOnItsBatch(LockstepMachine):
    def _agree(self, votes: Sequence[Vote]) -> StepAgreement:
        agreed, mine = super()._agree(votes), agree([votes[self._dp_rank]], self._switch.captured)
        across = mine.num_tokens_across_dp * len(votes)
        return msgspec.structs.replace(agreed, batch=mine.batch, num_tokens_across_dp=across)


class _DispatchesOnItsClock(SimLeader):
    """Some of the time it takes every step for one that replays nothing."""

    def start(self) -> None:
        super().start()
        if (machine := self.machine) is not None:
            agree = machine._agree
            machine._agree = lambda votes: agree(self._if_early(votes))  # type: ignore[method-assign]

    def _if_early(self, votes: Sequence[Vote]) -> Sequence[Vote]:
        if self.group.loop.now % 1.0 <= 0.9:
            return votes
        return [msgspec.structs.replace(vote, kind=StepKind.MIXED) for vote in votes]


class _GoesOverAlone(SimLeader):
    """Runs what was compiled as soon as it has it."""

    def on_compiled(self) -> None:
        super().on_compiled()
        self.switch.stage = 1


class _GoesOverBeforeItsLeader(SimFollower):
    """Runs what was compiled as soon as it has it, and captures a graph."""

    def on_compiled(self) -> None:
        super().on_compiled()
        self.switch.stage = 2


class _CapturesEarly(SimRunner):
    """Captures a graph that the next step was to capture."""

    def enter(self, agreed: StepAgreement, num_tokens: int) -> None:
        super().enter(agreed, num_tokens)
        if agreed.stage == 2 and self._rank.index == 1:
            super().enter(msgspec.structs.replace(agreed, stage=3), num_tokens)


class _ForgetsFollowers(SimLeader):
    """Goes over although a follower has not loaded what was compiled."""

    def on_compiled(self) -> None:
        self.switch._num_awaited = 0
        super().on_compiled()


class _SleepsUntilARequest(SimLeader):
    """A rank that has compiled does not wake its group."""

    def on_compiled(self) -> None:
        self.switch.is_loaded = True

    def sleep(self) -> None:
        self.step_stats.wait(self.last_step, is_asleep=True)
        while not (self.inbox or self.peers.has_frames or self.has_rung or self._has_reports):
            self.is_asleep = True
            self.process.sleep(MAX_SLEEP_S)
        self.is_asleep = self.has_rung = False

    @property
    def _has_reports(self) -> bool:
        return self.sender is not None and bool(self.sender.reports)


class _HidesItsVote(SimLeader):
    """Its heartbeat says that it plans, until all have voted."""

    def __init__(self, group: SimGroup, index: int) -> None:
        super().__init__(group, index)
        self.step_stats.vote = lambda: None  # type: ignore[method-assign]


class _SleepsThroughVotes(SimLeader):
    """Sleeps in a wait over its inbox and doorbell alone, and without a bound."""

    def sleep(self) -> None:
        self.step_stats.wait(self.last_step, is_asleep=True)
        while not (self.inbox or self.has_rung):
            self.is_asleep = True
            self.process.wait()
            self.is_asleep = False
        self.has_rung = False


class _EndsWithTheFirst(SimLeader):
    """Ends at once when it is told, without asking the others."""

    def run(self) -> None:
        while not self.is_told_to_stop and not self.engine.has_ended:
            self.step()
            if self.engine.is_idle and not self.is_told_to_stop:
                self.sleep()


class _ForgetsOutputs(SimPool):
    """A request that is submitted again comes without the tokens that were delivered."""

    def generate(self, request_id: str, frame: bytes) -> asyncio.Task[str]:
        submit: Submit = decode(frame, Submit)
        request = msgspec.structs.replace(submit.request, output_token_ids=[])
        return super().generate(request_id, encode(Submit(request, submit.handoff)))


class _LosesOpenRequests(PoolCore):
    """Requests of a group that ended are not given back to the router."""

    def _lose(self, reason: str) -> None:
        self._enter("restarting", reason)


class _NeverTicks(SimGroup):
    async def watch(self) -> str:
        never: asyncio.Future[str] = self.loop.create_future()
        return await never


class _HasOneClock(SimGroup):
    """Ranks that answer are never stuck."""

    async def watch(self) -> str:
        while "does not advance" in (named := await super().watch()):
            pass
        return named


class _LeaksOnAbort(Scheduler):
    """A request that is aborted while it runs keeps its blocks."""

    def _abort(self, seq: sequence.Sequence) -> None:
        held, seq.block_table = seq.block_table, []
        super()._abort(seq)
        seq.block_table = held


class _PreemptsToThePrompt(Scheduler):
    """A sequence that is pre-empted starts over from its prompt, and says its output again."""

    def _preempt(self, seq: sequence.Sequence) -> None:
        del seq.token_ids[seq.num_prompt_tokens :]
        super()._preempt(seq)


class _FeedsStaleTokens(Scheduler):
    """Where the host does not know a token yet, the ranks are told the one before it."""

    def schedule(self) -> StepPlan:
        plan = super().schedule()
        token_ids = plan.token_ids.copy()
        for i, seq in enumerate(self._in_flight.get(plan.step, [])[: plan.num_decodes]):
            if token_ids[i] == PENDING:
                token_ids[i] = seq.token_ids[-1]
        return msgspec.structs.replace(plan, token_ids=token_ids)


class _FreesWhatIsInFlight(Scheduler):
    """A sequence that has ended gives up its blocks at once, and a step in flight writes there."""

    def _is_in_flight(self, seq: sequence.Sequence) -> bool:
        return False


class _PreemptsWhatIsInFlight(OverlappedEngine):
    """A step is planned before the one in flight has ended, whatever is lacking."""

    def step(self) -> list[EngineOutput]:
        self.scheduler.schedule_ahead = self.scheduler.schedule  # type: ignore[method-assign]
        return super().step()


class _DrawsApart(SimRunner):
    """A follower keeps another token than its leader has drawn."""

    def wait(self, launched: Any) -> SampledTokens:
        sampled = super().wait(launched)
        if self._rank.tp_rank == 0 or self.ended_step < 8:
            return sampled
        return msgspec.structs.replace(
            sampled, token_ids=[token + 1 for token in sampled.token_ids]
        )


class _TakesOldVotes(LockstepMachine):
    """Votes are put into the agreement as they come, each rank's own first."""

    def conclude(self) -> Any:
        first = next(iter(self._peers))
        if self._dp_rank == 1 and self._mine is not None and self._mine.num_seqs:
            self._peers[first].votes = deque([self._mine])
        return super().conclude()


class _SkipsTheDigest(FollowerLoop):
    """Runs whatever it is told."""

    def _execute(self, frame: StepFrame) -> None:
        self.step = frame.plan.step
        self._runner.execute(frame.plan, frame.agreed)


class _HidesItsWait(SimFollower):
    """Its heartbeat says that it books a step while it waits for a plan."""

    def __init__(self, group: SimGroup, index: int) -> None:
        super().__init__(group, index)
        phases = self.step_stats
        phases.wait = lambda step, *, is_asleep: phases._enter(step, Phase.BOOKING)  # type: ignore[method-assign]


class _IsHeardAsALeaderAlone(SimHandle):
    """A follower's death is heard of through its leader."""

    def run(self) -> Awaitable[CallEnd]:
        end = super().run()
        return end if isinstance(self._rank, SimLeader) else self._loop.create_future()


class _WaitsAsIfAsleep(SimLeader):
    """Its heartbeat says that it sleeps while it waits for others."""

    def __init__(self, group: SimGroup, index: int) -> None:
        super().__init__(group, index)
        phases = self.step_stats
        phases.vote = lambda: phases.wait(self.last_step, is_asleep=True)  # type: ignore[method-assign]
        phases.agree = phases.vote  # type: ignore[method-assign]
        phases.build = lambda step, num_tokens: phases.wait(step, is_asleep=True)  # type: ignore[method-assign]


class _BelievesHalfARead(GroupReader):
    """A read is good if it has ended on every rank."""

    def on_read_ended(self, request_id: str, error: str) -> None:
        super().on_read_ended(request_id, "")


class _BelievesAnyRelease(KVPulls):
    """What was copied is good, whether or not its lease held."""

    def on_answer(self, source: KVSource, answer: KVAnswer, blocks: list[memoryview]) -> None:
        alive = msgspec.structs.replace(answer, alive=answer.alive or answer.call == "KVRelease")
        super().on_answer(source, alive, blocks)


class _EndsLeasesEarly(KVHolder):
    """A read ends its ticket: the rest is asked for in vain, and believed to have been there."""

    def covers(self, ticket: int, block_ids: list[int], generations: list[int]) -> bool:
        is_held = super().covers(ticket, block_ids, generations)
        if is_held:
            self._ended.append(ticket)
        return is_held


class _KeepsAbandonedTickets(KVHolder):
    """A lease that nobody renews runs on."""

    def tick(self) -> list[int]:
        return []

    def next_deadline(self) -> float | None:
        return None


def _plants(**parts: Any) -> Plants:
    plants = Plants()
    for name, part in parts.items():
        setattr(plants, name, part)
    return plants


BUGS: dict[str, Plants] = {
    "a skipped dummy step": _plants(runner=_SkipsDummies),
    "a local branch before a collective": _plants(runner=_BranchesLocally),
    "an unpadded dummy": _plants(runner=_RunsUnpaddedDummies),
    "an unpadded decode": _plants(runner=_RunsUnpaddedDecodes),
    "a collective before the confirms": _plants(runner=_NeverConfirms),
    "an epoch off by one": _plants(leader=_StaysInItsEpoch),
    "a dropped abort": _plants(leader=_DropsAborts),
    "dispatch on a rank's own batch": _plants(machine=_DispatchesOnItsBatch),
    "dispatch on a rank's own clock": _plants(leader=_DispatchesOnItsClock),
    "a rank that goes over on its own": _plants(leader=_GoesOverAlone),
    "a follower that goes over before its leader": _plants(follower=_GoesOverBeforeItsLeader),
    "a graph captured a step early": _plants(runner=_CapturesEarly),
    "a leader that goes over without its followers": _plants(leader=_ForgetsFollowers),
    "a sleep that compiled pieces do not end": _plants(leader=_SleepsUntilARequest),
    "a sleep that votes do not end": _plants(leader=_SleepsThroughVotes),
    "a rank that ends before the others": _plants(leader=_EndsWithTheFirst),
    "an agreement of the wrong votes": _plants(machine=_TakesOldVotes),
    "a resubmission that forgets its outputs": _plants(pool=_ForgetsOutputs),
    "a restart that forgets open requests": _plants(pool_core=_LosesOpenRequests),
    "a watchdog that never ticks": _plants(group=_NeverTicks),
    "a watchdog without its second clock": _plants(group=_HasOneClock),
    "an abort that leaks blocks": _plants(scheduler=_LeaksOnAbort),
    "a pre-emption that forgets its outputs": _plants(scheduler=_PreemptsToThePrompt),
    "a token of the host in place of a device's": _plants(scheduler=_FeedsStaleTokens),
    "blocks that are freed in flight": _plants(scheduler=_FreesWhatIsInFlight),
    "a pre-emption of what is in flight": _plants(overlapped_engine=_PreemptsWhatIsInFlight),
    "a follower that draws something else": _plants(runner=_DrawsApart),
    "a vote that heartbeats do not tell of": _plants(leader=_HidesItsVote),
    "a wait for peers that looks like sleep": _plants(leader=_WaitsAsIfAsleep),
    "a plan whose digest is not checked": _plants(follower_loop=_SkipsTheDigest),
    "a wait for a plan that looks like work": _plants(follower=_HidesItsWait),
    "a follower that nobody watches": _plants(handle=_IsHeardAsALeaderAlone),
    "a read that is good on half of its ranks": _plants(group_reader=_BelievesHalfARead),
    "a release that is not listened to": _plants(kv_pulls=_BelievesAnyRelease),
    "a ticket that ends with its first read": _plants(kv_holder=_EndsLeasesEarly),
    "a ticket whose lease never ends": _plants(kv_holder=_KeepsAbandonedTickets),
}
