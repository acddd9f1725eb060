"""What a body may hold, what an answer may become, and what waits for a client."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from serve.admission import Admission
from serve.arguments import DeployArgs
from serve.clients import UNKNOWN
from serve.config import ApiSettings
from serve.openai import endpoint, generation
from serve.openai.app import build_app
from serve.openai.body import SMALL_BYTES, check_values
from serve.openai.errors import ApiError
from serve.openai.generation import BEGUN_AT_ONCE, COPIES_IN_MEMORY, Serving

pytestmark = pytest.mark.feature("R22")

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
MIB = 1 << 20


def message_of(answer: httpx.Response, status: int, param: str | None) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    message: str = error["message"]
    return message


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b'{"prompt":[' + b"[]," * MIB + b"[]]}", "lists and objects"),
        (b'{"prompt":' + b'{"a":' * MIB + b"1" + b"}" * (MIB + 1), "strings"),
        (b'{"prompt":["' + b'","' * MIB + b'"]}', "strings"),
        (b'{"prompt":[' + b"1," * 3 * MIB + b"1]}", "numbers"),
    ],
    ids=["lists", "objects", "strings", "numbers"],
)
def test_a_body_of_very_many_values_is_refused_before_they_are_built(
    call_with: Any, body: bytes, what: str
) -> None:
    answer = call_with({"max_body_bytes": 8 * MIB}, "POST", TEXT, content=body)
    assert f" {what}, found " in message_of(answer, 400, None)


@pytest.mark.parametrize(
    "text",
    ["a [list] of {things}, and more, " * 4000, '\\"[[[[' * 20_000, "\\" * 200_000, '"' * 200_000],
    ids=["marks", "quotes and brackets", "backslashes", "quotes"],
)
def test_what_stands_within_a_text_is_no_value(text: str) -> None:
    body = json.dumps({"prompt": text, "n": 1}).encode()
    assert len(body) > SMALL_BYTES
    check_values(body, 100)


def test_a_body_that_is_cut_within_a_text_is_left_to_the_parser() -> None:
    for end in (b"", b"\\", b'\\"'):
        check_values(b'{"prompt":"' + b"a" * SMALL_BYTES + end, 100)
    with pytest.raises(ApiError):
        check_values(b'"' * MIB, 100)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("[" + "7," * 500_000 + "7]", "body: wanted at most 400000 numbers, found"),
        ("[" + f"{'7' * 401}," * 200 + "7]", "body: wanted numbers of at most 400 digits"),
        (f"[0.{'7' * 401}{' ' * SMALL_BYTES}]", "body: wanted numbers of at most 400 digits"),
    ],
    ids=["many", "long", "one long"],
)
def test_numbers_are_counted_and_measured_before_they_are_read(
    call_with: Any, prompt: str, message: str
) -> None:
    body = f'{{"prompt":{prompt}}}'.encode()
    answer = call_with({"max_body_bytes": 2 * MIB}, "POST", TEXT, content=body)
    assert message_of(answer, 400, None).startswith(message)


def test_a_long_context_may_be_token_ids() -> None:
    body = f'{{"prompt":[{"7," * 700_000}7],"n":1}}'.encode()
    check_values(body, 400_000)
    with pytest.raises(ApiError, match="wanted at most 600000 numbers, found 699999"):
        check_values(body, 300_000)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_an_answer_is_bounded_by_what_its_request_asks_for(
    call_with: Any, backend: Any, path: str, stream: bool
) -> None:
    limits = {"max_answer_bytes": 100_000 * (1 if stream else COPIES_IN_MEMORY)}
    body: dict[str, Any] = {"prompt": "a", "logprobs": 20}
    if path == CHAT:
        body = {"messages": HI, "logprobs": True, "top_logprobs": 20}
    body |= {"n": 4, "stream": stream}
    answer = call_with(limits, "POST", path, json={**body, "max_tokens": 40})
    message = message_of(answer, 400, "max_tokens")
    most = int(message.partition("at most ")[2].partition(" ")[0])
    assert "an answer has at most max_answer_bytes, here 100000 bytes" in message
    assert 10 < most < 16 and "of 4 choices" in message
    assert not backend.requests
    assert call_with(limits, "POST", path, json={**body, "max_tokens": most}).status_code == 200
    assert [r.sampling.max_tokens for r in backend.requests] == [most] * 4


def test_a_limit_that_nobody_asked_for_gives_way_to_the_answers(
    call_with: Any, backend: Any
) -> None:
    limits = {"max_answer_bytes": 4 * 9 * 100}
    body = {"messages": HI, "logprobs": True}
    assert call_with(limits, "POST", CHAT, json=body).status_code == 200
    [request] = backend.requests
    assert 1 <= request.sampling.max_tokens < 16


def test_what_is_said_of_a_prompt_is_bounded_with_all_its_copies(
    call_with: Any, backend: Any
) -> None:
    limits = {"max_answer_bytes": 4 * MIB}
    body = {"prompt": [5] * 200, "prompt_logprobs": 20, "max_tokens": 1}
    answer = call_with(limits, "POST", TEXT, json={**body, "n": 16})
    message = message_of(answer, 400, "prompt_logprobs")
    assert "here 1048576 bytes" in message and "for 16 choices" in message
    assert not backend.requests
    assert call_with(limits, "POST", TEXT, json=body).status_code == 200
    ids = {"prompt": [5] * 200, "return_token_ids": True, "n": 128, "max_tokens": 1}
    answer = call_with({"max_answer_bytes": MIB // 2}, "POST", TEXT, json=ids)
    assert "for 128 choices" in message_of(answer, 400, "return_token_ids")


@pytest.mark.parametrize("stream", [False, True])
def test_places_are_free_again_whatever_became_of_a_request(
    call: Any, backend: Any, admission: Admission, stream: bool
) -> None:
    for body in ({"prompt": ["a", "b"], "n": 3}, {"prompt": "a", "top_p": 7}, {"nothing": 1}):
        call("POST", TEXT, json={**body, "stream": stream})
        assert (admission.num_live, admission.num_bytes) == (0, 0)
    backend.raises = RuntimeError("broken")
    call("POST", TEXT, json={"prompt": "a", "stream": stream})
    assert (admission.num_live, admission.num_bytes) == (0, 0)


HELD_BYTES = MIB // 4
"""Of refused bodies that are far longer, at the most."""
REFUSED = {
    "characters": b'{"prompt":"' + b"a " * MIB + b'"}',
    "token ids": b'{"prompt":[' + b"123456," * 300_000 + b"1]}",
    "tokens": b'{"prompt":"' + b"hello world " * 15_000 + b'"}',
    "values": b'{"prompt":' + b"[" * MIB,
    "no JSON": b'{"prompt":"' + b"a" * 2 * MIB,
    "a field": b'{"nothing":"' + b"a" * 2 * MIB + b'"}',
    "the model": b'{"prompt":"a","model":"' + b"a" * 2 * MIB + b'"}',
    "a client that leaves": b"cut" + b"a" * 2 * MIB,
    "sampling": b'{"prompt":"' + b"a" * 2 * MIB + b'","top_p":7}',
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
def test_a_body_that_is_refused_is_let_go_of_at_once(
    connect: Any, app_with: Any, body: bytes, stream: bool
) -> None:
    """No cycle of an error and its traceback holds it until the garbage is collected."""
    is_cut = body.startswith(b"cut")
    max_len = 20_000 if body.startswith(b'{"prompt":"hello') else 256
    app = app_with({"max_model_len": max_len, "max_body_bytes": 4 * MIB})
    if stream:
        body = body.replace(b"{", b'{"stream":true,', 1)

    async def main() -> int:
        await ask()
        gc.collect()
        gc.disable()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(3):
            await ask()
        # A thread that read the body may be a moment later than the answer.
        deadline = time.monotonic() + 5.0
        while (held := tracemalloc.get_traced_memory()[0] - before) > HELD_BYTES:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.01)
        return held

    async def ask() -> None:
        connection = connect(bytes(bytearray(body)))
        if is_cut:
            connection.parts[0]["more_body"] = True
            connection.leaves.set()
        await connection(app)
        expected = b"not_found" if b'"model"' in body else b"invalid_request"
        assert is_cut or expected in connection.body

    tracemalloc.start()
    try:
        assert asyncio.run(main()) <= HELD_BYTES
    finally:
        gc.enable()
        tracemalloc.stop()


async def steps_of(count: Callable[[], int], last: int) -> list[int]:
    """Return by how much a count grew in each turn of the loop until it was `last`."""
    steps = [count()]
    async with asyncio.timeout(60):
        while sum(steps) < last:
            await asyncio.sleep(0)
            steps.append(count() - sum(steps))
    return steps


async def test_requests_of_a_burst_begin_a_few_at_a_time(
    connect: Any, app: Any, backend: Any, admission: Admission
) -> None:
    """What comes in one turn of the loop does not hold up the tokens of others in that turn."""
    backend.hangs = True
    tasks = [asyncio.create_task(connect({"prompt": "a"})(app)) for _ in range(40)]
    steps = await steps_of(lambda: admission.num_live, len(tasks))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert max(steps) == BEGUN_AT_ONCE


async def test_sequences_of_a_request_begin_a_few_at_a_time(
    connect: Any, app: Any, backend: Any
) -> None:
    backend.hangs = True
    task = asyncio.create_task(connect({"prompt": ["a", "b"], "n": 20})(app))
    steps = await steps_of(lambda: len(backend.requests), 40)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert max(steps) == BEGUN_AT_ONCE


async def test_a_client_that_lets_too_much_wait_is_cut_off_and_its_sequence_freed(
    connect: Any, app: Any, backend: Any, admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MAX_WAITING_BYTES", 50_000)
    backend.pieces, backend.hangs = [[5]] * 1000, True
    connection = connect({"prompt": "a", "stream": True})
    connection.reads.clear()
    async with asyncio.timeout(60):
        await connection(app)
    assert (backend.num_open, connection.messages, admission.num_live) == (0, [], 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_sequences_that_have_ended_make_room_although_their_client_does_not_read(
    connect: Any, app: Any, admission: Admission, stream: bool
) -> None:
    class Stops(connect):  # type: ignore[misc]
        async def send(self, message: dict[str, Any]) -> None:
            await super().send(message)
            if b'"finish_reason":"' in message.get("body", b""):
                self.reads.clear()

    connection = Stops({"prompt": "a", "stream": stream})
    if not stream:
        connection.reads.clear()
    task = asyncio.create_task(connection(app))
    async with asyncio.timeout(60):
        while admission.num_requests == 0 or admission.num_live:
            await asyncio.sleep(0.001)
    found = admission.num_requests, admission.num_live
    connection.reads.set()
    await task
    assert found == (1, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_reads_nothing_is_cut_off(
    connect: Any, app: Any, admission: Admission, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(endpoint, "SEND_TIMEOUT_S", 0.1)
    connection = connect({"prompt": "a", "stream": stream})
    connection.reads.clear()
    async with asyncio.timeout(60):
        await connection(app)
    assert admission.num_live == 0


async def test_a_slow_body_gives_its_place_to_who_comes(
    app: Any, admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every place is held by a body of one byte; a request comes and is served."""
    monkeypatch.setattr("serve.admission.PATIENCE_S", 0.1)

    async def drip() -> Any:
        yield b"{"
        await asyncio.sleep(30)

    async with client_of(app) as client:
        places = [admission.enter(UNKNOWN) for _ in range(admission.max_live - 3)]
        slow = [asyncio.create_task(client.post(TEXT, content=drip())) for _ in range(3)]
        while admission.num_live < admission.max_live:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        good = await client.post(TEXT, json={"prompt": "a"})
        await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
        ended = [task.result().status_code for task in slow if task.done()]
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)
        for place in places:
            place.leave()
    assert (ended, good.status_code) == ([408], 200)
    assert admission.num_live == 0


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")


async def all_but_the_last_byte(num_bytes: int) -> Any:
    """Yield a body that is never complete."""
    yield b"{" + b" " * (num_bytes - 2)
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("access", "num_bytes"),
    [({}, 100), ({"api_keys": ("greedy", "other")}, 9 * MIB // 10)],
    ids=["a small body", "a large one of another key"],
)
async def test_bodies_that_wait_for_their_rest_shut_nobody_out(
    backend: Any, tokenizer: Any, access: dict[str, Any], num_bytes: int
) -> None:
    """Eight bodies are complete but for the last byte, and hold all bytes; a request is served."""
    settings = ApiSettings(
        served_model_name="m", max_model_len=MIB, args=DeployArgs(max_body_bytes=MIB, **access)
    )
    limits: dict[str, Any] = {"max_queue_wait_s": 60.0, "max_body_bytes": MIB, "retry_after_s": 3.0}
    admission = Admission(max_running=2048, max_queued=0, **limits)
    serving = Serving(settings, backend, lambda: tokenizer, admission)
    app = build_app(serving)
    body = b'{"prompt":"a"' + b" " * num_bytes + b"}"

    greedy, other = ({"Authorization": f"Bearer {key}"} for key in ("greedy", "other"))
    async with client_of(app) as client:
        posts = [
            client.post(TEXT, content=all_but_the_last_byte(MIB), headers=greedy) for _ in range(8)
        ]
        tasks = [asyncio.create_task(post) for post in posts]
        while admission.num_bytes < 8 * (MIB - 1):
            await asyncio.sleep(0.001)
        good = await client.post(TEXT, content=body, headers=other)
        ended, others = await asyncio.wait(
            tasks, return_when=asyncio.FIRST_COMPLETED, timeout=20 * (good.status_code == 200)
        )
        for task in others:
            task.cancel()
        await asyncio.wait(tasks)
    found = (good.status_code, [task.result().status_code for task in ended])
    assert found == (200, [408])
    assert (admission.num_live, admission.num_bytes) == (0, 0)


def test_refused_bodies_are_read_on_for_only_so_many_clients(
    call_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_DISCARDS", 0)
    num_read = 0

    async def body() -> Any:
        nonlocal num_read
        for _ in range(50):
            num_read += 1
            yield b" " * 1000

    answer = call_with({"max_body_bytes": 2000}, "POST", TEXT, content=body())
    message_of(answer, 413, None)
    assert num_read == 3
