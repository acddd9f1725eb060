"""Sending answers, and noticing clients that leave or do not read.

Nothing is sent until the first event, or the whole answer, exists, so that an error before that
still has its own HTTP status. A later error is an event, followed by [DONE].

A client that reads slowly is noticed only if the server in front is not Ray's Python proxy, whose
queue takes everything at once. Without it a send waits until the client has read, and what comes
meanwhile is sent in one chunk. A client that lets `MAX_WAITING_BYTES` wait, or reads nothing for
`SEND_TIMEOUT_S`, is cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from serve.admission import Place
from serve.openai.errors import as_api_error

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
MAX_WAITING_BYTES = 4 << 20
"""What may wait for a client that reads slowly before it is cut off: seconds of 128 choices with
log-probabilities, hours of one choice's text."""
SEND_TIMEOUT_S = 30.0
"""A client that reads nothing for so long is cut off, and its sequences end."""
PIECE_BYTES = 256 * 1024
"""Bytes of a whole answer that a client has to read in that time."""


class ClientGone(Exception):
    """The client closed the connection, or does not read: there is no use in an answer."""


class Backlog:
    """About how many bytes wait for one client. `on_full` is set while a send waits for it."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.on_full: Callable[[], None] | None = None

    def add(self, num_bytes: int) -> None:
        """Count more that waits."""
        self.num_bytes += num_bytes
        if self.num_bytes > MAX_WAITING_BYTES and self.on_full is not None:
            self.on_full()

    def clear(self) -> None:
        """All that waited is on its way to be sent."""
        self.num_bytes = 0


class _Answer(Response):
    """An answer that is produced while its client stays. Gives its place back at the end."""

    def __init__(self, place: Place, timeout_s: float, media_type: str) -> None:
        super().__init__(media_type=media_type)
        # Its body is not known yet; Response counted an empty one.
        del self.headers["content-length"]
        self._place = place
        self._timeout_s = timeout_s
        self._is_started = False
        self._backlog = Backlog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._answer(scope, receive, send))
        except ClientGone:
            return
        finally:
            self._place.leave()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._write(send)
        except ClientGone:
            raise
        except Exception as error:
            refusal = as_api_error(error)
            if self._is_started:
                await self._write_error(send, refusal.body())
            else:
                await refusal.response()(scope, receive, send)

    async def _write(self, send: Send) -> None:
        raise NotImplementedError

    async def _write_error(self, send: Send, body: bytes) -> None:
        raise NotImplementedError

    async def _start(self, send: Send) -> None:
        self._is_started = True
        message = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        await _send(send, message, self._backlog)

    async def _send_body(self, send: Send, body: bytes, *, more_body: bool = True) -> None:
        message = {"type": "http.response.body", "body": body, "more_body": more_body}
        await _send(send, message, self._backlog)


class EventStream(_Answer):
    """Sends each struct of a generator as one event, and [DONE] at the end.

    The generator is closed when the client leaves, also while it waits for its next event.
    """

    def __init__(
        self,
        events: Callable[[Backlog], AsyncGenerator[msgspec.Struct, None]],
        place: Place,
        timeout_s: float,
    ) -> None:
        super().__init__(place, timeout_s, "text/event-stream")
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"
        self._events = events

    async def _write(self, send: Send) -> None:
        async with aclosing(self._events(self._backlog)) as events:
            async for event in events:
                if not self._is_started:
                    await self._start(send)
                await self._send_body(send, _event(msgspec.json.encode(event)))
        await self._send_body(send, DONE, more_body=False)

    async def _write_error(self, send: Send, body: bytes) -> None:
        await self._send_body(send, _event(body))
        await self._send_body(send, DONE, more_body=False)


class WholeAnswer(_Answer):
    """Sends the JSON text that a coroutine returns."""

    def __init__(
        self, answer: Callable[[], Coroutine[Any, Any, bytes]], place: Place, timeout_s: float
    ) -> None:
        super().__init__(place, timeout_s, "application/json")
        self._produce = answer

    async def _write(self, send: Send) -> None:
        body = await self._produce()
        self.headers["Content-Length"] = str(len(body))
        await self._start(send)
        for start in range(0, len(body), PIECE_BYTES):
            end = start + PIECE_BYTES
            await self._send_body(send, body[start:end], more_body=end < len(body))

    async def _write_error(self, send: Send, body: bytes) -> None:
        raise ClientGone  # its length was promised already: only time ran out


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


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def _send(send: Send, message: Message, backlog: Backlog) -> None:
    """Send a message; raises ClientGone where the client does not read."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S) as timer:
            backlog.on_full = lambda: timer.reschedule(loop.time())
            await send(message)
    except TimeoutError as error:
        raise ClientGone from error
    finally:
        backlog.on_full = None
