"""The life of a generating request.

1. *Access*: the middleware has noted who asks (`middleware.py`).
2. *Admit*: not ready yet, 503. It takes one slot, or gets 429; only then its body is read.
3. *Parse*: the body is checked, and parsed into a `RequestRenderer`, off the event loop if it is
   long. The request takes a slot for each sequence that it asks for.
4. *Prepare*: its prompts become token ids, and sampling is resolved against their length. A prompt
   that is too long gets 400, and so does an answer that could become too large.
5. *Generate*: its sequences run (this and the previous one: `generation.py`).
6. *Render*: what they produce becomes the structs that are sent as JSON, once at the end or event
   by event.
7. *Send*: nothing until the first event, or the whole answer, exists, so that an error before that
   still has its own HTTP status. A later error is an event, followed by [DONE] unless events have
   types; a whole answer that has begun is cut off.

A call by handle from another Ray app has the same body, checks and answer, without HTTP (`answer`,
`stream`); its errors are `RequestRefused`, which can travel between processes.

A client that reads slowly is noticed only if the server in front is not Ray's Python proxy, whose
queue takes everything at once. Without it a send waits until the client has read, and what comes
meanwhile is sent in one chunk. A client that lets `MAX_WAITING_BYTES` wait, or reads nothing for
`SEND_TIMEOUT_S`, is cut off.

If the client leaves or does not read, or time is up, the generation ends, which aborts its
sequences and frees the slots. When a request is refused, the rest of its body is read for a while
and dropped: a client whose connection is closed while it sends sees a reset instead of the answer.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve import clients
from serve.admission import AdmissionSlot, Overloaded
from serve.event_loop import Check
from serve.openai.body import parse
from serve.openai.errors import ApiError, as_api_error
from serve.openai.generation import Endpoint, Generation, RequestRenderer, Serving
from serve.requests.records import RequestRecord
from serve.requests.tokenizer import Tokenizer
from serve.served_models import ServedModel

MAX_DISCARDED_BYTES = 64 << 20
"""What is read and dropped of a refused body, so that its client can read why."""
MAX_DISCARD_S = 10.0
"""How long a refused body is read."""
MAX_DISCARD_PAUSE_S = 5.0
"""A client that sends nothing for so long is taken to wait for the answer."""
MAX_SMALL_BODY_BYTES = 64 * 1024
"""Of a request that loads or unloads an adapter; a larger body gets 413."""
MAX_DISCARDS = 64
"""Refused bodies that are read at once; further connections are just closed."""
SEND_TIMEOUT_S = 30.0
"""A client that reads nothing for so long is cut off, and its sequences end."""
PIECE_BYTES = 256 * 1024
"""Bytes of a whole answer that a client has to read in that time."""
DONE = b"data: [DONE]\n\n"
HANDLE_ROUTE = "handle"
"""In place of a route."""

Handler = Callable[[Request], Awaitable[Response]]


def json_response(
    body: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(
        msgspec.json.encode(body), status, headers=headers, media_type="application/json"
    )


def guarded(handler: Handler) -> Handler:
    """Answer a handler's exception in the API's shape; it is lost if the client has left."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=499)
        except Exception as error:
            return as_api_error(error).response()

    return answer


async def respond(serving: Serving, endpoint: Endpoint, request: Request) -> Response:
    """Answer a generating request. Raises what `as_api_error` knows, and ClientGone."""
    record: RequestRecord = request.state.record
    record.is_generating = True
    tokenizer, slot, body = await admitted(serving, request)
    try:
        generation = await parsed(serving, tokenizer, endpoint, body, slot, record)
    except BaseException:
        slot.leave()
        raise
    is_stream = generation.renderer.request.stream
    return EventStream(generation) if is_stream else WholeAnswer(generation)


async def admitted(serving: Serving, request: Request) -> tuple[Tokenizer, AdmissionSlot, bytes]:
    """Return the tokenizer, and a request's slot and body; nothing of it is read before the slot.
    With ApiError and Overloaded it is refused, and the rest of its body discarded."""
    slot: AdmissionSlot | None = None
    limit = serving.settings.args.max_body_bytes
    try:
        tokenizer = require_ready(serving)
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > limit:
            raise _too_large(limit, length[:20])
        await serving.throttle.wait()
        slot = serving.admission.enter(request.state.record.client)
        return tokenizer, slot, await _read(serving, request, slot, limit)
    except BaseException as error:
        if slot is not None:
            slot.leave()
        if isinstance(error, ApiError | Overloaded):
            await discard(serving, request)
        raise


def require_ready(serving: Serving) -> Tokenizer:
    """Return the tokenizer; raises ApiError until all pools have served."""
    tokenizer = serving.tokenizer()
    if tokenizer is None or not serving.backend.is_ready():
        message = "the model is not ready; /ready tells why"
        raise ApiError(503, message, retry_after_s=serving.settings.retry_after_s)
    return tokenizer


def require_model(serving: Serving, name: str | None) -> ServedModel:
    """Return what `name` means, the model itself if it is left out; ApiError: nothing has it."""
    models = serving.models
    if (found := models.base if name is None else models.by_name.get(name)) is None:
        wanted = " or ".join(models.by_name)
        raise ApiError(404, f"model: wanted {wanted}, found {name}", param="model")
    return found


async def _read(serving: Serving, request: Request, slot: AdmissionSlot, limit: int) -> bytes:
    """Return the request's body, whose bytes count as held by `slot`; raises Overloaded. ApiError
    if too many bytes have come (413); or it did not come within the request's time, or came slowly
    while another request wanted its slot (408)."""
    timeout_s = serving.settings.args.request_timeout_s
    body = bytearray()
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s) as timer:
            slot.on_evicted = lambda: timer.reschedule(loop.time())
            async for part in _parts(request):
                if len(body) + len(part) > limit:
                    raise _too_large(limit, f"at least {len(body) + len(part)}")
                slot.hold(len(part))
                body += part
    except TimeoutError as error:
        wanted = f"wanted within {timeout_s:g} s, sooner under load"
        raise ApiError(408, f"body: {wanted}, found it unfinished") from error
    finally:
        slot.on_evicted = None
    return bytes(body)


def _too_large(limit: int, found: str) -> ApiError:
    # The unread rest is still in the connection, which cannot serve another request.
    message = f"body: wanted at most {limit} bytes, found {found}"
    return ApiError(413, message, headers={"Connection": "close"})


async def _parts(request: Request) -> AsyncGenerator[bytes, None]:
    try:
        async for part in request.stream():
            if part:  # the last one is empty
                yield part
    except (ClientDisconnect, RuntimeError):
        raise
    except Exception as error:
        # Ray's proxy drops a request whose client left, and the call for more of its body fails
        # (TaskCancelledError).
        raise ClientDisconnect from error


async def small_body(request: Request) -> bytes:
    """Return a body that needs no slot, of somebody who administers; ApiError if it is too large or
    slow."""
    body = bytearray()
    try:
        async with asyncio.timeout(MAX_DISCARD_S):
            async for part in _parts(request):
                body += part
                if len(body) > MAX_SMALL_BODY_BYTES:
                    raise _too_large(MAX_SMALL_BODY_BYTES, f"at least {len(body)}")
    except TimeoutError as error:
        wanted = f"wanted within {MAX_DISCARD_S:g} s"
        raise ApiError(408, f"body: {wanted}, found it unfinished") from error
    return bytes(body)


async def discard(serving: Serving, request: Request) -> None:
    """Read on for a while and keep nothing: the answer is a refusal."""
    if serving.num_discarding >= MAX_DISCARDS:
        return
    serving.num_discarding += 1
    try:
        await _discard(_parts(request))
    finally:
        serving.num_discarding -= 1


async def _discard(parts: AsyncGenerator[bytes, None]) -> None:
    num_bytes = 0
    with suppress(TimeoutError, RuntimeError):  # that the body was read already
        async with asyncio.timeout(MAX_DISCARD_S):
            while num_bytes < MAX_DISCARDED_BYTES:
                async with asyncio.timeout(MAX_DISCARD_PAUSE_S):
                    part = await anext(parts, None)
                if part is None:
                    return
                num_bytes += len(part)


async def parsed(
    serving: Serving,
    tokenizer: Tokenizer,
    endpoint: Endpoint,
    body: bytes,
    slot: AdmissionSlot,
    record: RequestRecord,
) -> Generation:
    """Return the answer to a JSON body, which now has a slot for each of its sequences. ApiError or
    FieldError if it cannot be answered; Overloaded if there is no room for all of them."""
    settings = serving.settings

    def read(_: Check) -> RequestRenderer:
        found = parse(body, endpoint.request, settings.max_model_len)
        return endpoint.renderer(found, settings, tokenizer)

    renderer = await serving.threads.run(len(body), read)
    request, params = renderer.request, renderer.params
    model = require_model(serving, request.model)
    # No answer of the board comes between the two: what is offered and used is kept by all engines.
    slot.adapter_id = model.adapter_id
    slot.grow(renderer.num_prompts * params.n)
    renderer.model = model.name
    record.id, record.model, record.is_stream = renderer.id, renderer.model, request.stream
    record.n, record.temperature, record.top_p = params.n, params.temperature, params.top_p
    record.max_tokens = None if params.max_tokens is UNSET else params.max_tokens
    return Generation(serving, tokenizer, renderer, slot, record, model)


class ClientGone(Exception):
    """The client closed the connection, or does not read: there is no use in an answer."""


class _Answer(Response):
    """An answer that is produced while its client stays and reads. Gives its slot back at the end.
    The request's body must have been received. One timer watches all sends: one for each would cost
    more than the send."""

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
        self._generation.on_full = None
        if not self._is_over and not self._stays.expired():
            self._stays.reschedule(self._loop.time())


class EventStream(_Answer):
    """Sends each event of a generation, and [DONE] at the end unless events bear their types."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation, "text/event-stream")
        self._is_typed = generation.renderer.has_typed_events
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


class RequestRefused(RuntimeError):
    """A request failed; `body` is the error that HTTP would have answered with `status`."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body

    def __str__(self) -> str:
        return f"{self.status}: {self.body['error']['message']}"


async def answer(serving: Serving, endpoint: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
    """Return the whole answer to a call by handle; raises RequestRefused."""
    async with _by_handle(serving, endpoint, body, is_stream=False) as generation:
        async with asyncio.timeout(generation.timeout_s):
            return dict(msgspec.json.decode(await generation.whole_answer()))


async def stream(
    serving: Serving, endpoint: Endpoint, body: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield a streamed answer's chunks; closing it aborts. Raises RequestRefused."""
    async with _by_handle(serving, endpoint, body, is_stream=True) as generation:
        ends_at = asyncio.get_running_loop().time() + generation.timeout_s
        async with aclosing(generation.events()) as events:
            while True:
                async with asyncio.timeout_at(ends_at):  # around a `yield` it would hit the caller
                    event = await anext(events, None)
                if event is None:
                    return
                yield dict(msgspec.to_builtins(event, str_keys=True))


@contextmanager
def refusing() -> Iterator[None]:
    """Raise what goes wrong within as RequestRefused."""
    try:
        yield
    except Exception as error:
        refusal = as_api_error(error)
        raise RequestRefused(refusal.status, msgspec.json.decode(refusal.body())) from error


@asynccontextmanager
async def _by_handle(
    serving: Serving, endpoint: Endpoint, body: dict[str, Any], *, is_stream: bool
) -> AsyncIterator[Generation]:
    """Hold a request's slot, and record it, as long as the block lasts; raises RequestRefused."""
    with refusing():
        tokenizer = require_ready(serving)
        record = RequestRecord(
            secrets.token_hex(16),
            HANDLE_ROUTE,
            is_generating=True,
            status=200,
            client=clients.HANDLE,
        )
        slot = serving.admission.enter(record.client)
        try:
            text = _encode(body, is_stream)
            limit = serving.settings.args.max_body_bytes
            if len(text) > limit:
                raise ApiError(413, f"body: wanted at most {limit} bytes, found {len(text)}")
            slot.hold(len(text))
            generation = await parsed(serving, tokenizer, endpoint, text, slot, record)
            del text  # its bytes are no longer counted once the answer begins
            yield generation
        except Exception as error:
            record.status = as_api_error(error).status
            raise
        finally:
            slot.leave()
            for call in serving.on_end:
                call(record)


def _encode(body: object, is_stream: bool) -> bytes:
    """Return a body as JSON. msgspec would write NaN and inf as null, which means a default."""
    if not isinstance(body, dict):
        found = type(body).__name__
        raise ApiError(400, f"body: wanted a dictionary, found {found}")
    try:
        return json.dumps({**body, "stream": is_stream}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ApiError(400, f"body: wanted what JSON can tell, found {error}") from error
