"""One answer of a chat: its text, divided into reasoning, content and tool calls as it arrives."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from serve.openai.reasoning import MARKERS, ReasoningFormat, ReasoningParser
from serve.openai.tool_parser import CallDelta, ToolFormat, ToolParser


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
        """Texts that divide an answer."""
        of_reasoning = () if self.reasoning is ReasoningFormat.NONE else MARKERS
        return frozenset((*of_reasoning, *(self.tools.markers if self.tools else ())))


class AnswerDelta(NamedTuple):
    """What some text added to an answer."""

    reasoning: str
    content: str
    calls: list[CallDelta]
    content_at: int = 0
    """Calls that came before the content."""


class AnswerParser:
    """Divides one answer's text. Calls are looked for behind the reasoning only."""

    def __init__(self, answer_format: AnswerFormat, prompt_end: str) -> None:
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
        return self._reasoning.num_chars

    @property
    def has_calls(self) -> bool:
        return self._tools is not None and self._tools.num_calls > 0

    def push(self, text: str, *, is_last: bool) -> AnswerDelta:
        """Add text; return what is certain of it, which is everything with the last one."""
        reasoning, text = self._reasoning.push(text)
        if is_last:
            left = self._reasoning.finish()
            reasoning, text = reasoning + left.reasoning, text + left.content
        if self._tools is None:
            return AnswerDelta(reasoning, text, [])
        content, calls = self._tools.push(text)
        if is_last:
            rest = self._tools.finish()
            content, calls = content + rest.content, calls + rest.calls
        return AnswerDelta(reasoning, content, calls, self._tools.content_at)
