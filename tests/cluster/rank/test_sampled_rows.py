"""How sequences are sampled is worked out when they change, and follows every change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from wire_structs import admission_of, plan_of, rules_of

from cluster.config import CacheConfig, EngineConfig, SchedulerConfig
from cluster.rank.inputs import StepBatch, StepInputs
from cluster.wire.messages import NewBlocks, RowAdmission, RowRules, StepPlan


@pytest.fixture
def inputs() -> StepInputs:
    cache, limits = CacheConfig(block_size=4), SchedulerConfig(4, 16)
    config = EngineConfig("model", 16, cache=cache, scheduler=limits)
    return StepInputs(config, 64, torch.device("cpu"))


def plan(
    rows: list[int], output_index: list[int], admitted: tuple[RowAdmission, ...] = ()
) -> StepPlan:
    """Each row decodes one token; a sequence with output index -1 samples none."""
    return plan_of(
        [1] * len(rows),
        admitted=list(admitted),
        new_blocks=[NewBlocks(a.row, 0, [1 + a.row]) for a in admitted],
        rows=rows,
        num_computed=[1] * len(rows),
        output_index=output_index,
    )


def admission(row: int, temperature: float, **fields: Any) -> RowAdmission:
    filters = {"top_k": 7 * row, "top_p": 0.5, "min_p": 0.25, "seed": 11 + row}
    return admission_of(row, temperature=temperature, **filters, **fields)


def temperatures(batch: StepBatch) -> list[float]:
    return batch.sampling.temperature.tolist()


def test_a_row_that_is_given_away_is_sampled_as_its_new_sequence_wants(inputs: StepInputs) -> None:
    first = (admission(0, 1.0), admission(1, 2.0, num_logprobs=3))
    batch = inputs.build(plan([0, 1], [0, 0], first))
    assert (temperatures(batch), batch.wants_logprobs) == ([1.0, 2.0], [-1, 3])
    batch = inputs.build(plan([0, 1], [1, 0], (admission(1, 0.0),)))
    assert (temperatures(batch), batch.wants_logprobs) == ([1.0, 0.0], [-1, -1])
    assert batch.sampling.num_logprobs == -1 and not batch.sampling.all_greedy


def test_steps_of_the_same_sequences_differ_in_what_is_drawn_alone(inputs: StepInputs) -> None:
    rows = (admission(0, 1.0), admission(1, 2.0))
    first = inputs.build(plan([0, 1], [0, 0], rows)).sampling
    drawn = first.uniform.tolist()
    second = inputs.build(plan([0, 1], [1, 1])).sampling
    assert second.uniform.tolist() != drawn
    assert inputs.build(plan([0, 1], [0, 0])).sampling.uniform.tolist() == drawn
    assert second.temperature.tolist() == [1.0, 2.0] and second.top_k.tolist() == [0, 7]


def test_rules_are_followed_as_long_as_a_row_has_some(inputs: StepInputs) -> None:
    rules = RowRules(rules_of(presence_penalty=1.0, bias_token_ids=(3,), biases=(2.0,)), (), 1, [5])
    first = (admission(0, 1.0), admission(1, 1.0, rules=rules))
    found = inputs.build(plan([0, 1], [0, 0], first)).sampling.adjustments
    assert found is not None and found.bias is not None and found.penalties is not None
    assert found.bias[1, 3] == 2.0
    assert inputs.build(plan([0, 1], [1, 0], (admission(1, 1.0),))).sampling.adjustments is None


def test_other_rows_between_two_steps_leave_nothing_behind(inputs: StepInputs) -> None:
    rows = (admission(0, 1.0), admission(1, 2.0), admission(2, 3.0))
    assert temperatures(inputs.build(plan([0, 1], [0, 0], rows))) == [1.0, 2.0]
    assert temperatures(inputs.build(plan([2, 1], [0, 1]))) == [3.0, 2.0]
    assert temperatures(inputs.build(plan([0, 1], [1, 2]))) == [1.0, 2.0]
    # A step that samples only the second of them, and one that samples none.
    batch = inputs.build(plan([0, 1], [-1, 3]))
    assert temperatures(batch) == [2.0]
    assert (batch.logits_index.tolist(), batch.sampled_rows.tolist()) == ([1], [1])
    batch = inputs.build(plan([0, 1], [-1, -1]))
    assert temperatures(batch) == [] and batch.logits_index.numel() == 0
    inputs.dummy(4, 4)
    assert temperatures(inputs.build(plan([0, 1], [-1, 4]))) == [2.0]
    assert temperatures(inputs.build(plan([0, 1], [2, 5]))) == [1.0, 2.0]
