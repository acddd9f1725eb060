"""An engine that plans ahead, or drafts, generates what one does that takes one token after the
other, through the offline API."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cluster.engine.engine import OverlappedEngine
from cluster.engine.sequence import SampledTokens
from cluster.rank.runner import LaunchedStep, ModelRunner
from cluster.wire.messages import PENDING, StepAgreement, StepPlan
from serve.llm import LLM, RequestOutput, SamplingParams

SIZES: dict[str, Any] = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "max_model_len": 96,
    "block_size": 4,
    # One longest sequence and little more.
    "num_kv_blocks": 30,
    "dtype": "float32",
    "enforce_eager": True,
}


@pytest.fixture(scope="module")
def engines() -> dict[str, LLM]:
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    return {
        "off": LLM(overlap="off", **SIZES),
        "on": LLM(overlap="on", **SIZES),
        "drafting": LLM(speculative_config=ngram, **SIZES),
    }


@pytest.fixture(scope="module")
def predicting(mtp_checkpoint: Path) -> dict[str, LLM]:
    """Engines of a DeepSeek-V3 model; the drafting one has its MTP layer."""
    mtp = {"method": "mtp", "num_speculative_tokens": 3}
    return {
        "off": LLM(mtp_checkpoint, overlap="off", **SIZES),
        "drafting": LLM(mtp_checkpoint, speculative_config=mtp, **SIZES),
    }


class Counting:
    """Notes what an engine's runner is told."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.plans: list[StepPlan] = []
        self.most_in_flight = 0
        self._num_in_flight = 0
        self.switch = runner.switch

    def launch(self, plan: StepPlan, agreed: StepAgreement, confirm: Any) -> LaunchedStep:
        self.plans.append(plan)
        self._num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._num_in_flight)
        return self._runner.launch(plan, agreed, confirm)

    def wait(self, launched: LaunchedStep) -> SampledTokens:
        self._num_in_flight -= 1
        return self._runner.wait(launched)

    def execute(self, plan: StepPlan, agreed: StepAgreement, confirm: Any) -> SampledTokens:
        return self.wait(self.launch(plan, agreed, confirm))


def of_all_kinds(rng: random.Random, stop: list[int]) -> SamplingParams:
    """Return parameters whose draws depend on what was drawn before."""
    return SamplingParams(
        temperature=rng.choice((0.0, 0.7, 1.0)),
        top_k=rng.choice((0, 20)),
        top_p=rng.choice((1.0, 0.9)),
        seed=rng.randrange(1 << 40),
        max_tokens=rng.randint(1, 60),
        min_tokens=rng.choice((0, 0, 1)),
        stop_token_ids=rng.sample(stop, rng.choice((0, 2))),
        ignore_eos=rng.random() < 0.7,
        stop=rng.choice(([], ["e"], ["th", "3"])),
        presence_penalty=rng.choice((0.0, 1.5)),
        frequency_penalty=rng.choice((0.0, -0.5, 1.0)),
        repetition_penalty=rng.choice((1.0, 1.3)),
        logprobs=rng.choice((None, 2)),
        prompt_logprobs=rng.choice((None, None, 1)),
    )


def told(output: RequestOutput) -> list[Any]:
    """Return what a client is told, apart from values that depend on rounding."""
    [choice] = output.outputs
    likeliest = [[entry.rank, *entry.top_token_ids] for entry in choice.logprobs]
    return [choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason, likeliest]


def values(output: RequestOutput) -> list[float]:
    """Return all log-probabilities, of prompt and output."""
    entries = [*output.prompt_logprobs, *output.outputs[0].logprobs]
    return [entry.logprob for entry in entries if entry is not None]


@pytest.mark.feature("T04", "T05")
@pytest.mark.parametrize("seed", range(2))
def test_planning_ahead_and_drafting_change_no_output(engines: dict[str, LLM], seed: int) -> None:
    """In a pool that pre-empts: stops, seeds, penalties, limits, log-probabilities."""
    check_equal(engines, seed)


@pytest.mark.feature("T05", "D04")
def test_drafts_of_the_model_s_own_layer_change_no_output(predicting: dict[str, LLM]) -> None:
    check_equal(predicting, 0)


def check_equal(engines: dict[str, LLM], seed: int) -> None:
    rng = random.Random(seed)
    vocab = engines["off"].runner.model_config.vocab_size
    shared = [rng.randrange(vocab) for _ in range(9)]
    prompts: list[Any] = []
    for _ in range(14):
        own = [rng.randrange(vocab) for _ in range(rng.randint(1, 24))]
        prompts.append(shared + own if rng.random() < 0.4 else own)
    params = [of_all_kinds(rng, rng.sample(range(vocab), 40)) for _ in prompts]
    found = {}
    for overlap, llm in engines.items():
        before = llm.engine.scheduler.stats().num_preemptions
        found[overlap] = llm.generate(prompts, params)
        stats = llm.engine.scheduler.stats()
        assert stats.num_preemptions > before
        assert stats.num_free_blocks == stats.num_blocks == SIZES["num_kv_blocks"]
        assert not llm.engine.has_unfinished
    stats = engines["drafting"].engine.scheduler.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    for plain, *others in zip(*found.values(), strict=True):
        for other in others:
            assert told(plain) == told(other)
            assert values(plain) == pytest.approx(values(other), abs=1e-4)
    reasons = [output.outputs[0].finish_reason for output in found["off"]]
    assert {"stop", "length"} == set(reasons)


@pytest.mark.feature("T05")
@pytest.mark.parametrize(
    ("method", "limits"),
    [("ngram", {"allowed_token_ids": [7, 8, 9]}), ("mtp", {"top_k": 3})],
    ids=["ngram", "mtp"],
)
def test_tokens_that_were_drafted_are_drawn_as_likely_as_the_model_says(
    predicting: dict[str, LLM], mtp_checkpoint: Path, method: str, limits: dict[str, Any]
) -> None:
    """The first three, of three tokens each, by Pearson's chi-square. The third one is the first
    that may stand behind a token that was drafted and not drawn."""
    num_drawn, prompt = 1200, [7, 8, 9, 9, 8, 7, 7, 8]
    drafting = predicting["drafting"]
    if method == "ngram":
        lookup = {"method": method, "num_speculative_tokens": 3, "prompt_lookup_min": 1}
        drafting = LLM(mtp_checkpoint, speculative_config=lookup, **SIZES)
    expected: dict[tuple[int, ...], float] = {(): num_drawn}
    for _ in range(3):
        expected = {
            (*before, token): often * likely
            for before, often in expected.items()
            for token, likely in likelihoods(predicting["off"], [*prompt, *before], limits).items()
        }
    num_accepted = drafting.engine.scheduler.stats().num_accepted_tokens
    params = [
        SamplingParams(temperature=1, seed=seed, max_tokens=4, ignore_eos=True, **limits)
        for seed in range(num_drawn)
    ]
    outputs = drafting.generate([prompt] * num_drawn, params)
    assert drafting.engine.scheduler.stats().num_accepted_tokens > num_accepted
    found = Counter(tuple(output.outputs[0].token_ids[:3]) for output in outputs)
    assert set(found) <= set(expected)
    # Where fewer than five are expected the distribution is another one: those count as one.
    rare = {drawn for drawn, often in expected.items() if often < 5}
    pairs = [(found[drawn], often) for drawn, often in expected.items() if drawn not in rare]
    if (often := sum(expected[drawn] for drawn in rare)) >= 5:
        pairs.append((sum(found[drawn] for drawn in rare), often))
    freedom = len(pairs) - 1
    assert freedom >= 7
    distance = sum((num - often) ** 2 / often for num, often in pairs)
    # One of ten thousand is larger (Wilson and Hilferty, 1931).
    scale = 2 / (9 * freedom)
    assert distance < freedom * (1 - scale + 3.719 * scale**0.5) ** 3, (found, expected)


def likelihoods(llm: LLM, prompt: list[int], limits: dict[str, Any]) -> dict[int, float]:
    """Return how likely next tokens are among those that may be drawn."""
    params = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, logprobs=3, prompt_logprobs=0
    )
    [output] = llm.generate([prompt], params)
    tokens = limits.get("allowed_token_ids") or output.outputs[0].logprobs[0].top_token_ids
    outputs = llm.generate([[*prompt, token] for token in tokens], params)
    masses = [math.exp(output.prompt_logprobs[-1].logprob) for output in outputs]
    return {token: mass / sum(masses) for token, mass in zip(tokens, masses, strict=True)}


@pytest.mark.feature("T04")
def test_steps_are_planned_before_the_tokens_of_the_last_are_known(engines: dict[str, LLM]) -> None:
    llm = engines["on"]
    assert isinstance(llm.engine, OverlappedEngine)
    assert not isinstance(engines["off"].engine, OverlappedEngine)
    runner = llm.engine.runner
    llm.engine.runner = counting = Counting(llm.runner)
    greedy = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    try:
        [output] = llm.generate([[7, 8, 9]], SamplingParams(**greedy))
    finally:
        llm.engine.runner = runner
    tokens = output.outputs[0].token_ids
    assert counting.most_in_flight == 2
    # All but the first step take their token from the one before; none computes the last token.
    assert [plan.token_ids for plan in counting.plans] == [[7, 8, 9], *[[PENDING]] * 11]
    assert [plan.output_index for plan in counting.plans] == [[i] for i in range(12)]
    stopping = SamplingParams(**greedy, stop_token_ids=[tokens[5]])
    [stopped] = llm.generate([[7, 8, 9]], stopping)
    assert stopped.outputs[0].token_ids == tokens[: tokens.index(tokens[5]) + 1]


def test_a_prompt_beside_a_stream_is_computed_in_the_time_that_a_step_may_take() -> None:
    """In chunks of the fewest tokens, if that is less than any step takes."""
    llm = LLM(max_step_ms=0.1, **SIZES | {"max_num_batched_tokens": 48})
    llm.engine.runner = counting = Counting(llm.runner)
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    llm.generate([[5], list(range(85))], greedy)
    # The first step holds nobody up.
    sizes = [plan.num_new for plan in counting.plans]
    assert sizes[:3] == [[1, 47], [1, 32], [1, 6]]


@pytest.mark.gpu
def test_on_a_gpu_too_planning_ahead_changes_no_token() -> None:
    """There copies and steps are under way while the host fills the next step's arrays."""
    rng = random.Random(1)
    sizes = SIZES | {"device": "cuda", "enforce_eager": False}
    found = []
    for overlap in ("off", "on"):
        llm = LLM(overlap=overlap, **sizes)
        vocab = llm.runner.model_config.vocab_size
        rng.seed(1)
        prompts: Any = [
            [rng.randrange(vocab) for _ in range(rng.randint(1, 24))] for _ in range(14)
        ]
        params = [
            SamplingParams(temperature=0, max_tokens=rng.randint(1, 60), frequency_penalty=0.5)
            for _ in prompts
        ]
        found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert found[0] == found[1]


@pytest.mark.parametrize(("device", "overlap"), [("cpu", False), ("cuda", True)])
def test_a_device_that_runs_beside_the_host_is_planned_ahead_by_default(
    device: str, overlap: bool
) -> None:
    from serve.config import deploy_config

    for pool in deploy_config({"device": device}).pools:
        assert pool.engine.overlap is overlap
    hashes = {o: deploy_config({"device": device, "overlap": o}).config_hash for o in ("on", "off")}
    assert hashes["on"] != hashes["off"]
    auto = deploy_config({"device": device}).config_hash
    assert auto == hashes["on" if overlap else "off"]
