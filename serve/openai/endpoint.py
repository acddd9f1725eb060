"""The life of a generating request.

1. Not ready yet: 503. It takes one place, or gets 429; only then its body is read.
2. The body is checked, and parsed into a `Shape` beside the event loop. It takes a place for each
   sequence that it asks for.
3. Its prompts become token ids, and sampling is resolved against their length. A prompt that is
   too long gets 400, and so does an answer that could become too large.
4. Its sequences run in a `Generation`; the shape turns what they produce into JSON, once at the
   end or event by event.
5. If the client leaves or does not read, or time is up, the block of the generation ends, which
   aborts its sequences and frees the places.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cluster.observe.metrics import Described
from cluster.wire.messages import GenerateRequest
from compile.errors import FieldError, Words
from serve.admission import Admission, Overloaded, Place
from serve.clients import client_of
from serve.event_loop import Check, Pace, SharedTick, WorkThreads
from serve.observe.metrics import Scrapes
from serve.openai.backend import ApiSettings, Backend
from serve.openai.body import BodyReader, check_values
from serve.openai.errors import ApiError, NotFound, Unavailable, as_api_error
from serve.openai.generation import Choice, Generation
from serve.openai.observed import record_of
from serve.openai.responses import Usage
from serve.openai.schema import ChatRequest, CompletionRequest, StreamOptions
from serve.openai.streaming import Backlog, ClientGone, EventStream, WholeAnswer
from serve.requests.cache_salt import CacheSalts
from serve.requests.records import IngressCounts, RequestRecord
from serve.requests.sampling import DEFAULT_MAX_TOKENS, Resolver, SamplingParams, too_long_a_prompt
from serve.requests.text import StopStrings, TextStream
from serve.requests.tokenizer import Tokenizer, TooManyTokens

CHOICE_SIZE = 100
"""The cost of preparing a choice, as about so many characters of tokenizing."""

BEGUN_AT_ONCE = 4
"""Requests, and sequences, in a turn of the event loop: each costs it a millisecond or two."""

Handler = Callable[[Request], Awaitable[Response]]
TEXT_BYTES = 8
"""Bytes of a token's text: about twice the mean."""
TOKEN_ID_BYTES = 7
CANDIDATE_BYTES = 80
"""Bytes of one candidate among log-probabilities: its text, its bytes as numbers, its value."""
EVENT_BYTES = 320
"""Bytes of a stream's event beside the text: each repeats the answer's id, model and date."""
COPIES_IN_MEMORY = 4
"""Copies of a whole answer: what the engine sent, structs, JSON, and what the server holds."""


class Serving:
    """What all handlers share."""

    def __init__(
        self,
        settings: ApiSettings,
        backend: Backend,
        tokenizer: Callable[[], Tokenizer | None],
        admission: Admission,
        tick: SharedTick | None = None,
        salts: CacheSalts | None = None,
    ) -> None:
        """Share what is given; `tick` is the one that the backend's outputs wait for."""
        self.salts = salts or CacheSalts()
        self.settings = settings
        self.backend = backend
        self.admission = admission
        self.bodies = BodyReader(settings)
        self.threads = WorkThreads()
        self.requests = Pace(BEGUN_AT_ONCE)
        self.sequences = Pace(BEGUN_AT_ONCE)
        self.tick = tick or SharedTick()
        self.counts = IngressCounts(settings.max_model_len)
        self.on_end: list[Callable[[RequestRecord], None]] = []
        """Called with what was noted of each generating request."""
        self.is_traced = False
        """Whether a request's trace is noted too. Set before the application is built."""
        described = Described(
            settings.served_model_name, settings.max_model_len, settings.cache_info
        )
        self.scrapes = Scrapes(lambda: backend.metrics(self.counts.counts()), described)
        self._tokenizer = tokenizer

    def require_ready(self) -> Tokenizer:
        """Return the tokenizer; raises Unavailable until the pools are ready."""
        tokenizer = self._tokenizer()
        if tokenizer is None or not self.backend.is_ready():
            raise Unavailable(
                "the model is not ready; /ready tells why",
                retry_after_s=self.settings.retry_after_s,
            )
        return tokenizer

    def require_model(self, name: str | None) -> None:
        """Raise NotFound unless `name` is one of the served model's or left out."""
        names = self.settings.model_names
        if name is not None and name not in names:
            raise NotFound(f"model: wanted {' or '.join(names)}, found {name}", param="model")


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
    def params(self) -> SamplingParams: ...

    @property
    def stamp(self) -> Stamp: ...

    @property
    def has_typed_events(self) -> bool:
        """Whether the events of a stream carry the name of their type, as those of Responses."""
        ...

    @property
    def shown_token_ids(self) -> frozenset[int]:
        """Special tokens that the text of an answer has in any case."""
        ...

    @property
    def num_prompts(self) -> int: ...

    @property
    def num_prompt_copies(self) -> int:
        """How often an answer repeats what it says of one prompt."""
        ...

    @property
    def size(self) -> int:
        """Characters and token ids in the prompts, and what is written around them."""
        ...

    def encode(self, max_tokens: int, check: Check) -> list[list[int]]:
        """Return the prompts' token ids.

        Raises:
            TooManyTokens: one has more than `max_tokens`.
        """
        ...

    def response(self, generation: Generation) -> object:
        """Return the whole answer, to be written as JSON; all choices are finished."""
        ...

    def chunks(self, choice: Choice, usage: Usage | UnsetType | None) -> Iterator[msgspec.Struct]:
        """Return the events for what the choice has produced since the last call."""
        ...

    def ending(self, generation: Generation) -> Iterator[msgspec.Struct]:
        """Return the events behind those of the choices, which are finished."""
        ...


class Prepared(msgspec.Struct, frozen=True):
    """A request that is ready for an engine."""

    choices: list[Choice]
    answer_size: AnswerSize


def json_response(
    body: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a JSON answer."""
    return Response(
        msgspec.json.encode(body), status, headers=headers, media_type="application/json"
    )


def guarded(handler: Handler) -> Handler:
    """Answer whatever a handler raises in the API's shape; it is lost if the client has left."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=499)
        except Exception as error:
            return as_api_error(error).response()

    return answer


Parse = Callable[[Serving, Tokenizer, bytes], Shape]


async def admitted(serving: Serving, request: Request) -> tuple[Tokenizer, Place]:
    """Return the tokenizer and a place for a request; nothing of its body is read before.

    Raises:
        ApiError, Overloaded: it is refused, and its body discarded.
    """
    await serving.requests.wait()
    try:
        tokenizer = serving.require_ready()
        serving.bodies.check_length(request)
        return tokenizer, serving.admission.enter(client_of(request.scope))
    except (ApiError, Overloaded):
        await serving.bodies.discard(request)
        raise


async def respond(serving: Serving, request: Request, parse: Parse) -> Response:
    """Answer a generating request, streamed or whole.

    Raises whatever `as_api_error` knows, and ClientGone.
    """
    record = record_of(request)
    record.is_generating = True
    tokenizer, place = await admitted(serving, request)
    try:
        body = await serving.bodies.read(request, place)
        shape = await parsed(serving, tokenizer, parse, body, place, record)
    except BaseException as error:
        place.leave()
        if isinstance(error, ApiError | Overloaded):
            await serving.bodies.discard(request)
        raise
    timeout_s = serving.settings.args.request_timeout_s
    if shape.request.stream:
        return EventStream(
            lambda backlog: stream_chunks(serving, tokenizer, shape, place, record, backlog),
            place,
            timeout_s,
            is_typed=shape.has_typed_events,
        )
    return WholeAnswer(
        lambda: whole_answer(serving, tokenizer, shape, place, record), place, timeout_s
    )


async def parsed(
    serving: Serving,
    tokenizer: Tokenizer,
    parse: Parse,
    body: bytes,
    place: Place,
    record: RequestRecord,
) -> Shape:
    """Return the request in a JSON body, which now has a place for each of its sequences.

    Raises:
        ApiError: it cannot be answered.
        Overloaded: there is no room for all its sequences.
    """

    def work(check: Check) -> Shape:
        check_values(body, serving.settings.max_model_len)
        return parse(serving, tokenizer, body)

    shape = await serving.threads.run(len(body), work)
    serving.require_model(shape.request.model)
    place.grow(shape.num_prompts * shape.params.n)
    record.id, record.model = shape.stamp.id, shape.stamp.model
    record.is_stream = shape.request.stream
    params = shape.params
    record.n, record.temperature, record.top_p = params.n, params.temperature, params.top_p
    max_tokens = params.max_tokens
    serving.counts.on_parsed(params.n, None if max_tokens is UNSET else max_tokens)
    return shape


async def whole_answer(
    serving: Serving, tokenizer: Tokenizer, shape: Shape, place: Place, record: RequestRecord
) -> bytes:
    """Return the answer's JSON when all sequences have ended; cancelling aborts them."""
    prepared = await _prepared(serving, tokenizer, shape, place)
    n, pace = shape.params.n, serving.sequences
    async with Generation(
        serving.backend, prepared.choices, n, pace, record=record, counts=serving.counts
    ) as generation:
        while not generation.is_finished:
            await generation.wait()
    place.end_sequences()
    size = prepared.answer_size.of_tokens(sum(choice.num_tokens for choice in generation.choices))
    place.hold(size)
    # Tens of megabytes of log-probabilities take seconds to write.
    return await serving.threads.run(
        size, lambda _: msgspec.json.encode(shape.response(generation))
    )


async def stream_chunks(
    serving: Serving,
    tokenizer: Tokenizer,
    shape: Shape,
    place: Place,
    record: RequestRecord,
    backlog: Backlog,
) -> AsyncGenerator[msgspec.Struct, None]:
    """Yield the answer's events; closing the generator aborts the sequences.

    Args:
        backlog: counts what waits to be yielded.
    """
    prepared = await _prepared(serving, tokenizer, shape, place)
    options = shape.request.stream_options or StreamOptions()
    n, pace = shape.params.n, serving.sequences
    async with Generation(
        serving.backend, prepared.choices, n, pace, backlog, record=record, counts=serving.counts
    ) as generation:
        changed = await generation.wait()
        with serving.tick.streaming(len(generation.choices)):
            while True:
                for choice in changed:
                    if choice.is_due(serving.settings.args.stream_interval):
                        for chunk in shape.chunks(choice, _chunk_usage(options, generation)):
                            yield chunk
                if generation.is_finished:
                    break
                changed = await generation.wait()
    place.end_sequences()
    for chunk in shape.ending(generation):
        yield chunk


def _chunk_usage(options: StreamOptions, generation: Generation) -> Usage | UnsetType | None:
    """Return the `usage` of a chunk with choices: null if a last chunk brings it, as OpenAI's."""
    if options.continuous_usage_stats:
        return generation.usage()
    return None if options.include_usage else UNSET


async def _prepared(serving: Serving, tokenizer: Tokenizer, shape: Shape, place: Place) -> Prepared:
    """Do everything that may refuse the request, before an engine has it."""
    size = shape.size + CHOICE_SIZE * shape.num_prompts * shape.params.n
    wanted = shape.params.structured_outputs
    salt = serving.salts.of(place.client, shape.request.cache_salt)
    try:
        text = await tokenizer.grammars.text(wanted, place.client) if wanted else ""
        return await serving.threads.run(
            size, lambda check: _prepare(serving.settings, tokenizer, shape, text, salt, check)
        )
    except FieldError as error:
        raise error.renamed(shape.request.spelling(error.field)) from error
    finally:
        place.let_go_of_bytes()


def _prepare(
    settings: ApiSettings,
    tokenizer: Tokenizer,
    shape: Shape,
    grammar_text: str,
    cache_salt: bytes,
    check: Check,
) -> Prepared:
    request, params = shape.request, shape.params
    vocab_size = min(tokenizer.vocab_size, settings.vocab_size or tokenizer.vocab_size)
    resolver = Resolver(
        params,
        max_model_len=settings.max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        grammar_text=lambda _: grammar_text,
    )
    try:
        prompts = shape.encode(settings.max_model_len, check)
    except TooManyTokens as error:
        raise too_long_a_prompt(settings.max_model_len, str(error)) from error
    for prompt in prompts:
        _check_prompt(settings, vocab_size, prompt)
    answer_size = AnswerSize.of(request, params, prompts, num_prompt_copies=shape.num_prompt_copies)
    max_bytes = settings.args.max_answer_bytes // (1 if request.stream else COPIES_IN_MEMORY)
    max_tokens = answer_size.max_tokens(params, max_bytes)
    pairs = [
        (prompt, sampling)
        for prompt in prompts
        for sampling in resolver.choices(len(prompt), max_tokens)
    ]
    stop = StopStrings(params.stop_strings)
    choices = [
        Choice(
            index,
            GenerateRequest(f"{shape.stamp.id}-{index}", prompt, [], sampling, "", cache_salt),
            TextStream.of(tokenizer, params, stop, prompt, shape.shown_token_ids),
            params.stop_token_ids,
        )
        for index, (prompt, sampling) in enumerate(pairs)
    ]
    return Prepared(choices, answer_size)


def _check_prompt(settings: ApiSettings, vocab_size: int, prompt: list[int]) -> None:
    """Refuse what the model cannot compute; an empty prompt is refused with its sampling.

    A tokenizer may know tokens that its model does not, and a model may take shorter prompts.
    """
    if prompt and not 0 <= min(prompt) <= max(prompt) < vocab_size:
        least, largest = min(prompt), max(prompt)
        wanted = f"token ids from 0 to {vocab_size - 1}"
        raise FieldError("prompt", wanted, least if least < 0 else largest)
    if settings.max_prompt_len is not None and len(prompt) > settings.max_prompt_len:
        wanted = f"at most {settings.max_prompt_len} tokens (rope_type dynamic)"
        raise FieldError("prompt", wanted, Words(f"{len(prompt)} tokens"))


class AnswerSize(msgspec.Struct, frozen=True):
    """How large one request's answer may become, about, in bytes of JSON.

    A few hundred bytes can ask for hundreds of megabytes: log-probabilities of a long prompt,
    repeated for 128 choices. What a client has not read stays in memory, here or in the proxy in
    front, so an answer is bounded before it is begun.
    """

    prompt_bytes: int
    """What is said of the prompts, however much is generated."""
    token_bytes: int
    """Of one token of one choice."""
    num_choices: int
    cause: str = "return_token_ids"
    """The field that has the prompts said again, if log-probabilities do not."""

    @classmethod
    def of(
        cls,
        request: ChatRequest | CompletionRequest,
        params: SamplingParams,
        prompts: Sequence[Sequence[int]],
        *,
        num_prompt_copies: int,
    ) -> AnswerSize:
        """Return the size of the answer to these prompts.

        Args:
            num_prompt_copies: how often an answer repeats what it says of a prompt.
        """
        of_prompt_token = _candidates(params.prompt_logprobs)
        of_token = TEXT_BYTES + _candidates(params.logprobs)
        if request.stream:
            of_token += EVENT_BYTES
        if request.return_token_ids:
            of_prompt_token += TOKEN_ID_BYTES
            of_token += TOKEN_ID_BYTES
        if isinstance(request, CompletionRequest) and request.echo:
            of_prompt_token += TEXT_BYTES
        num_prompt_tokens = sum(map(len, prompts))
        return cls(
            prompt_bytes=num_prompt_tokens * num_prompt_copies * of_prompt_token,
            token_bytes=of_token,
            num_choices=len(prompts) * params.n,
            cause="return_token_ids" if request.return_token_ids else "echo",
        )

    def of_tokens(self, num_tokens: int) -> int:
        """Return the bytes of an answer with so many tokens in all choices."""
        return self.prompt_bytes + num_tokens * self.token_bytes

    def max_tokens(self, params: SamplingParams, max_bytes: int) -> int:
        """Return how many tokens a choice may have in an answer of `max_bytes`.

        Raises:
            FieldError: they are fewer than the request asks for.
        """
        limit = f"an answer has at most max_answer_bytes, here {max_bytes} bytes"
        if self.prompt_bytes > max_bytes:
            by_logprobs = params.prompt_logprobs is not None
            param = "prompt_logprobs" if by_logprobs else self.cause
            found = Words(f"{self.prompt_bytes} for {params.n} choices")
            raise FieldError(param, f"less said of the prompt ({limit})", found)
        left = (max_bytes - self.prompt_bytes) // (self.num_choices * self.token_bytes)
        asked = DEFAULT_MAX_TOKENS if params.max_tokens is UNSET else params.max_tokens
        asked = max(asked or 1, params.min_tokens)
        if asked > left:
            each = f"{self.token_bytes} for each token of {self.num_choices} choices"
            raise FieldError("max_tokens", f"at most {left} ({limit}, {each})", asked)
        return left


def _candidates(num_logprobs: int | None) -> int:
    return 0 if num_logprobs is None else (1 + num_logprobs) * CANDIDATE_BYTES
