"""A step that is not the leader's is found by the field that differs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from wire_structs import admission_of, plan_of

from cluster.engine.divergence import StepDigester, StepDivergence, check_digest
from cluster.engine.lockstep import AloneLockstep
from cluster.wire.messages import NewBlocks, PromptTargets, StepAgreement, StepPlan


def make_plan(step: int, **fields: Any) -> StepPlan:
    given = {"rows": [0, 2], "num_computed": [9, 4], "output_index": [3, -1]}
    given |= {"token_ids": [7, 8, 9]}
    return plan_of([1, 2], epoch=3, step=step, **{**given, **fields})


PLANS = [
    make_plan(
        1,
        admitted=[admission_of(0, seed=5)],
        new_blocks=[NewBlocks(0, 0, [4, 6]), NewBlocks(2, 0, [1])],
    ),
    make_plan(2, num_computed=[10, 6]),
    make_plan(4, new_blocks=[NewBlocks(2, 1, [3])], num_computed=[11, 8]),  # 3 was empty
]


def agree(plan: StepPlan) -> StepAgreement:
    return AloneLockstep().agree(plan.vote())


def follow(sent: list[StepPlan], received: list[tuple[StepPlan, StepAgreement]]) -> None:
    """Compare what a leader sent with what its follower got, frame by frame."""
    leader, follower = StepDigester(), StepDigester()
    digests = {plan.step: leader.digest(plan, agree(plan)) for plan in sent}
    by_position = list(digests.values())
    for i, (plan, agreed) in enumerate(received):
        wanted = digests.get(plan.step, by_position[min(i, len(by_position) - 1)])
        check_digest("rank dp=0 tp=1", wanted, follower.digest(plan, agreed))


def test_what_arrives_as_it_was_sent_is_the_leaders_step() -> None:
    follow(PLANS, [(plan, agree(plan)) for plan in PLANS])


@pytest.mark.feature("T04")
def test_who_drew_something_else_is_found_two_steps_later() -> None:
    """Where steps overlap; by then each rank has waited for the step."""
    leader, follower = (StepDigester(is_overlapped=True) for _ in range(2))
    plans = [make_plan(step, rows=[0, 2], token_ids=[-1, 8, 9]) for step in range(1, 6)]
    for plan in plans:
        wanted = leader.digest(plan, agree(plan))
        found = follower.digest(plan, agree(plan))
        if plan.step < 5:
            check_digest("rank dp=0 tp=1", wanted, found)
            leader.note_drawn([plan.step])
            follower.note_drawn([plan.step + (plan.step == 3)])
    with pytest.raises(StepDivergence, match=r"rank dp=0 tp=1 step 5: drawn: wanted \d+, found"):
        check_digest("rank dp=0 tp=1", wanted, found)


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"epoch": 2}, "epoch"),
    ({"step": 5}, "step"),
    ({"rows": [0, 1]}, "rows"),
    ({"rows": [0], "num_seqs": 1}, "num_seqs"),
    ({"num_computed": [11, 7]}, "num_computed"),
    ({"num_new": [2, 1]}, "num_new"),
    ({"output_index": [3, 0]}, "output_index"),
    ({"token_ids": [7, 8, 8]}, "token_ids"),
    ({"token_ids": [7, 8], "num_tokens": 2}, "num_tokens"),
    ({"num_decodes": 0}, "num_decodes"),
    ({"num_drafting": 1}, "num_drafting"),
    ({"prompt_targets": [PromptTargets(0, [7], 0)]}, "prompt_targets"),
    ({"known_token_ids": [5]}, "known_token_ids"),
    ({"new_blocks": [NewBlocks(2, 1, [2])]}, "row_state"),
    ({"new_blocks": []}, "row_state"),
    ({"admitted": [admission_of(0, seed=5, temperature=0.5)]}, "row_state"),
]


def test_each_field_of_a_plan_is_altered_here() -> None:
    altered = {name for change, _ in CHANGES for name in change}
    assert altered == {*StepPlan.__struct_fields__}


@pytest.mark.parametrize(("change", "field"), CHANGES)
def test_an_altered_plan_is_named_by_its_field(change: dict[str, Any], field: str) -> None:
    last = PLANS[-1]
    altered = msgspec.structs.replace(last, **change)
    received = [*((plan, agree(plan)) for plan in PLANS[:-1]), (altered, agree(last))]
    message = rf"^rank dp=0 tp=1 step {altered.step}: {field}: wanted \d+, found \d+$"
    with pytest.raises(StepDivergence, match=message):
        follow(PLANS, received)


@pytest.mark.feature("P13")
@pytest.mark.parametrize("field", StepAgreement.__struct_fields__)
def test_every_field_of_the_agreement_counts(field: str) -> None:
    agreed = agree(PLANS[0])
    value = getattr(agreed, field)
    if isinstance(value, tuple):
        changed = (*value, 0)
    else:
        changed = not value if isinstance(value, bool) else value + 1
    other = msgspec.structs.replace(agreed, **{field: changed})
    with pytest.raises(StepDivergence, match="agreement: wanted"):
        follow(PLANS, [(PLANS[0], other)])


@pytest.mark.parametrize("arrived", [[0, 2], [0, 0], [1], [0, 1, 1]])
def test_a_frame_that_is_lost_or_repeated_is_a_gap(arrived: list[int]) -> None:
    with pytest.raises(StepDivergence, match="previous_step: wanted"):
        follow(PLANS, [(PLANS[i], agree(PLANS[i])) for i in arrived])


def test_a_row_that_missed_its_blocks_shows_in_every_later_step() -> None:
    """Also where the frame itself came in order."""
    silent = msgspec.structs.replace(PLANS[0], admitted=[], new_blocks=[])
    leader, follower = StepDigester(), StepDigester()
    leader.digest(PLANS[0], agree(PLANS[0]))
    follower.digest(silent, agree(silent))
    # PLANS[2] brings blocks of its own: what came before them counts all the same.
    wanted, found = (d.digest(PLANS[2], agree(PLANS[2])) for d in (leader, follower))
    with pytest.raises(StepDivergence, match="row_state"):
        check_digest("rank", wanted, found)
