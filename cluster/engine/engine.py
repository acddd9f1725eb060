"""The step: the heart of Lockstep. It is checked to be the same on all ranks of a group.

1. `scheduler.schedule()` turns what is waiting and running into a `StepPlan`.
2. `lockstep.agree(vote)` exchanges votes, of which each leader makes the same `StepAgreement`.
3. `channel.send(plan, agreed)` hands both to the followers, if there are any, with a digest that
   each compares with its own (`divergence.py`).
4. `execute(plan, agreed)` runs the model and samples; followers do the same. An empty plan becomes
   a dummy batch. Before the first collective `lockstep.wait_for_peers()` waits until every rank has
   confirmed the same step; it rarely blocks, because building inputs takes longer. An agreement may
   name a stage that all ranks enter first (`cluster/engine/compile_switch.py`).
5. `scheduler.update(plan, sampled)` appends tokens, ends sequences and returns their outputs.

The loop that calls `step` is in `cluster/rank/leader.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from cluster.engine.compile_switch import CompileSwitch
from cluster.engine.scheduler import Scheduler
from cluster.engine.sequence import SampledTokens
from cluster.engine.step_stats import StepStats
from cluster.wire.messages import EngineOutput, StepAgreement, StepPlan, Submit, Vote


class Lockstep(Protocol):
    def agree(self, vote: Vote) -> StepAgreement: ...

    def wait_for_peers(self) -> None:
        """Wait until every rank is known to have agreed on the same; raise if one has not."""


class Channel(Protocol):
    """The leader's side of the channel to its tensor-parallel followers."""

    def send(self, plan: StepPlan, agreed: StepAgreement) -> None: ...

    def note_drawn(self, token_ids: list[int]) -> None:
        """Note what a step drew where followers draw along: they are checked two steps later."""


class Runner(Protocol):
    """Runs plans on this rank, one after the other; shared by leaders and followers."""

    switch: CompileSwitch
    step_stats: StepStats

    def load_piece(self) -> None: ...

    def execute(
        self,
        plan: StepPlan,
        agreed: StepAgreement,
        wait_for_peers: Callable[[], None] | None = None,
    ) -> SampledTokens: ...

    def launch(
        self,
        plan: StepPlan,
        agreed: StepAgreement,
        wait_for_peers: Callable[[], None] | None = None,
    ) -> Any:
        """Enter the agreement's stage and run the batch, or a dummy one; return what to `wait` for.
        `wait_for_peers` is called before the first collective. On a device that runs by itself the
        step may still be under way at the return."""

    def wait(self, launched: Any) -> SampledTokens: ...


class Engine:
    """One data-parallel rank's scheduler with its own runner and the way to its followers'.
    `agreed` is the agreement of the last step. `is_draining`: this rank was asked to end; the group
    ends once all ranks were."""

    def __init__(
        self, scheduler: Scheduler, lockstep: Lockstep, channel: Channel | None, runner: Runner
    ) -> None:
        self.scheduler = scheduler
        self.lockstep = lockstep
        self.channel = channel
        self.runner = runner
        self.agreed: StepAgreement | None = None
        self.is_draining = False

    def step(self) -> list[EngineOutput]:
        """Run one step; return its outputs, also those of requests that ended without running."""
        plan = self.scheduler.schedule()
        agreed = self._agree(plan)
        if not agreed.has_work:
            self.lockstep.wait_for_peers()
            return self.scheduler.take_outputs()
        if self.channel is not None:
            self.channel.send(plan, agreed)
        sampled = self.runner.execute(plan, agreed, self.lockstep.wait_for_peers)
        return self.scheduler.update(plan, sampled)

    def _agree(self, plan: StepPlan) -> StepAgreement:
        switch = self.runner.switch
        vote = plan.vote(
            draining=self.is_draining,
            stage=switch.stage,
            can_advance=not switch.is_over and switch.can_advance,
        )
        self.agreed = self.lockstep.agree(vote)
        return self.agreed

    def submit(self, submit: Submit) -> None:
        self.scheduler.add(submit)

    def abort(self, request_ids: Iterable[str]) -> None:
        self.scheduler.abort(request_ids)

    @property
    def is_idle(self) -> bool:
        return self.agreed is not None and not self.agreed.has_work

    @property
    def has_ended(self) -> bool:
        """Whether all ranks have agreed to end: no step follows."""
        return self.agreed is not None and self.agreed.draining

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished


class OverlappedEngine(Engine):
    """The host plans step N+1 while the device runs step N; `agreed` is of the last one launched.

    1. `scheduler.schedule_ahead()` plans the next step. A sequence whose last token is being drawn
       is planned with `PENDING` in its place: the ranks have it on the device.
    2. Leaders agree and followers get the plan, as in the plain step.
    3. `runner.launch` puts the step behind the one in flight.
    4. The step in flight is retired: wait for its tokens, tell the channel, book them.

    A stop token is seen one step late, so a sequence that ends by one has been computed once more:
    that row's token is dropped. What needs the tokens first is not planned ahead, but as the plain
    step does: a running sequence that lacks a block, steps that nobody can run before the tokens
    are known, and stages of going over to compiled steps. `Engine` is the oracle: both generate the
    same tokens.

    Invariant: between two calls at most one step is in flight, and none if that agreement has no
    work.
    """

    def __init__(
        self, scheduler: Scheduler, lockstep: Lockstep, channel: Channel | None, runner: Runner
    ) -> None:
        super().__init__(scheduler, lockstep, channel, runner)
        self._in_flight: tuple[StepPlan, Any] | None = None

    def step(self) -> list[EngineOutput]:
        if self._in_flight is not None and not self.runner.switch.is_over:
            return self._retire()
        plan = self.scheduler.schedule_ahead()
        if plan is None:
            return self._retire()
        agreed = self._agree(plan)
        if not agreed.has_work:
            self.lockstep.wait_for_peers()
            return self._retire()
        if self.channel is not None:
            self.channel.send(plan, agreed)
        launched = self.runner.launch(plan, agreed, self.lockstep.wait_for_peers)
        outputs = self._retire()
        self._in_flight = plan, launched
        return outputs

    def _retire(self) -> list[EngineOutput]:
        if self._in_flight is None:
            return self.scheduler.take_outputs()
        (plan, launched), self._in_flight = self._in_flight, None
        sampled = self.runner.wait(launched)
        if self.channel is not None:
            self.channel.note_drawn(sampled.token_ids)
        return self.scheduler.update(plan, sampled)
