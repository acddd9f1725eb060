"""The offline API."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cluster.rank import forward, runner
from cluster.rank.inputs import StepBatch
from cluster.wire.messages import MAX_LOGPROBS
from compile.errors import FieldError
from model.sampler import SamplerOutput, SamplingTensors, sample, score
from serve.llm import LLM, SamplingParams

TINY = Path(__file__).parents[2] / "examples" / "tiny"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=4, dtype="float32", kv_memory="64MiB")


def test_the_least_top_p_keeps_the_likeliest_token(llm: LLM) -> None:
    least = SamplingParams(temperature=1, top_p=5e-324, max_tokens=8)
    found, wanted = llm.generate(
        ["What is 12 + 30?"] * 2, [least, SamplingParams(temperature=0, max_tokens=8)]
    )
    assert found.outputs[0].token_ids == wanted.outputs[0].token_ids


def test_many_chats_are_answered_as_each_alone(llm: LLM) -> None:
    chats = [[{"role": "user", "content": f"What is {a} + 3?"}] for a in (14, 25, 36)]
    params = [SamplingParams(temperature=0, max_tokens=8), *[SamplingParams(temperature=0)] * 2]
    together = [output.outputs[0].text for output in llm.chat(chats, params)]
    alone = [llm.chat(chat, params[0])[0].outputs[0].text for chat in chats]
    assert together == alone and len(set(alone)) == 3
    with pytest.raises(ValueError, match="sampling_params: wanted 3, one per prompt, found 2"):
        llm.chat(chats, params[:2])


@pytest.mark.feature("T01")
def test_prompts_of_another_salt_are_not_found_in_the_prefix_cache(llm: LLM) -> None:
    ids, params = [70 + i % 9 for i in range(40)], SamplingParams(max_tokens=1)
    prompts = [{"prompt_token_ids": ids}, {"prompt_token_ids": ids, "cache_salt": "mine"}]
    for wanted in (0, 32):
        for prompt in prompts:
            [output] = llm.generate(prompt, params)  # type: ignore[arg-type]
            assert output.num_cached_tokens == wanted
    with pytest.raises(ValueError, match=r"^prompts: wanted prompt or prompt_token_ids, and cache"):
        llm.generate({"prompt": "1 2", "salt": "mine"}, params)  # type: ignore[arg-type]


def test_a_bad_prompt_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(ValueError, match="5000"):
        llm.generate([[65] * 10, [65] * 5000], SamplingParams(max_tokens=4))
    assert not llm.engine.has_unfinished
    with pytest.raises(RuntimeError, match="prompt_token_ids: wanted ids from 0 to 639"):
        llm.generate([[10**6]], SamplingParams(max_tokens=4))
    assert not llm.engine.has_unfinished


def test_stop_strings_and_stop_tokens_are_told_apart(llm: LLM) -> None:
    prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": "Count from 3 to 9."}])
    [by_string] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=30, stop=["6"]))
    assert by_string.outputs[0].text == "3 4 5 "
    assert by_string.outputs[0].stop_reason == "6"
    token = by_string.outputs[0].token_ids[0]
    [by_token] = llm.generate(
        [prompt], SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[token])
    )
    assert by_token.outputs[0].stop_reason == token
    [by_eos] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=30))
    assert (by_eos.outputs[0].finish_reason, by_eos.outputs[0].stop_reason) == ("stop", None)


Sampled = list[tuple[tuple[int, ...], SamplerOutput]]


@pytest.fixture
def sampled_by_every_rule(monkeypatch: pytest.MonkeyPatch) -> Sampled:
    """Shapes of logits that a forward samples before its rank is ready, and what is drawn."""
    seen: Sampled = []

    def noted(logits: torch.Tensor, tensors: SamplingTensors) -> SamplerOutput:
        assert tensors.adjustments is not None and tensors.adjustments.penalties is not None
        assert not tensors.all_greedy
        assert tensors.any_top_k and tensors.any_top_p and tensors.any_min_p
        seen.append((tuple(logits.shape), sample(logits, tensors)))
        return seen[-1][1]

    monkeypatch.setattr(forward, "sample", noted)
    return seen


def test_the_step_that_memory_is_measured_by_samples_every_row_by_every_rule(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, sampled_by_every_rule: Sampled
) -> None:
    """On a GPU the KV cache takes what it leaves; on a CPU it is run, and measures nothing."""
    scored: list[tuple[tuple[int, ...], int]] = []

    def noted(logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int) -> SamplerOutput:
        scored.append((tuple(logits.shape), num_logprobs))
        return score(logits, token_ids, num_logprobs)

    monkeypatch.setattr(forward, "score", noted)
    limits, vocab_size = llm.config.scheduler, llm.runner.model_config.vocab_size
    assert llm.runner.forward.run_largest(limits.max_num_batched_tokens) == 0
    [(shape, output)] = sampled_by_every_rule
    assert shape == (limits.max_num_seqs, vocab_size)
    assert output.logprobs is not None and output.logprobs.isfinite().all()
    # Of a prompt, as many rows as exist at once, which may be more than are sampled.
    num_rows = min(forward.MAX_SCORED_ROWS, limits.max_num_batched_tokens)
    assert scored == [((num_rows, vocab_size), MAX_LOGPROBS)]


def test_decodes_and_prompts_of_every_size_run_on_padding_and_leave_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, sampled_by_every_rule: Sampled
) -> None:
    """On a GPU they build kernels before the first request, those of the sampler included."""
    greedy = SamplingParams(temperature=0, max_tokens=5)
    before = llm.generate("Count from 3 to 9.", greedy)[0].outputs[0].token_ids
    replays = llm.runner.forward.num_replays
    sizes: list[tuple[int, int]] = []
    dummy, limits = llm.runner.inputs.dummy, llm.config.scheduler

    def noted(num_tokens: int, num_seqs: int) -> StepBatch:
        sizes.append((num_tokens, num_seqs))
        return dummy(num_tokens, num_seqs)

    monkeypatch.setattr(llm.runner.inputs, "dummy", noted)
    llm.runner.forward.run_sizes()
    powers = [2**i for i in range(20)]
    most = limits.max_num_seqs
    assert {n for n, m in sizes if n == m} == {most, *(n for n in powers if n < most)}
    most = limits.max_num_batched_tokens
    assert {n for n, m in sizes if m == 1} >= {most, *(n for n in powers if n < most)}
    assert llm.runner.forward.num_replays == replays
    assert [shape[0] for shape, _ in sampled_by_every_rule] == [1, 2]
    assert llm.generate("Count from 3 to 9.", greedy)[0].outputs[0].token_ids == before


def test_bfloat16_follows_transformers() -> None:
    """Every product of a prompt and of decodes, on whatever packs bfloat16 here."""
    llm = LLM(max_num_seqs=4, dtype="bfloat16", kv_memory="64MiB")
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": "Count from 3 to 9."}])
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, logprobs=5, prompt_logprobs=5
    )
    [output] = llm.generate([prompt], params)
    tokens = output.outputs[0].token_ids
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].float()
    wanted = logits.log_softmax(-1)
    found = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert len(found) == len(prompt) - 1 + len(tokens)
    for place, row in zip(found, wanted, strict=False):
        assert place is not None
        theirs = row[torch.tensor(place.top_token_ids)]
        # Where both see a likely token, they agree to what bfloat16 leaves of a logit.
        error = (torch.tensor(place.top_logprobs).exp() - theirs.exp()).abs().max()
        assert error < 0.05


# An FP8 KV cache.

SUMS = [[{"role": "user", "content": f"What is {a} + 3?"}] for a in (14, 25, 36, 77)]


def fp8_llm(**options: Any) -> LLM:
    options = {"compilation": {"level": 0}, **options}
    return LLM(max_num_seqs=4, dtype="float32", kv_cache_dtype="fp8", **options)


def tokens_of(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.chat(SUMS, params)]


@pytest.fixture(scope="module")
def fp8_tokens() -> list[list[int]]:
    """What one eager engine generates, whose cache finds nothing."""
    return tokens_of(fp8_llm(enable_prefix_caching=False))


@pytest.mark.feature("S09")
@pytest.mark.parametrize(
    "compilation",
    [
        pytest.param({"level": 0, "cudagraph_mode": "FULL"}, id="full graphs"),
        pytest.param({"level": 0, "cudagraph_mode": "FULL_AND_PIECEWISE"}, id="pieces"),
        pytest.param({"level": 3}, id="compiled", marks=pytest.mark.slow),
    ],
)
def test_fp8_kv_gives_one_models_tokens_however_it_runs(
    compilation: dict[str, Any], fp8_tokens: list[list[int]]
) -> None:
    llm = fp8_llm(compilation=compilation)
    assert tokens_of(llm) == fp8_tokens
    # The same again: prompts are found in the prefix cache.
    assert tokens_of(llm) == fp8_tokens
    [output] = llm.chat(SUMS[0], SamplingParams(max_tokens=1))
    assert output.num_cached_tokens > 0


@pytest.mark.feature("S09")
def test_twice_as_many_fp8_blocks_as_bfloat16_ones_fit_in_given_memory() -> None:
    num_blocks = {}
    for kind in ("auto", "fp8"):
        eager = {"level": 0}
        llm = LLM(dtype="bfloat16", kv_memory="16MiB", kv_cache_dtype=kind, compilation=eager)
        num_blocks[kind] = llm.runner.num_blocks
        assert llm.runner.kv_pool.nbytes <= 16 << 20
    # The scratch block is counted among what fits.
    assert num_blocks["fp8"] + 1 == 2 * (num_blocks["auto"] + 1)


# What graphs cost, and what their padding does.

GRAPHS = {"level": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def llm_with(sizes: list[int] | None, *, is_reserved: bool = False, **options: Any) -> LLM:
    """Return the bundled model that replays whole decode steps of the given sizes; None: none."""
    graphs = {**GRAPHS, "cudagraph_capture_sizes": sizes, "reserve_graph_memory": is_reserved}
    return LLM(
        max_num_seqs=4,
        max_model_len=48,
        dtype="float32",
        compilation_config=graphs if sizes else {"level": 0},
        **options,
    )


@pytest.mark.feature("N06")
def test_padding_of_decode_steps_takes_no_kv_and_makes_no_outputs() -> None:
    """A pool that three sequences fill to the last block still pads them to four."""
    prompts = [[65 + i] * 13 for i in range(3)]  # 13 + 20 tokens: three blocks each
    plain = llm_with(None, num_kv_blocks=9)
    wanted = [output.outputs[0].token_ids for output in plain.generate(prompts, GREEDY)]
    llm = llm_with([4], num_kv_blocks=9)
    found = llm.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in found] == wanted
    # The first token comes from the prompt's step; the pool was full, and nobody had to wait.
    assert {k.num_seqs: n for k, n in llm.runner.forward.num_replays.items()} == {4: 19}
    stats = llm.engine.scheduler.stats()
    assert (stats.num_preemptions, stats.num_free_blocks) == (0, 9)


@pytest.mark.feature("C10")
def test_memory_of_graphs_is_measured_before_kv_is_sized_and_logged_beside_what_they_took(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "lockstep.rank")
    llm = llm_with([1, 2, 4], kv_memory="8MiB", is_reserved=True)
    [line] = [r.getMessage() for r in caplog.records if "reserved" in r.getMessage()]
    reserved, taken = map(int, re.findall(r"\d+", line))
    assert taken == llm.runner.forward.taken_bytes > 0
    assert taken <= reserved < taken + 3 * 2**20  # at most a MiB for each graph beside its tensors
    found = llm.generate([[65] * 5], GREEDY)
    assert found == llm_with(None, kv_memory="8MiB").generate([[65] * 5], GREEDY)
    assert llm.runner.forward.num_replays  # what was captured for trial is not replayed


@pytest.mark.feature("C10")
def test_kv_that_would_leave_no_room_for_graphs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "available_memory_bytes", lambda: 8 * 2**20)
    llm_with([4], kv_memory="8MiB")
    wanted = r"^kv_memory: wanted at most the 8388608 bytes that are available, \d+ of them for "
    with pytest.raises(FieldError, match=wanted + "graphs, found 8388608"):
        llm_with([4], kv_memory="8MiB", is_reserved=True)
