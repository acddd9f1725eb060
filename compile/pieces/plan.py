"""`ForwardPlan`: what tracing a forward found out, as plain data that a later process can bind
without importing Dynamo or a compiler."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from compile.cache.manager import CompilerManager
from compile.config import CUDAGraphMode
from compile.graphs.wrapper import CUDAGraphWrapper, StableOutputs
from compile.pieces.piecewise import PieceShapes, PiecewiseBackend, TokenSource
from compile.pieces.stitch import BoundInput, bind_ops, compile_execution_fn, make_copy_and_call
from compile.scope import CompileScope, Runnable

TOKEN_ARGUMENT = "input_ids"
"""The argument whose length is the number of tokens."""

VERSION = 1
"""Of the plan's format; a plan of another one is traced again."""

_IN_GUARDS = {"__builtins__": {"min": min, "max": max, "int": int, "abs": abs}, "math": math}
"""What the expression of a guard may name."""


class GuardError(RuntimeError):
    """A step has a number of tokens for which the traced forward may be wrong."""


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
    """A tensor of the module: name in the source, path, and layout, which pieces do not check."""

    name: str
    path: str
    layout: str


@dataclass(frozen=True)
class Guard:
    """A condition that tracing assumed, over `num_tokens`, and the line that needed it."""

    expression: str
    where: str

    def holds(self, num_tokens: int) -> bool:
        return bool(eval(self.expression, dict(_IN_GUARDS), {"num_tokens": num_tokens}))


def check_guards(guards: Sequence[Guard], num_tokens: int) -> None:
    """Raise GuardError if `num_tokens` breaks an assumption of the trace."""
    for guard in guards:
        if not guard.holds(num_tokens):
            wanted = f"{guard.expression}, as {guard.where} asked when traced"
            raise GuardError(f"num_tokens: wanted {wanted}, found {num_tokens}")


@dataclass(frozen=True)
class ForwardPlan:
    """How a forward runs without being traced. Invariant: `source` takes the names of `pieces`,
    `ops` and `weights` and returns a function of the tensors called `arguments`, in that order.
    `absent` were None when the forward was traced."""

    forward: str
    """Which function this is a plan of."""
    arguments: tuple[str, ...]
    absent: tuple[str, ...]
    kinds: tuple[str, ...]
    """For each argument what compiled code assumes of it."""
    symbolic_dims: tuple[tuple[int, ...], ...]
    """For each argument its dimensions of tokens."""
    source: str
    weights: tuple[Weight, ...]
    ops: Mapping[str, str]
    pieces: tuple[PiecePlan, ...]
    guards: tuple[Guard, ...] = ()

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ForwardPlan:
        """Read a plan; PlanError: it is none, or one of another format."""
        try:
            data = json.loads(text)
            if (version := data.pop("version")) != VERSION:
                raise ValueError(f"version {version}")
            for piece in data["pieces"]:
                piece["tokens"] = piece["tokens"] and TokenSource(*piece["tokens"])
            for name, kind in (("pieces", PiecePlan), ("guards", Guard), ("weights", Weight)):
                data[name] = tuple(kind(**each) for each in data[name])
            data["symbolic_dims"] = tuple(map(tuple, data["symbolic_dims"]))
            lists = {name: tuple(data[name]) for name in ("arguments", "absent", "kinds")}
            return cls(**{**data, **lists})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise PlanError(f"plan: wanted one of version {VERSION}, found {error!r}") from error


def bind(
    scope: CompileScope, plan: ForwardPlan, module: nn.Module, pieces: Mapping[str, Runnable]
) -> Runnable:
    """Return the planned forward of `module` as a function of the plan's arguments. Weights are
    looked up now: a tensor that is assigned later is not seen. PlanError: a tensor is missing or
    laid out differently; StitchError: an op is not registered."""
    config = scope.config
    has_graphs = config.graph_mode.requires_piecewise_compilation()
    values: dict[str, Any] = {piece.name: pieces[piece.name] for piece in plan.pieces}
    values |= bind_ops(plan.ops, StableOutputs if has_graphs else lambda op: op)
    values |= {weight.name: _checked(module, weight) for weight in plan.weights}
    run = compile_execution_fn(plan.source, values)
    if not (config.cudagraph_copy_inputs and has_graphs):
        return run
    return make_copy_and_call(run, plan.symbolic_dims, scope.max_num_tokens)


def _checked(module: nn.Module, weight: Weight) -> torch.Tensor:
    found = attribute(module, weight.path)
    if layout(found) != weight.layout:
        raise PlanError(f"{weight.path}: wanted {weight.layout}, found {layout(found)}")
    return found


def forward_name(module: nn.Module) -> str:
    """Return which function a module's forward is, by which its plan is recognised."""
    return f"{type(module).__module__}.{type(module).forward.__qualname__}"


def kind(value: torch.Tensor) -> str:
    """Spell out what compiled code assumes of an argument of any size."""
    return f"{value.dtype} of {value.ndim} dimensions on {value.device.type}"


def layout(value: torch.Tensor) -> str:
    """Spell out what compiled code assumes of a tensor."""
    shape, stride = list(value.shape), list(value.stride())
    return f"{value.dtype} {shape} with strides {stride} on {value.device.type}"


def attribute(module: nn.Module, path: str) -> torch.Tensor:
    """Walk to a tensor below a module; PlanError: the path ends early or at something else."""
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, torch.Tensor):
        raise PlanError(f"{path}: wanted a tensor of {type(module).__name__}, found {found!r}")
    return found


def sources_of(
    inputs: Mapping[str, Any],
    module: nn.Module,
    given: Mapping[str, torch.Tensor],
    dims: Mapping[str, tuple[int, ...]],
) -> list[BoundInput]:
    """Return for each input of a graph where later calls find it, by the identity of the object.
    `inputs` has what Dynamo's code passed to the graph, `dims` the dimensions of tokens of the
    arguments in `given`."""
    arguments = {id(value): name for name, value in given.items()}
    weights = {id(tensor): path for path, tensor in _tensors(module)}
    tokens = next((name, of_tokens[0]) for name, of_tokens in dims.items() if of_tokens)
    num_tokens = given[tokens[0]].shape[tokens[1]]
    found = []
    for name, value in inputs.items():
        if id(value) in arguments:
            found.append(BoundInput(argument=arguments[id(value)]))
        elif id(value) in weights:
            found.append(BoundInput(weight=weights[id(value)]))
        elif isinstance(value, int) and value == num_tokens:
            found.append(BoundInput(argument=tokens[0], dim=tokens[1]))
        else:
            wanted = "an argument, its number of tokens, or a tensor of the module"
            raise PlanError(f"graph input {name}: wanted {wanted}, found none of them")
    return found


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a module and those below it, registered or not, with their paths."""
    for prefix, owner in module.named_modules():
        held = {**vars(owner), **owner._parameters, **owner._buffers}
        for name, value in held.items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{name}".removeprefix("."), value


def wrapped(scope: CompileScope, piece: Runnable, index: int) -> Runnable:
    """Return a piece as steps call it: behind a graph wrapper if some step replays pieces."""
    if not scope.config.graph_mode.requires_piecewise_compilation():
        return piece
    assert scope.pools is not None, "scope: wanted pools for the graphs of pieces, found none"
    return CUDAGraphWrapper(piece, CUDAGraphMode.PIECEWISE, scope.pools, trims_pool=index == 0)


def load_pieces(
    scope: CompileScope, manager: CompilerManager, plan: ForwardPlan
) -> Generator[None, None, dict[str, Runnable]]:
    """Load every artifact of a plan, and pause after each; return the pieces by name."""
    shapes, loaded = PieceShapes.of(scope.config), {}
    for piece in plan.pieces:
        runnables = {}
        for shape in shapes.all():
            runnables[shape] = manager.load(
                piece.key, index=piece.index, shape=shape, num_graphs=len(plan.pieces)
            )
            yield
        backend = PiecewiseBackend(
            index=piece.index,
            num_graphs=len(plan.pieces),
            tokens=piece.tokens,
            shapes=shapes,
            compiled_runnables=runnables,
        )
        loaded[piece.name] = wrapped(scope, backend, piece.index)
    return loaded
