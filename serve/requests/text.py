"""Token ids to text while they arrive, up to a stop string.

However tokens are grouped as they arrive, the joined deltas equal what all tokens decoded at once
add to the text of the prompt, cut at the first stop string that is complete. Text that may still
change, or may be the start of a stop string, is held back.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from serve.requests.sampling import SamplingParams
from serve.requests.tokenizer import Tokenizer

NUM_PROMPT_TOKENS = 5
"""The last tokens of a prompt, which decide how the first output token is written."""
MAX_UTF8_BYTES = 4
"""Bytes of one character."""


class TextDelta(NamedTuple):
    """What some tokens added to the text."""

    text: str
    stop_string: str | None
    """One that is complete: the text has ended."""
    num_tokens_used: int
    """Tokens up to the one that completed the stop string; all where none did."""
    offsets: list[int]
    """Of each token used: the characters of the sequence that were decoded before it."""


class TextStream:
    """The text of one sequence.

    With `include_stop_str_in_output` the text ends with the stop string, or with the text of the
    token that ended the sequence; otherwise it ends before. A stop string that is complete within
    the first `min_tokens` tokens is text like any other.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        stop: StopStrings,
        prompt_token_ids: Sequence[int] = (),
        shown_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Begin the text of one choice after its prompt.

        Args:
            stop: made of the stop strings of `params`, once for all choices.
            shown_token_ids: special tokens that are text in any case.
        """
        skipped = tokenizer.special_token_ids if params.skip_special_tokens else frozenset()
        self._num_unstoppable = params.min_tokens
        self._detokenizer = detokenizer(tokenizer, skipped - shown_token_ids, prompt_token_ids)
        self._include_stop = params.include_stop_str_in_output
        self._matcher = StopMatcher(stop, self._include_stop)
        self._is_finished = False
        self._num_chars = 0
        self.stop_string: str | None = None
        """The stop string that ended the text, once one is complete."""

    def push(self, token_ids: Sequence[int], *, stop_token_id: int = -1) -> TextDelta:
        """Add tokens and return the text that is now certain.

        `stop_token_id` is the token that ended the sequence, if one did; it comes last.
        """
        parts: list[str] = []
        offsets: list[int] = []
        if self._is_finished:
            return TextDelta("", None, 0, offsets)
        for used, token_id in enumerate(token_ids, start=1):
            offsets.append(self._num_chars)
            is_end = token_id == stop_token_id and used == len(token_ids)
            if is_end and not self._include_stop:
                continue
            may_stop = self._num_unstoppable == 0
            self._num_unstoppable -= not may_stop
            decoded = self._detokenizer.step(token_id)
            self._num_chars += len(decoded)
            text, stop_string = self._matcher.push(decoded, may_stop)
            parts.append(text)
            if stop_string is not None:
                self._is_finished, self.stop_string = True, stop_string
                return TextDelta("".join(parts), stop_string, used, offsets)
        return TextDelta("".join(parts), None, len(token_ids), offsets)

    def finish(self) -> str:
        """Return the text held back so far: no token follows. Empty after a stop string.

        The text held back may itself complete a stop string: then `stop_string` is set.
        """
        if self._is_finished:
            return ""
        self._is_finished = True
        text, self.stop_string = self._matcher.push(self._detokenizer.flush())
        return text + self._matcher.held


class StopStrings:
    """The stop strings of a request, as an automaton that reads a text once.

    A node is a prefix of a stop string, the root the empty one; `step` leads from the longest
    prefix that the text so far ends with to that of the text with one more character. Source: Aho
    and Corasick, 1975. Immutable once built: the choices of a request share one.
    """

    ROOT = 0

    def __init__(self, stop: list[str]) -> None:
        self.longest_end: list[str | None] = [None]
        """Per node: the longest stop string that it ends with."""
        self.depth = [0]
        """Per node: its length."""
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [self.ROOT]
        """Per node: the longest of its proper ends that is a node too."""
        for string in stop:
            self._insert(string)
        self._link()

    @property
    def is_empty(self) -> bool:
        return len(self._next) == 1

    def step(self, node: int, char: str) -> int:
        """Return the node after one more character."""
        following = self._next
        while char not in following[node]:
            if node == self.ROOT:
                return node
            node = self._fallback[node]
        return following[node][char]

    def unfinished(self, node: int) -> int:
        """Return the longest end of a node that a stop string continues."""
        while node != self.ROOT and not self._next[node]:
            node = self._fallback[node]
        return node

    def _insert(self, string: str) -> None:
        node = self.ROOT
        for char in string:
            child = self._next[node].get(char)
            if child is None:
                child = self._next[node][char] = len(self._next)
                self._next.append({})
                self._fallback.append(self.ROOT)
                self.longest_end.append(None)
                self.depth.append(self.depth[node] + 1)
            node = child
        self.longest_end[node] = string

    def _link(self) -> None:
        # By length: the ends of a node are shorter, and linked before it.
        waiting = deque(self._next[self.ROOT].values())
        while waiting:
            node = waiting.popleft()
            if self.longest_end[node] is None:
                self.longest_end[node] = self.longest_end[self._fallback[node]]
            for char, child in self._next[node].items():
                self._fallback[child] = self.step(self._fallback[node], char)
                waiting.append(child)


class StopMatcher:
    """Finds the stop string that is complete first; of those ending together, the longest.

    Invariant: `held` is the longest end of the text so far that a stop string starts with. So the
    outcome does not depend on how the text is cut into pieces.
    """

    def __init__(self, stop: StopStrings, include_stop: bool) -> None:
        self.held = ""
        self._stop = stop
        self._include_stop = include_stop
        self._node = stop.ROOT

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Add text; return what is certain of it, and the stop string if this completes one.

        Where it may not stop, a stop string that is complete now is not seen later either.
        """
        stop, node = self._stop, self._node
        if stop.is_empty:
            return text, None
        num_held = len(self.held)
        text = self.held + text
        for end in range(num_held + 1, len(text) + 1):
            node = stop.step(node, text[end - 1])
            stop_string = stop.longest_end[node]
            if may_stop and stop_string is not None:
                self.held = ""
                return text[: end if self._include_stop else end - len(stop_string)], stop_string
        self._node = node = stop.unfinished(node)
        certain = len(text) - stop.depth[node]
        self.held = text[certain:]
        return text[:certain], None


class Detokenizer(Protocol):
    """Turns one sequence's tokens into text that later tokens do not change."""

    def step(self, token_id: int) -> str: ...

    def flush(self) -> str:
        """Return what is left when no token follows."""


def detokenizer(
    tokenizer: Tokenizer, skipped: frozenset[int], prompt_token_ids: Sequence[int]
) -> Detokenizer:
    """Return the detokenizer that fits the tokenizer, for what follows a prompt.

    The tokens in `skipped` have no text.

    Not tokenizers' DecodeStream: it decodes all bytes again for as long as they make no character,
    raises where a byte-fallback run turns out to be invalid, and has no flush.
    """
    if tokenizer.is_byte_level:
        return ByteLevelDetokenizer(tokenizer, skipped)
    return WindowDetokenizer(tokenizer, skipped, prompt_token_ids)


class ByteLevelDetokenizer:
    """For byte-level vocabularies, where text is the tokens' bytes joined: constant per token."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For all other vocabularies: decodes the last tokens with and without the new ones.

    The tokens of the previous delta, at first the prompt's last ones, stay as context, since a
    token that opens a text may lose its leading space. A run of byte-fallback tokens is text as
    soon as they make a character. From the first byte that makes none each is U+FFFD, to the end
    of the run; decoding all at once would turn the characters before it into U+FFFD as well.
    """

    def __init__(
        self, tokenizer: Tokenizer, skipped: frozenset[int], prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._token_ids = self._end_of(prompt_token_ids)
        self._num_context = len(self._token_ids)
        self._context = self._decode()
        self._bytes: list[int] = []
        """Byte-fallback tokens that make no character yet."""

    def step(self, token_id: int) -> str:
        # Tokens without text would let the window grow, and each step decodes all of it.
        if self._has_no_text(token_id):
            return ""
        if self._tokenizer.is_byte_fallback(token_id):
            self._bytes.append(token_id)
            return self._take_bytes() if self._is_character() else ""
        broken = self._take_bytes()
        self._token_ids.append(token_id)
        text = self._decode()
        if len(text) <= len(self._context) or not text.startswith(self._context):
            return broken
        return broken + self._advance(text)

    def flush(self) -> str:
        return self._take_bytes() + self._advance(self._decode())

    def _end_of(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Return the last tokens of a prompt that have text, but for a run of bytes at its end.

        The output may continue such a run, and change what it says.
        """
        end: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if self._has_no_text(token_id):
                continue
            if end or not self._tokenizer.is_byte_fallback(token_id):
                end.append(token_id)
            if len(end) == NUM_PROMPT_TOKENS:
                break
        return end[::-1]

    def _has_no_text(self, token_id: int) -> bool:
        return token_id in self._skipped or self._tokenizer.token(token_id) is None

    def _is_character(self) -> bool:
        """Return whether the bytes that wait make a character."""
        if len(self._bytes) > MAX_UTF8_BYTES:
            return False
        try:
            b"".join(map(self._tokenizer.token_bytes, self._bytes)).decode()
        except UnicodeDecodeError:
            return False
        return True

    def _take_bytes(self) -> str:
        """Return the text of the bytes that wait: a character, or U+FFFD for each."""
        if not self._bytes:
            return ""
        before = self._advance(self._decode())
        is_broken = not self._is_character()
        if is_broken:  # what belongs to a character of the same run must not be decoded with them
            self._token_ids, self._num_context, self._context = [], 0, ""
        self._token_ids += self._bytes
        self._bytes = []
        return before + self._advance(self._decode())

    def _decode(self) -> str:
        return self._tokenizer.decode(self._token_ids, skip_special_tokens=False)

    def _advance(self, text: str) -> str:
        """Return what `text` adds to the context; the tokens of that are the next context."""
        delta = text[len(self._context) :]
        if self._num_context < len(self._token_ids):
            self._token_ids = self._token_ids[self._num_context :]
            self._num_context = len(self._token_ids)
            self._context = self._decode()
        return delta
