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
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve.openai.errors import as_api_error
from serve.openai.generation import Generation

DONE = b"data: [DONE]\n\n"
SEND_TIMEOUT_S = 30.0
"""A client that reads nothing for so long is cut off, and its sequences end."""
PIECE_BYTES = 256 * 1024
"""Bytes of a whole answer that a client has to read in that time."""


class ClientGone(Exception):
    """The client closed the connection, or does not read: there is no use in an answer."""


class _Answer(Response):
    """An answer that is produced while its client stays and reads. Gives its slot back at the end.

    The request's body must have been received. One timer watches all sends: one for each would
    cost more than the send.
    """

    def __init__(self, generation: Generation, media_type: str) -> None:
        super().__init__(media_type=media_type)
        # Its body is not known yet; Response counted an empty one.
        del self.headers["content-length"]
        self._generation = generation
        self._loop = asyncio.get_running_loop()
        self._is_started = False
        self._is_over = False
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = self._loop.create_task(_disconnected(receive))
        leaving.add_done_callback(self._on_left)
        self._stays = asyncio.timeout(None)
        self._look()
        try:
            async with self._stays:
                try:
                    await self._answer(scope, receive, send)
                finally:
                    self._is_over = True  # a callback that is due already comes all the same
                    self._looking.cancel()
                    leaving.remove_done_callback(self._on_left)
                    leaving.cancel()
                    self._generation.on_full = None
        except ClientGone:
            return
        except TimeoutError:
            if not self._stays.expired():
                raise
        finally:
            self._generation.slot.leave()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._generation.timeout_s):
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

    async def _send(self, send: Send, body: bytes, *, more_body: bool = True) -> None:
        """Send a part of the body, and before the first one the status and the headers."""
        self._sending_since = self._loop.time()
        self._generation.on_full = self._leave
        if not self._is_started:
            self._is_started = True
            start = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **start})
        await send({"type": "http.response.body", "body": body, "more_body": more_body})
        self._generation.on_full = self._sending_since = None

    def _look(self) -> None:
        now, since = self._loop.time(), self._sending_since
        if since is not None and now - since >= SEND_TIMEOUT_S:
            self._leave()
            return
        self._looking = self._loop.call_at((since or now) + SEND_TIMEOUT_S, self._look)

    def _on_left(self, leaving: asyncio.Task[None]) -> None:
        if not leaving.cancelled():
            leaving.exception()  # a failure to receive is the end of the connection too
        self._leave()

    def _leave(self) -> None:
        """End the answer: its client has left, or does not read."""
        self._generation.on_full = None
        if not self._is_over and not self._stays.expired():
            self._stays.reschedule(self._loop.time())


class EventStream(_Answer):
    """Sends each event of a generation, and [DONE] at the end.

    Events of a typed stream, as that of Responses, bear the name of their type, and no [DONE] is at
    its end.
    """

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation, "text/event-stream")
        self._is_typed = generation.adapter.has_typed_events
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"

    async def _write(self, send: Send) -> None:
        # Closed when the client leaves, also while it waits for its next event.
        async with aclosing(self._generation.events()) as events:
            async for event in events:
                name = f"event: {getattr(event, 'type', '')}\n".encode() if self._is_typed else b""
                await self._send(send, b"%bdata: %b\n\n" % (name, msgspec.json.encode(event)))
        await self._end(send)

    async def _write_error(self, send: Send, body: bytes) -> None:
        name = b"event: error\n" if self._is_typed else b""
        await self._send(send, b"%bdata: %b\n\n" % (name, body))
        await self._end(send)

    async def _end(self, send: Send) -> None:
        await self._send(send, b"" if self._is_typed else DONE, more_body=False)


class WholeAnswer(_Answer):
    """Sends the JSON text of a generation."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation, "application/json")

    async def _write(self, send: Send) -> None:
        body = await self._generation.whole_answer()
        self.headers["Content-Length"] = str(len(body))
        for start in range(0, len(body), PIECE_BYTES):
            end = start + PIECE_BYTES
            await self._send(send, body[start:end], more_body=end < len(body))

    async def _write_error(self, send: Send, body: bytes) -> None:
        raise ClientGone  # its length was promised already: only time ran out


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
