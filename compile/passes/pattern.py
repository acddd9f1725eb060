"""Patterns of operations, written down and not traced.

A scalar in a pattern is a wildcard. A pattern that is traced holds the scalars of its trace, and
would be needed once for each epsilon.

    Op("mul", (Bind("weight"), Op("add", (Bind("x"), Scalar("eps")))))

matches `weight * (x + 1e-6)`, operands in either order, in Dynamo's spelling and in ATen's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from compile.passes.spelling import operation

_COMMUTES = ("add", "mul")


@dataclass(frozen=True)
class Bind:
    """Any node; the same one wherever the name occurs."""

    name: str


@dataclass(frozen=True)
class Scalar:
    """Any Python number; the same one wherever the name occurs."""

    name: str


@dataclass(frozen=True)
class Op:
    """A node that computes `kind` of such operands. With a name it is bound like any other."""

    kind: str
    args: tuple[Pattern, ...]
    name: str = ""


@dataclass(frozen=True)
class Cast:
    """A node, behind a conversion of its dtype or without one; the name binds what is outside."""

    inner: Pattern
    name: str = ""


Pattern = Bind | Scalar | Op | Cast
Match = dict[str, Any]
"""What each name stands for: nodes and numbers. The empty name holds the matched nodes."""


def find(pattern: Pattern, node: Node) -> Iterator[Match]:
    """Yield every way in which `pattern` ends in `node`."""
    yield from _match(pattern, node, {"": ()})


def matched_nodes(match: Match) -> tuple[Node, ...]:
    """Return the nodes that a match's operations and conversions are, results first."""
    nodes: tuple[Node, ...] = match[""]
    return tuple(dict.fromkeys(nodes))


def _match(pattern: Pattern, found: Any, match: Match) -> Iterator[Match]:
    if isinstance(pattern, Op):
        yield from _match_op(pattern, found, match)
    elif isinstance(pattern, Cast):
        yield from _match_cast(pattern, found, match)
    elif isinstance(found, Node if isinstance(pattern, Bind) else (int, float)):
        yield from _bound(pattern.name, found, match)


def _match_op(pattern: Op, found: Any, match: Match) -> Iterator[Match]:
    kind, args = operation(found)
    if kind != pattern.kind or len(args) != len(pattern.args):
        return
    for inside in _bound(pattern.name, found, match | {"": (*match[""], found)}):
        yield from _match_all(pattern.args, args, inside)
        if kind in _COMMUTES:
            yield from _match_all(pattern.args, args[::-1], inside)


def _match_cast(pattern: Cast, found: Any, match: Match) -> Iterator[Match]:
    for inside in _bound(pattern.name, found, match):
        yield from _match(pattern.inner, found, inside)
        kind, args = operation(found)
        if kind == "cast":
            yield from _match(pattern.inner, args[0], inside | {"": (*inside[""], found)})


def _match_all(
    patterns: tuple[Pattern, ...], found: tuple[Any, ...], match: Match
) -> Iterator[Match]:
    if not patterns:
        yield match
        return
    for inside in _match(patterns[0], found[0], match):
        yield from _match_all(patterns[1:], found[1:], inside)


def _bound(name: str, found: Any, match: Match) -> Iterator[Match]:
    if not name:
        yield match
    elif match.get(name, found) is found or match.get(name) == found:
        yield match | {name: found}
