"""One sequence as its client sees it: text, tokens and why it ended.

However tokens are grouped as they arrive, the joined deltas equal what all tokens decoded at once
add to the text of the prompt, cut at the first stop string that is complete. Text that may still
change, or may be the start of a stop string, is held back.
"""

from __future__ import annotations

import msgspec

from cluster.wire.messages import EngineOutput, GenerateRequest, TokenLogprobs
from serve.requests.sampling import SamplingParams
from serve.requests.tokenizer import Tokenizer, detokenizer

_FINISH_REASONS = ("stop", "length", "abort")


class GenerationError(RuntimeError):
    """The engine refused or lost a request; the message says why."""


class StopStrings:
    """The stop strings of a request, which its choices share."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        self.beginnings = frozenset(text[:n] for text in texts for n in range(1, len(text)))


class StopMatcher:
    """Finds the stop string that is complete first; of those ending together, the longest.
    Invariant: `held` is the longest end of the text so far that a stop string starts with, and is
    longer than. So the outcome does not depend on how the text is cut into pieces."""

    def __init__(self, stop: StopStrings, include_stop: bool) -> None:
        self.held = ""
        self._stop = stop
        self._include_stop = include_stop

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Add text; return what is certain of it, and the stop string if this completes one. Where
        it may not stop, a stop string that is complete now is not seen later either."""
        if not self._stop.texts:
            return text, None
        num_held, text = len(self.held), self.held + text
        if may_stop and (found := self._first_in(text, num_held)):
            end, start = found
            self.held = ""
            return text[: end if self._include_stop else start], text[start:end]
        # About two looks for each character in all: what is held shrinks as often as it grew.
        num_certain = 0
        while num_certain < len(text) and text[num_certain:] not in self._stop.beginnings:
            num_certain += 1
        self.held = text[num_certain:]
        return text[:num_certain], None

    def _first_in(self, text: str, num_held: int) -> tuple[int, int] | None:
        """Return the end and the start of the stop string that ends first behind what was held."""
        found, new = [], text[num_held:]
        for stop in self._stop.texts:
            if stop[-1] not in new:
                continue
            start = text.find(stop, max(0, num_held + 1 - len(stop)))
            if start >= 0:
                found.append((start + len(stop), start))
        return min(found, default=None)


class OutputDelta(msgspec.Struct):
    """What a choice produced since the last delta was taken. Invariant: `logprobs` is empty or has
    one entry per token; `offsets` has one."""

    text: str = ""
    token_ids: list[int] = []
    offsets: list[int] = []
    """Of each token: the characters of the sequence that were decoded before it."""
    logprobs: list[TokenLogprobs] = []
    finish_reason: str | None = None
    """Set in the last delta: stop, length or abort."""
    stop_reason: int | str | None = None
    """The stop string, or the client's stop token; None for the model's own end."""


class Choice:
    """One sequence of a request, as it is generated. With `include_stop_str_in_output` the text
    ends with what ended it, otherwise before. A stop string that is complete within the first
    `min_tokens` tokens is text like any other."""

    def __init__(
        self,
        index: int,
        request: GenerateRequest,
        tokenizer: Tokenizer,
        params: SamplingParams,
        stop: StopStrings,
        shown_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Start without output. shown_token_ids: special tokens that are text in any case."""
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
        self._matcher = StopMatcher(stop, params.include_stop_str_in_output)
        skipped = tokenizer.special_token_ids if params.skip_special_tokens else frozenset()
        self._detokenizer = detokenizer(
            tokenizer, skipped - shown_token_ids, request.prompt_token_ids
        )
        self._params = params
        self._num_chars = 0
        self._delta = OutputDelta()

    @property
    def is_finished(self) -> bool:
        return bool(self.finish_reason)

    def absorb(self, output: EngineOutput) -> None:
        """Add one step's output, but for what comes after a stop string; raises GenerationError."""
        if self.finish_reason:
            return
        if self.num_cached_tokens is None:
            # A decode engine, or one that takes over, finds KV of what others have computed.
            self.num_cached_tokens = output.num_cached_tokens
        self.prompt_logprobs += output.prompt_logprobs
        stop_string = self._add_tokens(output)
        if stop_string is None and output.finish_reason in _FINISH_REASONS:
            text, stop_string = self._matcher.push(self._detokenizer.flush())
            self._delta.text += text + self._matcher.held
        if stop_string is not None:
            self._end("stop", stop_string)
        elif output.finish_reason in _FINISH_REASONS:
            is_clients = output.stop_token_id in self._params.stop_token_ids
            self._end(output.finish_reason, output.stop_token_id if is_clients else None)
        elif output.finish_reason:
            raise GenerationError(output.error or output.finish_reason)

    def take(self) -> OutputDelta:
        self.was_taken = True
        delta, self._delta = self._delta, OutputDelta()
        return delta

    def is_due(self, stream_interval: int) -> bool:
        """Return whether a stream sends what was absorbed: its first tokens and its last ones at
        once, and otherwise at least `stream_interval` together."""
        is_edge = self._delta.finish_reason or not self.was_taken
        return bool(is_edge) or len(self._delta.token_ids) >= stream_interval

    def _add_tokens(self, output: EngineOutput) -> str | None:
        """Add tokens up to the one that completes a stop string; return that stop string."""
        parts: list[str] = []
        delta, token_ids, stop_string = self._delta, output.token_ids, None
        num_used = 0
        while num_used < len(token_ids) and stop_string is None:
            token_id = token_ids[num_used]
            may_stop = self.num_tokens + num_used >= self._params.min_tokens
            num_used += 1
            delta.offsets.append(self._num_chars)
            is_end = token_id == output.stop_token_id and num_used == len(token_ids)
            if is_end and not self._params.include_stop_str_in_output:
                break
            decoded = self._detokenizer.step(token_id)
            self._num_chars += len(decoded)
            text, stop_string = self._matcher.push(decoded, may_stop)
            parts.append(text)
        self.num_tokens += num_used
        delta.text += "".join(parts)
        delta.token_ids += token_ids[:num_used]
        delta.logprobs += output.logprobs[:num_used]
        return stop_string

    def _end(self, finish_reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason = self._delta.finish_reason = finish_reason
        self._delta.stop_reason = stop_reason
