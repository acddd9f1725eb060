"""One answer of a chat: its text, divided into reasoning, content and tool calls as it arrives.
Reasoning is what `<think>` models write between two markers, around which white space is dropped.
How the text is cut into pieces makes no difference."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

import msgspec

from serve.openai.tool_parser import SPACE, CallDelta, ToolFormat, ToolParser, start_of_part

OPENER = "<think>"
CLOSER = "</think>"
TAIL_TOKENS = 16
"""Tokens at the end of a prompt that are read for a marker after which the answer begins."""


class ReasoningFormat(Enum):
    """How a model writes its reasoning."""

    NONE = "none"
    """It writes none, or it is left in the answer."""
    DEEPSEEK_R1 = "deepseek_r1"
    """An answer begins with reasoning, whether or not it is opened; without an end all of it is."""
    QWEN3 = "qwen3"
    """An answer begins with reasoning only if the prompt or the answer opens it."""


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a model writes the answers to one request."""

    reasoning: ReasoningFormat = ReasoningFormat.NONE
    tools: ToolFormat | None = None
    """None where no calls are looked for."""
    names: tuple[str, ...] = ()
    """The functions that may be called."""
    parallel: bool = True
    is_forced: bool = False
    """The text is what `calls_schema` describes: a list of calls, or arguments of `forced_name`."""
    forced_name: str | None = None

    @property
    def markers(self) -> frozenset[str]:
        of_reasoning = () if self.reasoning is ReasoningFormat.NONE else (OPENER, CLOSER)
        return frozenset((*of_reasoning, *(self.tools.markers if self.tools else ())))


ALL_CONTENT = AnswerFormat()
"""Of an answer without reasoning or calls."""


class AnswerDelta(NamedTuple):
    reasoning: str
    content: str
    calls: list[CallDelta]
    content_at: int = 0
    """Calls that came before the content."""


class AnswerParser:
    """Divides one answer's text. Calls are looked for after the reasoning only."""

    def __init__(self, answer_format: AnswerFormat, prompt_end: str) -> None:
        self._reasoning: ReasoningParser | None = None
        if answer_format.reasoning is not ReasoningFormat.NONE:
            self._reasoning = ReasoningParser(answer_format.reasoning, prompt_end)
        self._tools: ToolParser | None = None
        names, parallel = frozenset(answer_format.names), answer_format.parallel
        if answer_format.forced_name is not None:
            self._tools = ToolParser.of_arguments(answer_format.forced_name)
        elif answer_format.is_forced:
            self._tools = ToolParser.of_list(names, parallel=parallel)
        elif answer_format.tools is not None:
            self._tools = ToolParser(answer_format.tools, names, parallel=parallel)

    @property
    def num_reasoning_chars(self) -> int:
        """Characters of the text that are reasoning or its markers."""
        return 0 if self._reasoning is None else self._reasoning.num_chars

    @property
    def has_calls(self) -> bool:
        return self._tools is not None and self._tools.num_calls > 0

    def push(self, text: str, *, is_last: bool) -> AnswerDelta:
        """Add text; return what is certain of it, which is everything with the last one."""
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
            if is_last:
                left, content = self._reasoning.finish()
                reasoning, text = reasoning + left, text + content
        if self._tools is None:
            return AnswerDelta(reasoning, text, [])
        content, calls = self._tools.push(text)
        if is_last:
            rest = self._tools.finish()
            content, calls = content + rest.content, calls + rest.calls
        return AnswerDelta(reasoning, content, calls, self._tools.content_at)


class _ReasoningState(Enum):
    BEGINNING = auto()
    """At the beginning, where reasoning may be opened."""
    REASONING = auto()
    CLOSED = auto()
    """Behind reasoning, in white space."""
    CONTENT = auto()


class ReasoningParser:
    def __init__(self, reasoning_format: ReasoningFormat, prompt_end: str) -> None:
        """Begin an answer; the end of its prompt says whether reasoning is open."""
        end = prompt_end.rstrip(SPACE)
        is_closed = end.endswith(CLOSER)
        self._state = _ReasoningState.CONTENT if is_closed else _ReasoningState.BEGINNING
        self._is_open = end.endswith(OPENER) or reasoning_format is ReasoningFormat.DEEPSEEK_R1
        self._pending = ""
        """The end of the text so far that may be the start of a marker."""
        self._space: list[str] = []
        """White space that counts only if something follows."""
        self._has_reasoning = False
        self.num_chars = 0
        """Characters of the text that are reasoning or its markers."""
        self._num_read = 0

    def push(self, text: str) -> tuple[str, str]:
        """Add text; return what is certain of it: reasoning, and what is not."""
        if self._state is _ReasoningState.CONTENT:
            return "", text
        self._num_read += len(text)
        text, self._pending = self._pending + text, ""
        reasoning = ""
        if self._state is _ReasoningState.BEGINNING:
            text = self._begin(text)
        if self._state is _ReasoningState.REASONING:
            reasoning, text = self._reason(text)
            self.num_chars = self._num_read - len(text)
        if self._state is _ReasoningState.CLOSED:
            text = text.lstrip(SPACE)
            self._state = _ReasoningState.CONTENT if text else _ReasoningState.CLOSED
        return reasoning, text

    def finish(self) -> tuple[str, str]:
        """Return what is left when no text follows."""
        text, self._pending = self._pending, ""
        if self._state is _ReasoningState.BEGINNING and not self._is_open:
            return "", "".join(self._space) + text
        return self._trimmed(text), ""

    def _begin(self, text: str) -> str:
        """Find out whether an answer begins with reasoning; return what is left of the text."""
        stripped = text.lstrip(SPACE)
        self._space.append(text[: len(text) - len(stripped)])
        if OPENER.startswith(stripped) and stripped != OPENER:
            self._pending = stripped
            return ""
        if self._is_open or stripped.startswith(OPENER):
            self._state, self._space = _ReasoningState.REASONING, []
            return stripped.removeprefix(OPENER)
        self._state = _ReasoningState.CONTENT
        return "".join(self._space) + stripped

    def _reason(self, text: str) -> tuple[str, str]:
        """Return the reasoning of a text, and what follows its end."""
        before, closer, after = text.partition(CLOSER)
        if closer:
            self._state = _ReasoningState.CLOSED
            return self._trimmed(before), after
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
