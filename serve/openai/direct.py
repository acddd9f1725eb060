"""The endpoints without HTTP: what another Ray app calls through a handle.

A body is the same dictionary that would be posted as JSON, checked in the same way, and an answer
is the one that would come back. Errors are `RequestRefused`, which can travel between
processes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import msgspec

from serve import clients
from serve.admission import Place
from serve.openai.endpoint import Parse, Serving, Shape, parsed, stream_chunks, whole_answer
from serve.openai.errors import BadRequest, BodyTooLarge, as_api_error
from serve.openai.observed import new_request_id
from serve.openai.streaming import Backlog
from serve.requests.records import RequestRecord
from serve.requests.tokenizer import Tokenizer

HANDLE = "handle"
"""In place of a route."""


class RequestRefused(RuntimeError):
    """A request failed; `body` is the error that HTTP would have answered with `status`."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body

    def __str__(self) -> str:
        return f"{self.status}: {self.body['error']['message']}"


async def answer(serving: Serving, parse: Parse, body: dict[str, Any]) -> dict[str, Any]:
    """Return the whole answer to a request.

    Raises:
        RequestRefused: with the status and the body of the error.
    """
    try:
        with _admitted(serving) as (place, record):
            tokenizer, shape = await _read(serving, parse, body, place, record, stream=False)
            async with asyncio.timeout(serving.settings.args.request_timeout_s):
                found = await whole_answer(serving, tokenizer, shape, place, record)
            return dict(msgspec.json.decode(found))
    except Exception as error:
        raise _refused(error) from error


async def stream(
    serving: Serving, parse: Parse, body: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the chunks of a streamed answer; closing the generator aborts its sequences.

    Raises:
        RequestRefused: with the status and the body of the error.
    """
    try:
        with _admitted(serving) as (place, record):
            tokenizer, shape = await _read(serving, parse, body, place, record, stream=True)
            ends_at = asyncio.get_running_loop().time() + serving.settings.args.request_timeout_s
            events = stream_chunks(serving, tokenizer, shape, place, record, Backlog())
            async with aclosing(events) as chunks:
                while (chunk := await _next(chunks, ends_at)) is not None:
                    yield _builtins(chunk)
    except Exception as error:
        raise _refused(error) from error


@contextmanager
def _admitted(serving: Serving) -> Iterator[tuple[Place, RequestRecord]]:
    serving.require_ready()
    place = serving.admission.enter(clients.HANDLE)
    record = RequestRecord(new_request_id(), HANDLE, is_generating=True, status=200)
    try:
        yield place, record
    except Exception as error:
        record.status = as_api_error(error).status
        raise
    finally:
        place.leave()
        for call in serving.on_end:
            call(record)


async def _next(
    chunks: AsyncGenerator[msgspec.Struct, None], ends_at: float
) -> msgspec.Struct | None:
    """Return the next chunk or None; a timeout around a `yield` would hit the consumer."""
    async with asyncio.timeout_at(ends_at):
        return await anext(chunks, None)


async def _read(
    serving: Serving,
    parse: Parse,
    body: dict[str, Any],
    place: Place,
    record: RequestRecord,
    *,
    stream: bool,
) -> tuple[Tokenizer, Shape]:
    tokenizer = serving.require_ready()
    text = _encode({**_as_dict(body), "stream": stream})
    limit = serving.settings.args.max_body_bytes
    if len(text) > limit:
        raise BodyTooLarge(f"body: wanted at most {limit} bytes, found {len(text)}")
    place.hold(len(text))
    return tokenizer, await parsed(serving, tokenizer, parse, text, place, record)


def _as_dict(body: object) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise BadRequest(f"body: wanted a dictionary, found {type(body).__name__}")
    return body


def _encode(body: dict[str, Any]) -> bytes:
    """Return a body as JSON. msgspec would write NaN and inf as null, which means a default."""
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise BadRequest(f"body: wanted what JSON can tell, found {error}") from error


def _builtins(chunk: msgspec.Struct) -> dict[str, Any]:
    return dict(msgspec.to_builtins(chunk, str_keys=True))


def _refused(error: Exception) -> RequestRefused:
    refusal = as_api_error(error)
    return RequestRefused(refusal.status, msgspec.json.decode(refusal.body()))
