"""The endpoints without HTTP: what another Ray app calls through a handle.

A body is the same dictionary that would be posted as JSON, checked in the same way, and an answer
is the one that would come back. Errors are `RequestRefused`, which can travel between
processes.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec

from serve import clients
from serve.openai.backend import Serving
from serve.openai.endpoint import Parse, parsed, require_ready
from serve.openai.errors import ApiError, as_api_error
from serve.openai.generation import Generation
from serve.requests.records import RequestRecord

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
    async with _admitted(serving, parse, body, is_stream=False) as generation:
        async with asyncio.timeout(generation.timeout_s):
            return dict(msgspec.json.decode(await generation.whole_answer()))


async def stream(
    serving: Serving, parse: Parse, body: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the chunks of a streamed answer; closing the generator aborts its sequences.

    Raises:
        RequestRefused: with the status and the body of the error.
    """
    async with _admitted(serving, parse, body, is_stream=True) as generation:
        ends_at = asyncio.get_running_loop().time() + generation.timeout_s
        async with aclosing(generation.events()) as events:
            while True:
                async with asyncio.timeout_at(ends_at):  # around a `yield` it would hit the caller
                    event = await anext(events, None)
                if event is None:
                    return
                yield dict(msgspec.to_builtins(event, str_keys=True))


@asynccontextmanager
async def _admitted(
    serving: Serving, parse: Parse, body: dict[str, Any], *, is_stream: bool
) -> AsyncIterator[Generation]:
    """Hold a request's slot, and record it, as long as the block lasts; raises RequestRefused."""
    try:
        tokenizer = require_ready(serving)
        record = RequestRecord(
            secrets.token_hex(16), HANDLE, is_generating=True, status=200, client=clients.HANDLE
        )
        slot = serving.admission.enter(record.client)
        try:
            text = _encode(body, is_stream)
            limit = serving.settings.args.max_body_bytes
            if len(text) > limit:
                raise ApiError(413, f"body: wanted at most {limit} bytes, found {len(text)}")
            slot.hold(len(text))
            generation = await parsed(serving, tokenizer, parse, text, slot, record)
            del text  # its bytes are given back before the answer begins
            yield generation
        except Exception as error:
            record.status = as_api_error(error).status
            raise
        finally:
            slot.leave()
            for call in serving.on_end:
                call(record)
    except Exception as error:
        refusal = as_api_error(error)
        raise RequestRefused(refusal.status, msgspec.json.decode(refusal.body())) from error


def _encode(body: object, is_stream: bool) -> bytes:
    """Return a body as JSON. msgspec would write NaN and inf as null, which means a default."""
    if not isinstance(body, dict):
        found = type(body).__name__
        raise ApiError(400, f"body: wanted a dictionary, found {found}")
    try:
        return json.dumps({**body, "stream": is_stream}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ApiError(400, f"body: wanted what JSON can tell, found {error}") from error
