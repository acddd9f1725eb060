"""One request's answer: its prompts as tokens, its sequences, and what its adapter makes of them.

Each sequence has a task that moves outputs from the backend into one mailbox, and all that the
mailbox holds is taken at once, so a client that reads slowly gets its waiting tokens in one piece.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from cluster.wire.messages import EngineOutput, GenerateRequest
from compile.errors import FieldError, Words
from serve.admission import AdmissionSlot
from serve.config import ApiSettings
from serve.event_loop import Check
from serve.openai.answers import PromptTokensDetails, Usage
from serve.openai.backend import Serving
from serve.openai.errors import ApiError
from serve.openai.schema import ChatRequest, CompletionRequest, StreamOptions
from serve.requests.choice import Choice, StopStrings
from serve.requests.records import ABORTED, FAILED, RequestRecord, SequenceRecord
from serve.requests.sampling import DEFAULT_MAX_TOKENS, Resolver, SamplingParams, too_long_a_prompt
from serve.requests.tokenizer import Tokenizer, TooManyTokens

CHOICE_SIZE = 100
"""The cost of preparing a choice, as about so many characters of tokenizing."""
MAX_WAITING_BYTES = 4 << 20
"""What may wait for a client that reads slowly before it is cut off: seconds of 128 choices with
log-probabilities, hours of one choice's text."""
WAITING_TOKEN_BYTES = 400
"""Bytes of a token that waits, with its text."""
WAITING_CANDIDATE_BYTES = 16
"""Bytes of each candidate among its log-probabilities."""
TEXT_BYTES = 8
"""Bytes of a token's text in an answer: about twice the mean."""
TOKEN_ID_BYTES = 7
CANDIDATE_BYTES = 80
"""Bytes of one candidate among log-probabilities: its text, its bytes as numbers, its value."""
EVENT_BYTES = 320
"""Bytes of a stream's event without the text: each repeats the answer's id, model and date."""
COPIES_IN_MEMORY = 4
"""Copies of a whole answer: what the engine sent, structs, JSON, and what the server holds."""


class RequestAdapter(Protocol):
    """How one endpoint reads its prompts and writes its answer."""

    id: str
    """Of the answer, as are its date and model; each of its JSON objects repeats them."""
    created: int
    model: str
    params: SamplingParams
    has_typed_events: bool
    """Whether the events of a stream carry the name of their type, as those of Responses."""
    shown_token_ids: frozenset[int]
    """Special tokens that the text of an answer has in any case."""
    num_prompts: int
    num_prompt_copies: int
    """How often an answer repeats what it says of one prompt."""
    size: int
    """Characters and token ids in the prompts, and what is written around them."""

    @property
    def request(self) -> ChatRequest | CompletionRequest: ...

    def encode(self, max_tokens: int, check: Check) -> list[list[int]]:
        """Return the prompts' token ids; raises TooManyTokens."""

    def response(self, generation: Generation) -> object:
        """Return the whole answer, to be written as JSON; all choices are finished."""

    def chunks(self, choice: Choice, usage: Usage | UnsetType | None) -> Iterator[msgspec.Struct]:
        """Return the events for what the choice has produced since the last call."""

    def ending(self, generation: Generation) -> Iterator[msgspec.Struct]:
        """Return the events after those of the choices, which are finished."""


class Generation:
    """A request that is answered once, whole or as events. Its owner gives its slot back.

    Invariant: the `n` choices of a prompt stand together, the prompts in their order.
    """

    def __init__(
        self,
        serving: Serving,
        tokenizer: Tokenizer,
        adapter: RequestAdapter,
        slot: AdmissionSlot,
        record: RequestRecord,
    ) -> None:
        self.adapter = adapter
        self.slot = slot
        self.timeout_s = serving.settings.args.request_timeout_s
        self.choices: list[Choice] = []
        """Empty until the request is prepared."""
        self.on_full: Callable[[], None] | None = None
        """Set while a send waits for its client: called where more waits than may."""
        self._serving = serving
        self._tokenizer = tokenizer
        self._record = record
        self._mailbox: deque[tuple[Choice, EngineOutput | Exception]] = deque()
        self._num_waiting_bytes = 0
        """About so many bytes are in the mailbox."""
        self._arrival: asyncio.Future[None] | None = None
        """Of the next output, while somebody waits for it."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._submitting: asyncio.Task[None] | None = None
        self._error: Exception | None = None

    async def whole_answer(self) -> bytes:
        """Return the answer's JSON when all sequences have ended; cancelling aborts them."""
        answer_size = await self._prepare()
        async with self._running():
            while not self.is_finished:
                await self._wait()
        self.slot.end_sequences()
        size = answer_size.of_tokens(sum(choice.num_tokens for choice in self.choices))
        self.slot.hold(size)
        # Tens of megabytes of log-probabilities take seconds to write.
        return await self._serving.threads.run(
            size, lambda _: msgspec.json.encode(self.adapter.response(self))
        )

    async def events(self) -> AsyncGenerator[msgspec.Struct, None]:
        """Yield the answer's events; closing the generator aborts the sequences."""
        await self._prepare()
        options = self.adapter.request.stream_options or StreamOptions()
        # As OpenAI's: null in chunks with choices if a last chunk brings it.
        usage: Usage | UnsetType | None = None if options.include_usage else UNSET
        interval = self._serving.settings.args.stream_interval
        async with self._running():
            changed = await self._wait()
            with self._serving.tick.streaming(len(self.choices)):
                while True:
                    for choice in changed:
                        if choice.is_due(interval):
                            if options.continuous_usage_stats:
                                usage = self.usage()
                            for chunk in self.adapter.chunks(choice, usage):
                                yield chunk
                    if self.is_finished:
                        break
                    changed = await self._wait()
        self.slot.end_sequences()
        for chunk in self.adapter.ending(self):
            yield chunk

    @property
    def is_finished(self) -> bool:
        return all(choice.finish_reason for choice in self.choices)

    def usage(self) -> Usage:
        """Return the tokens counted so far, over all choices; a prompt counts once."""
        firsts = self.choices[:: self.adapter.params.n]
        prompt = sum(len(choice.request.prompt_token_ids) for choice in firsts)
        completion = sum(choice.num_tokens for choice in self.choices)
        cached = sum(choice.num_cached_tokens or 0 for choice in firsts)
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))

    # --- prompts ------------------------------------------------------------------------------

    async def _prepare(self) -> AnswerSize:
        """Do everything that may refuse the request, before an engine has it."""
        adapter, params = self.adapter, self.adapter.params
        size = adapter.size + CHOICE_SIZE * adapter.num_prompts * params.n
        wanted, client = params.structured_outputs, self.slot.client
        try:
            grammar = await self._tokenizer.grammars.text(wanted, client) if wanted else ""
            return await self._serving.threads.run(size, partial(self._prepare_choices, grammar))
        except FieldError as error:
            raise error.renamed(adapter.request.spelling(error.field)) from error
        finally:
            self.slot.let_go_of_bytes()

    def _prepare_choices(self, grammar: str, check: Check) -> AnswerSize:
        adapter, settings, tokenizer = self.adapter, self._serving.settings, self._tokenizer
        request, params = adapter.request, adapter.params
        salt = self._serving.salts.of(self.slot.client, request.cache_salt)
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
        samplings = [resolver.choices(len(prompt), max_tokens) for prompt in prompts]
        stop = StopStrings(params.stop_strings)
        for prompt, of_choices in zip(prompts, samplings, strict=True):
            for sampling in of_choices:
                index = len(self.choices)
                engine_request = GenerateRequest(
                    f"{adapter.id}-{index}", prompt, [], sampling, "", salt
                )
                shown = adapter.shown_token_ids
                self.choices.append(Choice(index, engine_request, tokenizer, params, stop, shown))
        return answer_size

    # --- sequences ----------------------------------------------------------------------------

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        """Run the sequences; leaving the block, for whatever reason, aborts what runs."""
        self._record.sequences = [
            SequenceRecord(
                is_first_choice=choice.index % self.adapter.params.n == 0,
                num_prompt_tokens=len(choice.request.prompt_token_ids),
                max_tokens=choice.request.sampling.max_tokens,
            )
            for choice in self.choices
        ]
        loop = asyncio.get_running_loop()
        rest = deque(self.choices)
        while rest and self._serving.sequences.take():
            choice = rest.popleft()
            self._tasks[choice.index] = loop.create_task(self._pump(choice))
        if rest:
            self._submitting = loop.create_task(self._submit(rest))
        try:
            yield
        finally:
            await self._abort()

    async def _abort(self) -> None:
        # All are cancelled before anything is waited for: whoever runs this may be cancelled
        # again meanwhile, since Ray Serve cancels the requests of clients that leave, and so do we.
        tasks = [task for task in self._tasks.values() if not task.done()]
        if self._submitting is not None:
            tasks.append(self._submitting)
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            reason = ABORTED if self._error is None else FAILED
            for sequence in self._record.sequences:
                if not sequence.finish_reason:
                    self._serving.counts.on_end(self._record, sequence, reason)

    async def _submit(self, choices: Iterable[Choice]) -> None:
        for choice in choices:
            await self._serving.sequences.wait()
            self._tasks[choice.index] = asyncio.create_task(self._pump(choice))

    async def _pump(self, choice: Choice) -> None:
        record = self._record.sequences[choice.index]
        try:
            async with aclosing(self._serving.backend.generate(choice.request, record)) as outputs:
                async for output in outputs:
                    self._put(choice, output)
                    if output.finish_reason:
                        return
            raise ApiError(500, "generating ended without a result")
        except Exception as error:
            self._put(choice, error)

    def _put(self, choice: Choice, event: EngineOutput | Exception) -> None:
        self._mailbox.append((choice, event))
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
        if isinstance(event, Exception):
            return
        num_candidates = sum(1 + len(found.top_token_ids) for found in event.logprobs)
        self._num_waiting_bytes += WAITING_TOKEN_BYTES * max(1, len(event.token_ids))
        self._num_waiting_bytes += WAITING_CANDIDATE_BYTES * num_candidates
        if self._num_waiting_bytes > MAX_WAITING_BYTES and self.on_full is not None:
            self.on_full()

    async def _wait(self) -> list[Choice]:
        """Wait for output and return the choices that have some, in order.

        Raises what ended a sequence without a result, after the outputs before it.
        """
        if self._error is not None:
            raise self._error
        if not self._mailbox:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        self._num_waiting_bytes = 0
        changed: dict[int, Choice] = {}
        while self._mailbox:
            choice, event = self._mailbox.popleft()
            try:
                if isinstance(event, Exception):
                    raise event
                choice.absorb(event)
            except Exception as error:
                self._error = error
                break
            if choice.finish_reason:
                # A stop string ends a sequence that the engine would continue.
                self._tasks[choice.index].cancel()
            changed[choice.index] = choice
        counts, record = self._serving.counts, self._record
        for choice in changed.values():
            sequence = record.sequences[choice.index]
            sequence.num_cached_tokens = choice.num_cached_tokens or 0
            counts.on_tokens(record, sequence, choice.num_tokens)
            if choice.finish_reason and not sequence.finish_reason:
                counts.on_end(record, sequence, choice.finish_reason)
        return [changed[index] for index in sorted(changed)]


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
        """Return how many tokens a choice may have in an answer of `max_bytes`; FieldError if they
        are fewer than the request asks for."""
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
