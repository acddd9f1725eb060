"""The overlapped step: the host plans step N+1 while the device runs step N.

`Engine.step` waits for a step's tokens before it plans the next, so a device idles while the host
books, plans and builds. Here one step is in flight between two calls:

1. `scheduler.schedule_ahead()` plans the next step. A sequence whose last token is being drawn is
   planned with `PENDING` in its place: the ranks have it on the device.
2. Leaders agree and followers get the plan, as in the plain step.
3. `executor.launch` puts the step behind the one in flight.
4. The step in flight is retired: wait for its tokens, tell the channel, book them.

A stop token is seen one step late, so a sequence that ends by one has been computed once more: that
row's token is dropped, and its blocks and row are free when that step has ended.

What needs the tokens first is not planned ahead: the step in flight is retired, and the next call
plans as the plain step does. This is so

- if a running sequence lacks a block, because the one that it pre-empts may be in flight;
- if nobody can run before the tokens are known: sequences that end with their pending token by
  their length, and those of a prefill engine, whose first token is their last;
- while the group serves and compiles: it enters a stage of going over between two steps.

A step that scores a prompt reads its logits on the host, so its launch waits for the device. All
other rules of sampling need nothing of the host: the plan counts pending tokens, and ranks count
tokens on the device. `Engine` is the readable twin and the oracle: both generate the same tokens.
"""

from __future__ import annotations

from typing import Any

from cluster.engine.engine import Channel, Engine, Executor, Lockstep
from cluster.engine.scheduler import Scheduler
from cluster.wire.messages import EngineOutput, StepPlan


class OverlappedEngine(Engine):
    """An engine that plans one step ahead; `agreed` is the agreement of the last one launched.

    Invariant: between two calls at most one step is in flight, and none if that agreement has no
    work.
    """

    def __init__(
        self, scheduler: Scheduler, lockstep: Lockstep, channel: Channel | None, executor: Executor
    ) -> None:
        super().__init__(scheduler, lockstep, channel, executor)
        self._in_flight: tuple[StepPlan, Any] | None = None
        """With what its launch returned."""

    def step(self) -> list[EngineOutput]:
        """Launch a step, if it can be planned now, and return the outputs of the one before."""
        if self._in_flight is not None and not self.executor.switch.is_over:
            return self._retire()
        plan = self.scheduler.schedule_ahead()
        if plan is None:
            return self._retire()
        agreed = self._agree(plan)
        if not agreed.has_work:
            self.lockstep.confirm()
            return self._retire()
        if self.channel is not None:
            self.channel.send(plan, agreed)
        launched = self.executor.launch(plan, agreed, self.lockstep.confirm)
        outputs = self._retire()
        self._in_flight = plan, launched
        return outputs

    def _retire(self) -> list[EngineOutput]:
        """Wait for the step in flight, if there is one, and return all outputs since."""
        if self._in_flight is None:
            return self.scheduler.take_outputs()
        (plan, launched), self._in_flight = self._in_flight, None
        sampled = self.executor.wait(launched)
        if self.channel is not None:
            self.channel.note_drawn(sampled.token_ids)
        return self.scheduler.update(plan, sampled)
