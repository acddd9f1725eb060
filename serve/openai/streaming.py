"""Sending answers, and noticing clients that leave or do not read.

Nothing is sent until the first event, or the whole answer, exists, so that an error before that
still has its own HTTP status. A later error is an event, followed by [DONE] unless events have
types; a whole answer that has begun is cut off.

A client that reads slowly is noticed only if the server in front is not Ray's Python proxy, whose
queue takes everything at once. Without it a send waits until the client has read, and what comes
meanwhile is sent in one chunk. A client that lets `MAX_WAITING_BYTES` wait, or reads nothing for
`SEND_TIMEOUT_S`, is cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from serve.admission import AdmissionSlot
from serve.openai.errors import as_api_error

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
    """An answer that is produced while its client stays. Gives its slot back at the end."""

    def __init__(self, slot: AdmissionSlot, timeout_s: float, media_type: str) -> None:
        super().__init__(media_type=media_type)
        # Its body is not known yet; Response counted an empty one.
        del self.headers["content-length"]
        self._slot = slot
        self._timeout_s = timeout_s
        self._is_started = False
        self._backlog = Backlog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with _WhileRead(receive, self._backlog) as self._client:
                await self._answer(scope, receive, send)
        except ClientGone:
            return
        finally:
            self._slot.leave()

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
        await self._client.send(send, message)

    async def _send_body(self, send: Send, body: bytes, *, more_body: bool = True) -> None:
        message = {"type": "http.response.body", "body": body, "more_body": more_body}
        await self._client.send(send, message)


class EventStream(_Answer):
    """Sends each struct of a generator as one event, and [DONE] at the end.

    Events of a typed stream, as that of Responses, bear the name of their type, and no [DONE] is at
    its end. The generator is closed when the client leaves, also while it waits for its next event.
    """

    def __init__(
        self,
        events: Callable[[Backlog], AsyncGenerator[msgspec.Struct, None]],
        slot: AdmissionSlot,
        timeout_s: float,
        *,
        is_typed: bool = False,
    ) -> None:
        super().__init__(slot, timeout_s, "text/event-stream")
        self._is_typed = is_typed
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"
        self._events = events

    async def _write(self, send: Send) -> None:
        async with aclosing(self._events(self._backlog)) as events:
            async for event in events:
                if not self._is_started:
                    await self._start(send)
                kind = str(getattr(event, "type", "")) if self._is_typed else ""
                await self._send_body(send, _event(msgspec.json.encode(event), kind))
        await self._end(send)

    async def _write_error(self, send: Send, body: bytes) -> None:
        await self._send_body(send, _event(body, "error" if self._is_typed else ""))
        await self._end(send)

    async def _end(self, send: Send) -> None:
        await self._send_body(send, b"" if self._is_typed else DONE, more_body=False)


class WholeAnswer(_Answer):
    """Sends the JSON text that a coroutine returns."""

    def __init__(
        self,
        answer: Callable[[], Coroutine[Any, Any, bytes]],
        slot: AdmissionSlot,
        timeout_s: float,
    ) -> None:
        super().__init__(slot, timeout_s, "application/json")
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


class _WhileRead:
    """A block that ends with ClientGone as soon as the client leaves or does not read.

    The request's body must have been received. One timer watches all sends of the block: one for
    each would cost more than the send.
    """

    def __init__(self, receive: Receive, backlog: Backlog) -> None:
        self._receive = receive
        self._backlog = backlog
        self._loop = asyncio.get_running_loop()
        self._scope = asyncio.timeout(None)
        self._is_over = False
        self._sending_since: float | None = None

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self._leaving = self._loop.create_task(_disconnected(self._receive))
        self._leaving.add_done_callback(self._on_left)
        self._look()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over = True  # a callback that is due already comes all the same
        self._looking.cancel()
        self._leaving.remove_done_callback(self._on_left)
        self._leaving.cancel()
        self._backlog.on_full = None
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError as ended:
            raise ClientGone from ended

    async def send(self, send: Send, message: Message) -> None:
        self._sending_since = self._loop.time()
        self._backlog.on_full = self._end
        await send(message)
        self._backlog.on_full = self._sending_since = None

    def _look(self) -> None:
        now, since = self._loop.time(), self._sending_since
        if since is not None and now - since >= SEND_TIMEOUT_S:
            self._end()
            return
        self._looking = self._loop.call_at((since or now) + SEND_TIMEOUT_S, self._look)

    def _on_left(self, leaving: asyncio.Task[None]) -> None:
        if not leaving.cancelled():
            leaving.exception()  # a failure to receive is the end of the connection too
        self._end()

    def _end(self) -> None:
        self._backlog.on_full = None
        if not self._is_over and not self._scope.expired():
            self._scope.reschedule(self._loop.time())


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(data: bytes, kind: str = "") -> bytes:
    name = f"event: {kind}\n".encode() if kind else b""
    return name + b"data: " + data + b"\n\n"
