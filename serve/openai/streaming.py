"""Server-sent events, and the watch over a client that may leave.

The one thing to know: nothing is sent before the first event exists, so that an error before it
still has its own HTTP status. After that an error is an event, followed by [DONE].
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve.openai.errors import as_api_error

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed the connection: there is nobody to answer."""


class EventStream(Response):
    """Sends each struct of `events` as one event, and [DONE] at the end.

    The generator is closed when the client leaves, also while it waits for its next event.
    """

    def __init__(self, events: AsyncGenerator[msgspec.Struct, None], timeout_s: float) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            media_type="text/event-stream",
        )
        # Its body comes in pieces; Response counted an empty one.
        del self.headers["content-length"]
        self._events = events
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._write(scope, receive, send))
        except ClientGone:
            return

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False
        try:
            async with asyncio.timeout(self._timeout_s), aclosing(self._events) as events:
                async for event in events:
                    if not is_started:
                        is_started = True
                        await self._start(send)
                    await _send_event(send, msgspec.json.encode(event))
        except Exception as error:
            refusal = as_api_error(error)
            if not is_started:
                await refusal.response()(scope, receive, send)
                return
            await _send_event(send, refusal.body())
        await send({"type": "http.response.body", "body": DONE})

    async def _start(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled at once when the client leaves.

    The request's body must have been received.

    Raises:
        ClientGone: it left.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_event(send: Send, data: bytes) -> None:
    body = b"data: " + data + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})
