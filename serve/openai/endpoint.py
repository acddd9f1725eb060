"""The life of a generating request.

1. *Access*: the middleware has noted who asks (`middleware.py`).
2. *Admit*: not ready yet, 503. It takes one slot, or gets 429; only then its body is read.
3. *Parse*: the body is checked, and parsed into a `RequestAdapter` off the event loop. The
   request takes a slot for each sequence that it asks for.
4. *Prepare*: its prompts become token ids, and sampling is resolved against their length. A prompt
   that is too long gets 400, and so does an answer that could become too large.
5. *Generate*: its sequences run (this and the previous one: `generation.py`).
6. *Render*: the adapter turns what they produce into JSON, once at the end or event by event, which
   `streaming.py` sends.

If the client leaves or does not read, or time is up, the generation ends, which aborts its
sequences and frees the slots. When a request is refused, the rest of its body is read for a while
and dropped: a client whose connection is closed while it sends sees a reset instead of the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress

import msgspec
from msgspec import UNSET
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from serve.admission import AdmissionSlot, Overloaded
from serve.openai.backend import Serving
from serve.openai.errors import ApiError, as_api_error
from serve.openai.generation import Generation, RequestAdapter
from serve.openai.streaming import ClientGone, EventStream, WholeAnswer
from serve.requests.records import RequestRecord
from serve.requests.tokenizer import Tokenizer

MAX_DISCARDED_BYTES = 64 << 20
"""What is read and dropped of a refused body, so that its client can read why."""
MAX_DISCARD_S = 10.0
"""How long a refused body is read."""
MAX_DISCARD_PAUSE_S = 0.5
"""A client that sends nothing for so long is taken to wait for the answer."""
MAX_DISCARDS = 64
"""Refused bodies that are read at once; further connections are just closed."""

Handler = Callable[[Request], Awaitable[Response]]
Parse = Callable[[Serving, Tokenizer, bytes], RequestAdapter]


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


async def respond(serving: Serving, parse: Parse, request: Request) -> Response:
    """Answer a generating request, streamed or whole.

    Raises what `as_api_error` knows, and ClientGone.
    """
    record: RequestRecord = request.state.record
    record.is_generating = True
    tokenizer, slot, body = await admitted(serving, request)
    try:
        generation = await parsed(serving, tokenizer, parse, body, slot, record)
    except BaseException:
        slot.leave()
        raise
    is_stream = generation.adapter.request.stream
    return EventStream(generation) if is_stream else WholeAnswer(generation)


async def admitted(serving: Serving, request: Request) -> tuple[Tokenizer, AdmissionSlot, bytes]:
    """Return the tokenizer, and a request's slot and body; nothing of it is read before the slot.

    Raises:
        ApiError, Overloaded: it is refused, and the rest of its body discarded.
    """
    await serving.requests.wait()
    slot: AdmissionSlot | None = None
    limit = serving.settings.args.max_body_bytes
    try:
        tokenizer = require_ready(serving)
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > limit:
            raise _too_large(limit, length[:20])
        slot = serving.admission.enter(request.state.record.client)
        return tokenizer, slot, await _read(serving, request, slot, limit)
    except BaseException as error:
        if slot is not None:
            slot.leave()
        if isinstance(error, ApiError | Overloaded):
            await discard(serving, request)
        raise


def require_ready(serving: Serving) -> Tokenizer:
    """Return the tokenizer; raises ApiError until the pools are ready."""
    tokenizer = serving.tokenizer()
    if tokenizer is None or not serving.backend.is_ready():
        message = "the model is not ready; /ready tells why"
        raise ApiError(503, message, retry_after_s=serving.settings.retry_after_s)
    return tokenizer


def require_model(serving: Serving, name: str | None) -> None:
    """Raise ApiError unless `name` is one of the served model's or left out."""
    settings = serving.settings
    if name not in (None, settings.served_model_name, *settings.other_model_names):
        wanted = " or ".join(settings.model_names)
        raise ApiError(404, f"model: wanted {wanted}, found {name}", param="model")


async def _read(serving: Serving, request: Request, slot: AdmissionSlot, limit: int) -> bytes:
    """Return the request's body, whose bytes count as held by `slot`.

    Raises:
        ApiError: too many bytes have come (413); or it did not come within the request's time,
            or came slowly while another request wanted its slot (408).
        Overloaded: other requests hold too many bytes.
    """
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
    """Yield the parts of a body; raises ClientDisconnect."""
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
    parse: Parse,
    body: bytes,
    slot: AdmissionSlot,
    record: RequestRecord,
) -> Generation:
    """Return the answer to a JSON body, which now has a slot for each of its sequences.

    Raises:
        ApiError, FieldError: it cannot be answered.
        Overloaded: there is no room for all its sequences.
    """
    adapter = await serving.threads.run(len(body), lambda _: parse(serving, tokenizer, body))
    request, params = adapter.request, adapter.params
    require_model(serving, request.model)
    slot.grow(adapter.num_prompts * params.n)
    record.id, record.model, record.is_stream = adapter.id, adapter.model, request.stream
    record.n, record.temperature, record.top_p = params.n, params.temperature, params.top_p
    max_tokens = params.max_tokens
    serving.counts.on_parsed(params.n, None if max_tokens is UNSET else max_tokens)
    return Generation(serving, tokenizer, adapter, slot, record)
