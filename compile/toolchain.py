"""What the compiling of a forward is handed: compilers, a cache for its plan, and graphs.

The one thing to know: nothing here is looked up by the code that splits and stitches. A toolchain
comes with the scope in which a model is built, so a test or another capture brings its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torch import fx

if TYPE_CHECKING:
    from compile.scope import CompileScope

Shape: TypeAlias = int | tuple[int, int] | None
"""What an artifact is for: so many tokens, a range of counts (first, last), or any count."""

Runnable: TypeAlias = Callable[..., Any]
"""A compiled piece: takes the piece's inputs in order, returns a tuple or a list of its outputs."""


class Manager(Protocol):
    """Turns pieces into runnables, and finds those that were compiled before."""

    misses: list[str]
    """Why pieces were compiled although there is a cache, one line each."""

    def compile(
        self,
        graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        index: int,
        shape: Shape,
        num_graphs: int,
        key: str,
    ) -> Runnable:
        """Compile a piece, or load what an equal piece was compiled to.

        Args:
            example_inputs: fake; symbolic, but of that size for an exact number of tokens.
            index: place of the piece among the `num_graphs` that are compiled.
            key: of the graph on symbolic inputs, from `split.canonical_key`.
        """

    def load(self, key: str, *, index: int, shape: Shape, num_graphs: int) -> Runnable:
        """Load what a piece was compiled to under a key, without its graph.

        Raises an exception of any kind if there is none that can be used: the forward is then
        traced and compiled again.
        """


class PlanStore(Protocol):
    """Keeps the text of a forward's plan beside its artifacts."""

    @property
    def directory(self) -> Path:
        """Where readable files about this forward go; it exists."""

    def load_plan(self) -> str | None:
        """Return what was saved under the same key, if anything."""

    def save_plan(self, text: str) -> None:
        """Keep a plan whose pieces are all stored."""


@dataclass(frozen=True)
class Opened:
    """Compilers and cache of one forward. Invariant: without a cache nothing is read or written."""

    manager: Manager
    cache: PlanStore | None = None


class Toolchain(Protocol):
    """Opens compilers and wraps compiled pieces."""

    def open(
        self, scope: CompileScope, prefix: str, traced_files: Sequence[str] | None
    ) -> Opened | None:
        """Return compilers and cache of the forward called `prefix`.

        Before tracing `traced_files` is None: the answer is None unless an earlier start left a
        forward that a warm start can use.
        """

    def wrap(self, runnable: Runnable, *, is_first: bool) -> Runnable:
        """Return a piece that is captured and replayed as the forward context says."""

    def keep_outputs(self, op: Runnable) -> Runnable:
        """Return one call of an eager op between captured pieces; its outputs keep their place."""
