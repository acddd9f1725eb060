"""Let ops write into their arguments again, where a functional graph has them return new values.

Inductor does the same to what it compiles (`reinplace_inplaceable_ops`); this is for pieces that
run as they are.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx import Node

from compile.passes.graph_pass import AUTO_FUNCTIONALIZED, Functionalized, writes
from compile.passes.storages import Storages


def reinplace(graph: fx.Graph, storages: Storages) -> int:
    """Unwrap every op that is given whole tensors, and return how many there were. A tensor that
    is read later is copied first, and so is one that belongs to the caller, unless the caller is to
    find there what the op writes. An op that is given views stays wrapped. Afterwards `storages`
    knows what shares memory."""
    count = 0
    for wrapper in graph.find_nodes(op="call_function", target=AUTO_FUNCTIONALIZED):
        if (found := Functionalized.of(wrapper)) is not None:
            _unwrap(graph, wrapper, found, storages)
            count += 1
    return count


_COPY = torch.ops.aten.copy_.default


def _unwrap(graph: fx.Graph, wrapper: Node, found: Functionalized, storages: Storages) -> None:
    own = found.num_own
    results = {int(user.args[1]): user for user in wrapper.users}  # type: ignore[arg-type]
    bases = list(found.bases)
    for k, base in enumerate(bases):
        back = _copies_back(base, results.get(own + k))
        if _may_write(graph, wrapper, base, back, storages):
            if back is not None:
                back.replace_all_uses_with(base)
                graph.erase_node(back)
        else:
            with graph.inserting_before(wrapper):
                bases[k] = graph.call_function(torch.ops.aten.clone.default, (base,))
            bases[k].meta = {**base.meta, "val": torch.empty_like(base.meta["val"])}
    with graph.inserting_before(wrapper):
        called = graph.call_function(found.op, found.arguments(bases))
    values = wrapper.meta["val"][:own]
    called.meta = {**wrapper.meta, "val": values[0] if own == 1 else tuple(values)}
    for index, result in results.items():
        if index < own and own > 1:
            result.replace_input_with(wrapper, called)
            continue
        new = called if index < own else bases[index - own]
        storages.join(result, new)
        result.replace_all_uses_with(new)
        graph.erase_node(result)
    graph.erase_node(wrapper)


def _copies_back(base: Node, result: Node | None) -> Node | None:
    """Return the node that brings an op's result into the caller's tensor, if there is one."""
    users = result.users if result is not None and base.op == "placeholder" else ()
    return next((user for user in users if user.target is _COPY and user.args[0] is base), None)


def _may_write(
    graph: fx.Graph, wrapper: Node, base: Node, back: Node | None, storages: Storages
) -> bool:
    """Return whether nothing reads later what was in a tensor, and no caller does."""
    storage = storages.of(base)
    is_behind = False
    for node in graph.nodes:
        if node is wrapper:
            is_behind = True
        elif is_behind and node is not back:
            # Who makes a view reads nothing; who reads that has an argument of the same memory.
            is_read = any(storages.of(each) == storage for each in node.all_input_nodes)
            if is_read and (storages.of(node) != storage or writes(node)):
                return False
        elif node.op == "placeholder" and storages.of(node) == storage:
            is_asked_for = node is base and back is not None
            if not is_asked_for:
                return False
    return storage is not None
