"""Split a traced forward at its splitting ops, which run eagerly, and name equal pieces equally.
Every piece returns a tuple, because a freshly compiled piece and one that was loaded disagree about
bare outputs."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from compile.config import DEFAULT_SPLITTING_OPS
from compile.errors import FieldError

_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
"""Calls that reserve memory and run no kernel; a captured graph of them alone would be empty."""


@dataclass(frozen=True)
class SplitItem:
    """One piece of a split graph. Invariant: `name` is `submod_<index>`, in order of execution."""

    name: str
    index: int
    is_splitting: bool
    """It holds splitting ops and runs eagerly."""
    graph: fx.GraphModule


def placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def is_symbolic(size: Any) -> bool:
    """Return whether tracing left a size open; a symbol may also wrap a plain number."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)


def example_value(node: fx.Node) -> Any:
    """Return the fake value that tracing left on a node, or None."""
    return node.meta.get("example_value", node.meta.get("val"))


def split_graph(
    graph: fx.GraphModule, splitting_ops: Sequence[str]
) -> tuple[fx.GraphModule, list[SplitItem]]:
    """Cut `graph` before and after each run of splitting ops; return the root, and its pieces by
    ascending index. Neither tuples nor a `torch.Size` pass between pieces; memory reserved between
    two splitting ops is reserved by the compiled piece before them. FieldError: a name is no
    registered op."""
    names = look_up_ops(splitting_ops)
    _spell_sizes_out(graph)
    parts, eager = _partition(graph.graph, names)
    unused: Any = None
    root = split_module(graph, unused, lambda node: parts[node], keep_original_order=True)
    _return_tuples(root)
    children = {name: child for name, child in root.named_children() if name.startswith("submod_")}
    items = [
        SplitItem(name, index, index in eager, child)
        for name, child in children.items()
        if isinstance(child, fx.GraphModule) and (index := int(name.removeprefix("submod_"))) >= 0
    ]
    return root, sorted(items, key=lambda item: item.index)


def look_up_ops(names: Sequence[str]) -> set[str]:
    """Return ops as torch prints them; FieldError: one, that is no default, does not exist."""
    for name in names:
        if name not in DEFAULT_SPLITTING_OPS and find_op(name) is None:
            wanted = "names of registered ops such as lockstep::unified_attention_with_output"
            raise FieldError("compilation.splitting_ops", wanted, name)
    return {name.replace("::", ".").removesuffix(".default") for name in names}


def find_op(name: str) -> Any:
    """Return the op `library::op`, with or without an overload; None if this process has none."""
    library, _, rest = name.partition("::")
    found: Any = getattr(torch.ops, library)
    for part in rest.split("."):
        found = getattr(found, part, None) if part else None
    return found


def _spellings(target: Any) -> set[str]:
    """Return `library.op` and, for an overload that is not the default one, that too."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return {str(target)}
    if isinstance(target, torch._ops.OpOverload):
        return {str(target.overloadpacket), str(target).removesuffix(".default")}
    return set()


def _partition(graph: fx.Graph, splitting: set[str]) -> tuple[dict[fx.Node, int], set[int]]:
    """Number the piece of each node; return also the numbers of the eager ones."""
    parts: dict[fx.Node, int] = {}
    eager: set[int] = set()
    waiting: list[fx.Node] = []
    current = -1
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if _is_element_of_tuple(node) and node.args[0] in parts:
            parts[node] = parts[node.args[0]]
        elif splitting & _spellings(node.target):
            if waiting and not _hoist(waiting, parts, current):
                current = _open(waiting, parts, current)
            if current not in eager:
                current += 1
                eager.add(current)
            waiting = []
            parts[node] = current
        elif current in eager and _is_weightless(node):
            waiting.append(node)
        else:
            if current in eager or current < 0:
                current = _open(waiting, parts, current)
                waiting = []
            parts[node] = current
    if waiting:
        _open(waiting, parts, current)
    return parts, eager


def _open(waiting: list[fx.Node], parts: dict[fx.Node, int], current: int) -> int:
    """Start a compiled piece after `current` with the waiting nodes."""
    parts.update(dict.fromkeys(waiting, current + 1))
    return current + 1


def _hoist(waiting: list[fx.Node], parts: dict[fx.Node, int], eager: int) -> bool:
    """Move nodes that wait after the piece `eager` into the compiled one before it, if possible."""
    inputs = {source for node in waiting for source in node.all_input_nodes}
    made_later = any(parts.get(source, -1) >= eager for source in inputs)
    if eager == 0 or made_later:
        return False
    parts.update(dict.fromkeys(waiting, eager - 1))
    return True


def _is_weightless(node: fx.Node) -> bool:
    """Return whether a node runs no kernel: it reserves memory, or computes a size."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if str(name).split(".")[0] in _ALLOCATIONS:
        return True
    return isinstance(example_value(node), torch.SymInt | int)


def _is_element_of_tuple(node: fx.Node) -> bool:
    """Return whether a node takes an element of a tuple; indexing a tensor computes."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return False
    value = example_value(node.args[0])
    if value is None:
        return isinstance(node.args[1], int) and node.args[0].op != "placeholder"
    return isinstance(value, tuple | list)


def _spell_sizes_out(graph: fx.GraphModule) -> None:
    """Replace `x.size()` by one entry for each dimension: a number, an input, or `x.size(d)`."""
    symbols = {
        str(value): node
        for node in reversed(placeholders(graph))
        if isinstance(value := example_value(node), torch.SymInt)
    }
    for node in list(graph.graph.nodes):
        value = example_value(node)
        if node.op != "call_method" or not isinstance(value, torch.Size):
            continue
        with graph.graph.inserting_before(node):
            entries = tuple(_dimension(graph, node, d, symbols) for d in range(len(value)))
        _replace_by_tuple(graph, node, entries)
    graph.recompile()


def _dimension(
    graph: fx.GraphModule, size: fx.Node, dim: int, symbols: dict[str, fx.Node]
) -> int | fx.Node:
    length = example_value(size)[dim]
    if isinstance(length, int):
        return length
    if str(length) in symbols:
        return symbols[str(length)]
    entry = graph.graph.call_method("size", (size.args[0], dim))
    entry.meta = {**size.meta, "example_value": length}
    return entry


def _replace_by_tuple(
    graph: fx.GraphModule, node: fx.Node, entries: tuple[int | fx.Node, ...]
) -> None:
    for user in list(node.users):
        if user.target is operator.getitem and isinstance(user.args[1], int):
            for reader in list(user.users):
                _replace_argument(reader, user, entries[user.args[1]])
            graph.graph.erase_node(user)
        else:
            _replace_argument(user, node, entries)
    graph.graph.erase_node(node)


def _replace_argument(user: fx.Node, old: fx.Node, new: Any) -> None:
    def swap(argument: fx.Node) -> Any:
        return new if argument is old else argument

    user.args = fx.node.map_arg(user.args, swap)
    user.kwargs = fx.node.map_arg(user.kwargs, swap)


def _return_tuples(root: fx.GraphModule) -> None:
    """Make every piece return a tuple, of which the root takes elements."""
    for call in list(root.graph.nodes):
        if call.op != "call_module":
            continue
        piece = root.get_submodule(call.target)
        assert isinstance(piece, fx.GraphModule)
        returned = next(node for node in piece.graph.nodes if node.op == "output")
        value = returned.args[0]
        if isinstance(value, fx.Node):
            returned.args = ((value,),)
            piece.recompile()
            _take_first(root, call)
        for element in call.users:
            sources = next(node for node in piece.graph.nodes if node.op == "output").args[0]
            element.meta.setdefault("example_value", example_value(sources[element.args[1]]))
    root.graph.lint()
    root.recompile()


def _take_first(root: fx.GraphModule, call: fx.Node) -> None:
    with root.graph.inserting_after(call):
        element = root.graph.call_function(operator.getitem, (call, 0))
    call.replace_all_uses_with(element, delete_user_cb=lambda user: user is not element)


def canonical_key(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    """Return a digest that two pieces share exactly if one compiled artifact serves both: of ops,
    constants, order and the inputs' dtypes, devices, shapes and strides, without names."""
    text = "\n".join(_Canonical().lines(graph, example_inputs))
    return hashlib.sha256(text.encode()).hexdigest()


class _Canonical:
    """Spells a graph with numbers in place of names; symbols by first appearance."""

    def __init__(self) -> None:
        self._symbols: dict[str, str] = {}
        self._nodes: dict[fx.Node, str] = {}

    def lines(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Iterator[str]:
        inputs = iter(example_inputs)
        for number, node in enumerate(graph.graph.nodes):
            self._nodes[node] = f"%{number}"
            if node.op == "placeholder":
                yield f"%{number} input {self._value(next(inputs))}"
            elif node.op == "get_attr":
                yield f"%{number} {self._attribute(graph, node)}"
            else:
                target = node.target if isinstance(node.target, str) else _qualified(node.target)
                arguments = f"{self._value(node.args)} {self._value(node.kwargs)}"
                yield f"%{number} {node.op} {target} {arguments}"

    def _attribute(self, graph: fx.GraphModule, node: fx.Node) -> str:
        value = operator.attrgetter(str(node.target))(graph)
        if isinstance(value, fx.GraphModule):
            inner = _Canonical().lines(value, [example_value(n) for n in placeholders(value)])
            return "graph {" + "; ".join(inner) + "}"
        if isinstance(value, torch.Tensor):
            content = hashlib.sha256(_bytes(value))
            return f"constant {self._value(value)} {content.hexdigest()}"
        return f"constant {value!r}"

    def _value(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._nodes[value]
        if isinstance(value, torch.Tensor):
            sizes = f"{self._value(tuple(value.shape))} {self._value(value.stride())}"
            return f"{value.dtype} {value.device} {sizes} {value.requires_grad}"
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self._expression(value)
        if isinstance(value, tuple | list):
            return "(" + ", ".join(self._value(item) for item in value) + ")"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key}: {self._value(value[key])}" for key in value) + "}"
        if isinstance(value, slice):
            return f"slice{self._value((value.start, value.stop, value.step))}"
        return f"{type(value).__name__}:{value!r}"

    def _expression(self, value: Any) -> str:
        expression = value.node.expr
        for symbol in sorted(expression.free_symbols, key=str):
            self._symbols.setdefault(str(symbol), f"n{len(self._symbols)}")
        renamed = {s: type(s)(self._symbols[str(s)]) for s in expression.free_symbols}
        return f"sym {expression.xreplace(renamed)}"


def _bytes(value: torch.Tensor) -> bytes:
    flat = value.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist())


def _qualified(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"op {target}"
    module = getattr(target, "__module__", None)
    return f"function {module}.{getattr(target, '__qualname__', repr(target))}"


class PieceInvariantError(ValueError):
    """A piece cannot be captured, or not be sized by the number of tokens."""


def check_pieces(items: Sequence[SplitItem], num_tokens: Any, *, captured: bool) -> None:
    """Check that nothing but the number of tokens is dynamic, and of pieces that become graphs that
    attention returns nothing and that every compiled one gets a tensor with the token dimension."""
    for item in items:
        values = [example_value(node) for node in item.graph.graph.nodes if node.op != "output"]
        symbols = {s for value in values for s in _symbols(value)}
        if symbols - {num_tokens}:
            found = ", ".join(sorted(map(str, symbols - {num_tokens})))
            wanted = "no dynamic dimension but the number of tokens"
            raise PieceInvariantError(f"{item.name}: wanted {wanted}, found {found}")
        if not captured:
            continue
        if not item.is_splitting:
            given = map(example_value, placeholders(item.graph))
            tensors = [value for value in given if torch.is_tensor(value)]
            if not any(num_tokens in _symbols(value) for value in tensors):
                wanted, found = "an input with the token dimension", f"{len(tensors)} without"
                raise PieceInvariantError(f"{item.name}: wanted {wanted}, found {found}")
            continue
        for node in item.graph.graph.nodes:
            if "attention" in str(node.target) and example_value(node) is not None:
                wanted = "attention that writes into an output of its caller"
                found = f"{node.target}, which returns one"
                raise PieceInvariantError(f"{item.name}: wanted {wanted}, found {found}")


def _symbols(value: Any) -> set[Any]:
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    symbolic = [size.node.expr for size in sizes if isinstance(size, torch.SymInt)]
    return {symbol for expression in symbolic for symbol in expression.free_symbols}
