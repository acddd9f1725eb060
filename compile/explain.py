"""`python -m compile.explain [DIR]`: what is cached, why a start missed, and the four layers.

    python -m compile.explain                       the cache under the user's cache directory
    python -m compile.explain DIR                   another root, or one directory of it
    python -m compile.explain DIR --layer split     one layer in full: dynamo, split, pieces, stitch

It reads files that compiling left and runs none of them, so it also works beside a server, on
another machine, and on a cache that cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from compile.cache.artifacts import OUTPUT_CODE, ArtifactError, ArtifactStore, unpack
from compile.cache.index import (
    ARTIFACTS,
    FACTORS,
    INDEX,
    Index,
    nearest_factors,
    read_factors,
    root_directory,
    shape_text,
)
from compile.cache.key import TRACED_FILES, describe, differing
from compile.config import CompilationConfig
from compile.report import (
    COMPUTATION_GRAPH,
    DYNAMO_GRAPH,
    REPORT,
    TRANSFORMED_CODE,
    CompileReport,
    ReportError,
)

LAYERS = {
    "dynamo": ("what Dynamo traced", DYNAMO_GRAPH),
    "split": ("split at the splitting ops", COMPUTATION_GRAPH),
    "pieces": ("what the compiler generated for each piece", None),
    "stitch": ("the function that runs the pieces", TRANSFORMED_CODE),
}
"""From the forward to machine code: title, and the file; pieces lie in their artifacts."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what a directory holds; return 1 where it holds nothing compiled."""
    parser = argparse.ArgumentParser(prog="python -m compile.explain", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--layer", choices=LAYERS)
    given = parser.parse_args(arguments)
    directory = (given.directory or root_directory(CompilationConfig())).absolute()
    found = [path.parent for path in sorted(directory.rglob(FACTORS), key=_age)]
    found = found or [path for path in directory.parents if (path / FACTORS).exists()][:1]
    if not found:
        print(f"directory: wanted one with {FACTORS} in or above it, found none: {directory}")
        return 1
    for shared in found:
        print("\n".join(_explain(shared, directory, given.layer)))
    return 0


def _age(path: Path) -> tuple[float, str]:
    return path.stat().st_mtime, path.parent.name


def _explain(shared: Path, within: Path, layer: str | None) -> Iterator[str]:
    forwards = sorted(path.parent for path in shared.glob(f"rank_*/*/{INDEX}"))
    forwards = [path for path in forwards if path.is_relative_to(within) or within == path]
    if layer is not None:
        for forward in forwards:
            yield from _layer(shared, forward, layer)
        return
    yield f"{shared.name}"
    yield from _indented(_key(shared))
    for forward in forwards:
        yield f"  {forward.relative_to(shared)}"
        yield from _indented(_forward(shared, forward), 4)


def _indented(lines: Iterator[str], by: int = 2) -> Iterator[str]:
    for line in lines:
        yield " " * by + line


# --- the key ----------------------------------------------------------------------------------


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


# --- one forward ------------------------------------------------------------------------------


def _forward(shared: Path, forward: Path) -> Iterator[str]:
    report = _report(forward)
    if isinstance(report, str):
        yield report
    else:
        yield from _from_report(report)
    entries = Index.read(forward / INDEX).places()
    for (shape, index, compiler), entry in entries:
        name = Path(entry["artifact"]).name
        state = _state(shared, name)
        yield f"graph {index}, shape {shape_text(shape)}: {compiler}, key {entry['key']}, {state}"
    for name, (title, file) in LAYERS.items():
        yield f"layer {name}: {title}: {_where(forward, file, len(entries))}"


def _report(forward: Path) -> CompileReport | str:
    try:
        return CompileReport.from_json((forward / REPORT).read_text())
    except FileNotFoundError:
        return "report: none was left"
    except (OSError, UnicodeDecodeError, ReportError) as error:
        return str(error)


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
        return f"{len(ArtifactStore(shared / ARTIFACTS).get(name))} bytes"
    except ArtifactError as error:
        return f"unusable: {error}"


def _where(forward: Path, file: str | None, num_artifacts: int) -> str:
    if file is None:
        return f"{num_artifacts} artifacts"
    path = forward / file
    return str(path) if path.exists() else "not kept"


# --- one layer in full ------------------------------------------------------------------------


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
    return members.get(OUTPUT_CODE, b"# no code\n").decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
