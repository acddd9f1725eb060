"""What the scheduler asks of grammars: to be compiled, and masks for a step.

`cluster/rank/grammar_masks.py` does both in threads. A sequence enters no batch before its grammar
is compiled. Its masks are filled while the step's forward runs, and the executor waits for them
right before it samples. Ranks that do not sample know nothing of grammars.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.wire.messages import Grammar


class Matcher(Protocol):
    """One sequence's place in its grammar.

    It follows from the output tokens alone: one that is dropped is made again from them.
    """

    num_tokens: int
    """Output tokens that it was given, those of the last `fill` included."""

    @property
    def error(self) -> str:
        """Why the step that was filled last draws nothing of use; empty if all is well."""


class Compiled(Protocol):
    """A grammar that is ready."""

    def start(self, end_token_ids: Sequence[int]) -> Matcher:
        """Return a matcher at the start of a text."""


@dataclass(frozen=True)
class CompileResult:
    """What became of a request's grammar. Invariant: `compiled` is None if `error` says why."""

    request_id: str
    compiled: Compiled | None
    error: str


@dataclass(frozen=True)
class MaskedRow:
    """A sampled sequence with a grammar."""

    index: int
    """Its place among those that the step samples."""
    matcher: Matcher
    token_ids: list[int]
    """Output tokens that the matcher was not given yet."""


class Grammars(Protocol):
    """Compiles grammars and fills masks, both beside the step thread."""

    def compile(self, request_id: str, grammar: Grammar) -> Compiled | None:
        """Return the grammar if it is ready; otherwise a result will come for the request."""

    def take_compiled(self) -> list[CompileResult]:
        """Return the results that have come since the last call."""

    def forget(self, request_id: str) -> None:
        """Bring no result for the request."""

    def fill(self, step: int, num_rows: int, rows: list[MaskedRow]) -> None:
        """Begin to fill the masks of a step that samples `num_rows` sequences."""
