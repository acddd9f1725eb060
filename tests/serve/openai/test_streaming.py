"""Slow readers, and clients that leave."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from cluster.wire.messages import EngineOutput, GenerateRequest
from serve.config import ApiSettings
from serve.event_loop import StreamBatcher
from serve.openai.app import build_app
from serve.openai.generation import BEGUN_AT_ONCE, Serving
from serve.pools.mailbox import Mailbox
from serve.requests.choice import GenerationError
from serve.requests.records import SequenceRecord

TEXT = "/v1/completions"
# From the client's leaving to the closed stream, on a machine that runs other tests beside.
MAX_CLOSE_S = 1.0


def until(is_met: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_met():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.002)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_prompts", [1, 3])
@pytest.mark.parametrize("has_first_token", [False, True])
def test_client_that_leaves_closes_the_backends_streams_at_once(
    url: str, backend: Any, stream: bool, num_prompts: int, has_first_token: bool
) -> None:
    backend.pieces = backend.pieces[:2] if has_first_token else []
    backend.hangs = True
    body = {"prompt": ["a"] * num_prompts, "stream": stream}

    async def leave() -> float:
        async with httpx.AsyncClient() as client:
            request = asyncio.create_task(client.post(f"{url}{TEXT}", json=body))
            while backend.num_open < num_prompts:
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.02)
            request.cancel()
            await asyncio.wait([request])
            return time.monotonic()

    left_at = asyncio.run(leave())
    until(lambda: len(backend.closed_at) == num_prompts)
    assert backend.num_open == 0
    assert max(backend.closed_at) - left_at < MAX_CLOSE_S


def test_client_that_stops_reading_a_stream_and_leaves_closes_it(url: str, backend: Any) -> None:
    backend.pieces = [[5]] * 100_000
    with httpx.stream("POST", f"{url}{TEXT}", json={"prompt": "a", "stream": True}) as answer:
        next(answer.iter_lines())
    left_at = time.monotonic()
    until(lambda: len(backend.closed_at) == 1)
    assert max(backend.closed_at) - left_at < MAX_CLOSE_S


class Chunk(NamedTuple):
    at_s: float
    """Since the request was sent."""
    text: str
    token_ids: list[int]


@pytest.fixture
def streamed(connect: Any) -> Any:
    """Return the chunks that a server sends, each send taking a while: `streamed(app)`."""

    async def ask(app: Any, send_s: float = 0.0) -> list[Chunk]:
        body = {"prompt": "a", "stream": True, "return_token_ids": True}
        connection, began = connect(body, send_s=send_s), time.monotonic()
        await connection(app)
        chunks = []
        for message, at in zip(connection.messages, connection.times, strict=True):
            part = message.get("body", b"")
            if part.startswith(b"data: {"):
                [choice] = msgspec.json.decode(part.removeprefix(b"data: "))["choices"]
                chunks.append(Chunk(at - began, choice["text"], choice["token_ids"]))
        return chunks

    return ask


async def test_tokens_that_wait_for_a_slow_reader_come_in_one_chunk(
    streamed: Any, app: Any, backend: Any, tokenizer: Any
) -> None:
    text = "the dog ran over the hill"
    backend.pieces = [[t] for t in tokenizer.encode(text)] * 20
    backend.stop_token_id = -1
    texts = [chunk.text for chunk in await streamed(app, send_s=0.02)]
    assert "".join(texts) == text * 20
    assert len(texts) < 20 and max(map(len, texts)) > len(text)


@pytest.mark.parametrize(("interval", "num_at_least"), [(1, 6), (4, 3), (50, 2)])
async def test_a_chunk_has_as_many_tokens_as_the_interval_says_but_for_the_first_and_last(
    streamed: Any, app_with: Any, backend: Any, interval: int, num_at_least: int
) -> None:
    backend.pieces = [[token] for token in range(40, 50)]
    backend.pause_s = 0.01
    backend.stop_token_id = -1
    chunks = await streamed(app_with({"stream_interval": interval}))
    assert [token for chunk in chunks for token in chunk.token_ids] == list(range(40, 50))
    sizes = [len(chunk.token_ids) for chunk in chunks]
    assert sizes[0] == 1 and len(sizes) >= num_at_least
    assert all(size >= interval for size in sizes[1:-1])


class Mailed:
    """A backend whose outputs wait in a mailbox, as those of engines do."""

    def __init__(self, backend: Any, tick: StreamBatcher) -> None:
        self.tick = tick
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def generate(
        self, request: GenerateRequest, record: SequenceRecord
    ) -> AsyncGenerator[EngineOutput, None]:
        mailbox = Mailbox(request.request_id, self.tick)

        async def fill() -> None:
            position = 0
            async for output in self._backend.generate(request, record):
                mailbox.put(msgspec.structs.replace(output, position=position))
                position += len(output.token_ids)

        filling = asyncio.create_task(fill())
        try:
            while not filling.done() or mailbox._waiting:
                yield await mailbox.get()
        finally:
            filling.cancel()


@pytest.fixture
def mailed(settings: ApiSettings, backend: Any, tokenizer: Any, admission: Any) -> Serving:
    """What the app serves, where outputs wait in mailboxes."""
    before = Mailed(backend, StreamBatcher())
    return Serving(settings, before, lambda: tokenizer, admission, before.tick)


@pytest.mark.parametrize("num_others", [0, 200])
async def test_beside_many_streams_a_chunk_holds_what_came_since_the_last_tick(
    streamed: Any, mailed: Serving, backend: Any, num_others: int
) -> None:
    """Without others each token is a chunk. With them the first chunk and the last wait for none:
    the last is sent long before the tick that all streams of a slow one would wait for."""
    backend.pieces = [[40 + i % 50] for i in range(100)]
    backend.pause_s = 0.005
    backend.stop_token_id = -1
    mailed.tick.num_streams = num_others
    chunks = await streamed(build_app(mailed))
    assert [token for chunk in chunks for token in chunk.token_ids] == [
        token for [token] in backend.pieces
    ]
    assert len(chunks[0].token_ids) == 1
    if num_others == 0:
        assert len(chunks) > 40
    else:
        assert 2 < len(chunks) < 30 and max(len(chunk.token_ids) for chunk in chunks) > 4
    assert mailed.tick.num_streams == num_others


async def test_the_last_chunk_waits_for_no_tick(
    streamed: Any, mailed: Serving, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.event_loop.MAX_TICK_S", 60.0)
    backend.pause_s = 0.002
    mailed.tick.num_streams = 100_000
    chunks = await streamed(build_app(mailed))
    assert [len(chunks), "".join(chunk.text for chunk in chunks)] == [2, "hello world"]
    assert chunks[-1].at_s < 30


@pytest.mark.parametrize("num_words", [5, 700])
def test_long_prompts_are_tokenized_in_a_thread_and_short_ones_on_the_loop(
    call: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, num_words: int
) -> None:
    threads: list[int] = []
    encode = tokenizer.encode

    def noted(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.get_ident())
        return encode(*args, **kwargs)

    monkeypatch.setattr(tokenizer, "encode", noted)
    text = "cat " * num_words
    call("POST", TEXT, json={"prompt": text})
    call("POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": text}]})
    assert len(threads) == 2
    assert {thread == threading.get_ident() for thread in threads} == {num_words == 5}


def events_of(connection: Any) -> list[dict[str, Any]]:
    bodies = [message.get("body", b"") for message in connection.messages]
    parts = [part.rpartition(b"data: ")[2] for part in bodies if b"data: {" in part]
    return [msgspec.json.decode(part) for part in parts]


async def test_an_answer_that_ends_while_its_first_events_are_sent_is_completed(
    connect: Any, app: Any, backend: Any
) -> None:
    connection = connect({"input": "a", "stream": True}, path="/v1/responses", send_s=0.02)
    await connection(app)
    last = events_of(connection)[-1]
    assert last["type"] == "response.completed", last
    [item] = last["response"]["output"]
    assert item["content"][0]["text"] == "hello world"


@pytest.mark.parametrize("n", [1, 3])
async def test_what_a_chunk_says_was_used_is_what_was_sent_to_a_slow_reader(
    connect: Any, app: Any, backend: Any, tokenizer: Any, n: int
) -> None:
    """Of one choice exactly; of several at least that, since all are counted."""
    backend.pieces = [[t] for t in tokenizer.encode("the dog ran over the hill")]
    backend.pause_s = 0.005
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "n": n}
    body |= {"return_token_ids": True, "stream_options": {"continuous_usage_stats": True}}
    connection = connect(body, path="/v1/chat/completions", send_s=0.02)
    await connection(app)
    num_sent = 0
    for event in events_of(connection):
        [choice] = event["choices"]
        is_begin = choice["delta"].get("role")
        num_sent += len(choice.get("token_ids") or ())
        used = event["usage"]["completion_tokens"]
        assert is_begin or (used == num_sent if n == 1 else used >= num_sent), event
    assert num_sent == n * len(backend.pieces)


async def endless(backend: Any, request: GenerateRequest) -> AsyncIterator[EngineOutput]:
    """What a sequence writes that nothing ends, one token in each turn of the loop."""
    while True:
        yield backend._output(request, [40], is_last=False)
        await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_its_sequence_while_others_go_on(
    connect: Any, app: Any, backend: Any, tokenizer: Any, stream: bool
) -> None:
    async def play(request: GenerateRequest) -> AsyncIterator[EngineOutput]:
        if request.request_id.endswith("-0"):
            while backend.num_open < 2:
                await asyncio.sleep(0)
            yield backend._output(request, tokenizer.encode("the dog"), is_last=False)
        async for output in endless(backend, request):
            yield output

    backend._play = play
    body = {"prompt": ["a", "b"], "stop": "dog", "stream": stream, "max_tokens": 200}
    answering = asyncio.create_task(connect(body)(app))
    async with asyncio.timeout(60):
        while not backend.closed_at:
            await asyncio.sleep(0)
    assert [backend.num_open, len(backend.closed_at)] == [1, 1]
    answering.cancel()
    await asyncio.wait([answering])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_of_one_sequence_ends_the_answer_while_others_go_on(
    connect: Any, app: Any, backend: Any, stream: bool
) -> None:
    async def play(request: GenerateRequest) -> AsyncIterator[EngineOutput]:
        if request.request_id.endswith("-0"):
            yield backend._output(request, [41], is_last=False)
            raise GenerationError("its engine is gone")
        async for output in endless(backend, request):
            yield output

    backend._play = play
    connection = connect({"prompt": ["a", "b"], "stream": stream, "max_tokens": 200})
    async with asyncio.timeout(60):
        await connection(app)
    assert backend.num_open == 0
    assert b"its engine is gone" in connection.body


async def test_a_client_that_leaves_while_its_sequences_begin_leaves_none_even_if_cancelled_twice(
    connect: Any, app: Any, backend: Any
) -> None:
    """Ray Serve cancels the request of a client that leaves, while its connection tells so too."""
    backend.pieces = []
    backend.hangs = True
    num_prompts = 3 * BEGUN_AT_ONCE
    connection = connect({"prompt": ["a"] * num_prompts, "stream": True})
    answering = asyncio.create_task(connection(app))
    while backend.num_open < BEGUN_AT_ONCE:
        await asyncio.sleep(0)
    assert backend.num_open < num_prompts
    answering.cancel()
    await asyncio.sleep(0)
    answering.cancel()
    connection.leaves.set()
    await asyncio.wait([answering])
    await asyncio.sleep(0.05)
    assert backend.num_open == 0
