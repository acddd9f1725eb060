"""What clients get back, read by the official client and byte by byte."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import openai
import pytest

HI = [{"role": "user", "content": "hi"}]


def events(answer: httpx.Response) -> list[Any]:
    """Return the JSON of a stream's events; the last one must be [DONE]."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    parts = answer.content.split(b"\n\n")
    assert parts[-2:] == [b"data: [DONE]", b""]
    assert all(part.startswith(b"data: ") for part in parts[:-1])
    return [msgspec.json.decode(part[6:]) for part in parts[:-2]]


def test_chat_answers_the_official_client(client: openai.OpenAI, backend: Any) -> None:
    backend.num_cached_tokens = 2
    found = client.chat.completions.create(model="scripted", messages=HI)  # type: ignore[arg-type]
    assert found.id.startswith("chatcmpl-")
    assert (found.object, found.model) == ("chat.completion", "scripted")
    (choice,) = found.choices
    assert (choice.index, choice.finish_reason) == (0, "stop")
    assert (choice.message.role, choice.message.content) == ("assistant", "hello world")
    assert found.usage is not None and found.usage.prompt_tokens_details is not None
    assert found.usage.completion_tokens == len(backend.pieces)
    assert found.usage.prompt_tokens == len(backend.requests[0].prompt_token_ids)
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert found.usage.prompt_tokens_details.cached_tokens == 2


def test_chat_streams_to_the_official_client(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="scripted",
        messages=HI,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert len({chunk.id for chunk in chunks}) == 1
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == "hello world"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage is not None


def test_completions_stream_to_the_official_client(client: openai.OpenAI) -> None:
    asked: Any = {"model": "scripted", "prompt": [[5, 6]], "max_tokens": 32}
    whole = client.completions.create(**asked)
    assert whole.id.startswith("cmpl-") and whole.object == "text_completion"
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


def test_chat_stream_has_exactly_these_bytes(call: Any, backend: Any, tokenizer: Any) -> None:
    backend.pieces = [tokenizer.encode("hello"), [tokenizer.eos_token_ids[0]]]
    backend.pause_s = 0.01
    answer = call("POST", "/v1/chat/completions", json={"messages": HI, "stream": True})
    first = events(answer)[0]
    head = f'{{"id":"{first["id"]}","object":"chat.completion.chunk","created":{first["created"]},'
    head += '"model":"scripted","choices":[{"index":0,"delta":'
    deltas = [
        '{"role":"assistant","content":""},"logprobs":null,"finish_reason":null',
        '{"content":"hello"},"logprobs":null,"finish_reason":null',
        '{},"logprobs":null,"finish_reason":"stop"',
    ]
    tail = ',"stop_reason":null}],"system_fingerprint":null}\n\n'
    expected = "".join(f"data: {head}{delta}{tail}" for delta in deltas) + "data: [DONE]\n\n"
    assert answer.text == expected


def test_usage_chunk_comes_only_when_asked(call: Any) -> None:
    body = {"prompt": "a", "stream": True}
    assert all("usage" not in event for event in events(call("POST", "/v1/completions", json=body)))
    body["stream_options"] = {"continuous_usage_stats": True}
    counts = [
        event["usage"]["completion_tokens"]
        for event in events(call("POST", "/v1/completions", json=body))
    ]
    assert counts == sorted(counts) and counts[-1] > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_over_several_tokens_ends_the_text(
    call: Any, backend: Any, tokenizer: Any, stream: bool, include: bool
) -> None:
    backend.pieces = [[token_id] for token_id in tokenizer.encode("hello END again")]
    backend.hangs = True
    body = {
        "prompt": "a",
        "stop": ["EN!", "END"],
        "include_stop_str_in_output": include,
        "stream": stream,
    }
    answer = call("POST", "/v1/completions", json=body)
    choices = [e["choices"][0] for e in (events(answer) if stream else [answer.json()])]
    assert "".join(choice["text"] for choice in choices) == ("hello END" if include else "hello ")
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "END")
    assert backend.num_open == 0


def test_tokens_after_a_stop_string_are_not_counted(
    call: Any, backend: Any, tokenizer: Any
) -> None:
    hello, rest = tokenizer.encode("hello"), tokenizer.encode(" again and again")
    backend.pieces = [hello + rest]
    body = {"prompt": "a", "stop": "hello", "logprobs": 0, "return_token_ids": True}
    found = call("POST", "/v1/completions", json=body).json()
    assert found["choices"][0]["token_ids"] == hello
    assert len(found["choices"][0]["logprobs"]["tokens"]) == len(hello)
    assert found["usage"]["completion_tokens"] == len(hello)


@pytest.mark.parametrize(
    ("fields", "ends", "finish_reason", "stop_reason"),
    [
        ({"stop_token_ids": [2]}, "stop", "stop", 2),
        ({"skip_special_tokens": False}, "stop", "stop", None),
        ({}, "length", "length", None),
        ({}, "abort", "abort", None),
    ],
    ids=["a user's token", "the end token, which has no text", "length", "abort"],
)
def test_an_end_reaches_the_client(
    call: Any, backend: Any, fields: Any, ends: str, finish_reason: str, stop_reason: int | None
) -> None:
    assert backend.stop_token_id == 2
    backend.finish_reason = ends
    backend.stop_token_id = 2 if ends == "stop" else -1
    [found] = call("POST", "/v1/completions", json={"prompt": "a", **fields}).json()["choices"]
    assert (found["finish_reason"], found["stop_reason"]) == (finish_reason, stop_reason)
    assert found["text"] == "hello world"


def test_chat_logprobs_fit_the_official_client(client: openai.OpenAI, tokenizer: Any) -> None:
    found = client.chat.completions.create(
        model="scripted",
        messages=HI,  # type: ignore[arg-type]
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = found.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    first = logprobs.content[0]
    token_id = tokenizer.encode("hello world")[0]
    assert first.token == tokenizer.token_text(token_id)
    assert bytes(first.bytes or []) == tokenizer.token_bytes(token_id)
    assert [top.logprob for top in first.top_logprobs] == [-0.5, -1.5]


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_have_the_text_offsets_of_their_tokens(call: Any, stream: bool) -> None:
    body = {"prompt": "a", "logprobs": 2, "stream": stream}
    answer = call("POST", "/v1/completions", json=body)
    choices = [e["choices"][0] for e in (events(answer) if stream else [answer.json()])]
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
    for choice in choices:
        top = choice["logprobs"]["top_logprobs"]
        assert all(token in t for token, t in zip(choice["logprobs"]["tokens"], top, strict=True))
        assert all(len(t) == 2 for t in top)


@pytest.mark.parametrize("stream", [False, True])
def test_each_of_several_prompts_has_its_choice(
    call: Any, backend: Any, tokenizer: Any, stream: bool
) -> None:
    body = {"prompt": ["the cat", "a dog", "hill"], "stream": stream}
    answer = call("POST", "/v1/completions", json=body)
    texts = {0: "", 1: "", 2: ""}
    for event in events(answer) if stream else [answer.json()]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == ["hello world"] * 3
    prompts = [tokenizer.encode(prompt) for prompt in body["prompt"]]  # type: ignore[attr-defined]
    assert [r.prompt_token_ids for r in backend.requests] == prompts
    assert len({r.request_id for r in backend.requests}) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_when_asked(call: Any, backend: Any, stream: bool) -> None:
    output = [token_id for piece in backend.pieces for token_id in piece]
    body = {"prompt": [5, 6], "return_token_ids": True, "stream": stream}
    answer = call("POST", "/v1/completions", json=body)
    choices = [e["choices"][0] for e in (events(answer) if stream else [answer.json()])]
    assert choices[0]["prompt_token_ids"] == [5, 6]
    assert all("prompt_token_ids" not in choice for choice in choices[1:])
    assert [t for choice in choices for t in choice["token_ids"]] == output

    body = {"messages": HI, "return_token_ids": True, "stream": stream}
    answer = call("POST", "/v1/chat/completions", json=body)
    found = events(answer) if stream else [answer.json()]
    assert found[0]["prompt_token_ids"] == backend.requests[-1].prompt_token_ids
    assert all("prompt_token_ids" not in event for event in found[1:])
    assert [t for e in found for t in e["choices"][0].get("token_ids", [])] == output


def test_sampling_reaches_the_backend(call: Any, backend: Any) -> None:
    body = {"messages": HI, "temperature": 0, "top_k": 5, "top_p": 0.5, "seed": 7}
    call("POST", "/v1/chat/completions", json={**body, "ignore_eos": True, "stop_token_ids": [9]})
    request = backend.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 5, 0.5)
    assert (sampling.seed, sampling.stop_token_ids, sampling.num_logprobs) == (7, (9,), -1)
    assert sampling.max_tokens == 256 - len(request.prompt_token_ids)
    call("POST", "/v1/completions", json={"prompt": "a"})
    assert backend.requests[1].sampling.max_tokens == 16
    assert backend.requests[1].sampling.stop_token_ids == (backend.stop_token_id,)


@pytest.mark.parametrize("given", [{}, {"max_tokens": None}])
def test_a_limit_that_nobody_sent_gives_way_to_a_long_prompt(
    call: Any, backend: Any, given: dict[str, Any]
) -> None:
    """One that somebody sent is refused where it does not fit, and so is a prompt without room."""
    for num_tokens in (240, 241, 255):
        body = {"prompt": [5] * num_tokens, **given}
        assert call("POST", "/v1/completions", json=body).status_code == 200
    assert [request.sampling.max_tokens for request in backend.requests] == [16, 15, 1]
    for num_tokens, limits, param in ((241, {"max_tokens": 16}, "max_tokens"), (256, {}, "prompt")):
        body = {"prompt": [5] * num_tokens, **given, **limits}
        answer = call("POST", "/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_models_names_the_served_model_and_its_length(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.object) == ("scripted", "model")
    assert card.model_dump()["max_model_len"] == 256
    assert client.models.retrieve("scripted").id == "scripted"


@pytest.mark.feature("R06")
@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_each_text_with_its_prompt(call: Any, tokenizer: Any, stream: bool) -> None:
    ids = tokenizer.encode("a dog")
    for prompt in (["the cat", "hill"], [tokenizer.encode("the cat"), tokenizer.encode("hill")]):
        body = {"prompt": prompt, "n": 2, "echo": True, "stream": stream}
        answer = call("POST", "/v1/completions", json=body)
        texts = ["", "", "", ""]
        for event in events(answer) if stream else [answer.json()]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == ["the cathello world"] * 2 + ["hillhello world"] * 2
    answer = call("POST", "/v1/completions", json={"prompt": ids, "echo": True})
    assert answer.json()["choices"][0]["text"] == "a doghello world"


@pytest.mark.feature("R06")
def test_echo_has_the_prompts_logprobs_before_those_of_the_text(call: Any, tokenizer: Any) -> None:
    body = {"prompt": ["the cat", "hill"], "n": 2, "echo": True, "logprobs": 1}
    body |= {"prompt_logprobs": 3}
    choices = call("POST", "/v1/completions", json=body).json()["choices"]
    for choice, prompt in zip(choices, ["the cat", "the cat", "hill", "hill"], strict=True):
        found = choice["logprobs"]
        num_prompt_tokens = len(tokenizer.encode(prompt))
        assert "".join(found["tokens"][:num_prompt_tokens]) == prompt
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:num_prompt_tokens] == [-0.5] * (num_prompt_tokens - 1)
        # Of token and offset where the text has not ended.
        for token, offset in zip(found["tokens"][:-1], found["text_offset"], strict=False):
            assert choice["text"][offset:].startswith(token)
        assert len({len(values) for values in found.values()}) == 1
        assert max(map(len, found["top_logprobs"][1:])) == 1
        assert {len(entry) for entry in choice["prompt_logprobs"][1:]} <= {3}
    refused = call(
        "POST", "/v1/completions", json={**body, "stream": True, "prompt_logprobs": None}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")


@pytest.mark.feature("R06")
@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/embeddings", "/pooling", "/v1/rerank", "/score"]
)
def test_what_needs_another_kind_of_model_is_refused_by_name(call: Any, path: str) -> None:
    answer = call("POST", path, json={"model": "scripted", "input": "a"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (501, 501, "not_implemented_error")
    assert path in error["message"] and "generates text only" in error["message"]
