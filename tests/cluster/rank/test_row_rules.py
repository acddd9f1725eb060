"""The mask of allowed tokens, and what it costs a step to admit the most that may be asked for."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from wire_structs import admission_of, rules_of, submit_of

from cluster.config import Role
from cluster.engine.blocks import BlockManager
from cluster.engine.request_limits import RequestLimits
from cluster.engine.sequence import Sequence
from cluster.rank.buffers import Staging
from cluster.rank.row_rules import RowRulesTables
from cluster.wire.messages import (
    Inbound,
    LogitRules,
    RowAdmission,
    RowRules,
    Submit,
    decode,
    encode,
)

VOCAB = 152_064


def rules(allowed: list[int], vocab_size: int) -> LogitRules:
    bits = np.zeros(vocab_size, dtype=bool)
    bits[allowed] = True
    mask = np.packbits(bits, bitorder="little").tobytes().rstrip(b"\0")
    return rules_of(allowed_tokens=mask)


def tables_of(rows: int, tokens: int, vocab_size: int) -> RowRulesTables:
    staging = Staging(torch.device("cpu"))
    tables = RowRulesTables(rows, tokens, rows, vocab_size, staging)
    staging.allocate()
    return tables


def admission(row: int, found: LogitRules) -> RowAdmission:
    return admission_of(row, rules=RowRules(found, (), 5, []))


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 64, 509])
def test_no_other_token_is_left(vocab_size: int) -> None:
    tables = tables_of(2, 8, vocab_size)
    for allowed in ([0], [vocab_size - 1], [vocab_size // 2], list(range(0, vocab_size, 3))):
        tables.admit(admission(1, rules(allowed, vocab_size)))
        found = tables.adjustments(np.array([0, 1]), np.array([0, 0]))
        assert found.bias[1].isfinite().nonzero().flatten().tolist() == allowed
        assert not found.bias[0].any()


def test_a_bias_counts_among_what_is_allowed() -> None:
    tables = tables_of(1, 8, 16)
    mask = (1 << 3 | 1 << 9).to_bytes(2, "little")
    tables.admit(
        admission(0, rules_of(bias_token_ids=(3, 5), biases=(2.0, 4.0), allowed_tokens=mask))
    )
    found = tables.adjustments(np.array([0]), np.array([0]))
    assert found.bias[0, 3] == 2.0 and found.bias[0, 9] == 0.0 and found.bias[0, 5] == -torch.inf


def test_the_most_that_may_be_asked_for_holds_a_step_up_for_milliseconds() -> None:
    """Measured is the step thread: to decode a submission, to check it, and to take its row."""
    mask = rules(list(range(1, VOCAB)), VOCAB).allowed_tokens
    asked = rules_of(
        presence_penalty=2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.3,
        bias_token_ids=tuple(range(1024)),
        biases=(1.0,) * 1024,
        allowed_tokens=mask,
        min_tokens=16,
    )
    stops = tuple(range(5000, 5512))
    logprobs = {"num_logprobs": 20, "num_prompt_logprobs": 20}
    long = submit_of("r", [151_000] * 4096, stop_token_ids=stops, rules=asked, **logprobs)
    frame = encode(long)
    blocks = BlockManager(1000, 16, enable_prefix_caching=True)
    limits = RequestLimits(blocks, 8192, Role.MIXED, VOCAB)
    tables = tables_of(4, 64, VOCAB)
    tables.admit(admission(3, asked))  # the first row makes the tables
    took: list[float] = []
    for _ in range(15):
        began = time.thread_time()
        submit: Submit = decode(frame, Inbound)
        assert limits.find_error(Sequence(submit.request, max_model_len=8192)) == ""
        tables.admit(admission_of(0, rules=RowRules(asked, stops, 4096, [])))
        took.append(time.thread_time() - began)
    print(f"{min(took) * 1e3:.2f} ms")
    assert min(took) < 0.005
