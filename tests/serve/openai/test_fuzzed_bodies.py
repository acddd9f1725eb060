"""Bodies that nobody would send, to the app over a model in process: never a 500."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

from serve.admission import Admission
from serve.llm import LLM
from serve.openai.body import inert_fields
from serve.openai.schema import ChatRequest, CompletionRequest

NUM_BODIES = 250
TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
NAMES = sorted(
    {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__}
    | {*inert_fields(CompletionRequest), *inert_fields(ChatRequest), "nothing", ""}
)
STATUSES = {200, 400, 404, 429}
"""Of a body; what it is refused for has the error's shape."""

numbers = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([0, 1, -1, 128, 129, 511, 512, 513, 2**31, 2**63, 2**64, -(2**63) - 1]),
    st.floats(allow_nan=False, allow_infinity=False),
)
texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["a", "Count from 3 to 9.", "<|im_end|>", "\x00", "日本", "7" * 40, "{{ 1 }}"]),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
token_ids = st.lists(st.one_of(st.integers(0, 639), numbers), max_size=8)
functions = st.fixed_dictionaries(
    {"name": texts}, optional={"parameters": values, "arguments": texts, "strict": values}
)
tools = st.fixed_dictionaries({"type": st.just("function")}, optional={"function": functions})
items = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"])},
    optional={"role": st.just("user"), "call_id": texts, "content": values, "output": values},
)
calls = st.fixed_dictionaries({"id": texts, "function": st.one_of(values, functions)})
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "system", "assistant", "tool", "king"]),
            "content": texts,
        },
        optional={"name": values, "tool_calls": st.lists(st.one_of(values, calls), max_size=2)},
    ),
    max_size=3,
)
vocabulary = st.integers(0, 511)
good: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.one_of(
        st.text(min_size=1, max_size=12),
        st.lists(vocabulary, min_size=1, max_size=8),
        st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=3),
    ),
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": texts}),
        min_size=1,
        max_size=3,
    ),
    "model": st.sampled_from(["tiny", None]),
    "max_tokens": st.integers(1, 6),
    "n": st.integers(1, 4),
    "temperature": st.floats(0, 3),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 9),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 10),
    "prompt_logprobs": st.integers(0, 20),
    "logit_bias": st.dictionaries(vocabulary.map(str), st.floats(-100, 100), max_size=4),
    "allowed_token_ids": st.lists(vocabulary, min_size=1, max_size=8),
    "stop_token_ids": st.lists(vocabulary, max_size=8),
    "return_token_ids": st.booleans(),
    "ignore_eos": st.booleans(),
}
"""What both endpoints, or the one that has the field, take."""
likely: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.one_of(texts, token_ids, st.lists(texts, max_size=3), st.lists(token_ids)),
    "messages": messages,
    "model": st.just("other"),
    "max_tokens": st.integers(-1, 600),
    "max_completion_tokens": st.integers(0, 6),
    "n": st.integers(-1, 130),
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}),
    "logprobs": st.one_of(st.booleans(), st.integers(-1, 21)),
    "top_logprobs": st.integers(0, 21),
    "logit_bias": st.dictionaries(st.integers(-1, 641).map(str), st.floats(-101, 101), max_size=4),
    "allowed_token_ids": token_ids,
    "stop_token_ids": token_ids,
    "chat_template_kwargs": st.dictionaries(texts, values, max_size=3),
    "tools": st.lists(st.one_of(values, tools), max_size=3),
    "tool_choice": st.one_of(values, st.sampled_from(["auto", "none", "required"])),
    "parallel_tool_calls": values,
    "input": st.one_of(texts, st.lists(st.one_of(values, items), max_size=3)),
    "echo": st.booleans(),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path with a JSON object of good fields, of bad ones, with a byte changed, or cut."""
    main = draw(st.sampled_from(["prompt", "messages"]))
    path = TEXT if main == "prompt" else CHAT
    names = draw(st.lists(st.sampled_from(sorted(set(good) - {"prompt", "messages"})), max_size=5))
    fields = {name: draw(good[name]) for name in (main, *names)}
    fields.setdefault("max_tokens", 3)
    fields["stream"] = draw(st.booleans()) and "prompt_logprobs" not in fields
    wrong = draw(st.integers(0, 7))
    if wrong == 0:
        name = draw(st.sampled_from(sorted(likely)))
        fields[name] = draw(likely[name])
        if name == "input":
            path, fields = RESPONSES, {name: fields[name], "max_output_tokens": 3}
    elif wrong == 1:
        fields[draw(st.sampled_from(NAMES))] = draw(values)
    elif wrong == 2:
        path = draw(st.sampled_from([TEXT, CHAT]))
    body = bytearray(json.dumps(fields).encode())
    if wrong == 3:
        body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    elif wrong == 4:
        del body[draw(st.integers(0, len(body))) :]
    elif wrong == 5:
        body = bytearray(draw(st.binary(max_size=60)))
    return path, bytes(body)


@pytest.mark.feature("R22")
@pytest.mark.timeout(3600)  # of so many bodies as the command line asks for
def test_no_body_is_an_error_of_ours(
    engine_app: Starlette,
    engine_backend: Any,
    admission: Admission,
    llm: LLM,
    fuzz: Callable[[int], settings],
) -> None:
    found: Counter[int] = Counter()
    with asyncio.Runner() as runner:

        async def post(path: str, body: bytes) -> httpx.Response:
            transport = httpx.ASGITransport(app=engine_app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.post(path, content=body)

        @fuzz(NUM_BODIES)
        @given(request=requests())
        def check(request: tuple[str, bytes]) -> None:
            path, body = request
            answer = runner.run(post(path, body))
            found[answer.status_code] += 1
            assert answer.status_code in STATUSES, (answer.status_code, answer.text)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
            elif b"data: " in answer.content:
                assert b'"code":' not in answer.content
                assert answer.content.endswith(b"data: [DONE]\n\n")
            assert (admission.num_live, admission.num_bytes) == (0, 0)

        check()
        question = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_tokens": 8}
        answer = runner.run(post(CHAT, json.dumps({**question, "temperature": 0}).encode()))
    assert answer.json()["choices"][0]["message"]["content"] == "42"
    assert found[200] > found.total() / 10 and found[400] > found.total() / 10
    assert not llm.engine.has_unfinished
