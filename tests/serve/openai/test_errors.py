"""Every refusal: its status, type, param, and that the message names what was wrong."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import openai
import pytest

from serve import event_loop
from serve.admission import Admission, Overloaded
from serve.clients import UNKNOWN
from serve.openai import endpoint
from serve.openai.completions import COMPLETIONS
from serve.openai.errors import MAX_MESSAGE_CHARS
from serve.openai.generation import Serving
from serve.pools.directory import NoLeader

pytestmark = pytest.mark.feature("R12")

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image_url", "image_url": {}}
SPEED = {"stream": True, "stream_options": {"speed": 1}}
INVALID = "invalid_request_error"


def error_of(answer: httpx.Response, status: int, kind: str, param: str | None) -> str:
    """Check the shape of an error and return its message."""
    error = answer.json()["error"]
    assert list(answer.json()) == ["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (answer.status_code, error["code"]) == (status, status)
    assert (error["type"], error["param"]) == (kind, param), error["message"]
    message: str = error["message"]
    return message


BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "found none"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "hi"}, "messages", "wanted array, found str"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "found none"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role", "found king"),
    ({"messages": [{"role": "function", "content": "hi"}]}, "messages[0].role", "not built"),
    ({"messages": [*HI, {**HI[0], "crown": 1}]}, "messages[1].crown", "unknown"),
    (
        {"messages": [{**HI[0], "content": [IMAGE]}]},
        "messages[0].content[0].type",
        "found image_url",
    ),
    ({"messages": [*HI, {"role": "system", "content": "late"}]}, "messages", "comes first"),
    ({"messages": HI, "temperature": "hot"}, "temperature", "wanted float, found str"),
    ({"messages": HI, "seed": 2**64}, "seed", "64 bits"),
    ({"messages": HI, "max_tokens": 1000}, "max_tokens", "length is 256"),
    ({"messages": HI, "max_completion_tokens": 1000}, "max_completion_tokens", "found 1000"),
    ({"messages": HI, "top_logprobs": 3}, "top_logprobs", "logprobs"),
    ({"messages": HI, "stream_options": {}}, "stream_options", "stream true"),
    ({"messages": HI, **SPEED}, "stream_options.speed", "unknown"),
    ({"messages": [{"role": "user", "content": "cat " * 600}]}, "messages", "at most 255 tokens"),
    ({"messages": [{"role": "user", "content": "cat " * 2000}]}, "messages", "3328 characters"),
    ({"messages": HI * 257}, "messages", "at most 256, a token"),
]

# Types and bounds of each field are those of tests/serve/requests/test_sampling.py; here is what
# only JSON has, and each form of message once.
BAD_SAMPLING: list[tuple[str, Any, str]] = [
    ("logit_bias", {"the": 1}, "token ids as keys"),
    ("logit_bias", {"9" * 5000: 1}, "token ids as keys"),
    ("logit_bias", {"100000": 1}, "found 100000"),
    ("logit_bias", [1], "found array"),
    ("allowed_token_ids", [100_000], "found 100000"),
    ("min_tokens", 9, "max_tokens=8"),
]


BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "found none"),
    ({"prompt": ""}, "prompt", "at least one token"),
    ({"prompt": []}, "prompt", "empty list"),
    ({"prompt": [[]]}, "prompt", "at least one token"),
    ({"prompt": ["a", 1]}, "prompt", "mixture"),
    ({"prompt": {"a": 1}}, "prompt", "found object"),
    ({"prompt": [1, 100_000]}, "prompt", "found 100000"),
    ({"prompt": [-1]}, "prompt", "found -1"),
    ({"prompt": ["a"] * 1025}, "prompt", "at most 1024 prompts"),
    ({"prompt": "cat " * 600}, "prompt", "at most 255 tokens"),
    ({"prompt": "cat " * 2000}, "prompt", "at most 3328 characters"),
    ({"prompt": [5] * 250, "max_tokens": 7}, "max_tokens", "at most 6"),
    ({"prompt": ["a"] * 9, "n": 120}, "n", "at most 113"),
    (
        {"prompt": "a", "stream": True, "prompt_logprobs": 1},
        "prompt_logprobs",
        "none with stream true",
    ),
    ({"prompt": "a", "suffix": "b"}, "suffix", "not built"),
    ({"prompt": "a", "messages": HI}, "messages", "unknown"),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [(CHAT, *case) for case in BAD_CHATS] + [(TEXT, *case) for case in BAD_COMPLETIONS],
)
def test_bad_field_is_named(
    call: Any, backend: Any, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    message = error_of(call("POST", path, json=body), 400, INVALID, param)
    assert words in message
    assert backend.requests == []


@pytest.mark.parametrize(("name", "value", "words"), BAD_SAMPLING)
def test_bad_sampling_field_is_named_on_both_endpoints(
    call: Any, backend: Any, name: str, value: Any, words: str
) -> None:
    for path, body in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "a"})):
        answer = call("POST", path, json={**body, "max_tokens": 8, name: value})
        found = answer.json()["error"]["param"]
        # Of a list or an object the place may be named too.
        assert found.split("[")[0] == name
        assert words in error_of(answer, 400, INVALID, found)
    assert backend.requests == []


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b'{"prompt": NaN}', b"[" * 20_000, b'"text"', b"[]", b'{"a": 1e999}'],
)
def test_body_that_is_no_json_object_is_400(call: Any, body: bytes) -> None:
    assert "wanted" in error_of(call("POST", TEXT, content=body), 400, INVALID, None)


def test_messages_quote_only_so_much_of_the_request(call: Any) -> None:
    answer = call("POST", TEXT, json={"prompt": "a", "suffix": "x" * 10_000})
    assert len(error_of(answer, 400, INVALID, "suffix")) <= MAX_MESSAGE_CHARS + 1


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_unknown_model_is_404_and_names_the_served_one(call: Any, path: str) -> None:
    body = {"model": "gpt", "messages": HI} if path == CHAT else {"model": "gpt", "prompt": "a"}
    message = error_of(call("POST", path, json=body), 404, "not_found_error", "model")
    assert "scripted" in message and "gpt" in message
    error_of(call("GET", "/v1/models/gpt"), 404, "not_found_error", "model")


def test_a_model_answers_to_all_its_names_and_reports_the_first(call_with: Any) -> None:
    names = {"served_model_name": "large", "other_model_names": ("gpt-4o", "small")}
    body = {"prompt": [5], "max_tokens": 2}
    for name in ("large", "gpt-4o", "small"):
        answer = call_with(names, "POST", TEXT, json={**body, "model": name})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "large"
        assert call_with(names, "GET", f"/v1/models/{name}").json()["id"] == name
    listed = call_with(names, "GET", "/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["large", "gpt-4o", "small"]
    answer = call_with(names, "POST", TEXT, json={**body, "model": "gpt"})
    assert "large or gpt-4o or small" in error_of(answer, 404, "not_found_error", "model")


def test_unknown_path_and_wrong_method_have_the_same_shape(call: Any) -> None:
    error_of(call("GET", "/v1/nothing"), 404, "not_found_error", None)
    error_of(call("GET", "/v1/models/"), 404, "not_found_error", "model")
    answer = call("GET", CHAT)
    error_of(answer, 405, INVALID, None)
    assert answer.headers["allow"] == "POST"


def test_before_ready_is_503_with_retry_after(call: Any, backend: Any) -> None:
    backend.ready = False
    answer = call("POST", CHAT, json={"messages": HI})
    error_of(answer, 503, "service_unavailable_error", None)
    assert answer.headers["retry-after"] == "3"
    ready = call("GET", "/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "loading"})
    assert ready.headers["retry-after"] == "3"
    assert call("GET", "/health").status_code == 200
    backend.ready = True
    assert call("GET", "/ready").status_code == 200


def test_before_the_tokenizer_is_loaded_is_503(
    call: Any, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "tokenizer", lambda: None)
    answer = call("POST", CHAT, json={"messages": HI})
    error_of(answer, 503, "service_unavailable_error", None)


def test_unhealthy_backend_is_503_and_tells_why(call: Any, backend: Any) -> None:
    backend.is_healthy = False
    found = error_of(call("GET", "/health"), 503, "service_unavailable_error", None)
    assert found == "decode pool: rank dp=0 tp=1 epoch=0: stuck"


@pytest.mark.feature("R13")
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_a_place_is_429_before_its_body_is_looked_at(
    call: Any, admission: Admission, backend: Any, stream: bool
) -> None:
    places = [admission.enter(UNKNOWN) for _ in range(admission.max_live)]
    answer = call("POST", TEXT, content=b"not even JSON")
    message = error_of(answer, 429, "rate_limit_error", None)
    assert f"no room for 1 more beside {admission.max_live}" in message
    assert answer.headers["retry-after"] == "3"
    places.pop().leave()
    answer = call("POST", TEXT, json={"prompt": ["a", "a"], "stream": stream})
    assert "no room for 1 more" in error_of(answer, 429, "rate_limit_error", None)
    assert admission.num_live == len(places)
    assert call("POST", TEXT, json={"prompt": "a", "stream": stream}).status_code == 200
    assert admission.num_live == len(places) and len(backend.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_overload_is_429_with_the_backends_retry_after(
    call: Any, backend: Any, stream: bool
) -> None:
    backend.pieces, backend.raises = [], Overloaded(retry_after_s=6.2)
    answer = call("POST", TEXT, json={"prompt": "a", "stream": stream})
    error_of(answer, 429, "rate_limit_error", None)
    assert answer.headers["retry-after"] == "7"


NOBODY = (
    "mixed pool: wanted an engine that takes requests within 30 s, found mixed/r/0 epoch=1 lost"
)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_no_engine_takes_in_time_is_503_with_retry_after(
    call: Any, backend: Any, stream: bool
) -> None:
    backend.pieces, backend.raises = [], NoLeader(NOBODY)
    answer = call("POST", TEXT, json={"prompt": "a", "stream": stream})
    assert error_of(answer, 503, "service_unavailable_error", None) == NOBODY
    assert int(answer.headers["retry-after"]) >= 1


def test_a_stream_that_no_engine_goes_on_with_in_time_ends_with_that_error(
    call: Any, backend: Any
) -> None:
    backend.raises = NoLeader(NOBODY)
    answer = call("POST", TEXT, json={"prompt": "a", "stream": True})
    parts = answer.content.split(b"\n\n")
    error = msgspec.json.decode(parts[-3].removeprefix(b"data: "))["error"]
    assert (error["code"], error["message"]) == (503, NOBODY)
    assert b"hello" in answer.content and parts[-2] == b"data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token_has_its_own_status(
    call: Any, backend: Any, stream: bool
) -> None:
    backend.pieces, backend.finish_reason, backend.error = [[]], "error", "rank 3 died"
    answer = call("POST", TEXT, json={"prompt": "a", "stream": stream})
    assert "rank 3 died" in error_of(answer, 500, "server_error", None)


def test_failure_of_the_backend_does_not_leak_its_words(
    call: Any, backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    backend.pieces, backend.raises = [], RuntimeError("secret")
    message = error_of(call("POST", TEXT, json={"prompt": "a"}), 500, "server_error", None)
    assert "secret" not in message and "secret" in caplog.text


def test_stream_without_a_last_output_is_an_error(call: Any, backend: Any) -> None:
    backend.finish_reason = ""
    error_of(call("POST", TEXT, json={"prompt": "a"}), 500, "server_error", None)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_failure_within_a_stream_is_an_event_before_done(
    call: Any, backend: Any, path: str
) -> None:
    backend.finish_reason, backend.error = "error", "rank 3 died"
    body = {"messages": HI} if path == CHAT else {"prompt": "a"}
    answer = call("POST", path, json={**body, "stream": True})
    assert answer.status_code == 200
    parts = answer.content.split(b"\n\n")
    assert parts[-2] == b"data: [DONE]"
    error = msgspec.json.decode(parts[-3].removeprefix(b"data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", 500)
    assert b"hello" in answer.content and "rank 3 died" in error["message"]


def test_failure_within_a_stream_raises_in_the_official_client(
    client: openai.OpenAI, backend: Any
) -> None:
    backend.finish_reason, backend.error, backend.pause_s = "error", "rank 3 died", 0.01
    stream = client.completions.create(model="scripted", prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="rank 3 died"):
        list(stream)


@pytest.mark.parametrize("stream", [False, True])
def test_request_that_takes_too_long_is_504_and_aborted(
    call_with: Any, backend: Any, stream: bool
) -> None:
    backend.pieces, backend.hangs = [], True
    body = {"prompt": "a", "stream": stream}
    answer = call_with({"request_timeout_s": 0.05}, "POST", TEXT, json=body)
    error_of(answer, 504, "timeout_error", None)
    assert backend.num_open == 0 and len(backend.closed_at) == 1


def test_body_that_comes_too_slowly_is_408(call_with: Any) -> None:
    async def drip() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        await asyncio.sleep(10)
        yield b'"a"}'

    answer = call_with({"request_timeout_s": 0.05}, "POST", TEXT, content=drip())
    error_of(answer, 408, "timeout_error", None)


def test_large_body_is_refused_by_its_length_before_it_is_read(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_DISCARD_PAUSE_S", 0.1)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 20001\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 413 ")


def test_large_body_without_a_length_is_refused_while_it_is_read(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_DISCARDED_BYTES", 10_000)
    num_sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_sent
        while True:
            num_sent += 1
            yield b" " * 1000

    error_of(call("POST", TEXT, content=endless()), 413, INVALID, None)
    assert num_sent <= 32


def test_client_that_sends_a_large_body_reads_the_413(url: str) -> None:
    answer = httpx.post(f"{url}{TEXT}", content=b" " * 20_000_000, timeout=10)
    error_of(answer, 413, INVALID, None)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError),
        (404, openai.NotFoundError),
        (429, openai.RateLimitError),
        (503, openai.InternalServerError),
    ],
)
def test_official_client_raises_its_own_errors(
    client: openai.OpenAI,
    backend: Any,
    admission: Admission,
    status: int,
    kind: type[openai.APIStatusError],
) -> None:
    backend.ready = status != 503
    for _ in range(admission.max_live if status == 429 else 0):
        admission.enter(UNKNOWN)
    model = "gpt" if status == 404 else "scripted"
    with pytest.raises(kind) as raised:
        client.completions.create(
            model=model, prompt="a", temperature=-1.0 if status == 400 else 1.0
        )
    assert isinstance(raised.value.body, dict) and raised.value.body["code"] == status


@pytest.mark.parametrize(
    ("limit", "path", "body", "param", "message"),
    [
        ({"vocab_size": 9}, TEXT, {"prompt": [1, 9]}, "prompt", "token ids from 0 to 8, found 9"),
        ({"vocab_size": 9}, TEXT, {"prompt": "the cat"}, "prompt", "token ids from 0 to 8"),
        ({"vocab_size": 9}, CHAT, {"messages": HI}, "messages", "token ids from 0 to 8"),
        (
            {"vocab_size": 99},
            TEXT,
            {"prompt": [1], "logit_bias": {"99": 1}},
            "logit_bias",
            "0 to 98, found 99",
        ),
        ({"max_prompt_len": 3}, TEXT, {"prompt": [1] * 4}, "prompt", "at most 3 tokens"),
        ({"max_sequences": 3}, TEXT, {"prompt": ["a"] * 4}, "prompt", "at most 3 prompts, found 4"),
        ({"max_sequences": 3}, TEXT, {"prompt": "a", "n": 4}, "n", "at most 3"),
        ({"max_sequences": 3}, CHAT, {"messages": HI, "n": 4}, "n", "at most 3, found 4"),
    ],
)
def test_what_only_the_engine_would_refuse_is_the_clients_mistake_too(
    call_with: Any,
    backend: Any,
    limit: dict[str, int],
    path: str,
    body: dict[str, Any],
    param: str,
    message: str,
) -> None:
    answer = call_with(limit, "POST", path, json=body)
    assert message in error_of(answer, 400, "invalid_request_error", param)
    assert not backend.requests


def test_work_on_the_loop_is_bounded_whatever_a_prompt_is_made_of(
    call: Any, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    run = serving.threads.run

    async def noted(size: int, work: Any) -> Any:
        sizes.append(size)
        return await run(size, work)

    monkeypatch.setattr(serving.threads, "run", noted)
    call("POST", TEXT, json={"prompt": [1] * 3000})
    call("POST", CHAT, json={"messages": [{"role": "user", "content": ""}] * 200})
    assert len(sizes) == 4 and min(sizes) > event_loop.MAX_INLINE


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"prompt": "a", "temperature": math.nan}, 400, "body: wanted what JSON can tell"),
        ({"prompt": "a", "top_p": math.inf}, 400, "body: wanted what JSON can tell"),
        ({"prompt": "a", "stop": object()}, 400, "object is not JSON serializable"),
        ({"prompt": "\ud800"}, 400, "body: wanted JSON"),
        ([], 400, "body: wanted a dictionary, found list"),
        ({"prompt": "a" * 20_001}, 413, "body: wanted at most 20000 bytes"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_bodies_of_handle_calls_are_refused_as_over_http(
    serving: Serving, backend: Any, body: Any, status: int, message: str, streamed: bool
) -> None:
    async def ask() -> Any:
        if streamed:
            return [c async for c in endpoint.stream(serving, COMPLETIONS, body)]
        return await endpoint.answer(serving, COMPLETIONS, body)

    with pytest.raises(endpoint.RequestRefused, match=message) as caught:
        asyncio.run(ask())
    assert caught.value.status == status and not backend.requests


def test_answers_to_handle_calls_have_the_keys_of_http(call: Any, serving: Serving) -> None:
    body = {"prompt": "the cat", "prompt_logprobs": 1, "temperature": 0}
    found = asyncio.run(endpoint.answer(serving, COMPLETIONS, body))
    answer = call("POST", TEXT, json=body).json()
    assert found["choices"] == answer["choices"]
