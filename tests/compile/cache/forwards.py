"""A toy forward of three pieces, started as a rank starts it: from its plan, else compiled.

    python forwards.py '{"cache_dir": ..., "compilers": [...]}'

The last line of the output is JSON: what the forward computes, and for each compiler what it
returned and what it cost.
The first and the last piece compute the same.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from compile.cache.compilers import CompilerInterface
from compile.cache.index import CompileCache
from compile.cache.manager import CacheMissError, CompilerManager
from compile.config import CompilationConfig
from compile.counters import counter
from compile.scope import CompileScope

INPUT = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def _double(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (torch.sin(x) * 2 + x,)


def _shift(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (torch.relu(x) - 0.5,)


PIECES = (_double, _shift, _double)
"""What each computes; a trace of it is the piece's graph."""


@dataclass
class Started:
    """One start, as plain data."""

    outputs: list[list[float]]
    was_traced: bool
    counters: dict[str, int]
    misses: list[str] = field(default_factory=list)
    took_s: float = 0.0


def eager() -> list[list[float]]:
    """Return what the forward computes without any compiling."""
    return run([lambda x, piece=piece: piece(x) for piece in PIECES])


def run(runnables: Sequence[Any]) -> list[list[float]]:
    """Run the pieces one after another."""
    x = INPUT
    for runnable in runnables:
        [x] = runnable(x)
    values: list[list[float]] = x.tolist()
    return values


def graphs() -> list[fx.GraphModule]:
    """Trace the pieces anew."""
    return [_untyped(fx.symbolic_trace(piece)) for piece in PIECES]


def _untyped(graph: fx.GraphModule) -> fx.GraphModule:
    """Drop annotations, which are text here; Dynamo's graphs have none of that kind."""
    for node in graph.graph.nodes:
        node.type = None
    graph.recompile()
    return graph


def graph_key(graph: fx.GraphModule) -> str:
    """Name a piece by its code."""
    return hashlib.sha256(graph.code.encode()).hexdigest()


def scope(cache_dir: Path | str, tp_rank: int = 0, dp_rank: int = 0, **fields: Any) -> CompileScope:
    """Return the scope of one rank; pieces run as traced unless a field says otherwise."""
    fields = {"compiler": "eager", **fields}
    config = CompilationConfig(level=3, cache_dir=str(cache_dir), **fields)
    return CompileScope(config, tp_rank, dp_rank, {"model": "toy"})


def start(
    scope: CompileScope,
    *,
    prefix: str = "backbone",
    traced_files: Sequence[str] = (__file__,),
    compiler: CompilerInterface | None = None,
    shapes: Sequence[Any] = (None,),
) -> Started:
    """Start a forward: load what its plan names, or trace and compile it."""
    before = asdict(counter)
    manager = _warm(scope, prefix, compiler, shapes)
    was_traced = manager is None
    if manager is None:
        manager = _cold(scope, prefix, traced_files, compiler, shapes)
    keys = [graph_key(graph) for graph in graphs()]
    outputs = run(_loaded(manager, keys, shapes[:1]))  # a manager keeps what it compiled
    spent = {name: value - before[name] for name, value in asdict(counter).items()}
    return Started(outputs, was_traced, {k: v for k, v in spent.items() if v}, manager.misses)


def _warm(scope: CompileScope, prefix: str, compiler: Any, shapes: Sequence[Any]) -> Any:
    cache = CompileCache.open(scope, prefix)
    plan = cache.load_plan() if cache is not None else None
    if plan is None:
        return None
    manager = CompilerManager(scope, cache, compiler=compiler)
    try:
        _loaded(manager, json.loads(plan), shapes)
    except CacheMissError:
        return None
    return manager


def _loaded(manager: CompilerManager, keys: Sequence[str], shapes: Sequence[Any]) -> list[Any]:
    return [
        manager.load(key, index=index, shape=shape, num_graphs=len(keys))
        for index, key in enumerate(keys)
        for shape in shapes
    ]


def _cold(
    scope: CompileScope, prefix: str, files: Sequence[str], compiler: Any, shapes: Sequence[Any]
) -> Any:
    cache = CompileCache.open(scope, prefix, files)
    manager = CompilerManager(scope, cache, compiler=compiler)
    traced = graphs()
    for (index, graph), shape in itertools.product(enumerate(traced), shapes):
        manager.compile(
            graph, [INPUT], index=index, shape=shape, num_graphs=len(traced), key=graph_key(graph)
        )
    if cache is not None:
        cache.save_plan(json.dumps([graph_key(graph) for graph in traced]))
    return manager


def main() -> None:
    """Start once with each compiler, with the fields of the configuration given as JSON."""
    logging.basicConfig(stream=sys.stderr)
    logging.getLogger("compile").setLevel(logging.DEBUG)
    fields = json.loads(sys.argv[1])
    shapes, results = fields.pop("shapes", [None]), {}
    for compiler in fields.pop("compilers"):
        began = time.perf_counter()
        started = start(scope(**fields, compiler=compiler), shapes=shapes)
        started.took_s = time.perf_counter() - began
        results[compiler] = asdict(started)
    print(json.dumps({"eager": eager(), "results": results}))


if __name__ == "__main__":
    main()
