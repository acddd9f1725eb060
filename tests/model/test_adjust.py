"""Bias, masks and penalties against transformers' processors and OpenAI's formula."""

from __future__ import annotations

import pytest
import torch
import transformers

from model.sampler import Adjustments, Penalties, adjust_logits

VOCAB = 41
PROMPTS = [[1, 2, 2, 3], [40], [7, 8, 9, 7]]
OUTPUTS: list[list[int]] = [[3, 3, 3, 5], [], [7, 0]]


def random_logits() -> torch.Tensor:
    return 3 * torch.randn(len(PROMPTS), VOCAB, generator=torch.Generator().manual_seed(1))


def penalties(presence: float, frequency: float, repetition: float) -> Adjustments:
    counts = torch.zeros(len(PROMPTS), VOCAB, dtype=torch.int32)
    is_in_prompt = torch.zeros(len(PROMPTS), VOCAB, dtype=torch.bool)
    for row, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        is_in_prompt[row, prompt] = True
        counts[row] = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=VOCAB)
    rows = torch.arange(len(PROMPTS))
    given = [torch.full((len(PROMPTS),), value) for value in (presence, frequency, repetition)]
    return Adjustments(rows, None, None, None, Penalties(*given, counts, is_in_prompt))


@pytest.mark.parametrize("repetition", [0.5, 1.0, 1.1, 2.0])
def test_repetition_penalty_is_that_of_transformers(repetition: float) -> None:
    logits = random_logits()
    found = adjust_logits(logits, penalties(0.0, 0.0, repetition))
    processor = transformers.RepetitionPenaltyLogitsProcessor(repetition)
    for row, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        history = torch.tensor([prompt + output])
        assert torch.equal(found[row], processor(history, logits[row : row + 1].clone())[0])


@pytest.mark.parametrize(("presence", "frequency"), [(0.5, 0.0), (0.0, 0.3), (-1.0, 1.5)])
def test_presence_and_frequency_follow_openais_formula(presence: float, frequency: float) -> None:
    logits = random_logits()
    found = adjust_logits(logits, penalties(presence, frequency, 1.0))
    for row, output in enumerate(OUTPUTS):
        for token in range(VOCAB):
            count = output.count(token)
            wanted = float(logits[row, token]) - count * frequency - (count > 0) * presence
            assert float(found[row, token]) == pytest.approx(wanted, abs=1e-6)


def test_repetition_comes_before_the_two_others() -> None:
    logits = random_logits()
    found = adjust_logits(logits, penalties(0.5, 0.25, 1.7))
    repeated = adjust_logits(logits, penalties(0.0, 0.0, 1.7))
    torch.testing.assert_close(found, adjust_logits(repeated, penalties(0.5, 0.25, 1.0)))


def test_bias_is_that_of_transformers() -> None:
    logits = random_logits()
    bias = torch.zeros(len(PROMPTS), VOCAB)
    bias[1, 4], bias[1, 5] = 3.5, -100.0
    wanted = transformers.SequenceBiasLogitsProcessor({(4,): 3.5, (5,): -100.0})
    found = adjust_logits(logits, Adjustments(torch.tensor([0, 1, 2]), bias, None, None, None))
    assert torch.equal(found[1], wanted(torch.tensor([[1]]), logits[1:2])[0])
    assert torch.equal(found[[0, 2]], logits[[0, 2]])


def test_stop_tokens_are_masked_like_transformers_before_min_tokens() -> None:
    logits = random_logits()
    is_stop = torch.zeros(len(PROMPTS), VOCAB, dtype=torch.bool)
    is_stop[:, [2, 9]] = True
    is_before = torch.tensor([True, False, True])
    bias = torch.zeros(len(PROMPTS), VOCAB)
    bias[:, 2] = 100.0  # a bias does not bring a stop token back
    rows = torch.tensor([0, 1, 2])
    found = adjust_logits(logits, Adjustments(rows, bias, is_stop, is_before, None))
    processor = transformers.MinNewTokensLengthLogitsProcessor(0, 5, [2, 9], device="cpu")
    wanted = processor(torch.tensor([[1]]), logits.clone())
    assert torch.equal(found[[0, 2]], wanted[[0, 2]])
    assert float(found[1, 2]) == pytest.approx(float(logits[1, 2]) + 100, abs=1e-4)
    assert torch.equal(found[1, 3:], logits[1, 3:])
