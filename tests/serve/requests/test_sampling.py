"""User-facing sampling parameters: their checks and their resolution."""

from __future__ import annotations

import math
from typing import Any

import pytest

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


def resolved(params: SamplingParams, prompt_len: int = 10, max_model_len: int = 100) -> Any:
    return resolve_all(params, prompt_len, max_model_len)[0]


def resolve_all(
    params: SamplingParams, prompt_len: int = 10, max_model_len: int = 100
) -> list[Sampling]:
    resolver = Resolver(
        params,
        max_model_len=max_model_len,
        vocab_size=50,
        eos_token_ids=(2, 3),
        grammar_text=lambda wanted: "start: /a/",
    )
    return resolver.choices(prompt_len)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e39),  # infinite in float32
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_p", None),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_k", True),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", "1"),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("stop", [""]),
        ("stop", ""),
        ("stop", [1]),
        ("stop", ("a",)),
        ("stop", ["a" * 257]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 5),
        ("logprobs", -1),
        ("logprobs", 21),
        ("ignore_eos", 1),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("min_p", math.nan),
        ("presence_penalty", 2.01),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.01),
        ("frequency_penalty", None),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", 1e-38),  # logits divided by it would be infinite
        ("repetition_penalty", 1e39),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {"1": 1}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", dict.fromkeys(range(1025), 1)),
        ("logit_bias", [(1, 2)]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1.0]),
        ("allowed_token_ids", 3),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("min_tokens", True),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("skip_special_tokens", None),
        ("include_stop_str_in_output", "no"),
    ],
)
def test_bad_value_is_refused_by_name(name: str, value: Any) -> None:
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
    request = GenerateRequest("a", [1], [], sampling, "", b"")
    assert decode(encode(Submit(request, None)), Inbound) == Submit(request, None)


def test_defaults_are_those_of_vllm() -> None:
    found = resolved(SamplingParams())
    assert (found.temperature, found.top_p, found.top_k) == (1.0, 1.0, 0)
    assert (found.max_tokens, found.num_logprobs, found.stop_token_ids) == (16, -1, (2, 3))
    assert 0 <= found.seed < 2**64
    assert found.seed != resolved(SamplingParams()).seed


def test_values_are_resolved_to_what_the_engine_takes() -> None:
    params = SamplingParams(
        temperature=0, top_k=-1, seed=-1, stop_token_ids=[9, 2], logprobs=0, max_tokens=None
    )
    found = resolved(params)
    assert (found.temperature, found.top_k, found.seed) == (0.0, 0, 2**64 - 1)
    assert (found.stop_token_ids, found.num_logprobs) == ((9, 2, 3), 0)
    assert found.max_tokens == 90
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


@pytest.mark.parametrize(
    ("name", "value"), [("logit_bias", {50: 1}), ("allowed_token_ids", [3, 50])]
)
def test_token_outside_of_the_vocabulary_is_refused(name: str, value: Any) -> None:
    with pytest.raises(FieldError, match=f"^{name}: wanted token ids from 0 to 49, found 50"):
        resolved(SamplingParams(**{name: value}))


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


def test_one_stop_string_needs_no_list() -> None:
    assert SamplingParams(stop="END").stop_strings == ["END"]


def test_output_may_fill_the_models_length_and_no_more() -> None:
    assert resolved(SamplingParams(max_tokens=90)).max_tokens == 90
    with pytest.raises(FieldError, match=r"at most 90 .*100.*10 tokens.*found 91"):
        resolved(SamplingParams(max_tokens=91))


def test_the_default_gives_way_to_a_long_prompt() -> None:
    lengths = [(84, 16), (85, 15), (99, 1)]
    assert [resolved(SamplingParams(), prompt_len=n).max_tokens for n, _ in lengths] == [
        room for _, room in lengths
    ]
    with pytest.raises(FieldError, match=r"^max_tokens: wanted at most 15 .*found 16"):
        resolved(SamplingParams(max_tokens=16), prompt_len=85)


@pytest.mark.parametrize("given", [{}, {"max_tokens": None}, {"max_tokens": 10}])
def test_min_tokens_never_gives_way(given: dict[str, Any]) -> None:
    params = SamplingParams(min_tokens=10, **given)
    assert resolved(params, prompt_len=90).rules.min_tokens == 10
    with pytest.raises(FieldError, match=r"^min_tokens: wanted at most 9 .*found 10"):
        resolved(params, prompt_len=91)


@pytest.mark.parametrize("given", [{}, {"max_tokens": None}, {"max_tokens": 1}])
def test_prompt_has_to_leave_room_for_a_token(given: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    assert resolved(params, prompt_len=99).max_tokens == 1
    with pytest.raises(FieldError, match=r"^prompt: wanted at most 99 .*100.*found 100"):
        resolved(params, prompt_len=100)
    with pytest.raises(FieldError, match=r"^prompt: wanted at least one"):
        resolved(params, prompt_len=0)
