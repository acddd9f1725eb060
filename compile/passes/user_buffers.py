"""Let ranks add up in memory that they all read, so that a sum over ranks needs no copy (user
buffers, after TensorRT-LLM). For pieces that run as they are; `model.user_buffers` has the ops.

1. Convert: a fused sum, addition and norm becomes a copy into the user buffer and the op that adds
   up there, and sets this rank's rows of the new residual alone.
2. Prologue: what only that copy reads is computed in the buffer instead, if it is a product.
3. Finalize: all rows of a residual are gathered, unless only other such sums read it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from compile.custom_op import LIBRARY
from compile.passes.fuse_all_reduce_rms_norm import all_reduce_add_rms_norm

PROLOGUES = {
    "aten::mm": "mm_to_user_buffers",
    f"{LIBRARY}::packed_linear": "packed_linear_to_user_buffers",
}
"""By the product, the op that computes it in the buffer of a group, its last argument."""


def use_user_buffers(graph: fx.Graph) -> int:
    """Rewrite all sums that are fused with a norm, and return how many there were. Behind it comes
    nothing that looks for dead code."""
    fused = graph.find_nodes(op="call_function", target=all_reduce_add_rms_norm.default)
    sums = [_convert(graph, node) for node in fused]
    for node in sums:
        _move_product(graph, node)
    for node in sums:
        _finalize(graph, node)
    return len(sums)


def _op(name: str) -> Any:
    return getattr(getattr(torch.ops, LIBRARY), name).default


def _convert(graph: fx.Graph, fused: Node) -> Node:
    x, residual, weight, eps, group_name = fused.args
    with graph.inserting_before(fused):
        buffer = graph.call_function(_op("copy_to_user_buffers"), (x, group_name))
        arguments = (buffer, residual, weight, eps, group_name)
        found = graph.call_function(_op("user_buffers_all_reduce_add_rms_norm"), arguments)
    assert isinstance(x, Node)
    buffer.meta = {"val": torch.empty_like(x.meta["val"])}
    found.meta = dict(fused.meta)
    fused.replace_all_uses_with(found)
    graph.erase_node(fused)
    return found


def _move_product(graph: fx.Graph, node: Node) -> None:
    """Have a product written into the buffer, if nobody else adds up there in between."""
    buffer, group_name = node.args[0], node.args[-1]
    assert isinstance(buffer, Node)
    product = buffer.args[0]
    assert isinstance(product, Node)
    schema = getattr(product.target, "_schema", None)
    name = PROLOGUES.get(schema.name if schema is not None else "")
    if name is None or len(product.users) > 1 or _is_used_between(product, node, group_name):
        return
    with graph.inserting_before(product):
        moved = graph.call_function(_op(name), (*product.args, group_name))
    moved.meta = dict(product.meta)
    buffer.replace_all_uses_with(moved)
    graph.erase_node(buffer)
    graph.erase_node(product)


def _is_used_between(product: Node, node: Node, group_name: Any) -> bool:
    each = product.next
    while each is not node:
        if each.target is node.target and each.args[-1] == group_name:
            return True
        each = each.next
    return False


def _finalize(graph: fx.Graph, node: Node) -> None:
    for part in node.users:
        if part.target is not operator.getitem or part.args[1] != 1:
            continue
        if any(not _reads_own_rows(user, part, node) for user in part.users):
            with graph.inserting_after(part):
                graph.call_function(_op("user_buffers_finalize"), (part, node.args[-1]))


def _reads_own_rows(user: Node, part: Node, node: Node) -> bool:
    """Return whether a node is another such sum of the same ranks, whose residual this is."""
    if user.target is not node.target or user.args[-1] != node.args[-1]:
        return False
    return [index for index, each in enumerate(user.args) if each is part] == [1]
