"""The reasoning of `<think>` models, divided from their answer while both arrive.

White space around the two markers is dropped. How the text is cut into pieces makes no difference.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from serve.openai.json_scanner import SPACE
from serve.openai.markers import start_of_part

OPENER = "<think>"
CLOSER = "</think>"
MARKERS = (OPENER, CLOSER)
TAIL_TOKENS = 16
"""Tokens at the end of a prompt that are read for a marker behind which the answer begins."""


class ReasoningFormat(Enum):
    """How a model writes its reasoning."""

    NONE = "none"
    """It writes none, or it is left in the answer."""
    DEEPSEEK_R1 = "deepseek_r1"
    """An answer begins with reasoning, whether or not it is opened; without an end all of it is."""
    QWEN3 = "qwen3"
    """An answer begins with reasoning only if the prompt or the answer opens it."""


class Divided(NamedTuple):
    """What some text added to an answer."""

    reasoning: str
    content: str


class _At(Enum):
    BEGINNING = auto()
    """At the beginning, where reasoning may be opened."""
    REASONING = auto()
    CLOSED = auto()
    """Behind reasoning, in white space."""
    CONTENT = auto()


class ReasoningParser:
    """Divides one answer's text into reasoning and the rest."""

    def __init__(self, reasoning_format: ReasoningFormat, prompt_end: str) -> None:
        """Begin an answer behind a prompt, of which the end tells whether reasoning is open."""
        end = prompt_end.rstrip(SPACE)
        is_closed = end.endswith(CLOSER) or reasoning_format is ReasoningFormat.NONE
        self._at = _At.CONTENT if is_closed else _At.BEGINNING
        self._is_open = end.endswith(OPENER) or reasoning_format is ReasoningFormat.DEEPSEEK_R1
        self._pending = ""
        """The end of the text so far that may be the start of a marker."""
        self._space: list[str] = []
        """White space that counts only if something follows."""
        self._has_reasoning = False
        self.num_chars = 0
        """Characters of the text that are reasoning or its markers."""
        self._num_read = 0

    def push(self, text: str) -> Divided:
        """Add text; return what is certain of it."""
        if self._at is _At.CONTENT:
            return Divided("", text)
        self._num_read += len(text)
        text, self._pending = self._pending + text, ""
        reasoning = ""
        if self._at is _At.BEGINNING:
            text = self._begin(text)
        if self._at is _At.REASONING:
            reasoning, text = self._reason(text)
            self.num_chars = self._num_read - len(text)
        if self._at is _At.CLOSED:
            text = text.lstrip(SPACE)
            self._at = _At.CONTENT if text else _At.CLOSED
        return Divided(reasoning, text)

    def finish(self) -> Divided:
        """Return what is left when no text follows."""
        text, self._pending = self._pending, ""
        if self._at is _At.BEGINNING and not self._is_open:
            return Divided("", "".join(self._space) + text)
        return Divided(self._trimmed(text), "")

    def _begin(self, text: str) -> str:
        """Find out whether an answer begins with reasoning; return what is left of the text."""
        stripped = text.lstrip(SPACE)
        self._space.append(text[: len(text) - len(stripped)])
        if OPENER.startswith(stripped) and stripped != OPENER:
            self._pending = stripped
            return ""
        if self._is_open or stripped.startswith(OPENER):
            self._at, self._space = _At.REASONING, []
            return stripped.removeprefix(OPENER)
        self._at = _At.CONTENT
        return "".join(self._space) + stripped

    def _reason(self, text: str) -> tuple[str, str]:
        """Return the reasoning of a text, and what is behind its end."""
        before, closer, behind = text.partition(CLOSER)
        if closer:
            self._at = _At.CLOSED
            return self._trimmed(before), behind
        cut = start_of_part(text, 0, (CLOSER,))
        self._pending = text[cut:]
        return self._trimmed(text[:cut]), ""

    def _trimmed(self, text: str) -> str:
        """Return reasoning without white space at its beginning, and so far at its end."""
        stripped = text.rstrip(SPACE)
        space = text[len(stripped) :]
        if stripped:
            stripped = "".join((*self._space, stripped))
            stripped = stripped if self._has_reasoning else stripped.lstrip(SPACE)
            self._has_reasoning, self._space = True, []
        self._space.append(space)
        return stripped
