"""Every sampling field from the body to the row: the HTTP app over a real engine in process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.config import Role
from serve.llm import LLM, SamplingParams

pytestmark = pytest.mark.feature("R08")

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "Count from 3 to 9. Reverse the word: stone. What is 12 + 30?"


@pytest.fixture
def app(engine_app: Any) -> Any:
    """In place of the one over a script: `call` reaches a model."""
    return engine_app


@pytest.fixture(scope="module")
def oracle(llm: LLM) -> Callable[[list[int]], torch.Tensor]:
    """Return the logits that transformers computes, of each of some tokens."""
    model = AutoModelForCausalLM.from_pretrained(llm.config.model_path, dtype=torch.float32)

    @torch.no_grad()
    def logits(token_ids: list[int]) -> torch.Tensor:
        found: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
        return found.clone()

    return logits


def complete(call: Any, **fields: Any) -> dict[str, Any]:
    """Return the answer to a completion of 24 tokens, with their ids."""
    body = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    answer: httpx.Response = call("POST", TEXT, json={**body, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ids(call: Any, **fields: Any) -> list[int]:
    (choice,) = complete(call, **fields)["choices"]
    found: list[int] = choice["token_ids"]
    return found


HOT: dict[str, Any] = {"temperature": 2.0, "seed": 11}


@pytest.mark.parametrize(
    ("base", "fields"),
    [
        ({"temperature": 0}, {"temperature": 2.0, "seed": 3}),
        (HOT, {"seed": 12}),
        (HOT, {"top_k": 2}),
        (HOT, {"top_p": 0.3}),
        (HOT, {"min_p": 0.5}),
        (HOT, {"presence_penalty": 2}),
        (HOT, {"frequency_penalty": 2.0}),
        ({"temperature": 0}, {"repetition_penalty": 3.0}),
        ({"temperature": 0}, {"logit_bias": {"44": 100}}),
        (HOT, {"allowed_token_ids": [70, 71, 72]}),
    ],
    ids=lambda fields: "-".join(fields),
)
def test_field_reaches_the_model(call: Any, base: dict[str, Any], fields: dict[str, Any]) -> None:
    plain, changed = ids(call, **base), ids(call, **{**base, **fields})
    assert plain != changed
    assert changed == ids(call, **{**base, **fields})


def test_filters_that_leave_one_token_are_greedy(call: Any) -> None:
    greedy = ids(call, temperature=0)
    assert ids(call, **HOT, top_k=1) == greedy
    assert ids(call, **HOT, top_p=1e-9) == greedy
    assert ids(call, **HOT, min_p=1) == greedy


def test_bias_and_allowed_tokens_decide_the_text(call: Any) -> None:
    assert ids(call, temperature=0, logit_bias={"300": 100}) == [300] * 24
    assert set(ids(call, **HOT, allowed_token_ids=[5, 6])) == {5, 6}
    greedy = ids(call, temperature=0)
    banned = {str(token): -100 for token in greedy}
    assert not set(ids(call, temperature=0, logit_bias=banned)) & set(greedy)


def test_penalties_follow_their_formulas_over_http(call: Any, llm: LLM, oracle: Any) -> None:
    """A frequency penalty of 2 against a bias: a token returns until its count outweighs it."""
    bias = {"300": 100, "301": 95}
    found = ids(call, temperature=0, logit_bias=bias, frequency_penalty=2, max_tokens=12)
    for position, token in enumerate(found):
        before = found[:position]
        logits = oracle([*llm.tokenizer.encode(PROMPT), *before])[-1]
        for biased, value in bias.items():
            logits[int(biased)] += value
        for seen in set(before):
            logits[seen] -= 2 * before.count(seen)
        assert int(logits.argmax()) == token
    assert {300, 301} <= set(found)
    once = ids(call, temperature=0, presence_penalty=2, logit_bias={"300": 100}, max_tokens=4)
    assert once == [300] * 4  # 2 does not outweigh 100, however often it came


def test_min_tokens_keeps_stop_tokens_and_stop_strings_from_ending(call: Any, llm: LLM) -> None:
    greedy = ids(call, temperature=0)
    body: dict[str, Any] = {"temperature": 0, "stop_token_ids": greedy[1:]}
    assert len(ids(call, **body)) == 2
    held = complete(call, **body, min_tokens=10)["choices"][0]
    assert len(held["token_ids"]) >= 10
    assert not set(held["token_ids"][:10]) & set(greedy[1:])
    text = llm.tokenizer.decode(greedy)
    stop = text[len(text) // 4]
    early = complete(call, temperature=0, stop=stop)["choices"][0]
    late = complete(call, temperature=0, stop=stop, min_tokens=12)["choices"][0]
    assert early["finish_reason"] == "stop" and len(early["token_ids"]) < 12
    assert len(late["token_ids"]) > 12 or late["finish_reason"] == "length"
    assert greedy[: len(late["token_ids"])] == late["token_ids"]


def test_end_token_ends_unless_ignored_or_too_early(call: Any, llm: LLM) -> None:
    eos = llm.tokenizer.eos_token_ids[0]
    body = {"temperature": 0, "logit_bias": {str(eos): 100}, "ignore_eos": False}
    assert ids(call, **body) == [eos]
    assert ids(call, **body, min_tokens=3)[3:] == [eos]
    assert ids(call, **{**body, "ignore_eos": True}, max_tokens=5) == [eos] * 5


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_n_choices_have_seeds_of_their_own(call: Any, path: str) -> None:
    body: dict[str, Any] = {"n": 4, "max_tokens": 20, "ignore_eos": True, **HOT}
    body["return_token_ids"] = True
    body |= {"prompt": PROMPT} if path == TEXT else {"messages": [_user(PROMPT)]}
    four = call("POST", path, json=body).json()
    texts = [choice["token_ids"] for choice in four["choices"]]
    assert [choice["index"] for choice in four["choices"]] == [0, 1, 2, 3]
    assert len({tuple(text) for text in texts}) == 4
    assert four["choices"] == call("POST", path, json=body).json()["choices"]
    one = call("POST", path, json={**body, "n": 1}).json()
    # The first choice is the request's own; the others are no other request's first one.
    assert one["choices"][0]["token_ids"] == texts[0]
    for seed in (HOT["seed"] + 1, HOT["seed"] + 2):
        other = call("POST", path, json={**body, "n": 1, "seed": seed}).json()
        assert other["choices"][0]["token_ids"] not in texts
    assert four["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert four["usage"]["completion_tokens"] == sum(map(len, texts))


def test_n_choices_stream_side_by_side(client: Any) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "n": 3, "max_tokens": 12, "seed": 5}
    whole = client.chat.completions.create(messages=[_user("hello")], **arguments)
    stream = client.chat.completions.create(messages=[_user("hello")], stream=True, **arguments)
    texts, roles, ends = ["", "", ""], [0, 0, 0], [0, 0, 0]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
            ends[choice.index] += choice.finish_reason is not None
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == ends == [1, 1, 1]


def test_n_choices_of_several_prompts_stand_together(call: Any) -> None:
    found = complete(call, prompt=["one", "two two"], n=2, max_tokens=3, prompt_logprobs=0)
    prompts = [choice["prompt_token_ids"] for choice in found["choices"]]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert found["usage"]["prompt_tokens"] == len(prompts[0]) + len(prompts[2])
    for choice, prompt in zip(found["choices"], prompts, strict=True):
        assert len(choice["prompt_logprobs"]) == len(prompt)
        keys = [list(entry) for entry in choice["prompt_logprobs"][1:]]
        assert keys == [[str(token)] for token in prompt[1:]]


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_prompt_logprobs_are_those_of_transformers(
    call: Any, llm: LLM, oracle: Any, path: str
) -> None:
    body: dict[str, Any] = {"prompt_logprobs": 2, "max_tokens": 1, "return_token_ids": True}
    body |= {"prompt": PROMPT} if path == TEXT else {"messages": [_user(PROMPT)]}
    for _ in range(2):  # the second time the prompt's KV is cached
        answer = call("POST", path, json=body).json()
        holder = answer["choices"][0] if path == TEXT else answer
        found, prompt = holder["prompt_logprobs"], _prompt_ids(answer)
        assert found[0] is None and len(found) == len(prompt)
        logprobs = oracle(prompt).log_softmax(-1)
        for position, token in enumerate(prompt[1:]):
            _check_entry(llm, found[position + 1], logprobs[position], token)


def _check_entry(llm: LLM, entry: Any, logprobs: torch.Tensor, token: int) -> None:
    values, top = logprobs.topk(2)
    assert list(entry) == [str(t) for t in dict.fromkeys([token, *top.tolist()])]
    own = entry[str(token)]
    assert own["logprob"] == pytest.approx(float(logprobs[token]), abs=1e-4)
    assert own["rank"] == 1 + int((logprobs > logprobs[token]).sum())
    assert own["decoded_token"] == llm.tokenizer.token_text(token)
    for rank, (value, other) in enumerate(zip(values.tolist(), top.tolist(), strict=True), 1):
        assert entry[str(other)]["rank"] == rank
        assert entry[str(other)]["logprob"] == pytest.approx(value, abs=1e-4)


def _prompt_ids(answer: dict[str, Any]) -> list[int]:
    found: list[int] = {**answer, **answer["choices"][0]}["prompt_token_ids"]
    return found


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_logprobs_stay_those_of_the_raw_distribution(call: Any) -> None:
    plain = complete(call, temperature=0, logprobs=3, max_tokens=1)["choices"][0]
    pushed = complete(
        call, **HOT, logprobs=3, max_tokens=1, logit_bias={"300": 100}, repetition_penalty=2
    )["choices"][0]
    assert pushed["token_ids"] == [300]
    for text, logprob in plain["logprobs"]["top_logprobs"][0].items():
        assert pushed["logprobs"]["top_logprobs"][0][text] == pytest.approx(logprob, abs=1e-4)
    assert pushed["logprobs"]["token_logprobs"][0] < -1


def test_max_completion_tokens_limits_the_answer(call: Any) -> None:
    body = {"messages": [_user("hello")], "max_completion_tokens": 3, "ignore_eos": True}
    answer = call("POST", CHAT, json={**body, "max_tokens": 9}).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"


def test_offline_api_gives_what_http_gives(call: Any, llm: LLM) -> None:
    params = SamplingParams(
        n=3, temperature=2.0, seed=11, min_p=0.1, frequency_penalty=1, max_tokens=24,
        ignore_eos=True, prompt_logprobs=1, logit_bias={44: 3.0}, min_tokens=2,
    )  # fmt: skip
    [output] = llm.generate(PROMPT, params)
    fields = {"n": 3, **HOT, "min_p": 0.1, "frequency_penalty": 1, "logit_bias": {"44": 3}}
    found = complete(call, **fields, prompt_logprobs=1)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    for ours, theirs in zip(output.outputs, found["choices"], strict=True):
        assert (ours.token_ids, ours.text) == (theirs["token_ids"], theirs["text"])
        for mine, other in zip(
            output.prompt_logprobs[1:], theirs["prompt_logprobs"][1:], strict=True
        ):
            assert mine is not None
            own = next(iter(other.values()))
            assert mine.logprob == pytest.approx(own["logprob"], abs=1e-4)
    assert output.prompt_logprobs[0] is None
    [short] = llm.generate([[5]], SamplingParams(prompt_logprobs=0, max_tokens=1))
    assert short.prompt_logprobs == [None]
    assert llm.config.role is Role.MIXED
