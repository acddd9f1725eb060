"""`StepDivergence`: one rank's step is not another's, and how a follower finds out.

The leader sends its digest along with the plan. A follower makes its own from what it received and
from its own past: a frame that was lost, repeated or altered on the way shows as the first field
that differs. It does not enter the step's collectives then; the leader waits for no answer.
"""

from __future__ import annotations

from collections import deque

from cluster.wire.group_messages import StepDigest
from cluster.wire.messages import StepAgreement, StepPlan, checksum


class StepDivergence(RuntimeError):
    """One rank's step is not another's; the message's last line names rank, step and field. The
    lines before it are the end of the step log of the rank that found out."""

    def __init__(
        self,
        rank: str,
        step: int,
        field: str,
        wanted: object,
        found: object,
        log: tuple[str, ...] = (),
    ) -> None:
        lines = [*log, f"{rank} step {step}: {field}: wanted {wanted}, found {found}"]
        super().__init__("\n".join(lines))
        self.parts = (rank, step, field, wanted, found)
        self.log = log

    def after(self, log: tuple[str, ...]) -> StepDivergence:
        return StepDivergence(*self.parts, log)

    def __reduce__(self) -> tuple[type[StepDivergence], tuple[object, ...]]:
        return type(self), (*self.parts, self.log)


class StepDigester:
    """Digests of the steps that one rank runs. Where steps overlap, that of the next step but one
    covers what a step drew: by then every rank has called `note_drawn`. Invariant: `row_state`
    covers all admissions and new blocks so far; two ranks with equal digests hold equal rows."""

    def __init__(self, *, is_overlapped: bool = False) -> None:
        self._previous_step = 0
        self._row_state = 0
        self._is_overlapped = is_overlapped
        self._drawn = 0
        self._drawn_states = deque((0, 0))
        """Of what was drawn up to a step, for the digest of the next step but one."""

    def note_drawn(self, token_ids: list[int]) -> None:
        """Note what a step drew. Call it once for each step, in their order."""
        self._drawn = checksum(token_ids, self._drawn)
        self._drawn_states.append(self._drawn)

    def digest(self, plan: StepPlan, agreed: StepAgreement) -> StepDigest:
        """Return the digest of the next step. Call it once per step."""
        previous, self._previous_step = self._previous_step, plan.step
        if plan.admitted or plan.new_blocks:
            self._row_state = checksum((plan.admitted, plan.new_blocks), self._row_state)
        return StepDigest(
            previous_step=previous,
            epoch=plan.epoch,
            step=plan.step,
            num_seqs=plan.num_seqs,
            num_tokens=plan.num_tokens,
            num_decodes=plan.num_decodes,
            num_drafting=plan.num_drafting,
            agreement=checksum(agreed),
            rows=checksum(plan.rows),
            num_computed=checksum(plan.num_computed),
            num_new=checksum(plan.num_new),
            output_index=checksum(plan.output_index),
            token_ids=checksum(plan.token_ids),
            prompt_targets=checksum(plan.prompt_targets) if plan.prompt_targets else 0,
            known_token_ids=checksum(plan.known_token_ids) if plan.known_token_ids else 0,
            row_state=self._row_state,
            drawn=self._drawn_states.popleft() if self._is_overlapped else 0,
        )


def check_digest(rank: str, wanted: StepDigest, found: StepDigest) -> None:
    """Compare a leader's digest with a follower's own; raise for the first field that differs."""
    if wanted == found:
        return
    for field in StepDigest.__struct_fields__:
        theirs, ours = getattr(wanted, field), getattr(found, field)
        if theirs != ours:
            raise StepDivergence(rank, found.step, field, theirs, ours)
