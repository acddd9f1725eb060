"""`CompilerManager`: loads a piece that was compiled before, else compiles and stores it.

For each piece and shape, in this order:

1. An equal piece of this process: the same runnable. Layers that compute the same share one.
2. An artifact of this rank or another one under the same key: loaded.
3. The compiler, while a lock keeps other processes from doing the same work; then 2. again for
   them. Ranks that see other files have the same among them by an exchange.

A failed load is logged with its reason; it is an error only where there is no graph to compile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import fx

from compile.cache.artifacts import ArtifactError
from compile.cache.compilers import CompilerInterface, EagerAdaptor
from compile.cache.index import CompileCache, entry_key, shape_text
from compile.cache.inductor import make_compiler
from compile.counters import UNREADABLE, cache_misses, counter
from compile.graphs.capture import note_late_compile
from compile.passes.manager import PassManager
from compile.scope import CompileScope, Runnable, Shape

STATIC_OPTIONS = {"max_autotune": True, "coordinate_descent_tuning": True}
"""For pieces of one size: tuning finds the best kernel for it. A range has no best one."""

UNCHECKED_OPTIONS = {"size_asserts": False, "scalar_asserts": False, "alignment_asserts": False}
"""Inductor checks each input of a piece at run time, which is a tenth of a small step. Inputs were
checked before: weights when they were bound, all others by the shapes of the trace."""

QUIET_OPTIONS = {"autotune_num_choices_displayed": 0}
"""Inductor prints what it autotunes; here it is logged and kept."""

logger = logging.getLogger(__name__)


class CacheMissError(LookupError):
    """A piece is to be loaded and cannot be. The message is one line."""


@dataclass(frozen=True)
class _Piece:
    """A piece for one shape. `key` names what it computes, and for which shape."""

    index: int
    shape: Shape
    num_graphs: int
    key: str

    def __str__(self) -> str:
        return f"graph {self.index} of {self.num_graphs} for shape {shape_text(self.shape)}"


class CompilerManager:
    """The compiler of one forward with its cache. Invariant: equal pieces are compiled once."""

    def __init__(
        self,
        scope: CompileScope,
        cache: CompileCache | None,
        *,
        compiler: CompilerInterface | None = None,
    ) -> None:
        """Take over a cache, or none; `compiler` in place of the configured one."""
        self._progress = scope.progress
        self.compiler = make_compiler(scope.config) if compiler is None else compiler
        self.misses: list[str] = list(cache.misses) if cache is not None else []
        """Why pieces were compiled although there is a cache."""
        self.cache = cache
        self._exchange = scope.exchange if scope.config.share_artifacts else None
        self.passes = PassManager.from_config(scope.config)
        """Rewrite each piece before, or inside of, its compiler."""
        self._options = dict(scope.config.inductor_compile_config)
        self._runnables: dict[str, Runnable] = {}
        self._has_warned = False
        self._unusable: set[str] = set()
        directory = "" if cache is None else str(cache.artifacts)
        self.compiler.initialize_cache(directory, disable_cache=cache is None)

    @classmethod
    def open(
        cls, scope: CompileScope, prefix: str, traced_files: Sequence[str] | None
    ) -> CompilerManager | None:
        """Return compilers and cache of the forward called `prefix`; before tracing `traced_files`
        is None, and the answer None unless an earlier start left what can be used."""
        cache = CompileCache.open(scope, prefix, traced_files)
        return None if traced_files is None and cache is None else cls(scope, cache)

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
        """Return what runs a piece for a shape: an equal one, a stored one or a new one. `index` is
        the place of the piece among `num_graphs`; `key` names what the graph computes on symbolic
        inputs, and by it `load` finds the piece for any shape."""
        piece = _Piece(index, shape, num_graphs, entry_key(key, shape))
        if piece.key in self._runnables:
            logger.debug("%s is one that this process has: key %s", piece, piece.key)
            if (name := self._find(piece)) is not None:
                self._record(piece, name)  # at its own place too
            return self._runnables[piece.key]
        found = self._loaded(piece)
        if found is None:
            with nullcontext() if self.cache is None else self.cache.compiling(piece.key):
                # The process that had the right before may have left what is needed.
                found = self._loaded(piece) or self._fetched(piece, graph, example_inputs)
        self._runnables[piece.key] = found
        if self._progress is not None:
            self._progress(index + 1, num_graphs)
        return found

    def load(self, key: str, *, index: int, shape: Shape, num_graphs: int) -> Runnable:
        """Return a stored piece by what its graph computes; CacheMissError: none can be used."""
        piece = _Piece(index, shape, num_graphs, entry_key(key, shape))
        if piece.key not in self._runnables:
            found = self._loaded(piece)
            if found is None:
                raise CacheMissError(f"{piece}: wanted an artifact of key {piece.key}, found none")
            self._runnables[piece.key] = found
        return self._runnables[piece.key]

    def _loaded(self, piece: _Piece) -> Runnable | None:
        """Return a stored piece; None, and the reason in the log, if there is none to use."""
        name = self._find(piece)
        if self.cache is None or name is None or name in self._unusable:
            return None
        started = time.perf_counter()
        try:
            found = self.compiler.load((piece.key, name))
        except (ArtifactError, OSError) as error:
            self._unusable.add(name)
            self.misses.append(f"{piece}: {error}")
            cache_misses[UNREADABLE] += 1
            logger.warning("%s is compiled again: %s", piece, error)
            return None
        counter.num_compiled_artifacts_loaded += 1
        logger.debug("loaded %s in %.2f s", piece, time.perf_counter() - started)
        self._record(piece, name, "load")
        return found

    def _find(self, piece: _Piece) -> str | None:
        if self.cache is None:
            return None
        return self.cache.find(piece.key, self.compiler.name)

    def _fetched(self, piece: _Piece, graph: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        """Return what a rank elsewhere has compiled; compile it here if none has."""
        cache, exchange = self.cache, self._exchange
        if cache is None or exchange is None:
            return self._compiled(piece, graph, inputs)
        key = f"{cache.hash}/{self.compiler.name}/{piece.key}"
        if (data := exchange.claim(key)) is not None:
            name = cache.store.offer(data)
            if name is not None:
                self._record(piece, name)
            if (found := self._loaded(piece)) is not None:
                return found
        name = None
        try:
            found = self._compiled(piece, graph, inputs)
            name = self._find(piece)
            return found
        finally:
            # Ranks that wait for it must not wait in vain.
            exchange.publish(key, _bytes_of(cache, name))

    def _compiled(self, piece: _Piece, graph: fx.GraphModule, inputs: Sequence[Any]) -> Runnable:
        note_late_compile(str(piece))
        started = time.perf_counter()
        counter.num_backend_compilations += 1
        key = None if self.cache is None else piece.key
        static = STATIC_OPTIONS if isinstance(piece.shape, int) else {}
        options: dict[str, Any] = {**UNCHECKED_OPTIONS, **QUIET_OPTIONS, **static}
        options |= self._options
        if self.compiler.name == EagerAdaptor.name:
            graph = self.passes.apply(graph, inputs)
        else:
            options |= self.passes.inductor_config()
        found, handle = self.compiler.compile(graph, inputs, options, key)
        logger.info("compiled %s in %.2f s", piece, time.perf_counter() - started)
        if handle is not None and self.cache is not None:
            counter.num_compiled_artifacts_saved += 1
            self._record(piece, handle[1], "store")
        elif self.cache is not None and not self._has_warned:
            self._has_warned = True
            logger.warning("%s cannot be saved: every start compiles it again", piece)
        return found

    def _record(self, piece: _Piece, name: str, verb: str = "") -> None:
        """Enter a piece's artifact into the index; the log has what was done with it."""
        assert self.cache is not None
        path, compiler = self.cache.artifacts / name, self.compiler.name
        if verb:
            logger.debug("%s %s from %s: key %s, path %s", verb, piece, compiler, piece.key, path)
        self.cache.record(piece.shape, piece.index, compiler, piece.key, name)
        if unpacked := self.cache.unpack(name, piece.index, piece.shape):
            logger.debug("unpack %s: key %s, path %s", piece, piece.key, unpacked)


def _bytes_of(cache: CompileCache, name: str | None) -> bytes | None:
    try:
        return None if name is None else cache.store.get(name)
    except ArtifactError:
        return None
