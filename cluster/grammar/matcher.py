"""A sequence's place in its grammar, and a grammar that is ready. Nothing here imports the grammar
library, so an engine runs without it. A sequence enters no batch before its grammar is compiled,
and a step's masks are filled from what the scheduler hands over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher

Masks = npt.NDArray[np.uint32]
"""[R, W]: bit i % 32 of word i // 32 allows token i."""
FED_AT_ONCE = 64
"""Output tokens of a resumed sequence that are matched in one call, which holds the interpreter's
lock for some tens of microseconds."""


@dataclass(frozen=True)
class CompileResult:
    """What became of a request's grammar. Invariant: `compiled` is None if `error` says why."""

    request_id: str
    compiled: CompiledGrammar | None
    error: str


@dataclass(frozen=True)
class MaskedRow:
    index: int
    """Its place among those that the step samples."""
    matcher: Matcher
    token_ids: list[int]
    """Output tokens that the matcher was not given yet."""
    draft: list[int]
    """What may come behind them: each has a row of its own, behind this one."""

    @property
    def indices(self) -> range:
        return range(self.index, self.index + 1 + len(self.draft))


class CompiledGrammar:
    """A grammar that is ready; its matchers share what they learn of it. `is_spent`: one of them
    has spent the grammar's budget, and others would too."""

    def __init__(self, template: LLMatcher) -> None:
        self._template = template
        self.is_spent = False
        self.costly_s = 0.0
        """What its masks took of a processor beyond `COSTLY_MASK_S`, where measured one by one."""
        self.is_costly = False

    def start(self, end_token_ids: Sequence[int]) -> Matcher:
        return Matcher(self, tuple(end_token_ids))

    def copy(self) -> LLMatcher:
        return self._template.deep_copy()


class Matcher:
    """One sequence's place in its grammar: it follows from the output tokens that it was given.
    `error` is set by the thread that fills masks: no token fits, or the budget is spent."""

    def __init__(self, grammar: CompiledGrammar, end_token_ids: tuple[int, ...]) -> None:
        self.grammar = grammar
        self.end_token_ids = end_token_ids
        self.num_tokens = 0
        self.error = ""
        self._state: LLMatcher | None = None

    @property
    def state(self) -> LLMatcher:
        """The library's matcher, made by the first call."""
        if self._state is None:
            self._state = self.grammar.copy()
        return self._state

    def feed(self, token_ids: Sequence[int]) -> None:
        state = self.state
        for start in range(0, len(token_ids), FED_AT_ONCE):
            state.consume_tokens(list(token_ids[start : start + FED_AT_ONCE]))

    def note_error(self) -> None:
        if self.state.is_error() and not self.error:
            self.fail(self.state.get_error())

    def fail(self, message: str) -> None:
        """Keep an error, and let nobody else start with the same grammar."""
        self.error = first_line(message)
        self.grammar.is_spent = True


def first_line(message: str) -> str:
    """Return the first line of one of the library's errors, shortened."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[0][:300] if lines else "it has an error"
