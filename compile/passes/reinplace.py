"""Let ops write into their arguments again, where a functional graph has them return new values.

Inductor does the same to what it compiles (`reinplace_inplaceable_ops`); this is for pieces that
run as they are.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx import Node

from compile.passes.graph_pass import AUTO_FUNCTIONALIZED, Functionalized, writes


def reinplace(graph: fx.Graph) -> int:
    """Unwrap every op that is given whole tensors, and return how many there were. A tensor that
    is read later is copied first, and so is one that belongs to the caller, unless the caller is to
    find there what the op writes. An op that is given views stays wrapped."""
    storages = _Storages()
    count = 0
    for wrapper in graph.find_nodes(op="call_function", target=AUTO_FUNCTIONALIZED):
        if (found := Functionalized.of(wrapper)) is not None:
            _unwrap(graph, wrapper, found, storages)
            count += 1
    return count


_COPY = torch.ops.aten.copy_.default


class _Storages:
    """Which nodes share memory. Where an op writes in place, what it returned shares its argument's
    from then on."""

    def __init__(self) -> None:
        self._joined: dict[int, int] = {}

    def of(self, node: Node) -> int | None:
        """Return a number that nodes have in common if they share memory; None: no tensor."""
        found = node.meta.get("val")
        if not isinstance(found, torch.Tensor):
            return None
        storage: int = found.untyped_storage()._cdata
        while storage in self._joined:
            storage = self._joined[storage]
        return storage

    def join(self, node: Node, other: Node) -> None:
        one, two = self.of(node), self.of(other)
        if one is not None and two is not None and one != two:
            self._joined[one] = two


def _unwrap(graph: fx.Graph, wrapper: Node, found: Functionalized, storages: _Storages) -> None:
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
    graph: fx.Graph, wrapper: Node, base: Node, back: Node | None, storages: _Storages
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
