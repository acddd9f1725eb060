"""User-facing sampling parameters: their checks and their resolution."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec import UNSET

from cluster.wire.messages import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_REPETITION,
    MAX_TEMPERATURE,
    GenerateRequest,
    Inbound,
    LogitRules,
    Sampling,
    Submit,
    decode,
    encode,
)
from compile.errors import FieldError
from serve.requests.sampling import MAX_STOP_TOKEN_IDS, Resolver, SamplingParams


def resolved(params: SamplingParams, prompt_len: int = 10) -> Any:
    return resolve_all(params, prompt_len)[0]


def resolve_all(params: SamplingParams, prompt_len: int = 10) -> list[Sampling]:
    resolver = Resolver(
        params,
        max_model_len=100,
        vocab_size=50,
        eos_token_ids=(2, 3),
        grammar_text=lambda wanted: "start: /a/",
    )
    return resolver.choices(prompt_len)


BAD: dict[str, list[Any]] = {
    "temperature": [-0.1, math.nan, math.inf, 1e39, "hot", True],  # 1e39 is infinite in float32
    "top_p": [0, 1.01, math.nan, None],
    "top_k": [-2, 1.0, True],
    "min_p": [-0.01, 1.01, math.nan],
    "seed": [2**64, -(2**63) - 1, "1"],
    "max_tokens": [0, 1.5],
    "min_tokens": [-1, 17, True],
    "n": [0, 129, True],
    "stop": [[""], "", [1], ("a",), ["a" * 257], ["a"] * 65],
    "stop_token_ids": [[-1], ["a"], 5, [*range(257)]],
    "logprobs": [-1, 21],
    "prompt_logprobs": [-1, 21],
    "presence_penalty": [2.01, math.nan],
    "frequency_penalty": [-2.01, None],
    "repetition_penalty": [0, math.inf, 1e-38, 1e39],  # logits divided by 1e-38 would be infinite
    "logit_bias": [
        {1: 100.5},
        {1: math.nan},
        {"1": 1},
        {-1: 1},
        dict.fromkeys(range(1025), 1),
        [(1, 2)],
    ],
    "allowed_token_ids": [[], [1.0], 3],
    "ignore_eos": [1],
    "skip_special_tokens": [None],
    "include_stop_str_in_output": ["no"],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_refused_by_name(name: str) -> None:
    for value in BAD[name]:
        with pytest.raises(FieldError, match=f"^{name}: wanted .*, found") as raised:
            SamplingParams(**{name: value})
        assert raised.value.field == name


@pytest.mark.parametrize(
    "given",
    [
        *({"temperature": value} for value in (0, MAX_TEMPERATURE)),
        *({name: value} for name in ("top_p", "min_p") for value in (1e-9, 1)),
        *({"top_k": value} for value in (-1, 0, 2**31 - 1)),
        *({"seed": value} for value in (-(2**63), 2**64 - 1)),
        *({"repetition_penalty": value} for value in (1 / MAX_REPETITION, MAX_REPETITION)),
        *({"presence_penalty": value, "frequency_penalty": -value} for value in (-2, 2)),
        {"logprobs": MAX_LOGPROBS, "prompt_logprobs": MAX_LOGPROBS},
        {"logit_bias": {i: (-1) ** i * MAX_BIAS for i in range(MAX_BIASES)}},
        {"stop_token_ids": list(range(MAX_STOP_TOKEN_IDS))},
        {"allowed_token_ids": list(range(2000)), "min_tokens": 90, "max_tokens": 90},
    ],
    ids=str,
)
def test_what_a_request_may_ask_for_goes_over_the_wire(given: dict[str, Any]) -> None:
    resolver = Resolver(
        SamplingParams(**given),
        max_model_len=100,
        vocab_size=2000,
        eos_token_ids=range(256, 512),
        grammar_text=lambda wanted: "",
    )
    [sampling] = resolver.choices(10)
    request = GenerateRequest("a", [1], [], sampling, b"")
    assert decode(encode(Submit(request, None)), Inbound) == Submit(request, None)


def test_defaults_are_those_of_vllm() -> None:
    found = resolved(SamplingParams())
    assert (found.temperature, found.top_p, found.top_k) == (1.0, 1.0, 0)
    assert (found.max_tokens, found.num_logprobs, found.stop_token_ids) == (16, -1, (2, 3))
    assert 0 <= found.seed < 2**64
    assert found.seed != resolved(SamplingParams()).seed


def test_values_are_resolved_to_what_the_engine_takes() -> None:
    params = SamplingParams(temperature=0, top_k=-1, seed=-1, stop_token_ids=[9, 2], logprobs=0)
    found = resolved(params)
    assert (found.temperature, found.top_k, found.seed) == (0.0, 0, 2**64 - 1)
    assert (found.stop_token_ids, found.num_logprobs) == ((9, 2, 3), 0)
    ignoring = SamplingParams(stop_token_ids=[9], ignore_eos=True)
    assert resolved(ignoring).stop_token_ids == (9,)


def test_rules_are_sent_only_where_they_change_something() -> None:
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1}
    assert resolved(SamplingParams(**neutral, logit_bias={}, min_tokens=0)).rules is None
    found = resolved(
        SamplingParams(
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=2,
            logit_bias={7: 3, 4: -2.5},
            allowed_token_ids=[9, 4, 9],
            min_tokens=5,
        )
    )
    # Bits 4 and 9, the lowest first.
    assert found.rules == LogitRules(1.0, -1.0, 2.0, (7, 4), (3.0, -2.5), b"\x10\x02", 5)
    assert found.rules.has_penalties
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert resolved(SamplingParams(**{name: 0.5})).rules.has_penalties
    assert not resolved(SamplingParams(min_tokens=1)).rules.has_penalties


def test_tokens_that_may_come_are_not_all_stop_tokens_before_min_tokens() -> None:
    message = "^allowed_token_ids: wanted a token that may come before min_tokens"
    for given in ({"stop_token_ids": [7]}, {}):  # 7, or the end of text
        allowed = given.get("stop_token_ids", [2, 3])
        with pytest.raises(FieldError, match=message):
            resolved(SamplingParams(min_tokens=3, allowed_token_ids=allowed, **given))
        assert resolved(SamplingParams(allowed_token_ids=allowed, **given)).rules is not None
        two = [*allowed, 8]
        assert resolved(SamplingParams(min_tokens=3, allowed_token_ids=two, **given))
    ignoring = SamplingParams(min_tokens=3, allowed_token_ids=[2, 3], ignore_eos=True)
    assert resolved(ignoring).stop_token_ids == ()


def test_choices_differ_in_their_seeds_and_ask_once_for_the_prompt() -> None:
    found = resolve_all(SamplingParams(n=4, seed=5, prompt_logprobs=2))
    assert found == resolve_all(SamplingParams(n=4, seed=5, prompt_logprobs=2))
    assert found[0].seed == 5
    assert len({choice.seed for choice in found}) == 4
    assert all(0 <= choice.seed < 2**64 for choice in found)
    assert [choice.num_prompt_logprobs for choice in found] == [2, -1, -1, -1]
    neighbours = {choice.seed for choice in resolve_all(SamplingParams(n=4, seed=6))}
    assert not neighbours & {choice.seed for choice in found}
    assert resolve_all(SamplingParams(n=2))[1].seed != resolve_all(SamplingParams(n=2))[1].seed


@pytest.mark.parametrize(
    ("given", "prompt_len", "max_tokens"),
    [
        ({"max_tokens": 90}, 10, 90),
        ({"max_tokens": None}, 10, 90),
        # The default gives way to a long prompt, and min_tokens never does.
        *(({}, 100 - room, min(room, 16)) for room in (90, 16, 15, 1)),
        *(({"min_tokens": 10, "max_tokens": most}, 90, 10) for most in (UNSET, None, 10)),
        *(({"max_tokens": most}, 99, 1) for most in (None, 1)),
    ],
)
def test_output_may_fill_the_models_length(
    given: dict[str, Any], prompt_len: int, max_tokens: int
) -> None:
    assert resolved(SamplingParams(**given), prompt_len).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("given", "prompt_len", "message"),
    [
        ({"max_tokens": 91}, 10, r"max_tokens: wanted at most 90 .*100.*10 tokens.*found 91"),
        ({"max_tokens": 16}, 85, "max_tokens: wanted at most 15 .*found 16"),
        *(
            ({"min_tokens": 10, "max_tokens": most}, 91, "min_tokens: wanted at most 9 .*found 10")
            for most in (UNSET, None, 10)
        ),
        *(
            ({"max_tokens": most}, prompt_len, message)
            for most in (UNSET, None, 1)
            for prompt_len, message in (
                (100, "prompt: wanted at most 99 .*100.*found 100"),
                (0, "prompt: wanted at least one"),
            )
        ),
        ({"logit_bias": {50: 1}}, 10, "logit_bias: wanted token ids from 0 to 49, found 50"),
        (
            {"allowed_token_ids": [3, 50]},
            10,
            "allowed_token_ids: wanted token ids from 0 to 49, found 50",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused_by_name(
    given: dict[str, Any], prompt_len: int, message: str
) -> None:
    with pytest.raises(FieldError, match=f"^{message}"):
        resolved(SamplingParams(**given), prompt_len)
