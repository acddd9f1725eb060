"""One sequence as its client sees it: text, tokens and why it ended."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cluster.wire.messages import EngineOutput, GenerateRequest, TokenLogprobs
from serve.requests.text import TextStream

_FINISH_REASONS = ("stop", "length", "abort")


class GenerationError(RuntimeError):
    """The engine refused or lost a request; the message says why."""


class OutputDelta(msgspec.Struct):
    """What a choice produced since the last delta was taken.

    Invariant: `logprobs` is empty or has one entry per token; `offsets` has one.
    """

    text: str = ""
    token_ids: list[int] = []
    offsets: list[int] = []
    """Where each token's text starts in that of the sequence."""
    logprobs: list[TokenLogprobs] = []
    finish_reason: str | None = None
    """Set in the last delta: stop, length or abort."""
    stop_reason: int | str | None = None
    """The stop string, or the id of the stop token that the client named; None for the model's own
    end."""


class Choice:
    """One sequence of a request, as it is generated."""

    def __init__(
        self,
        index: int,
        request: GenerateRequest,
        text: TextStream,
        stop_token_ids: Sequence[int],
    ) -> None:
        """Start without output; `stop_token_ids` are those that the client named."""
        self.index = index
        self.request = request
        self.finish_reason = ""
        """Why it ended; empty while it runs."""
        self.was_taken = False
        self.num_tokens = 0
        self.num_cached_tokens: int | None = None
        """Of the prompt, in the cache of the engine that computed it; None before it did."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Of each prompt token but the first, if asked for; on a prompt's first choice alone."""
        self._text = text
        self._stop_token_ids = stop_token_ids
        self._delta = OutputDelta()

    @property
    def is_finished(self) -> bool:
        return bool(self.finish_reason)

    def absorb(self, output: EngineOutput) -> None:
        """Add one step's output; what comes after a stop string is dropped.

        Raises:
            GenerationError: the output says that generating failed.
        """
        if self.finish_reason:
            return
        if self.num_cached_tokens is None:
            # A decode engine, or one that takes over, finds KV of what others have computed.
            self.num_cached_tokens = output.num_cached_tokens
        self.prompt_logprobs += output.prompt_logprobs
        text = self._text.push(output.token_ids, stop_token_id=output.stop_token_id)
        delta, num_tokens = self._delta, text.num_tokens_used
        self.num_tokens += num_tokens
        delta.text += text.text
        delta.offsets += text.offsets
        delta.token_ids += output.token_ids[:num_tokens]
        delta.logprobs += output.logprobs[:num_tokens]
        if text.stop_string is not None:
            self._end("stop", text.stop_string)
        elif output.finish_reason in _FINISH_REASONS:
            self._finish(output)
        elif output.finish_reason:
            raise GenerationError(output.error or output.finish_reason)

    def take(self) -> OutputDelta:
        """Return what was absorbed since the last call."""
        self.was_taken = True
        delta, self._delta = self._delta, OutputDelta()
        return delta

    def is_due(self, stream_interval: int) -> bool:
        """Return whether a stream sends what was absorbed: its first tokens and its last ones at
        once, and otherwise at least `stream_interval` together."""
        is_edge = self.finish_reason or not self.was_taken
        return bool(is_edge) or len(self._delta.token_ids) >= stream_interval

    def _finish(self, output: EngineOutput) -> None:
        self._delta.text += self._text.finish()
        if self._text.stop_string is not None:  # completed by the last characters
            self._end("stop", self._text.stop_string)
        else:
            is_users = output.stop_token_id in self._stop_token_ids
            self._end(output.finish_reason, output.stop_token_id if is_users else None)

    def _end(self, finish_reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason = self._delta.finish_reason = finish_reason
        self._delta.stop_reason = stop_reason
