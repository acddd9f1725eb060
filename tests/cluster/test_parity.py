"""Engines generate what transformers generates, however their batches are put together."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cluster.config import CacheConfig, ConfigError, EngineConfig, SchedulerConfig
from cluster.engine.engine import Engine
from cluster.messages import EngineOutput, GenerateRequest, Sampling, Submit
from cluster.rank.assembly import assemble_engine
from cluster.rank.runner import ModelRunner
from model.config import ModelConfig

NUM_TOKENS = 64


def greedy(max_tokens: int = NUM_TOKENS) -> Sampling:
    return Sampling(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        max_tokens=max_tokens,
        stop_token_ids=(),
        num_logprobs=-1,
        num_prompt_logprobs=-1,
        rules=None,
    )


def make_engine(oracle: Any, **fields: Any) -> Engine:
    cache = {"block_size": 4, "num_kv_blocks": 600} | fields.pop("cache", {})
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 512} | fields
    config = EngineConfig(
        model_path=str(oracle.path),
        max_model_len=256,
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(**limits),
    )
    return assemble_engine(config, ModelRunner(config))


def prompts_for(oracle: Any, seed: int, n: int, longest: int = 90) -> list[list[int]]:
    rng = random.Random(seed)
    vocab = oracle.model.config.vocab_size
    return [[rng.randrange(vocab) for _ in range(rng.randint(1, longest))] for _ in range(n)]


def run(engine: Engine, prompts: list[list[int]], arrivals: list[int] | None = None) -> list[Any]:
    """Generate for all prompts; `arrivals` are the steps before which they are submitted."""
    waiting = sorted(zip(arrivals or [0] * len(prompts), range(len(prompts)), strict=True))
    outputs: dict[str, list[EngineOutput]] = {str(i): [] for i in range(len(prompts))}
    step = 0
    while waiting or engine.has_unfinished:
        while waiting and waiting[0][0] <= step:
            _, i = waiting.pop(0)
            engine.submit(Submit(GenerateRequest(str(i), prompts[i], [], greedy(), ""), None))
        for output in engine.step():
            assert output.finish_reason in ("", "length"), output
            outputs[output.request_id].append(output)
        step += 1
        assert step < 10_000
    return [outputs[str(i)] for i in range(len(prompts))]


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def check(oracle: Any, prompts: list[list[int]], results: list[Any]) -> None:
    for prompt, outputs in zip(prompts, results, strict=True):
        assert len(tokens(outputs)) == NUM_TOKENS
        oracle.check_greedy(prompt, tokens(outputs))
    oracle.report_ties()


def test_one_prompt_at_a_time(oracle: Any) -> None:
    engine = make_engine(oracle)
    prompts = prompts_for(oracle, 1, 4)
    check(oracle, prompts, [run(engine, [prompt])[0] for prompt in prompts])


def test_prompts_that_arrive_while_others_decode(oracle: Any) -> None:
    prompts = prompts_for(oracle, 2, 12)
    arrivals = [random.Random(oracle.name).randint(0, 40) for _ in prompts]
    check(oracle, prompts, run(make_engine(oracle), prompts, arrivals))


@pytest.mark.feature("T02")
@pytest.mark.parametrize("budget", [16, 23])
def test_chunked_prefill(oracle: Any, budget: int) -> None:
    engine = make_engine(oracle, max_num_batched_tokens=budget)
    prompts = prompts_for(oracle, 3, 8)
    assert max(map(len, prompts)) > budget
    check(oracle, prompts, run(engine, prompts, [0, 0, 1, 5, 9, 9, 20, 30]))


@pytest.mark.feature("T01")
def test_prefix_hits(oracle: Any) -> None:
    engine = make_engine(oracle)
    [head] = prompts_for(oracle, 4, 1, longest=1)
    head = head * 3 + list(range(40))
    prompts = [head + tail for tail in prompts_for(oracle, 5, 6, longest=20)]
    prompts.append(list(prompts[0]))  # the same again: all but its last token may be found
    results = run(engine, prompts, [0, 4, 4, 8, 12, 70, 90])
    check(oracle, prompts, results)
    cached = [max(output.num_cached_tokens for output in outputs) for outputs in results]
    assert cached[0] == 0
    assert all(n >= 40 for n in cached[1:]), cached


@pytest.mark.feature("T03")
def test_pre_emption_under_a_tiny_pool(oracle: Any) -> None:
    # 70 blocks of 4 tokens hold one longest sequence and little more; eight want to run. Where a
    # window bounds what a sequence holds, only short ones that grow side by side want too much.
    window = ModelConfig.from_dir(oracle.path).kv_window
    num_blocks, longest = (70, 90) if window is None else ((window - 2) // 4 + 4, 4)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    engine = make_engine(oracle, **limits, cache={"num_kv_blocks": num_blocks})
    prompts = prompts_for(oracle, 6, 8, longest)
    check(oracle, prompts, run(engine, prompts))
    stats = engine.stats()
    assert stats.num_preemptions > 0 or window == 1
    assert stats.num_free_blocks == stats.num_blocks


def test_logits_equal_transformers(oracle: Any) -> None:
    """The log-probabilities that a request gets are transformers' own, within 1e-4."""
    engine = make_engine(oracle, max_num_batched_tokens=32)
    [prompt] = prompts_for(oracle, 7, 1)
    vocab = oracle.model.config.vocab_size
    sampling = Sampling(0.0, 0, 1.0, 0.0, 0, 8, (), vocab, -1, None)
    engine.submit(Submit(GenerateRequest("r", prompt, [], sampling, ""), None))
    outputs: list[EngineOutput] = []
    while engine.has_unfinished:
        outputs += engine.step()
    theirs = oracle.logits(prompt, tokens(outputs)).log_softmax(-1)
    for position, output in enumerate(outputs):
        [found] = output.logprobs
        ours = torch.empty(vocab)
        ours[torch.tensor(found.top_token_ids)] = torch.tensor(found.top_logprobs)
        torch.testing.assert_close(ours, theirs[position], atol=1e-4, rtol=1e-5)
        assert found.rank == 1


@pytest.mark.feature("S06")
def test_a_window_bounds_the_blocks_of_a_long_sequence(make_oracle: Callable[[str], Any]) -> None:
    """A prompt of 23 blocks and its output go through the smallest pool, beside nothing else."""
    oracle = make_oracle("mistral window 13 wide heads")
    engine = make_engine(oracle, max_num_batched_tokens=16, cache={"num_kv_blocks": 4})
    [prompt] = prompts_for(oracle, 8, 1)
    prompt = (prompt * 90)[:90]
    check(oracle, [prompt], run(engine, [prompt]))
    assert engine.stats().num_preemptions == 0


@pytest.mark.parametrize(
    ("shape", "needed"), [("mistral window 13 wide heads", 4), ("mistral without window", 64)]
)
def test_a_pool_too_small_for_one_sequence_is_refused_by_name(
    make_oracle: Callable[[str], Any], shape: str, needed: int
) -> None:
    oracle = make_oracle(shape)
    wanted = rf"at least {needed} \(one sequence of max_model_len=256\)"
    with pytest.raises(ConfigError, match=f"^num_kv_blocks: wanted {wanted}, found {needed - 1}$"):
        make_engine(oracle, cache={"num_kv_blocks": needed - 1})
    assert make_engine(oracle, cache={"num_kv_blocks": needed}).stats().num_blocks == needed


@pytest.mark.feature("S06")
def test_prefix_hits_need_only_the_window(make_oracle: Callable[[str], Any]) -> None:
    oracle = make_oracle("mistral window 7")
    engine = make_engine(oracle, cache={"num_kv_blocks": 50})
    prompts = [list(range(80)), list(range(100, 160)), [*range(80), 7]]
    # What the second writes evicts the head of the first, whose tail is found nevertheless.
    results = [run(engine, [prompt])[0] for prompt in prompts]
    check(oracle, prompts, results)
    cached = [max(output.num_cached_tokens for output in outputs) for outputs in results]
    assert cached == [0, 0, 80]


@pytest.mark.feature("S05")
def test_a_prompt_beyond_dynamic_ropes_context_is_refused_by_name(
    make_oracle: Callable[[str], Any],
) -> None:
    engine = make_engine(make_oracle("qwen3 dynamic rope"))
    request = GenerateRequest("r", [1] * 91, [], greedy(), "")
    engine.submit(Submit(request, None))
    [output] = engine.step()
    wanted = "prompt_token_ids: wanted at most 90 tokens (rope_type dynamic: "
    assert output.finish_reason == "error"
    assert output.error.startswith(wanted) and output.error.endswith("found 91")
