"""What pads a step names no sequence, and how rows are sampled follows every change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from wire_structs import admission_of, plan_of

from cluster.config import CacheConfig, EngineConfig, SchedulerConfig
from cluster.rank.inputs import StepBatch, StepInputs
from cluster.wire.messages import NewBlocks, RowAdmission, StepPlan

BLOCK_SIZE = 4
ROWS, TOKENS, COLUMNS = 6, 32, 5


@pytest.fixture
def inputs() -> StepInputs:
    cache, limits = CacheConfig(block_size=BLOCK_SIZE), SchedulerConfig(ROWS, TOKENS)
    config = EngineConfig("model", COLUMNS * BLOCK_SIZE, cache=cache, scheduler=limits)
    return StepInputs(config, 64, torch.device("cpu"))


def decode_plan(rows: list[int], computed: int, *, admit: bool = False) -> StepPlan:
    """Every row decodes one token behind `computed`; its blocks are its own."""
    blocks = [list(range(1 + row * COLUMNS, 1 + (row + 1) * COLUMNS)) for row in rows]
    return plan_of(
        [1] * len(rows),
        step=computed,
        admitted=[admission_of(row) for row in rows if admit],
        new_blocks=[NewBlocks(r, 0, b) for r, b in zip(rows, blocks, strict=True) if admit],
        rows=rows,
        num_computed=[computed] * len(rows),
        token_ids=[7 + row for row in rows],
    )


@pytest.mark.feature("D03")
def test_padding_of_a_decode_step_keeps_nothing_of_an_earlier_one(inputs: StepInputs) -> None:
    inputs.build(decode_plan([0, 1, 2, 3, 4, 5], 17, admit=True))
    batch = inputs.build(decode_plan([3], 18), 4, 4)
    attention = batch.attention
    assert attention.num_decodes == 4
    assert attention.seq_lens.tolist() == [19, 0, 0, 0]
    assert attention.block_table[1:].eq(0).all() and attention.block_table[0].ne(0).all()
    assert attention.cu_seqlens_q.tolist() == [0, 1, 1, 1, 1]
    # Block 0 is scratch: what padding tokens write there is read by nobody.
    assert attention.slot_mapping[1:].lt(BLOCK_SIZE).all()
    assert batch.input_ids.tolist() == [10, 0, 0, 0]
    assert batch.positions.tolist() == [18, 0, 0, 0]
    assert batch.logits_index.tolist() == [0]


@pytest.mark.feature("D03")
def test_padding_tokens_behind_prompts_belong_to_no_sequence(inputs: StepInputs) -> None:
    inputs.build(decode_plan([0, 1, 2, 3, 4, 5], 17, admit=True))
    batch = inputs.build(decode_plan([2, 4], 18), 8, 2)
    assert batch.attention.seq_lens.tolist() == [19, 19]
    assert batch.attention.num_decodes == 2
    assert batch.input_ids.tolist() == [9, 11] + [0] * 6
    assert batch.attention.slot_mapping[2:].lt(BLOCK_SIZE).all()


@pytest.mark.feature("D06")
def test_buffers_stay_where_they_are(inputs: StepInputs) -> None:
    addresses = set()
    inputs.build(decode_plan([0, 1, 2, 3, 4, 5], 9, admit=True))
    for step in range(10, 18):
        rows = list(range(1 + step % 5))
        batch = inputs.build(decode_plan(rows, step), 6, 6)
        attention = batch.attention
        tensors = (batch.input_ids, batch.positions, attention.seq_lens, attention.block_table)
        addresses.add(tuple(t.data_ptr() for t in (*tensors, attention.slot_mapping)))
    assert len(addresses) == 1


def test_a_batch_of_padding_alone_attends_to_nothing(inputs: StepInputs) -> None:
    inputs.build(decode_plan([0, 1, 2, 3, 4, 5], 17, admit=True))
    decoding, prompt = inputs.dummy(4, 4), inputs.dummy(8, 1)
    for batch, num_decodes, num_tokens in ((decoding, 4, 4), (prompt, 0, 8)):
        assert batch.attention.num_decodes == num_decodes
        assert batch.attention.seq_lens.eq(0).all()
        assert batch.attention.cu_seqlens_q.eq(0).all()
        assert batch.input_ids.tolist() == [0] * num_tokens
        assert batch.attention.slot_mapping.lt(BLOCK_SIZE).all()
        assert batch.wants_logprobs == []


# --- how rows are sampled -----------------------------------------------------------------


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
