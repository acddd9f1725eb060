"""The sequences behind one HTTP request, from submission to their last token.

The one thing to know: each sequence has a task that moves outputs from the backend into one
mailbox. `wait()` takes all that the mailbox holds, so a client that reads slowly gets its waiting
tokens in one piece, and leaving the `async with` block, for whatever reason, aborts what runs.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

import msgspec

from cluster.messages import EngineOutput, GenerateRequest, TokenLogprobs
from serve.openai.backend import Backend
from serve.openai.errors import InternalError
from serve.openai.responses import PromptTokensDetails, Usage
from serve.sampling import SamplingParams
from serve.text import TextStream
from serve.tokenizer import Tokenizer

_FINISH_REASONS = ("stop", "length", "abort")


class Piece(msgspec.Struct):
    """What a sequence produced since the last piece was taken.

    Invariant: `logprobs` is empty or has one entry per token.
    """

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason: str | None = None
    """Set in the last piece: stop, length or abort."""
    stop_reason: int | str | None = None


class Choice:
    """One sequence as the client sees it: text, tokens and why it ended."""

    def __init__(self, index: int, request: GenerateRequest, text: TextStream) -> None:
        self.index = index
        self.request = request
        self.is_finished = False
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Of each prompt token but the first, if asked for; on a prompt's first choice alone."""
        self._text = text
        self._piece = Piece()

    def absorb(self, output: EngineOutput, user_stop_token_ids: list[int]) -> None:
        """Add one step's output; what comes after a stop string is dropped.

        Raises:
            InternalError: the output says that generating failed.
        """
        if self.is_finished:
            return
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.prompt_logprobs += output.prompt_logprobs
        delta = self._text.push(output.token_ids, stop_token_id=output.stop_token_id)
        self._add(delta.text, output, delta.num_tokens_used)
        if delta.stopped:
            self._end("stop", delta.stop_string)
        elif output.finish_reason in _FINISH_REASONS:
            self._finish(output, user_stop_token_ids)
        elif output.finish_reason:
            raise InternalError(f"generating failed: {output.error or output.finish_reason}")

    def take(self) -> Piece:
        """Return what was absorbed since the last call."""
        piece, self._piece = self._piece, Piece()
        return piece

    def _add(self, text: str, output: EngineOutput, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._piece.text += text
        self._piece.token_ids += output.token_ids[:num_tokens]
        self._piece.logprobs += output.logprobs[:num_tokens]

    def _finish(self, output: EngineOutput, user_stop_token_ids: list[int]) -> None:
        self._piece.text += self._text.finish()
        if self._text.stop_string is not None:
            self._end("stop", self._text.stop_string)
        else:
            is_users = output.stop_token_id in user_stop_token_ids
            self._end(output.finish_reason, output.stop_token_id if is_users else None)

    def _end(self, finish_reason: str, stop_reason: int | str | None) -> None:
        self.is_finished = True
        self._piece.finish_reason = finish_reason
        self._piece.stop_reason = stop_reason


class Generation:
    """Runs sequences on the backend for as long as its `async with` block lasts.

    Invariant: the `params.n` choices of a prompt stand together, the prompts in their order.
    """

    def __init__(self, backend: Backend, choices: list[Choice], params: SamplingParams) -> None:
        self.choices = choices
        self._backend = backend
        self._params = params
        self._mailbox: asyncio.Queue[tuple[Choice, EngineOutput | Exception]] = asyncio.Queue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._error: Exception | None = None

    async def __aenter__(self) -> Generation:
        self._backend.admit(len(self.choices))
        self._tasks = {c.index: asyncio.create_task(self._pump(c)) for c in self.choices}
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks.values():
            task.cancel()
        try:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        finally:
            self._backend.leave(len(self.choices))

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.is_finished for choice in self.choices)

    async def wait(self) -> list[Choice]:
        """Wait for output and return the choices that have some, in order.

        Raises whatever ended a sequence without a result, after the outputs before it.
        """
        if self._error is not None:
            raise self._error
        waiting = [await self._mailbox.get()]
        while not self._mailbox.empty():
            waiting.append(self._mailbox.get_nowait())
        changed: dict[int, Choice] = {}
        for choice, event in waiting:
            try:
                self._absorb(choice, event)
            except Exception as error:
                self._error = error
                break
            changed[choice.index] = choice
        return [changed[index] for index in sorted(changed)]

    def first_of(self, choice: Choice) -> Choice:
        """Return the first choice of the same prompt."""
        return self.choices[choice.index - choice.index % self._params.n]

    def usage(self) -> Usage:
        """Return the tokens counted so far, over all choices; a prompt counts once."""
        firsts = self.choices[:: self._params.n]
        prompt = sum(len(choice.request.prompt_token_ids) for choice in firsts)
        completion = sum(choice.num_tokens for choice in self.choices)
        cached = sum(choice.num_cached_tokens for choice in firsts)
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))

    def _absorb(self, choice: Choice, event: EngineOutput | Exception) -> None:
        if isinstance(event, Exception):
            raise event
        choice.absorb(event, self._params.stop_token_ids)
        if choice.is_finished:
            # A stop string ends a sequence that the engine would go on with.
            self._tasks[choice.index].cancel()

    async def _pump(self, choice: Choice) -> None:
        try:
            stream = self._backend.generate(choice.request)
            try:
                async for output in stream:
                    self._mailbox.put_nowait((choice, output))
                    if output.finish_reason:
                        return
            finally:
                await stream.aclose()
            raise InternalError("generating ended without a result")
        except Exception as error:
            self._mailbox.put_nowait((choice, error))


def make_choices(
    tokenizer: Tokenizer, params: SamplingParams, requests: list[GenerateRequest]
) -> list[Choice]:
    """Return one choice per request, in order."""
    return [
        Choice(index, request, TextStream.of(tokenizer, params, request.prompt_token_ids))
        for index, request in enumerate(requests)
    ]
