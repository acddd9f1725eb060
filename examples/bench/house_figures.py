"""Size and structure of the code, and the calls behind one answer, one step and one token.

    python examples/bench/house_figures.py [--root DIR] [--json FILE] [--no-traces]

Counted by reading the sources:

    code         lines without blank ones, comments and docstrings (also those below fields)
    functions    how many, and the lines of one: median, 95th percentile, longest
    protocols    Protocol classes, and those that one class implements (callbacks left out)
    class names  those that several classes of the packages have, leading underscores aside
    in tests     uses of `_names` of anything but self and cls, and attributes that are replaced

Counted by running a streamed chat answer of four tokens (`house_stations.py`), with the engine in
the process of the HTTP application: calls of the packages' functions, different functions, their
files, and hops, which are calls in another file than the call before. Libraries are not counted,
and neither Ray nor ZeroMQ take part. A generator or coroutine counts each time that it is resumed.
Counts of whole answers vary by some percent, because several threads take part.

`--root` counts another checkout by this script (`git worktree add --detach DIR COMMIT`), if
`house_stations.py` finds its classes there.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("serve", "cluster", "model", "compile")
MODES = ("eager", "piecewise", "full")
ROOT = Path(__file__).resolve().parents[2]
TRACER = Path(__file__).resolve().parent / "house_stations.py"
TIMEOUT_S = 600
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
PATCHES = re.compile(r"\bmonkeypatch\.setattr\(|\bmock\.patch\b")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Row = dict[str, int | float]


class Source:
    """One Python file, parsed."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def num_code_lines(self) -> int:
        """Lines that hold any token besides comments and docstrings."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        spans = (range(t.start[0], t.end[0] + 1) for t in tokens if t.type not in NO_CODE)
        return len({line for span in spans for line in span} - self._docstring_lines())

    def functions(self) -> Iterator[Function]:
        yield from (n for n in ast.walk(self.tree) if isinstance(n, Function))

    def classes(self) -> Iterator[ast.ClassDef]:
        yield from (n for n in ast.walk(self.tree) if isinstance(n, ast.ClassDef))

    def _docstring_lines(self) -> set[int]:
        """Lines of strings that stand alone, which are docstrings wherever they are."""
        found: set[int] = set()
        for node in ast.walk(self.tree):
            match node:
                case ast.Expr(ast.Constant(str())):
                    found |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return found


def sources(root: Path, folder: str) -> list[Source]:
    return [Source(path) for path in sorted((root / folder).rglob("*.py"))]


def size_of(files: list[Source]) -> Row:
    """Return the counts of some files."""
    lengths = sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for file in files
        for node in file.functions()
    )
    return {
        "files": len(files),
        "lines": sum(file.num_lines for file in files),
        "code": sum(file.num_code_lines for file in files),
        "functions": len(lengths),
        "median": statistics.median_low(lengths),
        "p95": lengths[int(0.95 * len(lengths))],
        "longest": lengths[-1],
        "classes": sum(1 for file in files for _ in file.classes()),
    }


# --- classes --------------------------------------------------------------------------------


def names_of_several(files: list[Source]) -> dict[str, int]:
    """Return the names that more than one class has, and how many have each."""
    counts = Counter(node.name.lstrip("_") for file in files for node in file.classes())
    return {name: count for name, count in sorted(counts.items()) if count > 1}


def protocols(files: list[Source]) -> dict[str, list[str]]:
    """Return each Protocol with the classes that implement it; none for a callback.

    A class counts if it inherits from the Protocol or has all of its members, inherited ones too.
    Two classes of one name are taken for one.
    """
    classes = {node.name: node for file in files for node in file.classes()}
    members = {name: _members(node) for name, node in classes.items()}
    found = {}
    for name, node in classes.items():
        if "Protocol" not in _bases(node):
            continue
        wanted = members[name]
        others = (other for other in classes if "Protocol" not in _bases(classes[other]))
        found[name] = [
            other
            for other in others
            if wanted - {"__call__"}
            and (
                wanted <= _all_members(other, classes, members)
                or name in _ancestors(other, classes)
            )
        ]
    return found


def _bases(node: ast.ClassDef) -> list[str]:
    found = []
    for base in node.bases:
        bare = base.value if isinstance(base, ast.Subscript) else base
        found.append(bare.id if isinstance(bare, ast.Name) else getattr(bare, "attr", ""))
    return found


def _members(node: ast.ClassDef) -> set[str]:
    """Return the methods and attributes that a class declares, those set on self included."""
    found: set[str] = set()
    for part in ast.walk(node):
        match part:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
    return {name for name in found if not name.startswith("_") or name == "__call__"}


def _ancestors(name: str, classes: dict[str, ast.ClassDef]) -> set[str]:
    found: set[str] = set()
    left = [name]
    while left:
        node = classes.get(left.pop())
        bases = set(_bases(node)) - found if node is not None else set()
        found |= bases
        left += bases
    return found


def _all_members(
    name: str, classes: dict[str, ast.ClassDef], members: dict[str, set[str]]
) -> set[str]:
    ancestors = _ancestors(name, classes) & classes.keys()
    return members[name].union(*(members[each] for each in ancestors))


# --- tests ----------------------------------------------------------------------------------


def num_private_accesses(files: Iterable[Source]) -> int:
    """Return how often an attribute `_name` is used of anything but self and cls."""
    return sum(
        1
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    )


def num_patches(files: Iterable[Source]) -> int:
    """Return how often a test puts something in another's place."""
    return sum(len(PATCHES.findall(file.text)) for file in files)


# --- the whole ------------------------------------------------------------------------------


def figures(root: Path) -> dict[str, Any]:
    """Return all counts of a checkout that reading it gives."""
    packages = {name: sources(root, name) for name in PACKAGES}
    product = [file for files in packages.values() for file in files]
    tests = sources(root, "tests")
    sizes = {name: size_of(files) for name, files in packages.items()}
    found = protocols(product)
    return {
        "sizes": {
            **sizes,
            "product": size_of(product),
            "tests": size_of(tests),
            "examples": size_of(sources(root, "examples")),
        },
        "protocols": len(found),
        "protocols of one class": sorted(name for name, by in found.items() if len(by) == 1),
        "class names of several": names_of_several(product),
        "private accesses in tests": num_private_accesses(tests),
        "patches in tests": num_patches(tests),
    }


def stations(root: Path) -> dict[str, dict[str, Row]]:
    """Return the traced counts by mode and part of an answer, each mode in a fresh process."""
    found = {}
    for mode in MODES:
        environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(TRACER), "--root", str(root), "--mode", mode]
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        if done.returncode:
            raise SystemExit(f"{TRACER.name} --mode {mode}: {done.stderr}")
        found[mode] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(first: str, rows: dict[str, Row]) -> str:
    """Return rows of equal columns as text."""
    columns = list(next(iter(rows.values())))
    width = max(len(name) for name in (first, *rows)) + 2
    lines = [f"{first:{width}}" + "".join(f"{column:>11}" for column in columns)]
    for name, row in rows.items():
        lines.append(f"{name:{width}}" + "".join(f"{row[column]:>11,}" for column in columns))
    return "\n".join(lines)


def report(found: dict[str, Any]) -> Iterator[str]:
    """Yield the parts of the text."""
    yield table("lines", found["sizes"])
    single, several = found["protocols of one class"], found["class names of several"]
    yield "\n".join(
        [
            f"protocols: {found['protocols']}, of one class: {len(single)} ({', '.join(single)})",
            f"class names of several classes: {len(several)} ({', '.join(several)})",
            f"in tests: {found['private accesses in tests']} private accesses, "
            f"{found['patches in tests']} patches",
        ]
    )
    if "stations" in found:
        traced = found["stations"]
        rows = {f"{part}, {mode}": row for mode in traced for part, row in traced[mode].items()}
        yield table("stations", rows)


def main() -> None:
    """Count a checkout, and print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (this one)")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--no-traces", action="store_true", help="only read the sources")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    found = figures(root)
    if not arguments.no_traces:
        found["stations"] = stations(root)
    print("\n\n".join(report(found)))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
