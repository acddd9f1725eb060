"""The sequences behind one HTTP request, from submission to their last token.

Each sequence has a task that moves outputs from the backend into one mailbox. `wait()` takes all
that the mailbox holds, so a client that reads slowly gets its waiting tokens in one piece. Leaving
the `async with` block, for whatever reason, aborts what runs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from types import TracebackType

from cluster.wire.messages import EngineOutput
from serve.event_loop import LoopThrottle
from serve.openai.answers import PromptTokensDetails, Usage
from serve.openai.backend import Backend
from serve.openai.errors import ApiError
from serve.openai.streaming import Backlog
from serve.requests.choice import Choice
from serve.requests.records import ABORTED, FAILED, IngressCounts, RequestRecord, SequenceRecord

TOKEN_BYTES = 400
"""Bytes of a token that waits, with its text."""
CANDIDATE_BYTES = 16
"""Bytes of each candidate among its log-probabilities."""


class Generation:
    """Runs sequences on the backend for as long as its `async with` block lasts.

    Invariant: the `n` choices of a prompt stand together, the prompts in their order.
    """

    def __init__(
        self,
        backend: Backend,
        choices: list[Choice],
        n: int,
        throttle: LoopThrottle,
        backlog: Backlog,
        *,
        record: RequestRecord,
        counts: IngressCounts,
    ) -> None:
        """Start nothing yet.

        Args:
            throttle: of the sequences that are submitted, by all generations together.
            backlog: counts the outputs that were not waited for yet.
            record: of the request; gets one for each choice.
            counts: where tokens and ends are counted.
        """
        self.choices = choices
        self._record = record
        self._counts = counts
        record.sequences = [
            SequenceRecord(
                is_first_choice=choice.index % n == 0,
                num_prompt_tokens=len(choice.request.prompt_token_ids),
                max_tokens=choice.request.sampling.max_tokens,
            )
            for choice in choices
        ]
        self._backend = backend
        self._n = n
        self._throttle = throttle
        self._backlog = backlog
        self._mailbox: deque[tuple[Choice, EngineOutput | Exception]] = deque()
        self._loop = asyncio.get_running_loop()
        self._arrival: asyncio.Future[None] | None = None
        """Of the next output, while somebody waits for it."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._submitting: asyncio.Task[None] | None = None
        self._error: Exception | None = None

    async def __aenter__(self) -> Generation:
        rest = deque(self.choices)
        while rest and self._throttle.take():
            self._begin(rest.popleft())
        if rest:
            self._submitting = self._loop.create_task(self._submit(rest))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # All are cancelled before anything is waited for: whoever is in this block may be cancelled
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
                    self._counts.on_end(self._record, sequence, reason)

    @property
    def is_finished(self) -> bool:
        return all(choice.is_finished for choice in self.choices)

    async def wait(self) -> list[Choice]:
        """Wait for output and return the choices that have some, in order.

        Raises what ended a sequence without a result, after the outputs before it.
        """
        if self._error is not None:
            raise self._error
        if not self._mailbox:
            self._arrival = self._loop.create_future()
            await self._arrival
        self._backlog.clear()
        changed: dict[int, Choice] = {}
        while self._mailbox:
            choice, event = self._mailbox.popleft()
            try:
                self._absorb(choice, event)
            except Exception as error:
                self._error = error
                break
            changed[choice.index] = choice
        for choice in changed.values():
            self._count(choice)
        return [changed[index] for index in sorted(changed)]

    def _count(self, choice: Choice) -> None:
        sequence = self._record.sequences[choice.index]
        sequence.num_cached_tokens = choice.num_cached_tokens or 0
        self._counts.on_tokens(self._record, sequence, choice.num_tokens)
        if choice.finish_reason and not sequence.finish_reason:
            self._counts.on_end(self._record, sequence, choice.finish_reason)

    def first_of(self, choice: Choice) -> Choice:
        """Return the first choice of the same prompt."""
        return self.choices[choice.index - choice.index % self._n]

    def usage(self) -> Usage:
        """Return the tokens counted so far, over all choices; a prompt counts once."""
        firsts = self.choices[:: self._n]
        prompt = sum(len(choice.request.prompt_token_ids) for choice in firsts)
        completion = sum(choice.num_tokens for choice in self.choices)
        cached = sum(choice.num_cached_tokens or 0 for choice in firsts)
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))

    async def _submit(self, choices: Iterable[Choice]) -> None:
        for choice in choices:
            await self._throttle.wait()
            self._begin(choice)

    def _begin(self, choice: Choice) -> None:
        self._tasks[choice.index] = self._loop.create_task(self._pump(choice))

    def _put(self, choice: Choice, event: EngineOutput | Exception) -> None:
        self._mailbox.append((choice, event))
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _absorb(self, choice: Choice, event: EngineOutput | Exception) -> None:
        if isinstance(event, Exception):
            raise event
        choice.absorb(event)
        if choice.is_finished:
            # A stop string ends a sequence that the engine would continue.
            self._tasks[choice.index].cancel()

    async def _pump(self, choice: Choice) -> None:
        try:
            stream = self._backend.generate(choice.request, self._record.sequences[choice.index])
            try:
                async for output in stream:
                    self._put(choice, output)
                    self._backlog.add(_num_bytes(output))
                    if output.finish_reason:
                        return
            finally:
                await stream.aclose()
            raise ApiError(500, "generating ended without a result")
        except Exception as error:
            self._put(choice, error)


def _num_bytes(output: EngineOutput) -> int:
    num_candidates = sum(1 + len(found.top_token_ids) for found in output.logprobs)
    return TOKEN_BYTES * max(1, len(output.token_ids)) + CANDIDATE_BYTES * num_candidates
