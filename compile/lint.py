"""Find code that would be traced again for other sizes, before anything is traced.

The one thing to know: this reads source and sees only the function it is given, so it finds what
is written there and not what is called. Counting graphs (`compile.counters`) finds the rest.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RecompileHazard:
    """A place whose trace depends on an integer's value."""

    file: str
    line: int
    pattern: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: wanted {self.remedy}, found {self.pattern}"


def recompile_hazards(function: Callable[..., Any]) -> list[RecompileHazard]:
    """Return what in a function's source makes one graph for each value, in its lines' order.

    Three patterns: `bit_length`, `min` or `max` of one list, and a branch or loop on a size. A
    fourth, an op that wants plain integers, shows in its schema: `plain_int_arguments`. A function
    without a source file has nothing that could be read.
    """
    try:
        lines, first = inspect.getsourcelines(function)
    except OSError:
        return []
    tree = ast.parse(textwrap.dedent("".join(lines)))
    file = inspect.getsourcefile(function) or "<string>"
    found = [
        RecompileHazard(file, first + node.lineno - 1, pattern, remedy)
        for node in ast.walk(tree)
        if isinstance(node, (ast.expr, ast.stmt))
        for pattern, remedy in _hazards_of(node)
    ]
    return sorted(found, key=lambda hazard: hazard.line)


def plain_int_arguments(op: torch._ops.OpOverload) -> list[str]:
    """Return the names of an op's arguments that must be constants of a graph.

    Each value of an `int` makes a graph of its own; a `SymInt` serves all.
    """
    # The types of the schema's arguments say int for both; its text tells them apart.
    return re.findall(r"[(\s]int\S* (\w+)", str(op._schema))


def _hazards_of(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Call):
        yield from _call_hazards(node)
    if isinstance(node, (ast.If, ast.IfExp, ast.While)) and _asks_for_a_size(node.test):
        kind = "loop" if isinstance(node, ast.While) else "branch"
        yield f"a {kind} on a size", "torch.where, or the decision made outside of the forward"


def _call_hazards(call: ast.Call) -> Iterator[tuple[str, str]]:
    match call.func:
        case ast.Attribute(attr="bit_length"):
            yield "bit_length()", "next_pow2 of compile.shapes"
        case ast.Name(id="max" | "min" as name) if len(call.args) == 1:
            better = "largest" if name == "max" else "smallest"
            yield (
                f"{name}() of a list",
                f"{better} of compile.shapes, or a value given to the forward",
            )


def _asks_for_a_size(test: ast.expr) -> bool:
    """Tell whether a condition compares a tensor's size."""
    comparisons = (part for part in ast.walk(test) if isinstance(part, ast.Compare))
    return any(_is_size(part) for comparison in comparisons for part in ast.walk(comparison))


def _is_size(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="shape"):
            return True
        case ast.Call(func=ast.Attribute(attr="size" | "numel" | "stride")):
            return True
    return False
