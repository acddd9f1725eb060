"""One view of an operation, however a graph spells it.

Dynamo writes what the model wrote: `a + b`, `torch.add(a, b)`, `a.add(b)`. ATen has one op for
all three, and Inductor's decompositions have their own. A pass that asks here sees one graph.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

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


class Operation(NamedTuple):
    """What a node computes.

    `kind` is "add", "mul", "square", "rsqrt", "cast" (to another dtype), "row_mean" (over the last
    dimension, which stays), the qualified name of any other op, or empty.
    """

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
    if node.kwargs:
        return _UNKNOWN
    if kind == "pow":
        return Operation("square", node.args[:1]) if node.args[1] == 2 else _UNKNOWN
    if kind == "mul" and node.args[0] is node.args[1]:
        return Operation("square", node.args[:1])
    return Operation(kind or _qualified_name(node.target), node.args)


def value(node: object) -> torch.Tensor | None:
    """Return the fake tensor that stands for a node's value; None where it is no tensor."""
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
