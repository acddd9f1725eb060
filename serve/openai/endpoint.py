"""The life of a generating request.

1. Not ready yet: 503. The body is read within its limits and parsed into a `Shape`.
2. The shape's prompts become token ids, long ones in a thread.
3. Sampling is resolved against the prompt's length: too long, 400.
4. The backend admits the request or says when to come back: 503.
5. Its sequences run in a `Generation`; the shape turns what they produce into JSON,
   once at the end or event by event.
6. The client leaves or time is up: the block of the generation ends, which aborts its sequences.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cluster.messages import GenerateRequest, Sampling
from serve.openai.backend import Backend
from serve.openai.errors import (
    BodyTooLarge,
    NotFound,
    SlowBody,
    Unavailable,
    as_api_error,
)
from serve.openai.generation import Choice, Generation, make_choices
from serve.openai.responses import Usage
from serve.openai.schema import ChatRequest, CompletionRequest, StreamOptions
from serve.openai.settings import ApiSettings
from serve.openai.streaming import ClientGone, EventStream, unless_disconnected
from serve.sampling import ParameterError, SamplingParams, resolve
from serve.tokenizer import Tokenizer

MAX_DISCARDED_BYTES = 64 << 20
"""What a client may send of a body that is too large and still read why it was refused."""
MAX_DISCARD_S = 10.0
MAX_DISCARD_PAUSE_S = 0.5
"""A client that sends nothing for so long waits for an answer."""

Handler = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")

# About a millisecond of tokenizing; more would keep the loop's other requests waiting.
MAX_INLINE_CHARS = 2000


class Serving(msgspec.Struct, frozen=True):
    """What all handlers share."""

    settings: ApiSettings
    backend: Backend
    tokenizer: Callable[[], Tokenizer | None]

    def require_ready(self) -> Tokenizer:
        """Return the tokenizer; raises Unavailable until the pools are ready."""
        tokenizer = self.tokenizer()
        if tokenizer is None or not self.backend.is_ready():
            raise Unavailable(
                "the model is not ready yet; /ready tells how far it is",
                retry_after_s=self.settings.retry_after_s,
            )
        return tokenizer

    def require_model(self, name: str | None) -> None:
        """Raise NotFound unless `name` is the served model or left out."""
        served = self.settings.served_model_name
        if name not in (None, served):
            raise NotFound(f"model: wanted {served}, found {name}", param="model")


class Stamp(msgspec.Struct, frozen=True):
    """What every JSON object of one answer repeats."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> Stamp:
        """Return a stamp of now, with an id of its own."""
        return cls(f"{prefix}-{secrets.token_hex(16)}", int(time.time()), model)


class Shape(Protocol):
    """How one endpoint reads its prompts and writes its answer."""

    @property
    def request(self) -> ChatRequest | CompletionRequest: ...

    @property
    def stamp(self) -> Stamp: ...

    async def tokenize(self) -> list[list[int]]:
        """Return the prompts."""
        ...

    def response(self, generation: Generation) -> msgspec.Struct:
        """Return the whole answer; all choices are finished."""
        ...

    def chunks(self, choice: Choice, usage: Usage | UnsetType | None) -> Iterator[msgspec.Struct]:
        """Return the events for what the choice has produced since the last call."""
        ...

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """Return the event without choices that ends a stream with include_usage."""
        ...


def json_response(
    body: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a JSON answer."""
    return Response(
        msgspec.json.encode(body), status, headers=headers, media_type="application/json"
    )


def guarded(handler: Handler) -> Handler:
    """Answer whatever a handler raises in the API's shape; nobody hears it if the client left."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=499)
        except Exception as error:
            return as_api_error(error).response()

    return answer


Parse = Callable[[Serving, Tokenizer, bytes], Shape]


async def respond(serving: Serving, request: Request, parse: Parse) -> Response:
    """Answer a generating request, streamed or whole.

    Raises whatever `as_api_error` knows, and ClientGone.
    """
    tokenizer = serving.require_ready()
    body = await read_body(request, serving.settings)
    # A long body may be a million small objects: the loop must not build them.
    shape = await beside_the_loop(len(body), lambda: parse(serving, tokenizer, body))
    serving.require_model(shape.request.model)
    timeout_s = serving.settings.request_timeout_s
    if shape.request.stream:
        return EventStream(stream_chunks(serving, tokenizer, shape), timeout_s)
    whole = asyncio.wait_for(whole_answer(serving, tokenizer, shape), timeout_s)
    return json_response(await unless_disconnected(request.receive, whole))


async def read_body(request: Request, settings: ApiSettings) -> bytes:
    """Return the request's body.

    Raises:
        BodyTooLarge: by its Content-Length, or as soon as that many bytes have come.
        SlowBody: it did not come within the request's time.
    """
    limit = settings.max_body_bytes
    length = request.headers.get("content-length", "")
    parts = request.stream()
    if length.isdecimal() and int(length) > limit:
        await _discard(parts)
        raise _too_large(limit, length)
    body = bytearray()
    try:
        async with asyncio.timeout(settings.request_timeout_s):
            async for part in parts:
                body += part
                if len(body) > limit:
                    await _discard(parts)
                    raise _too_large(limit, f"at least {len(body)}")
    except TimeoutError as error:
        message = f"body: wanted within {settings.request_timeout_s:g} s, found it unfinished"
        raise SlowBody(message) from error
    return bytes(body)


async def _discard(parts: AsyncGenerator[bytes, None]) -> None:
    """Read on for a while and keep nothing.

    A client that is still sending when the connection is closed sees a reset, not our answer.
    """
    num_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(MAX_DISCARD_S):
            while num_bytes < MAX_DISCARDED_BYTES:
                async with asyncio.timeout(MAX_DISCARD_PAUSE_S):
                    part = await anext(parts, None)
                if part is None:
                    return
                num_bytes += len(part)


def _too_large(limit: int, found: str) -> BodyTooLarge:
    # What was sent and not read has to go: the connection cannot serve another request.
    return BodyTooLarge(
        f"body: wanted at most {limit} bytes, found {found}", headers={"Connection": "close"}
    )


async def _start(serving: Serving, tokenizer: Tokenizer, shape: Shape) -> Generation:
    """Do all that can be refused before the backend is asked for room."""
    params = shape.request.sampling_params()
    prompts = await shape.tokenize()
    try:
        samplings = [_samplings(serving, tokenizer, params, prompt) for prompt in prompts]
    except ParameterError as error:
        raise error.renamed(shape.request.spelling(error.param)) from error
    pairs = zip(prompts, samplings, strict=True)
    requests = [
        GenerateRequest(f"{shape.stamp.id}-{index}", prompt, [], sampling, "")
        for index, (prompt, sampling) in enumerate(
            (prompt, sampling) for prompt, of_prompt in pairs for sampling in of_prompt
        )
    ]
    return Generation(serving.backend, make_choices(tokenizer, params, requests), params)


def _samplings(
    serving: Serving, tokenizer: Tokenizer, params: SamplingParams, prompt: list[int]
) -> list[Sampling]:
    settings = serving.settings
    vocab_size = min(tokenizer.vocab_size, settings.vocab_size or tokenizer.vocab_size)
    samplings = resolve(
        params,
        prompt_len=len(prompt),
        max_model_len=settings.max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
    )
    # A tokenizer may know tokens that its model does not, and a model may take shorter prompts.
    least, largest = min(prompt), max(prompt)
    if least < 0 or largest >= vocab_size:
        wanted = f"token ids from 0 to {vocab_size - 1}"
        raise ParameterError("prompt", wanted, least if least < 0 else largest)
    if settings.max_prompt_len is not None and len(prompt) > settings.max_prompt_len:
        wanted = f"at most {settings.max_prompt_len} tokens (rope_type dynamic)"
        raise ParameterError("prompt", wanted, f"{len(prompt)} tokens")
    return samplings


async def whole_answer(serving: Serving, tokenizer: Tokenizer, shape: Shape) -> msgspec.Struct:
    """Return the answer when all sequences have ended; cancelling aborts them."""
    async with await _start(serving, tokenizer, shape) as generation:
        while not generation.is_finished:
            await generation.wait()
        return shape.response(generation)


async def stream_chunks(
    serving: Serving, tokenizer: Tokenizer, shape: Shape
) -> AsyncGenerator[msgspec.Struct, None]:
    """Yield the answer's events; closing the generator aborts the sequences."""
    options = shape.request.stream_options or StreamOptions()
    async with await _start(serving, tokenizer, shape) as generation:
        while not generation.is_finished:
            for choice in await generation.wait():
                for chunk in shape.chunks(choice, _chunk_usage(options, generation)):
                    yield chunk
        if options.include_usage:
            yield shape.usage_chunk(generation.usage())


def _chunk_usage(options: StreamOptions, generation: Generation) -> Usage | UnsetType | None:
    """Return the `usage` of a chunk with choices: OpenAI announces the last one by nulls."""
    if options.continuous_usage_stats:
        return generation.usage()
    return None if options.include_usage else UNSET


async def beside_the_loop(size: int, work: Callable[[], T]) -> T:
    """Return what `work` returns, from a thread where there is much of it."""
    if size <= MAX_INLINE_CHARS:
        return work()
    return await asyncio.to_thread(work)
