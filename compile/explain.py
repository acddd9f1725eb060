"""`python -m compile.explain MODEL`: how a model is compiled, or what a start has left of that.

    python -m compile.explain MODEL                 trace a checkpoint: break, guards, split, layers
    python -m compile.explain DIR                   a cache, or one directory of it, and its misses
    python -m compile.explain DIR --layer split     one layer in full: dynamo, split, pieces, stitch
    python -m compile.explain                       the user's cache, else the bundled model

Of a cache it reads files and runs none. A model is started with a cache of its own and pieces that
run as they were traced; to see what Inductor makes of them: --compilation '{"use_inductor": true}'.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compile.cache.artifacts import OUTPUT_CODE, ArtifactError, ArtifactStore, unpack
from compile.cache.index import (
    ARTIFACTS,
    FACTORS,
    INDEX,
    Index,
    nearest_factors,
    read_factors,
    shape_text,
)
from compile.cache.key import TRACED_FILES, describe, differing
from compile.cache.tuning import HEADER, TUNING
from compile.environment import root_directory
from compile.pieces.diagnose import GraphBreakError
from compile.report import COMPUTATION_GRAPH, DYNAMO_GRAPH, REPORT, TRANSFORMED_CODE, CompileReport

LAYERS = {
    "dynamo": ("what Dynamo traced", DYNAMO_GRAPH),
    "split": ("split at the splitting ops", COMPUTATION_GRAPH),
    "pieces": ("what the compiler generated for each piece", None),
    "stitch": ("the function that runs the pieces", TRANSFORMED_CODE),
}
"""From the forward to machine code: title, and the file; pieces lie in their artifacts."""

LOADER = "serve.llm:LLM"
"""What starts a model. It belongs to a higher package, so only its name is known here."""
TRACED = {
    "level": 3,
    "use_inductor": False,
    "cudagraph_mode": "PIECEWISE",
    "capture_num_tokens": [8],
}
"""How a model is compiled to be looked at. Graphs are on, and strict about what they can hold."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what a directory holds; return 1 if it holds nothing compiled."""
    parser = argparse.ArgumentParser(prog="python -m compile.explain", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("directory", nargs="?", type=Path, help="a checkpoint, or a cache")
    parser.add_argument("--layer", choices=LAYERS, help="print this one in full")
    parser.add_argument(
        "--compilation", type=json.loads, default={}, help="fields for a model's compilation, JSON"
    )
    parser.add_argument(
        "--loader", default=LOADER, help="MODULE:NAME of what starts a model (%(default)s)"
    )
    given = parser.parse_args(arguments)
    cache = (given.directory or root_directory()).absolute()
    is_model = (cache / "config.json").exists() or not (given.directory or cache.exists())
    if not is_model:
        return _print(cache, given.layer)
    traced = Path(tempfile.mkdtemp(prefix="lockstep-explain-"))
    error = _trace(given.directory, given.loader, given.compilation, traced)
    if error is None:
        return _print(traced, given.layer)
    if any(traced.rglob(REPORT)):
        _print(traced, given.layer)
    print(f"{type(error).__name__}: {error}")
    return 1


def _trace(
    model: Path | None, loader: str, compilation: Mapping[str, Any], cache_dir: Path
) -> Exception | None:
    """Start a model so that its report lies in `cache_dir`; return why it cannot be started."""
    module, _, name = loader.partition(":")
    load = getattr(importlib.import_module(module), name)
    try:
        load(model, compilation_config={**TRACED, **compilation, "cache_dir": str(cache_dir)})
    except (GraphBreakError, ValueError) as error:
        return error
    return None


def _print(directory: Path, layer: str | None) -> int:
    oldest_first = sorted(
        directory.rglob(FACTORS), key=lambda p: (p.stat().st_mtime, p.parent.name)
    )
    found = [path.parent for path in oldest_first]
    found = found or [path for path in directory.parents if (path / FACTORS).exists()][:1]
    if not found:
        print(f"directory: wanted one with {FACTORS} in or above it, found none: {directory}")
        return 1
    for shared in found:
        print("\n".join(_explain(shared, directory, layer)))
    return 0


def _explain(shared: Path, within: Path, layer: str | None) -> Iterator[str]:
    # A forward that broke has a report and nothing else.
    left = [path for name in (INDEX, REPORT) for path in shared.glob(f"rank_*/*/{name}")]
    forwards = sorted({path.parent for path in left})
    forwards = [path for path in forwards if path.is_relative_to(within) or within == path]
    if layer is not None:
        for forward in forwards:
            yield from _layer(shared, forward, layer)
        return
    yield f"{shared.name}"
    yield from (f"  {line}" for line in _key(shared))
    for forward in forwards:
        yield f"  {forward.relative_to(shared)}"
        yield from (f"    {line}" for line in _forward(shared, forward))


def _key(shared: Path) -> Iterator[str]:
    factors = read_factors(shared)
    if factors is None:
        yield f"key: {FACTORS} is not what the directory was named after"
        return
    for name, value in factors.items():
        if name != TRACED_FILES:
            yield f"{name} = {_short(value)}"
    yield f"{TRACED_FILES} = {len(factors.get(TRACED_FILES, '').splitlines())}"
    age = (shared / FACTORS).stat().st_mtime
    nearest = nearest_factors(shared.parent, factors, before=age)
    if nearest is None:
        yield "missed because nothing was compiled before"
        return
    older, old = nearest
    for name, pair in differing(old, factors).items():
        yield f"missed {older} because of {describe(name, *pair)}"


def _short(value: str) -> str:
    line = " ".join(value.split())
    return line if len(line) <= 100 else f"{line[:97]}..."


def _forward(shared: Path, forward: Path) -> Iterator[str]:
    try:
        yield from _from_report(CompileReport.from_json((forward / REPORT).read_text()))
    except FileNotFoundError:
        yield "report: none was left"
    except (OSError, ValueError) as error:
        yield str(error)
    entries = Index.read(forward / INDEX).places()
    for (shape, index, compiler), entry in entries:
        name = Path(entry["artifact"]).name
        state = _state(shared, name)
        yield f"graph {index}, shape {shape_text(shape)}: {compiler}, key {entry['key']}, {state}"
    for name, (title, file) in LAYERS.items():
        yield f"layer {name}: {title}: {_where(forward, file, len(entries))}"


def _from_report(report: CompileReport) -> Iterator[str]:
    parts = {
        "miss": report.misses,
        "graph break": report.graph_breaks,
        "guard kept": report.guards_kept,
        "guard dropped": report.guards_dropped,
    }
    for what, lines in parts.items():
        yield from (f"{what}: {line}" for line in lines) if lines else (f"{what}: none",)
    for piece in report.pieces:
        kind = "runs eagerly" if piece.is_splitting else f"compiled, computes {piece.key[:12]}"
        yield f"split: {piece.name}: {piece.num_nodes} nodes, {kind}"
    yield f"traced files: {', '.join(report.traced_files) or 'none'}"
    for name, took in report.timings_s.items():
        yield f"took: {name} {took:.2f} s"


def _state(shared: Path, name: str) -> str:
    try:
        data = ArtifactStore(shared / ARTIFACTS).get(name)
        tuning = unpack(data).get(TUNING, b"").decode().splitlines()
    except ArtifactError as error:
        return f"unusable: {error}"
    num_tuned = sum(line.startswith(HEADER) for line in tuning)
    return f"{len(data)} bytes" + (f", autotuned ops: {num_tuned}" if num_tuned else "")


def _where(forward: Path, file: str | None, num_artifacts: int) -> str:
    if file is None:
        return f"{num_artifacts} artifacts"
    path = forward / file
    return str(path) if path.exists() else "not kept"


def _layer(shared: Path, forward: Path, layer: str) -> Iterator[str]:
    title, file = LAYERS[layer]
    yield f"# {forward.relative_to(shared)}: {title}"
    if file is not None:
        path = forward / file
        yield path.read_text() if path.exists() else "# not kept"
        return
    seen: set[str] = set()
    for (shape, index, _), entry in Index.read(forward / INDEX).places():
        name = Path(entry["artifact"]).name
        yield f"# graph {index}, shape {shape_text(shape)}, key {entry['key']}"
        yield "# the same as above" if name in seen else _code(shared, name)
        seen.add(name)


def _code(shared: Path, name: str) -> str:
    try:
        members = unpack(ArtifactStore(shared / ARTIFACTS).get(name))
    except ArtifactError as error:
        return f"# unusable: {error}"
    tuning = members.get(TUNING, b"").decode().splitlines(keepends=True)
    code = members.get(OUTPUT_CODE, b"# no code\n").decode(errors="replace")
    return "".join([*(f"# {line}" for line in tuning), code])


if __name__ == "__main__":
    sys.exit(main())
