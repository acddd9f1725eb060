"""How the decorated modules that are built inside a scope compile themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from compile.config import CompilationConfig
from compile.graphs.pools import GraphPools

Shape: TypeAlias = int | tuple[int, int] | None
"""What an artifact is for: one number of tokens, a range (first, last), or any number."""

Runnable: TypeAlias = Callable[..., Any]
"""A compiled piece: takes the piece's inputs in order, returns a tuple or a list of its outputs."""


class ArtifactExchange(Protocol):
    """Gives each piece's artifact to all that want it. Keys name what is computed, and for what."""

    def claim(self, key: str) -> bytes | None:
        """Return what another rank compiled, waiting for it; None: compile, and publish in the end,
        after an error too."""

    def publish(self, key: str, data: bytes | None) -> None:
        """Hand out what was compiled; None if there is nothing to hand out."""


class ModelTagError(ValueError):
    """Two compiled modules of one scope would share a name."""


@dataclass(frozen=True)
class CompileScope:
    """How modules built inside are compiled, and for which rank. Invariant: `config` is resolved.
    `key_factors` holds what decides generated code and only the caller knows, never ports, ranks or
    paths."""

    config: CompilationConfig = field(default_factory=CompilationConfig)
    tp_rank: int = 0
    dp_rank: int = 0
    key_factors: Mapping[str, str] = field(default_factory=dict)
    pools: GraphPools | None = None
    """Where graphs of pieces lie, if some step replays pieces."""
    progress: Callable[[int, int], None] | None = None
    """Called with (pieces compiled or loaded, pieces in all) after each."""
    max_num_tokens: int | None = None
    """Most tokens of a step; None: the first step is the largest."""
    exchange: ArtifactExchange | None = None
    """Where ranks on other disks publish what they compile."""
    _claimed_tags: set[str] = field(default_factory=set, compare=False)

    def claim(self, tag: str) -> None:
        """Take the name of a compiled module before its first call: at most one runs under it."""
        if tag in self._claimed_tags:
            wanted = "one compiled module for each tag; enter model_tag(...) around the other"
            raise ModelTagError(f"model_tag: wanted {wanted}, found {tag!r} twice")
        self._claimed_tags.add(tag)


_current: ContextVar[CompileScope | None] = ContextVar("compile_scope", default=None)
_tag: ContextVar[str] = ContextVar("model_tag", default="backbone")


@contextmanager
def compile_scope(scope: CompileScope) -> Iterator[CompileScope]:
    """Make `scope` the current one, also for nested builds, and restore the one before."""
    token = _current.set(scope)
    try:
        yield scope
    finally:
        _current.reset(token)


@contextmanager
def model_tag(tag: str) -> Iterator[None]:
    """Name the compiled module that is built inside, such as `draft`; otherwise `backbone`."""
    token = _tag.set(tag)
    try:
        yield
    finally:
        _tag.reset(token)


def current_model_tag() -> str:
    return _tag.get()


def current_scope() -> CompileScope:
    """Return the innermost scope; outside of all, one that compiles nothing."""
    return _current.get() or CompileScope()
