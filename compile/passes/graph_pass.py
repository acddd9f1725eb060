"""What a graph pass is, and what it is written with: patterns of operations in one spelling.

Dynamo writes `a + b`, `torch.add(a, b)` or `a.add(b)` as the model did; ATen has one op for all
three. Patterns are not traced: a traced one holds its scalars, so each epsilon would need its own.

    Op("mul", (Bind("weight"), Op("add", (Bind("x"), Scalar("eps")))))

matches `weight * (x + 1e-6)`, operands in either order, in Dynamo's spelling and in ATen's.
"""

from __future__ import annotations

import hashlib
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
import torch.fx
from torch.fx import Node


class GraphPass(Protocol):
    """Rewrites a graph, Dynamo's or of ATen ops, in place. Invariant: values stay as they were."""

    @property
    def name(self) -> str:
        """What configurations call the pass."""

    def uuid(self) -> str:
        """Return a hash of all that decides what the pass does: its source and configuration."""

    def __call__(self, graph: torch.fx.Graph) -> int:
        """Rewrite every match and return how many there were."""


def source_hash(*modules: ModuleType, config: str = "") -> str:
    sources = (inspect.getsource(module) for module in modules)
    return hashlib.sha256("\0".join([config, *sources]).encode()).hexdigest()


_aten, _prims = torch.ops.aten, torch.ops.prims
_SPELLINGS: dict[str, tuple[Any, ...]] = {
    "add": (operator.add, torch.add, "add", _aten.add.Tensor, _aten.add.Scalar),
    "mul": (operator.mul, torch.mul, "mul", _aten.mul.Tensor, _aten.mul.Scalar),
    "square": (torch.square, "square", _aten.square.default),
    "pow": (operator.pow, torch.pow, "pow", _aten.pow.Tensor_Scalar),
    "mean": (torch.mean, "mean", _aten.mean.dim),
    "rsqrt": (torch.rsqrt, "rsqrt", _aten.rsqrt.default),
    "cast": ("float", "to", _prims.convert_element_type.default, _aten._to_copy.default),
}
_KINDS = {target: kind for kind, targets in _SPELLINGS.items() for target in targets}
AUTO_FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2
"""What a functional graph has in place of an op that writes into its arguments."""


class Operation(NamedTuple):
    """What a node computes, however a graph spells it. `kind` is "add", "mul", "square", "rsqrt",
    "cast" (to another dtype), "row_mean" (over the last dimension, which stays), the qualified name
    of any other op, or empty."""

    kind: str
    args: tuple[Any, ...]


_UNKNOWN = Operation("", ())


def operation(node: object) -> Operation:
    """Return what a node computes; options that change it make it unknown."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return _UNKNOWN
    kind = _KINDS.get(node.target, "")
    if kind == "cast":
        return _cast(node)
    if kind == "mean":
        return _row_mean(node)
    if node.target is operator.getitem:
        return _written(node)
    if node.kwargs:
        return _UNKNOWN
    if kind == "pow":
        return Operation("square", node.args[:1]) if node.args[1] == 2 else _UNKNOWN
    if kind == "mul" and node.args[0] is node.args[1]:
        return Operation("square", node.args[:1])
    return Operation(kind or _qualified_name(node.target), node.args)


@dataclass(frozen=True)
class Functionalized:
    """An op that writes into whole tensors, as a functional graph has it: wrapped in another, which
    returns the op's own results and then its `bases` as they are afterwards."""

    op: torch._ops.OpOverload
    bases: tuple[Node, ...]
    _given: dict[str, Any]
    _base_of: dict[str, int]

    @classmethod
    def of(cls, node: Node) -> Functionalized | None:
        """Read a wrapper; None: the node is none, or the op is given views or lists."""
        if node.target is not AUTO_FUNCTIONALIZED:
            return None
        op: Any = node.args[0]
        given = dict(node.kwargs)
        bases = tuple(given.pop("_all_bases"))  # type: ignore[arg-type]
        base_of: dict[str, int] = {}
        for argument in op._schema.arguments:
            index = given.pop(f"_{argument.name}_base_index", None)
            if isinstance(index, int):
                base_of[argument.name] = index
        names = {argument.name for argument in op._schema.arguments}
        # What is left describes views of the bases.
        return cls(op, bases, given, base_of) if given.keys() <= names else None

    @property
    def num_own(self) -> int:
        """How many of the wrapper's results are the op's own; None counts."""
        return max(1, len(self.op._schema.returns))

    def arguments(self, bases: Sequence[Node]) -> tuple[Any, ...]:
        """Return the op's arguments, with these in place of its bases."""
        return tuple(
            bases[self._base_of[each.name]]
            if each.name in self._base_of
            else self._given.get(each.name, each.default_value)
            for each in self.op._schema.arguments
        )


def _written(node: Node) -> Operation:
    """Return the op that has written a value, applied to what it was given to write into."""
    wrapper, index = node.args
    found = Functionalized.of(wrapper) if isinstance(wrapper, Node) else None
    if found is None or len(found.bases) != 1 or index != found.num_own:
        return _UNKNOWN
    return Operation(_qualified_name(found.op), found.arguments(found.bases))


def value(node: object) -> torch.Tensor | None:
    """Return the fake tensor that stands for a node's value; None if it is no tensor."""
    if not isinstance(node, Node):
        return None
    found = node.meta.get("val", node.meta.get("example_value"))
    return found if isinstance(found, torch.Tensor) else None


def writes(node: Node) -> bool:
    """Return whether a node may write into a tensor that it is given."""
    if node.op == "call_method":
        return str(node.target).endswith("_")
    if node.op != "call_function":
        return node.op == "call_module"
    if node.target in (operator.setitem, operator.iadd, operator.imul):
        return True
    schema = getattr(_overload(node.target), "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _cast(node: Node) -> Operation:
    options = [*node.args[1:], *node.kwargs.values()]
    is_dtype_alone = all(isinstance(option, torch.dtype) for option in options)
    return Operation("cast", node.args[:1]) if is_dtype_alone else _UNKNOWN


def _row_mean(node: Node) -> Operation:
    names = ("input", "dim", "keepdim")
    arguments: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    base = value(arguments.get("input"))
    dims = arguments.get("dim")
    dims = list(dims) if isinstance(dims, (list, tuple)) else [dims]
    is_row_mean = arguments.get("keepdim") is True and len(arguments) == len(names)
    if base is None or not is_row_mean or dims not in ([-1], [base.ndim - 1]):
        return _UNKNOWN
    return Operation("row_mean", (arguments["input"],))


def _overload(target: Any) -> Any:
    """Return an op's only overload: Dynamo's graphs name the op without one."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        names = target.overloads()
        return getattr(target, names[0]) if len(names) == 1 else None
    return target


def _qualified_name(target: Any) -> str:
    found = _overload(target)
    return str(found._schema.name) if isinstance(found, torch._ops.OpOverload) else ""


_COMMUTES = ("add", "mul")


@dataclass(frozen=True)
class Bind:
    """Any node; the same one wherever the name occurs."""

    name: str


@dataclass(frozen=True)
class Scalar:
    """Any Python number or string; the same one wherever the name occurs."""

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


@dataclass(frozen=True)
class Result:
    """One of several results of an op, by its index."""

    of: Op
    index: int
    name: str = ""


Pattern = Bind | Scalar | Op | Cast | Result
Match = dict[str, Any]
"""What each name stands for: nodes and numbers. The empty name holds the matched nodes."""


def find(pattern: Pattern, node: Node) -> Iterator[Match]:
    yield from _match(pattern, node, {"": ()})


def rewrite(
    graph: torch.fx.Graph,
    patterns: Sequence[Pattern],
    can_replace: Callable[[Match], bool],
    replace: Callable[[torch.fx.Graph, Match], None],
) -> int:
    """Replace at each node the first match of a pattern that may be replaced, take away the matched
    nodes that nothing reads any more, and return how many matches there were."""
    count = 0
    for node in list(graph.nodes):
        matches = (match for pattern in patterns for match in find(pattern, node))
        if (found := next(filter(can_replace, matches), None)) is None:
            continue
        replace(graph, found)
        for matched in matched_nodes(found):
            if not matched.users:
                graph.erase_node(matched)
        count += 1
    return count


def matched_nodes(match: Match) -> tuple[Node, ...]:
    """Return the nodes that a match's operations and conversions are, results first."""
    nodes: tuple[Node, ...] = match[""]
    return tuple(dict.fromkeys(nodes))


def _match(pattern: Pattern, found: Any, match: Match) -> Iterator[Match]:
    if isinstance(pattern, Op):
        yield from _match_op(pattern, found, match)
    elif isinstance(pattern, Cast):
        yield from _match_cast(pattern, found, match)
    elif isinstance(pattern, Result):
        yield from _match_result(pattern, found, match)
    elif isinstance(found, Node if isinstance(pattern, Bind) else (int, float, str)):
        yield from _bound(pattern.name, found, match)


def _match_op(pattern: Op, found: Any, match: Match) -> Iterator[Match]:
    kind, args = operation(found)
    if kind != pattern.kind or len(args) != len(pattern.args):
        return
    nodes = (found, found.args[0]) if found.target is operator.getitem else (found,)
    for inside in _bound(pattern.name, found, match | {"": (*match[""], *nodes)}):
        yield from _match_all(pattern.args, args, inside)
        if kind in _COMMUTES:
            yield from _match_all(pattern.args, args[::-1], inside)


def _match_cast(pattern: Cast, found: Any, match: Match) -> Iterator[Match]:
    for inside in _bound(pattern.name, found, match):
        yield from _match(pattern.inner, found, inside)
        kind, args = operation(found)
        if kind == "cast":
            yield from _match(pattern.inner, args[0], inside | {"": (*inside[""], found)})


def _match_result(pattern: Result, found: Any, match: Match) -> Iterator[Match]:
    if not isinstance(found, Node) or found.target is not operator.getitem:
        return
    of, index = found.args
    if index == pattern.index:
        for inside in _bound(pattern.name, found, match | {"": (*match[""], found)}):
            yield from _match(pattern.of, of, inside)


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
