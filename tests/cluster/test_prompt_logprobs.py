"""Log-probabilities of prompts are transformers' own, however the prompt is computed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from local_ranks import config_of, make_engine, run
from wire_structs import plan_of, request_of

from cluster.engine.engine import Engine
from cluster.rank import runner
from cluster.wire.messages import EngineOutput, GenerateRequest, PromptTargets, TokenLogprobs

NUM_LOGPROBS = 4


def engine_for(oracle: Any, budget: int = 512, num_kv_blocks: int = 600) -> Engine:
    sizes = {"num_kv_blocks": num_kv_blocks, "max_num_seqs": min(8, budget)}
    return make_engine(config_of(oracle.path, 256, max_num_batched_tokens=budget, **sizes))


def make_request(
    name: str, prompt: list[int], *, num: int = NUM_LOGPROBS, max_tokens: int = 4, **fields: Any
) -> GenerateRequest:
    return request_of(name, prompt, num_prompt_logprobs=num, max_tokens=max_tokens, **fields)


def prompts_for(n: int) -> list[list[int]]:
    rng = random.Random(9)
    return [[rng.randrange(256) for _ in range(rng.randint(30, 120))] for _ in range(n)]


@torch.inference_mode()
def check(oracle: Any, prompt: list[int], found: list[TokenLogprobs]) -> None:
    logprobs = oracle.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert len(found) == len(prompt) - 1
    for position, entry in enumerate(found):
        theirs, token = logprobs[position], prompt[position + 1]
        assert entry.logprob == pytest.approx(float(theirs[token]), abs=1e-4)
        above, at_least = (int((theirs > theirs[token] + gap).sum()) for gap in (1e-4, -1e-4))
        assert above < entry.rank <= at_least
        values = theirs.topk(NUM_LOGPROBS).values.tolist()
        assert entry.top_logprobs == pytest.approx(values, abs=1e-4)
        assert theirs[entry.top_token_ids].tolist() == pytest.approx(values, abs=1e-4)


def only_first(outputs: list[EngineOutput]) -> list[TokenLogprobs]:
    """Return the log-probabilities, which come with the first token and never again."""
    assert not any(output.prompt_logprobs for output in outputs[1:])
    return outputs[0].prompt_logprobs


@pytest.mark.parametrize("budget", [512, 16, 7, 2])
def test_chunks_of_any_size_give_all(oracle: Any, budget: int) -> None:
    """Beside requests that want none; chunks of a single token are decodes to the rank."""
    prompts = prompts_for(4)
    requests = [
        make_request(str(i), prompt, num=NUM_LOGPROBS if i % 2 else -1)
        for i, prompt in enumerate(prompts)
    ]
    outputs = run(engine_for(oracle, budget), requests)
    for i, prompt in enumerate(prompts):
        found = only_first(outputs[str(i)])
        if i % 2:
            check(oracle, prompt, found)
        else:
            assert found == []


def test_logits_of_a_chunk_are_computed_in_pieces(
    oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MAX_SCORED_ROWS", 13)
    [prompt] = prompts_for(1)
    engine = engine_for(oracle)
    rows: list[int] = []
    real = engine.runner.model.compute_logits  # type: ignore[attr-defined]

    def compute_logits(hidden: torch.Tensor) -> Any:
        rows.append(len(hidden))
        return real(hidden)

    engine.runner.model.compute_logits = compute_logits  # type: ignore[attr-defined]
    check(oracle, prompt, only_first(run(engine, [make_request("0", prompt)])["0"]))
    assert max(rows) == 13 and sum(rows) == len(prompt) - 1 + 4


def test_a_rank_that_gets_no_logits_takes_part_in_as_many_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "MAX_SCORED_ROWS", 3)
    rows: list[int] = []
    targets = [PromptTargets(0, [1] * 5, 0), PromptTargets(1, [1] * 7, 0)]
    plan = plan_of([5, 8], output_index=[-1, 0], prompt_targets=targets)
    hidden = torch.zeros(13, 2)
    assert runner.prompt_logprobs(lambda part: rows.append(len(part)), hidden, plan) == [[], []]
    assert rows == [3, 2, 3, 3, 1]


def test_cached_prompts_are_computed_again_where_wanted(oracle: Any) -> None:
    engine = engine_for(oracle)
    [prompt] = prompts_for(1)
    for num in (-1, NUM_LOGPROBS, NUM_LOGPROBS):
        outputs = run(engine, [make_request("0", prompt, num=num)])["0"]
        assert outputs[0].num_cached_tokens == 0
    check(oracle, prompt, only_first(outputs))
    # What was computed for them serves others all the same.
    [first, *_] = run(engine, [make_request("0", prompt, num=-1)])["0"]
    assert first.num_cached_tokens > 0


def test_pre_emption_gives_them_once(oracle: Any) -> None:
    """In a pool for little more than one: in the middle of prompts, and after the first token."""
    engine = engine_for(oracle, budget=16, num_kv_blocks=66)
    prompts = prompts_for(6)
    requests = [make_request(str(i), prompt, max_tokens=80) for i, prompt in enumerate(prompts)]
    outputs = run(engine, requests)
    for i, prompt in enumerate(prompts):
        check(oracle, prompt, only_first(outputs[str(i)]))
    assert engine.scheduler.stats().num_preemptions > 3


def test_a_resumed_sequence_has_had_them_and_a_prompt_of_one_token_has_none(oracle: Any) -> None:
    [prompt] = prompts_for(1)
    requests = [make_request("0", prompt, output=[5]), make_request("1", [7])]
    for outputs in run(engine_for(oracle), requests).values():
        assert outputs[0].prompt_logprobs == [] and outputs[0].token_ids
