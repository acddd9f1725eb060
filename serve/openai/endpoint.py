"""The life of a generating request.

1. *Access*: the middleware has noted who asks (`middleware.py`).
2. *Admit*: not ready yet, 503. It takes one slot, or gets 429; only then its body is read.
3. *Parse*: the body is checked, and parsed into a `RequestAdapter` off the event loop. The
   request takes a slot for each sequence that it asks for.
4. *Prepare*: its prompts become token ids, and sampling is resolved against their length. A prompt
   that is too long gets 400, and so does an answer that could become too large.
5. *Generate*: its sequences run in a `Generation`.
6. *Render*: the adapter turns what they produce into JSON, once at the end or event by event.

If the client leaves or does not read, or time is up, the block of the generation ends, which aborts
its sequences and frees the slots.
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
from serve.admission import Admission, AdmissionSlot, Overloaded
from serve.event_loop import Check, LoopThrottle, StreamBatcher, WorkThreads
from serve.observe.metrics import Scrapes
from serve.openai.answers import Usage
from serve.openai.backend import ApiSettings, Backend
from serve.openai.body import BodyReader, check_values
from serve.openai.errors import ApiError, as_api_error
from serve.openai.generation import Generation
from serve.openai.middleware import record_of
from serve.openai.schema import ChatRequest, CompletionRequest, StreamOptions
from serve.openai.streaming import Backlog, ClientGone, EventStream, WholeAnswer
from serve.requests.cache_salt import CacheSalts
from serve.requests.choice import Choice, StopStrings
from serve.requests.records import IngressCounts, RequestRecord
from serve.requests.sampling import DEFAULT_MAX_TOKENS, Resolver, SamplingParams, too_long_a_prompt
from serve.requests.tokenizer import Tokenizer, TooManyTokens

CHOICE_SIZE = 100
"""The cost of preparing a choice, as about so many characters of tokenizing."""

BEGUN_AT_ONCE = 4
"""Requests, and sequences, started in a turn of the event loop: each costs it a millisecond or
two."""

Handler = Callable[[Request], Awaitable[Response]]
TEXT_BYTES = 8
"""Bytes of a token's text: about twice the mean."""
TOKEN_ID_BYTES = 7
CANDIDATE_BYTES = 80
"""Bytes of one candidate among log-probabilities: its text, its bytes as numbers, its value."""
EVENT_BYTES = 320
"""Bytes of a stream's event without the text: each repeats the answer's id, model and date."""
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
        tick: StreamBatcher | None = None,
        salts: CacheSalts | None = None,
    ) -> None:
        """Share what is given; `tick` is the one that the backend's outputs wait for."""
        self.salts = salts or CacheSalts()
        self.settings = settings
        self.backend = backend
        self.admission = admission
        self.bodies = BodyReader(settings)
        self.threads = WorkThreads()
        self.requests = LoopThrottle(BEGUN_AT_ONCE)
        self.sequences = LoopThrottle(BEGUN_AT_ONCE)
        self.tick = tick or StreamBatcher()
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
        self._model_names = settings.model_names

    def require_ready(self) -> Tokenizer:
        """Return the tokenizer; raises ApiError until the pools are ready."""
        tokenizer = self._tokenizer()
        if tokenizer is None or not self.backend.is_ready():
            message = "the model is not ready; /ready tells why"
            raise ApiError(503, message, retry_after_s=self.settings.retry_after_s)
        return tokenizer

    def require_model(self, name: str | None) -> None:
        """Raise ApiError unless `name` is one of the served model's or left out."""
        if name is not None and name not in self._model_names:
            wanted = " or ".join(self._model_names)
            raise ApiError(404, f"model: wanted {wanted}, found {name}", param="model")


class ResponseMeta(msgspec.Struct, frozen=True):
    """What every JSON object of one answer repeats."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> ResponseMeta:
        return cls(f"{prefix}-{secrets.token_hex(16)}", int(time.time()), model)


class RequestAdapter(Protocol):
    """How one endpoint reads its prompts and writes its answer."""

    @property
    def request(self) -> ChatRequest | CompletionRequest: ...

    @property
    def params(self) -> SamplingParams: ...

    @property
    def meta(self) -> ResponseMeta: ...

    @property
    def has_typed_events(self) -> bool:
        """Whether the events of a stream carry the name of their type, as those of Responses."""

    @property
    def shown_token_ids(self) -> frozenset[int]:
        """Special tokens that the text of an answer has in any case."""

    @property
    def num_prompts(self) -> int: ...

    @property
    def num_prompt_copies(self) -> int:
        """How often an answer repeats what it says of one prompt."""

    @property
    def size(self) -> int:
        """Characters and token ids in the prompts, and what is written around them."""

    def encode(self, max_tokens: int, check: Check) -> list[list[int]]:
        """Return the prompts' token ids.

        Raises:
            TooManyTokens: one has more than `max_tokens`.
        """

    def response(self, generation: Generation) -> object:
        """Return the whole answer, to be written as JSON; all choices are finished."""

    def chunks(self, choice: Choice, usage: Usage | UnsetType | None) -> Iterator[msgspec.Struct]:
        """Return the events for what the choice has produced since the last call."""

    def ending(self, generation: Generation) -> Iterator[msgspec.Struct]:
        """Return the events after those of the choices, which are finished."""


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


async def admitted(
    serving: Serving, request: Request, record: RequestRecord
) -> tuple[Tokenizer, AdmissionSlot, bytes]:
    """Return the tokenizer, and a request's slot and body; nothing of it is read before the slot.

    Raises:
        ApiError, Overloaded: it is refused, and the rest of its body discarded.
    """
    await serving.requests.wait()
    slot: AdmissionSlot | None = None
    try:
        tokenizer = serving.require_ready()
        serving.bodies.check_length(request)
        slot = serving.admission.enter(record.client)
        return tokenizer, slot, await serving.bodies.read(request, slot)
    except BaseException as error:
        if slot is not None:
            slot.leave()
        if isinstance(error, ApiError | Overloaded):
            await serving.bodies.discard(request)
        raise


async def respond(serving: Serving, parse: Parse, request: Request) -> Response:
    """Answer a generating request, streamed or whole.

    Raises what `as_api_error` knows, and ClientGone.
    """
    record = record_of(request)
    record.is_generating = True
    tokenizer, slot, body = await admitted(serving, request, record)
    try:
        running = await parsed(serving, tokenizer, parse, body, slot, record)
    except BaseException:
        slot.leave()
        raise
    timeout_s, adapter = serving.settings.args.request_timeout_s, running.adapter
    if adapter.request.stream:
        return EventStream(running.events, slot, timeout_s, is_typed=adapter.has_typed_events)
    return WholeAnswer(running.whole_answer, slot, timeout_s)


async def parsed(
    serving: Serving,
    tokenizer: Tokenizer,
    parse: Parse,
    body: bytes,
    slot: AdmissionSlot,
    record: RequestRecord,
) -> ParsedRequest:
    """Return the request in a JSON body, which now has a slot for each of its sequences.

    Raises:
        ApiError, FieldError: it cannot be answered.
        Overloaded: there is no room for all its sequences.
    """

    def work(check: Check) -> RequestAdapter:
        check_values(body, serving.settings.max_model_len)
        return parse(serving, tokenizer, body)

    adapter = await serving.threads.run(len(body), work)
    serving.require_model(adapter.request.model)
    params = adapter.params
    slot.grow(adapter.num_prompts * params.n)
    record.id, record.model = adapter.meta.id, adapter.meta.model
    record.is_stream = adapter.request.stream
    record.n, record.temperature, record.top_p = params.n, params.temperature, params.top_p
    max_tokens = params.max_tokens
    serving.counts.on_parsed(params.n, None if max_tokens is UNSET else max_tokens)
    return ParsedRequest(serving, tokenizer, adapter, slot, record)


class ParsedRequest:
    """A request that can be answered once, whole or as events. Its owner gives its slot back."""

    def __init__(
        self,
        serving: Serving,
        tokenizer: Tokenizer,
        adapter: RequestAdapter,
        slot: AdmissionSlot,
        record: RequestRecord,
    ) -> None:
        self.adapter = adapter
        self._serving = serving
        self._settings = serving.settings
        self._tokenizer = tokenizer
        self._slot = slot
        self._record = record

    async def whole_answer(self) -> bytes:
        """Return the answer's JSON when all sequences have ended; cancelling aborts them."""
        choices, answer_size = await self._prepare()
        async with self._generation(choices, Backlog()) as generation:
            while not generation.is_finished:
                await generation.wait()
        self._slot.end_sequences()
        size = answer_size.of_tokens(sum(choice.num_tokens for choice in choices))
        self._slot.hold(size)
        # Tens of megabytes of log-probabilities take seconds to write.
        return await self._serving.threads.run(
            size, lambda _: msgspec.json.encode(self.adapter.response(generation))
        )

    async def events(self, backlog: Backlog) -> AsyncGenerator[msgspec.Struct, None]:
        """Yield the answer's events; closing the generator aborts the sequences.

        Args:
            backlog: counts what waits to be yielded.
        """
        choices, _ = await self._prepare()
        options = self.adapter.request.stream_options or StreamOptions()
        # As OpenAI's: null in chunks with choices if a last chunk brings it.
        usage: Usage | UnsetType | None = None if options.include_usage else UNSET
        interval = self._settings.args.stream_interval
        async with self._generation(choices, backlog) as generation:
            changed = await generation.wait()
            with self._serving.tick.streaming(len(choices)):
                while True:
                    for choice in changed:
                        if choice.is_due(interval):
                            if options.continuous_usage_stats:
                                usage = generation.usage()
                            for chunk in self.adapter.chunks(choice, usage):
                                yield chunk
                    if generation.is_finished:
                        break
                    changed = await generation.wait()
        self._slot.end_sequences()
        for chunk in self.adapter.ending(generation):
            yield chunk

    def _generation(self, choices: list[Choice], backlog: Backlog) -> Generation:
        serving = self._serving
        return Generation(
            serving.backend,
            choices,
            self.adapter.params.n,
            serving.sequences,
            backlog,
            record=self._record,
            counts=serving.counts,
        )

    async def _prepare(self) -> tuple[list[Choice], AnswerSize]:
        """Do everything that may refuse the request, before an engine has it."""
        adapter, client = self.adapter, self._slot.client
        params = adapter.params
        size = adapter.size + CHOICE_SIZE * adapter.num_prompts * params.n
        wanted = params.structured_outputs
        try:
            grammar = await self._tokenizer.grammars.text(wanted, client) if wanted else ""
            return await self._serving.threads.run(
                size, lambda check: self._prepare_choices(grammar, check)
            )
        except FieldError as error:
            raise error.renamed(adapter.request.spelling(error.field)) from error
        finally:
            self._slot.let_go_of_bytes()

    def _prepare_choices(self, grammar: str, check: Check) -> tuple[list[Choice], AnswerSize]:
        adapter, settings, tokenizer = self.adapter, self._settings, self._tokenizer
        request, params = adapter.request, adapter.params
        vocab_size = min(tokenizer.vocab_size, settings.vocab_size or tokenizer.vocab_size)
        resolver = Resolver(
            params,
            max_model_len=settings.max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            grammar_text=lambda _: grammar,
        )
        try:
            prompts = adapter.encode(settings.max_model_len, check)
        except TooManyTokens as error:
            raise too_long_a_prompt(settings.max_model_len, str(error)) from error
        for prompt in prompts:
            _check_prompt(settings, vocab_size, prompt)
        answer_size = AnswerSize(adapter, prompts)
        max_bytes = settings.args.max_answer_bytes // (1 if request.stream else COPIES_IN_MEMORY)
        max_tokens = answer_size.max_tokens(max_bytes)
        stop = StopStrings(params.stop_strings)
        salt = self._serving.salts.of(self._slot.client, request.cache_salt)
        choices: list[Choice] = []
        for prompt in prompts:
            for sampling in resolver.choices(len(prompt), max_tokens):
                index = len(choices)
                engine_request = GenerateRequest(
                    f"{adapter.meta.id}-{index}", prompt, [], sampling, "", salt
                )
                shown = adapter.shown_token_ids
                choices.append(Choice(index, engine_request, tokenizer, params, stop, shown))
        return choices, answer_size


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


class AnswerSize:
    """How large one request's answer may become, about, in bytes of JSON.

    A few hundred bytes can ask for hundreds of megabytes: log-probabilities of a long prompt,
    repeated for 128 choices. What a client has not read stays in memory, here or in the proxy in
    front, so an answer is bounded before it is begun.
    """

    def __init__(self, adapter: RequestAdapter, prompts: Sequence[Sequence[int]]) -> None:
        """Measure the answer to these prompts."""
        request, params = adapter.request, adapter.params
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
        self._params = params
        self._prompt_bytes = num_prompt_tokens * adapter.num_prompt_copies * of_prompt_token
        self._token_bytes = of_token
        self._num_choices = len(prompts) * params.n
        self._repeats = "return_token_ids" if request.return_token_ids else "echo"
        """The field that has the prompts said again, if log-probabilities do not."""

    def of_tokens(self, num_tokens: int) -> int:
        """Return the bytes of an answer with so many tokens in all choices."""
        return self._prompt_bytes + num_tokens * self._token_bytes

    def max_tokens(self, max_bytes: int) -> int:
        """Return how many tokens a choice may have in an answer of `max_bytes`.

        Raises:
            FieldError: they are fewer than the request asks for.
        """
        params = self._params
        limit = f"an answer has at most max_answer_bytes, here {max_bytes} bytes"
        if self._prompt_bytes > max_bytes:
            by_logprobs = params.prompt_logprobs is not None
            param = "prompt_logprobs" if by_logprobs else self._repeats
            found = Words(f"{self._prompt_bytes} for {params.n} choices")
            raise FieldError(param, f"less said of the prompt ({limit})", found)
        left = (max_bytes - self._prompt_bytes) // (self._num_choices * self._token_bytes)
        asked = DEFAULT_MAX_TOKENS if params.max_tokens is UNSET else params.max_tokens
        asked = max(asked or 1, params.min_tokens)
        if asked > left:
            each = f"{self._token_bytes} for each token of {self._num_choices} choices"
            raise FieldError("max_tokens", f"at most {left} ({limit}, {each})", asked)
        return left


def _candidates(num_logprobs: int | None) -> int:
    return 0 if num_logprobs is None else (1 + num_logprobs) * CANDIDATE_BYTES
