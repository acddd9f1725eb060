"""Counters of everything that must not happen unnoticed. "compiles nothing" includes native builds:
an artifact may hold source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass


@dataclass
class CompilationCounter:
    """What this process has traced, compiled, built, captured and replayed."""

    num_graphs_seen: int = 0
    """Graphs that Dynamo handed to the backend."""
    num_piecewise_graphs_seen: int = 0
    """Pieces that splitting made, splitting ops included."""
    num_piecewise_capturable_graphs_seen: int = 0
    """Pieces that are compiled and can be captured."""
    num_backend_compilations: int = 0
    """Calls of any compiler: unique pieces and sizes."""
    num_inductor_compiles: int = 0
    num_eager_compiles: int = 0
    num_cpp_builds: int = 0
    """Runs of a C++ compiler."""
    num_triton_builds: int = 0
    num_autotuned: int = 0
    """Ops for which Inductor timed candidates."""
    num_cache_entries_updated: int = 0
    num_compiled_artifacts_saved: int = 0
    num_compiled_artifacts_loaded: int = 0
    num_cudagraph_captured: int = 0
    num_cudagraph_replayed: int = 0
    num_late_compilations: int = 0
    """Compilations after the process was sealed."""
    num_late_captures: int = 0
    num_dropped_guards: int = 0
    num_pass_matches: int = 0
    """What graph passes rewrote, in graphs that were compiled and not loaded."""

    @contextmanager
    def expect(self, **deltas: int) -> Iterator[None]:
        """Assert on leaving that each named counter grew by exactly its delta."""
        before = asdict(self)
        yield
        for name, delta in deltas.items():
            found = getattr(self, name) - before[name]
            assert found == delta, f"{name}: wanted {delta}, found {found}"


counter = CompilationCounter()
"""The one of this process."""
cache_misses: Counter[str] = Counter()
"""Why this process compiled although there is a cache, by reason: `COLD`, `UNREADABLE`, or the part
of the key that changed."""
COLD, UNREADABLE = "cold", "unreadable"
