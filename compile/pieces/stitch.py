"""Write the Python function that runs the pieces of a forward one after another.

A later process executes its text without any graph. A value is dropped after its last use.

    def make_forward(submod_0, unified_attention_with_output, submod_2, norm_weight):
        def forward(input_ids, positions):
            num_tokens = input_ids.shape[0]
            (q, output,) = submod_0(input_ids, num_tokens)
            unified_attention_with_output(q, output, 'layers.0.attn')
            del q
            (x,) = submod_2(output, num_tokens, norm_weight)
            return x
        return forward
"""

from __future__ import annotations

import itertools
import keyword
import linecache
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from compile.pieces.split import SplitItem, find_op, placeholders

Structure: TypeAlias = int | tuple["Structure", ...]
"""What a forward returns: an output of its graph by number, or a tuple of such."""

NUM_TOKENS = "num_tokens"
"""The name of the number of tokens in written code."""

_FACTORY = "make_forward"
_INDENT = "        "
_numbers = itertools.count()


class StitchError(ValueError):
    """A graph cannot be written as plain code."""


@dataclass(frozen=True)
class BoundInput:
    """How written code obtains one input of the graph: an argument, the size of one of its
    dimensions, or a weight by its path below the module."""

    argument: str | None = None
    dim: int | None = None
    weight: str | None = None


@dataclass(frozen=True)
class StitchCode:
    """A written function, and what its names stand for."""

    source: str
    pieces: dict[str, str]
    """Name in the source: compiled piece."""
    ops: dict[str, str]
    """Name in the source: op, as `library::op` with its overload."""
    weights: dict[str, str]
    """Name in the source: path of an attribute."""


@dataclass
class _Line:
    """One statement, with the names that it binds and those that it reads."""

    text: str
    binds: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)


class _Names:
    """Hands out names that are identifiers and occur once."""

    def __init__(self) -> None:
        self._taken = {*keyword.kwlist, "torch", "forward", _FACTORY, NUM_TOKENS}

    def fresh(self, wish: str) -> str:
        base = "".join(c if c.isalnum() else "_" for c in wish).strip("_") or "value"
        base = f"_{base}" if base[0].isdigit() else base
        candidates = itertools.chain([base], (f"{base}_{i}" for i in itertools.count(1)))
        name = next(candidate for candidate in candidates if candidate not in self._taken)
        self._taken.add(name)
        return name


def generate_execution_code(
    root: fx.GraphModule,
    items: Sequence[SplitItem],
    arguments: Sequence[str],
    inputs: Sequence[BoundInput],
    returns: Structure,
) -> StitchCode:
    """Write the stitching function of a split graph, with these arguments as parameters. `inputs`
    say how each input of the graph is obtained. Raises StitchError if a splitting op takes a
    constant that has no literal form."""
    return _Writer(root, items).write(arguments, inputs, returns)


class _Writer:
    def __init__(self, root: fx.GraphModule, items: Sequence[SplitItem]) -> None:
        self._root = root
        self._items = {item.name: item for item in items}
        self._names = _Names()
        self._values: dict[fx.Node, str] = {}
        self._lines: list[_Line] = []
        self.pieces: dict[str, str] = {}
        self.ops: dict[str, str] = {}
        self.weights: dict[str, str] = {}

    def write(
        self, arguments: Sequence[str], inputs: Sequence[BoundInput], returns: Structure
    ) -> StitchCode:
        parameters = self._bind_inputs(arguments, inputs)
        for node in self._root.graph.nodes:
            if node.op == "call_module":
                self._call(node, self._items[node.target])
            elif node.op == "get_attr":
                self._values[node] = self._weight(str(node.target))
        output = next(node for node in self._root.graph.nodes if node.op == "output")
        text = self._returned(output.args[0], returns)
        kept = {self._values[node] for node in output.all_input_nodes}
        body = [line.text for line in _with_deletions(self._lines, kept)]
        given = [*self.pieces, *self.ops, *self.weights]
        source = _function(given, parameters, [*body, f"return {text}"])
        return StitchCode(source, self.pieces, self.ops, self.weights)

    def _bind_inputs(self, arguments: Sequence[str], inputs: Sequence[BoundInput]) -> list[str]:
        parameters = [self._names.fresh(name) for name in arguments]
        of_argument = dict(zip(arguments, parameters, strict=True))
        for node, source in zip(placeholders(self._root), inputs, strict=True):
            if node.users:
                self._values[node] = self._input(source, of_argument)
        return parameters

    def _input(self, source: BoundInput, of_argument: Mapping[str, str]) -> str:
        if source.weight is not None:
            return self._weight(source.weight)
        assert source.argument is not None
        parameter = of_argument[source.argument]
        if source.dim is None:
            return parameter
        line = _Line(f"{NUM_TOKENS} = {parameter}.shape[{source.dim}]")
        if all(other.text != line.text for other in self._lines):
            self._lines.append(line)
        return NUM_TOKENS

    def _weight(self, path: str) -> str:
        for name, known in self.weights.items():
            if known == path:
                return name
        name = self._names.fresh(path)
        self.weights[name] = path
        return name

    def _returned(self, outputs: Any, returns: Structure) -> str:
        if isinstance(returns, int):
            return self._literal(outputs[returns])
        return "(" + "".join(f"{self._returned(outputs, part)}, " for part in returns) + ")"

    def _call(self, node: fx.Node, item: SplitItem) -> None:
        if item.is_splitting:
            self._inline(node, item.graph)
            return
        piece = self._names.fresh(item.name)
        self.pieces[piece] = item.name
        made = next(n for n in item.graph.graph.nodes if n.op == "output").args[0]
        names = [self._names.fresh(getattr(value, "name", "value")) for value in made]
        self._take(node, names)
        reads = [self._values[value] for value in node.all_input_nodes]
        target = "(" + "".join(f"{name}, " for name in names).rstrip() + ") = " if names else ""
        text = f"{target}{piece}({', '.join(self._literal(arg) for arg in node.args)})"
        self._lines.append(_Line(text, names, reads))

    def _inline(self, node: fx.Node, graph: fx.GraphModule) -> None:
        """Write the ops of an eager piece in place of a call."""
        outer = [self._literal(argument) for argument in node.args]
        self._values.update(zip(placeholders(graph), outer, strict=True))
        for inner in graph.graph.nodes:
            if inner.op == "call_function":
                self._op(inner)
        made = next(n for n in graph.graph.nodes if n.op == "output").args[0]
        self._take(node, [self._literal(value) for value in made])

    def _take(self, call: fx.Node, names: Sequence[str]) -> None:
        """Name the elements that the root takes of a piece's result."""
        for element in call.users:
            index = element.args[1]
            assert element.target is operator.getitem and isinstance(index, int)
            self._values[element] = names[index]

    def _op(self, node: fx.Node) -> None:
        arguments = [self._literal(arg) for arg in node.args]
        arguments += [f"{name}={self._literal(value)}" for name, value in node.kwargs.items()]
        reads = [self._values[value] for value in node.all_input_nodes]
        if node.target is operator.getitem:
            text = f"{arguments[0]}[{arguments[1]}]"
        else:
            text = f"{self._op_name(node)}({', '.join(arguments)})"
        binds = []
        if node.users:
            self._values[node] = self._names.fresh(node.name)
            binds = [self._values[node]]
            text = f"{binds[0]} = {text}"
        self._lines.append(_Line(text, binds, reads))

    def _op_name(self, node: fx.Node) -> str:
        """Name an op. Each call that returns something has its own name, and may be wrapped."""
        op = _name_of(node.target)
        for name, known in self.ops.items():
            if known == op and not node.users:
                return name
        name = self._names.fresh(op.split("::")[1].split(".")[0])
        self.ops[name] = op
        return name

    def _literal(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._values[value]
        if isinstance(value, tuple):
            return "(" + "".join(f"{self._literal(item)}, " for item in value).rstrip() + ")"
        if isinstance(value, list):
            return "[" + ", ".join(self._literal(item) for item in value) + "]"
        if isinstance(value, float):
            return repr(value) if value - value == 0 else f"float({str(value)!r})"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return str(value)
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        wanted = "a tensor, a number, a text, a dtype or a device"
        raise StitchError(f"argument of a splitting op: wanted {wanted}, found {value!r}")


def _with_deletions(lines: Sequence[_Line], kept: set[str]) -> list[_Line]:
    """Drop each value after the line that reads it last, except those that are returned."""
    last_use = {name: i for i, line in enumerate(lines) for name in (*line.binds, *line.reads)}
    bound = {name for line in lines for name in line.binds}
    out = []
    for i, line in enumerate(lines):
        out.append(line)
        names = dict.fromkeys((*line.reads, *line.binds))
        dead = [n for n in names if n in bound and n not in kept and last_use[n] == i]
        if dead:
            out.append(_Line(f"del {', '.join(dead)}"))
    return out


def _function(given: Iterable[str], parameters: Iterable[str], body: Iterable[str]) -> str:
    head = [f"def {_FACTORY}({', '.join(given)}):", f"    def forward({', '.join(parameters)}):"]
    return "\n".join([*head, *(_INDENT + line for line in body), "    return forward", ""])


def _name_of(target: Any) -> str:
    """Spell an op as `library::op.overload`; of several overloads none is named."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target).replace(".", "::", 1)
    if isinstance(target, torch._ops.OpOverloadPacket):
        name = str(target).replace(".", "::", 1)
        overloads = target.overloads()
        return f"{name}.{overloads[0]}" if len(overloads) == 1 else name
    raise StitchError(f"splitting piece: wanted calls of torch ops, found {target!r}")


def bind_ops(
    ops: Mapping[str, str], kept: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> dict[str, Callable[..., Any]]:
    """Look ops up, and put `kept` around each one that returns something."""
    found = {name: find_op(op) for name, op in ops.items()}
    if missing := [ops[name] for name, op in found.items() if op is None]:
        raise StitchError(f"op: wanted {missing[0]}, found no such op registered")
    return {name: kept(op) if _returns(op) else op for name, op in found.items()}


def _returns(op: Callable[..., Any]) -> bool:
    schema = getattr(op, "_schema", None)
    return schema is None or len(schema.returns) > 0


def compile_execution_fn(source: str, values: Mapping[str, Any]) -> Callable[..., Any]:
    """Execute written code and return its function; `values` are bound to its names once, here."""
    # A name of its own for each text lets tracebacks show the lines.
    filename = f"<stitched forward {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"torch": torch}
    exec(compile(source, filename, "exec"), namespace)
    forward: Callable[..., Any] = namespace[_FACTORY](**values)
    return forward


class CopyError(ValueError):
    """More tokens came than the static buffers hold."""


def make_copy_and_call(
    call: Callable[..., Any], dims: Sequence[tuple[int, ...]], max_num_tokens: int | None
) -> Callable[..., Any]:
    """Return `call` behind a layer that gives arguments with dimensions of tokens fixed addresses.
    Buffers hold `max_num_tokens`, or as many as the first call has; CopyError for more."""
    buffers: dict[int, torch.Tensor] = {}

    def static(i: int, value: torch.Tensor) -> torch.Tensor:
        if i not in buffers:
            buffers[i] = _buffer(value, dims[i], max_num_tokens)
        view = buffers[i]
        for dim in dims[i]:
            count, rows = value.shape[dim], view.shape[dim]
            if count > rows:
                wanted = f"at most {rows} tokens"
                raise CopyError(f"cudagraph_copy_inputs: wanted {wanted}, found {count}")
            view = view.narrow(dim, 0, count)
        return view.copy_(value)

    def copy_and_call(*args: Any) -> Any:
        return call(*(static(i, arg) if dims[i] else arg for i, arg in enumerate(args)))

    return copy_and_call


def _buffer(value: torch.Tensor, dims: tuple[int, ...], max_num_tokens: int | None) -> torch.Tensor:
    shape = list(value.shape)
    for dim in dims:
        shape[dim] = shape[dim] if max_num_tokens is None else max_num_tokens
    # Made inside inference mode, a buffer could not be written outside of it.
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=value.dtype, device=value.device)
