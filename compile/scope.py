"""What a module that compiles itself is told while it is built, and what it is handed.

Models are built by families that know nothing of compilation. The code that builds one enters a
scope around it, and the decorated module inside takes what it needs from there: compilers, a cache
for its plan, and graphs. The code that splits and stitches looks none of that up, so a test or
another way to capture brings a toolchain of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from torch import fx

from compile.config import CompilationConfig


@dataclass(frozen=True)
class CompileScope:
    """How modules built inside are compiled, and for which rank.

    Invariant: `config` is resolved. `key_factors` holds what decides generated code and is known
    to the caller alone (model configuration, dtype, parallel sizes), never ports, ranks or paths.
    """

    config: CompilationConfig = field(default_factory=CompilationConfig)
    tp_rank: int = 0
    dp_rank: int = 0
    key_factors: Mapping[str, str] = field(default_factory=dict)
    toolchain: Toolchain | None = None
    """Compilers, cache and graphs of the modules built inside; needed from level 2 on."""
    max_num_tokens: int | None = None
    """Most tokens of a step; None: the first step is the largest."""
    exchange: ArtifactExchange | None = None
    """Where ranks on other disks publish what they compile."""


class ModelTagError(ValueError):
    """Two compiled modules of one scope would share a name."""


_current: ContextVar[CompileScope | None] = ContextVar("compile_scope", default=None)
_tag: ContextVar[str] = ContextVar("model_tag", default="backbone")
_claimed: ContextVar[set[str] | None] = ContextVar("claimed_model_tags", default=None)


@contextmanager
def compile_scope(scope: CompileScope) -> Iterator[CompileScope]:
    """Make `scope` the current one, also for nested builds, and restore the one before."""
    token, claimed = _current.set(scope), _claimed.set(set())
    try:
        yield scope
    finally:
        _current.reset(token)
        _claimed.reset(claimed)


@contextmanager
def model_tag(tag: str) -> Iterator[None]:
    """Name the compiled module that is built inside, such as `draft`; otherwise `backbone`."""
    token = _tag.set(tag)
    try:
        yield
    finally:
        _tag.reset(token)


@dataclass(frozen=True)
class ModelTag:
    """The name of a compiled module, which is its directory in the cache.

    Invariant: of the modules of one scope, at most one runs under a name. Others may have been
    built, as loading a checkpoint builds a model to look at.
    """

    name: str
    _claimed: set[str]

    def claim(self) -> None:
        """Take the name, before the first forward.

        Raises:
            ModelTagError: another module of the scope took it.
        """
        if self.name in self._claimed:
            wanted = "one compiled module for each tag; enter model_tag(...) around the other"
            raise ModelTagError(f"model_tag: wanted {wanted}, found {self.name!r} twice")
        self._claimed.add(self.name)


def current_model_tag() -> ModelTag:
    """Return the name of the module that is being built."""
    claimed = _claimed.get()
    return ModelTag(_tag.get(), set() if claimed is None else claimed)


def current_scope() -> CompileScope:
    """Return the innermost scope; outside of all, one that compiles nothing."""
    return _current.get() or CompileScope()


Shape: TypeAlias = int | tuple[int, int] | None
"""What an artifact is for: one number of tokens, a range (first, last), or any number."""

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
    """Keeps the text of a forward's plan with its artifacts."""

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
        """Return one call of an eager op between captured pieces; its outputs stay in place."""


class ArtifactExchange(Protocol):
    """Gives each piece's artifact to all that want it. Keys name what is computed, and for what."""

    def claim(self, key: str) -> bytes | None:
        """Return what another rank compiled, waiting for it; None if this one is to compile.

        A caller that gets None publishes in the end, whatever happens.
        """

    def publish(self, key: str, data: bytes | None) -> None:
        """Hand out what was compiled; None if there is nothing to hand out."""
