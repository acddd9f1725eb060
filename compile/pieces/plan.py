"""`ForwardPlan`: what tracing a forward found out, as plain data that a later process can bind.

A plan holds no tensor and no graph. It says how each input of the graph is found on the module or
among the arguments, which pieces there are, and the text of the function that runs them. `bind`
needs neither Dynamo nor a compiler, and imports neither.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from compile.pieces.piecewise import PieceShapes, PiecewiseBackend, TokenSource
from compile.pieces.stitch import BoundInput, bind_ops, compile_execution_fn, make_copy_and_call
from compile.scope import CompileScope, Manager, Runnable, Shape, Toolchain

TOKEN_ARGUMENT = "input_ids"
"""The argument whose length is the number of tokens."""

VERSION = 1
"""Of the plan's format; a plan of another one is traced again."""


class GuardError(RuntimeError):
    """A step has a number of tokens for which the traced forward may be wrong."""


_IN_GUARDS = {"__builtins__": {"min": min, "max": max, "int": int, "abs": abs}, "math": math}
"""What the expression of a guard may name."""

_STORES = ("_parameters", "_buffers", "_modules")
"""Where a module keeps what looks like its attributes."""


class PlanError(ValueError):
    """A forward cannot be planned, or a plan does not fit its module."""


@dataclass(frozen=True)
class PiecePlan:
    """A compiled piece: its name in the source, its place, and the key of what it computes."""

    name: str
    index: int
    key: str
    tokens: TokenSource | None


@dataclass(frozen=True)
class Weight:
    """A tensor of the module: its name in the source, its path, and how it must be laid out.

    The pieces were compiled for that layout and do not check it.
    """

    name: str
    path: str
    layout: str


@dataclass(frozen=True)
class Guard:
    """A condition on the number of tokens that tracing took for granted.

    `expression` is Python over `num_tokens`; `where` is the line that asked.
    """

    expression: str
    where: str

    def holds(self, num_tokens: int) -> bool:
        """Evaluate the condition."""
        return bool(eval(self.expression, dict(_IN_GUARDS), {"num_tokens": num_tokens}))


def check_guards(guards: Sequence[Guard], num_tokens: int) -> None:
    """Raise GuardError if tracing took something for granted that so many tokens break."""
    for guard in guards:
        if not guard.holds(num_tokens):
            wanted = f"{guard.expression}, as {guard.where} asked when traced"
            raise GuardError(f"num_tokens: wanted {wanted}, found {num_tokens}")


@dataclass(frozen=True)
class ForwardPlan:
    """How a forward runs without being traced.

    Invariant: `source` takes the names of `pieces`, `ops` and `weights` and returns a function of
    the tensors called `arguments`, in that order. `absent` were None when the forward was traced.
    """

    forward: str
    """Which function this is a plan of."""
    arguments: tuple[str, ...]
    absent: tuple[str, ...]
    kinds: tuple[str, ...]
    """For each argument what compiled code takes for granted of it."""
    symbolic_dims: tuple[tuple[int, ...], ...]
    """For each argument its dimensions of tokens."""
    source: str
    weights: tuple[Weight, ...]
    ops: Mapping[str, str]
    pieces: tuple[PiecePlan, ...]
    guards: tuple[Guard, ...] = ()

    def to_json(self) -> str:
        """Return the plan as text."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ForwardPlan:
        """Read a plan.

        Raises:
            PlanError: it is no plan, or one of another format.
        """
        try:
            data = json.loads(text)
            if data.pop("version") != VERSION:
                raise PlanError(f"plan: wanted version {VERSION}, found another")
            return cls._of(data)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise PlanError(f"plan: wanted one of version {VERSION}, found {error!r}") from error

    @classmethod
    def _of(cls, data: dict[str, Any]) -> ForwardPlan:
        pieces = tuple(
            PiecePlan(**{**piece, "tokens": piece["tokens"] and TokenSource(*piece["tokens"])})
            for piece in data.pop("pieces")
        )
        guards = tuple(Guard(**guard) for guard in data.pop("guards"))
        weights = tuple(Weight(**weight) for weight in data.pop("weights"))
        dims = tuple(tuple(dims) for dims in data.pop("symbolic_dims"))
        for name in ("arguments", "absent", "kinds"):
            data[name] = tuple(data[name])
        return cls(**data, symbolic_dims=dims, weights=weights, pieces=pieces, guards=guards)


def bind(
    plan: ForwardPlan,
    module: nn.Module,
    pieces: Mapping[str, Callable[..., Any]],
    kept: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda op: op,
) -> Callable[..., Any]:
    """Return the planned forward of `module` as a function of the plan's arguments.

    Weights are looked up here and never again: assigning a new tensor to an attribute later is
    not seen, writing into the tensor is.

    Args:
        pieces: what runs each compiled piece, by its name in the plan.
        kept: put around each eager op that returns something.

    Raises:
        PlanError: the module lacks a tensor, or it is laid out differently.
        StitchError: an op is not registered.
    """
    values: dict[str, Any] = {piece.name: pieces[piece.name] for piece in plan.pieces}
    values |= bind_ops(plan.ops, kept)
    values |= {weight.name: _checked(module, weight) for weight in plan.weights}
    return compile_execution_fn(plan.source, values)


def _checked(module: nn.Module, weight: Weight) -> torch.Tensor:
    found = attribute(module, weight.path)
    if layout(found) != weight.layout:
        raise PlanError(f"{weight.path}: wanted {weight.layout}, found {layout(found)}")
    return found


def kind(value: torch.Tensor) -> str:
    """Spell out what compiled code takes for granted of an argument, whatever its size."""
    return f"{value.dtype} of {value.ndim} dimensions on {value.device.type}"


def layout(value: torch.Tensor) -> str:
    """Spell out what compiled code takes for granted of a tensor."""
    shape, stride = list(value.shape), list(value.stride())
    return f"{value.dtype} {shape} with strides {stride} on {value.device.type}"


def attribute(module: nn.Module, path: str) -> torch.Tensor:
    """Walk to a tensor below a module.

    Raises:
        PlanError: the path ends early or at something else.
    """
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, torch.Tensor):
        raise PlanError(f"{path}: wanted a tensor of {type(module).__name__}, found {found!r}")
    return found


@dataclass(frozen=True)
class TracedCall:
    """The call by which a forward was traced.

    `self_name` is what the forward calls its module; `dims` are the dimensions of tokens of some
    arguments, counted from the front.
    """

    forward: str
    self_name: str
    given: Mapping[str, torch.Tensor | None]
    dims: Mapping[str, tuple[int, ...]]

    def present(self) -> dict[str, torch.Tensor]:
        """Return the tensors, without what was None."""
        return {name: value for name, value in self.given.items() if value is not None}


# --- where a graph's inputs come from ---------------------------------------------------------


def parse_source(source: Any, module_name: str, arguments: Sequence[str]) -> BoundInput:
    """Translate the source that Dynamo noted for a graph input.

    Args:
        module_name: what the forward calls its module, `self`.
        arguments: the forward's tensor arguments.

    Raises:
        PlanError: the input is none of an argument, a size of one, and an attribute of the module.
    """
    base = getattr(source, "base", None)
    if type(source).__name__ == "TensorPropertySource" and source.prop.name == "SIZE":
        if (name := _local(base)) in arguments:
            return BoundInput(argument=name, dim=source.idx)
    elif (name := _local(source)) in arguments:
        return BoundInput(argument=name)
    else:
        path = _path(source, module_name)
        if path:
            return BoundInput(weight=".".join(path))
    wanted = "an argument, a size of one, or an attribute of the module"
    raise PlanError(f"graph input {_spelled(source)}: wanted {wanted}, found none of them")


def _local(source: Any) -> str | None:
    """Return the name of a local variable of the traced frame."""
    is_local = type(source).__name__ == "LocalSource"
    if not is_local or getattr(source, "is_derefed_cell_contents", False):
        return None
    name: str = source.local_name
    return name


def _path(source: Any, module_name: str) -> list[str]:
    """Return the attributes that lead from the module to a source; nothing if they do not."""
    steps: list[tuple[str, Any]] = []
    while _local(source) is None:
        if hasattr(source, "member"):
            steps.append(("attribute", source.member))
        elif hasattr(source, "index"):
            steps.append(("item", source.index))
        elif not type(source).__name__.endswith("NNModuleSource"):
            return []
        source = getattr(source, "base", None)
        if source is None:
            return []
    return _attributes(steps[::-1]) if _local(source) == module_name else []


def _attributes(steps: list[tuple[str, Any]]) -> list[str]:
    """Fold `_modules['layers']` and the like into the attribute `layers`."""
    names: list[str] = []
    in_store = False
    for kind, name in steps:
        if not isinstance(name, str) or (kind == "item") != in_store or "." in name:
            return []
        in_store = kind == "attribute" and name in _STORES
        if not in_store:
            names.append(name)
    return names


def _spelled(source: Any) -> str:
    name = getattr(source, "name", None)
    return str(name() if inspect.isroutine(name) else name or source)


class BackendError(RuntimeError):
    """A compiler was used in a way that it cannot serve."""


def toolchain_of(scope: CompileScope) -> Toolchain:
    """Return the toolchain that a scope brings.

    Raises:
        BackendError: it brings none.
    """
    if scope.toolchain is None:
        wanted = "a scope with a toolchain to compile with"
        raise BackendError(f"compilation.level: wanted {wanted}, found {scope.config.level}")
    return scope.toolchain


def wrapped(scope: CompileScope, backend: Runnable, index: int) -> Runnable:
    """Return a piece as steps call it: behind a graph wrapper where some step replays pieces."""
    if not scope.config.graph_mode.requires_piecewise_compilation():
        return backend
    return toolchain_of(scope).wrap(backend, is_first=index == 0)


def kept(scope: CompileScope, op: Runnable) -> Runnable:
    """Return one call of an eager op that returns something, as steps call it."""
    if not scope.config.graph_mode.requires_piecewise_compilation():
        return op
    return toolchain_of(scope).keep_outputs(op)


def with_copies(scope: CompileScope, call: Runnable, dims: Sequence[tuple[int, ...]]) -> Runnable:
    """Return a forward behind the copy layer, where pieces are replayed and it is asked for."""
    config = scope.config
    if not (config.cudagraph_copy_inputs and config.graph_mode.requires_piecewise_compilation()):
        return call
    return make_copy_and_call(call, dims, scope.max_num_tokens)


def load_pieces(scope: CompileScope, manager: Manager, plan: ForwardPlan) -> dict[str, Runnable]:
    """Load every artifact of a plan. Returns what runs each piece, by its name in the plan.

    Raises what the manager raises where an artifact is missing or cannot be used.
    """
    shapes, num_graphs = PieceShapes.of(scope.config), len(plan.pieces)
    loaded = {}
    for piece in plan.pieces:
        runnables: dict[Shape, Runnable] = {
            shape: manager.load(piece.key, index=piece.index, shape=shape, num_graphs=num_graphs)
            for shape in shapes.all()
        }
        backend = PiecewiseBackend(
            index=piece.index,
            num_graphs=num_graphs,
            tokens=piece.tokens,
            shapes=shapes,
            compiled_runnables=runnables,
        )
        loaded[piece.name] = wrapped(scope, backend, piece.index)
    return loaded
