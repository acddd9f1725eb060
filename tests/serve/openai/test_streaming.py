"""Slow readers, and clients that leave."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from serve.openai.app import build_app
from serve.openai.backend import ApiSettings
from serve.openai.endpoint import Serving
from serve.tokenizer import Tokenizer

TEXT = "/v1/completions"
# From the client's leaving to the closed stream, on a machine that runs other tests beside.
MAX_CLOSE_S = 0.2


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


def test_server_goes_on_after_clients_have_left(url: str, backend: Any) -> None:
    backend.hangs = True
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}{TEXT}", json={"prompt": "a"}, timeout=0.1)
    until(lambda: backend.num_open == 0)
    backend.hangs = False
    answer = httpx.post(f"{url}{TEXT}", json={"prompt": "a"})
    assert answer.json()["choices"][0]["text"] == "hello world"


def test_tokens_that_wait_for_a_slow_reader_come_in_one_chunk(
    app: Any, backend: Any, tokenizer: Any
) -> None:
    text = "the dog ran over the hill"
    backend.pieces = [[t] for t in tokenizer.encode(text)] * 20
    backend.stop_token_id = -1
    sent: list[bytes] = []
    body = msgspec.json.encode({"prompt": "a", "stream": True})
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body", b""))
        await asyncio.sleep(0.02)

    scope = {
        "type": "http",
        "method": "POST",
        "path": TEXT,
        "raw_path": TEXT.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [],
    }
    asyncio.run(app(scope, receive, send))
    chunks = [part.removeprefix(b"data: ") for part in sent if part.startswith(b"data: {")]
    texts = [msgspec.json.decode(chunk)["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == text * 20
    assert len(texts) < 20 and max(map(len, texts)) > len(text)


@pytest.mark.parametrize("num_words", [5, 700])
def test_long_prompts_are_tokenized_in_a_thread_and_short_ones_on_the_loop(
    settings: ApiSettings, backend: Any, admission: Any, checkpoint: Path, num_words: int
) -> None:
    threads: list[int] = []

    class Recording(Tokenizer):
        def encode(self, *args: Any, **kwargs: Any) -> list[int]:
            threads.append(threading.get_ident())
            return super().encode(*args, **kwargs)

    tokenizer = Recording.from_dir(checkpoint)
    app = build_app(Serving(settings, backend, lambda: tokenizer, admission))
    text = "cat " * num_words

    async def send() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await client.post(TEXT, json={"prompt": text})
            messages = [{"role": "user", "content": text}]
            await client.post("/v1/chat/completions", json={"messages": messages})

    asyncio.run(send())
    assert len(threads) == 2
    assert {thread == threading.get_ident() for thread in threads} == {num_words == 5}
