"""`PiecewiseBackend`: one piece of a forward, with an artifact for each shape it was compiled for:
for exactly this number of tokens, else for a range that holds it, else the general one."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from compile.config import CompilationConfig, CompilationLevel
from compile.graphs.capture import is_in_capture_window
from compile.pieces.split import is_symbolic
from compile.scope import Runnable, Shape

if TYPE_CHECKING:
    from compile.cache.manager import CompilerManager

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PieceShapes:
    """What each piece is compiled for besides the general shape."""

    sizes: tuple[int, ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()
    lazily: bool = False
    """A listed size is compiled when it is met for the second time."""

    @classmethod
    def of(cls, config: CompilationConfig) -> PieceShapes:
        """Read a resolved configuration; only pieces (level 3) have shapes of their own."""
        if config.level != CompilationLevel.PIECEWISE:
            return cls()
        sizes = tuple(size for size in config.compile_sizes or () if isinstance(size, int))
        return cls(sizes, config.compile_ranges, config.compile_lazily)

    def all(self) -> list[Shape]:
        return [None, *self.sizes, *self.ranges]


class TokenSource(NamedTuple):
    """Where the number of tokens is found among a piece's arguments."""

    argument: int
    dim: int | None
    """The dimension of a tensor; None: the argument is the number."""


class PiecewiseBackend:
    """Runs one piece. Invariant: every count has an artifact before the first call. `key` names the
    piece by what it computes, `index` by its place."""

    def __init__(
        self,
        *,
        index: int,
        num_graphs: int,
        tokens: TokenSource | None,
        shapes: PieceShapes,
        key: str = "",
        manager: CompilerManager | None = None,
        graph: fx.GraphModule | None = None,
        example_inputs: Sequence[Any] = (),
        compiled_runnables: Mapping[Shape, Runnable] | None = None,
    ) -> None:
        """Compile `graph` for all shapes, the general one included, or load them."""
        self.index = index
        self.key = key
        self.shapes = shapes
        self._num_graphs = num_graphs
        self.tokens = tokens
        self._manager = manager
        self._graph = graph
        self._example_inputs = list(example_inputs)
        self._calls: dict[int, int] = {}
        self.runnables: dict[Shape, Runnable] = {}
        self._by_count: dict[int, Runnable] = {}
        assert (graph is None) != (compiled_runnables is None), "piece: wanted a graph or runnables"
        if compiled_runnables is not None:
            self.runnables = dict(compiled_runnables)
        else:
            for shape in shapes.all():
                if not (shapes.lazily and isinstance(shape, int)):
                    self._compile(shape)
        if not shapes.lazily:
            # Nothing is compiled any more, and the graph keeps every layer's nodes.
            self._manager, self._graph, self._example_inputs = None, None, []

    def __call__(self, *args: Any) -> Any:
        """Run the piece; args: its inputs in order. Returns a tuple or list of its outputs."""
        if self.tokens is None:
            return self.runnables[None](*args)
        argument, dim = self.tokens
        count = args[argument] if dim is None else args[argument].shape[dim]
        runnable = self._by_count.get(count)
        return (runnable or self._look_up(count))(*args)

    def _look_up(self, count: int) -> Runnable:
        """Choose for a count that was not met before, or whose size is still to be compiled."""
        if self.shapes.lazily and count in self.shapes.sizes and count not in self.runnables:
            if is_in_capture_window():  # a compiler runs kernels of its own
                return self._choose(count)
            self._calls[count] = self._calls.get(count, 0) + 1
            if self._calls[count] == 1:
                return self._choose(count)
            self._compile(count)
        return self._by_count.setdefault(count, self._choose(count))

    def _choose(self, count: int) -> Runnable:
        if count in self.runnables:
            return self.runnables[count]
        for shape, runnable in self.runnables.items():
            if isinstance(shape, tuple) and shape[0] <= count <= shape[1]:
                return runnable
        return self.runnables[None]

    def _compile(self, shape: Shape) -> None:
        assert self._graph is not None and self._manager is not None
        inputs = self._example_inputs
        if isinstance(shape, int):
            inputs = sized(inputs, self.tokens, shape)
        started = time.perf_counter()
        self.runnables[shape] = self._manager.compile(
            self._graph,
            inputs,
            index=self.index,
            shape=shape,
            num_graphs=self._num_graphs,
            key=self.key,
        )
        took = time.perf_counter() - started
        logger.debug(
            "graph %d, shape %s: key %s, ready in %.3f s", self.index, shape, self.key, took
        )


def find_tokens(example_inputs: Sequence[Any], symbol: Any) -> TokenSource | None:
    """Find the argument that has the number of tokens: `symbol` itself, or as a dimension."""
    for argument, value in enumerate(example_inputs):
        if isinstance(value, torch.SymInt) and value.node.expr == symbol:
            return TokenSource(argument, None)
    for argument, value in enumerate(example_inputs):
        sizes: Sequence[Any] = value.shape if isinstance(value, torch.Tensor) else ()
        for dim, size in enumerate(sizes):
            if is_symbolic(size) and size.node.expr == symbol:
                return TokenSource(argument, dim)
    return None


def sized(example_inputs: Sequence[Any], tokens: TokenSource | None, count: int) -> list[Any]:
    if tokens is None:
        raise ValueError(f"compile_sizes: wanted a piece with a token dimension, found {count}")
    carrier = example_inputs[tokens.argument]
    size = carrier if tokens.dim is None else carrier.shape[tokens.dim]
    values = {size.node.expr: count}
    return [_sized(value, values) for value in example_inputs]


def _sized(value: Any, values: Mapping[Any, int]) -> Any:
    if isinstance(value, torch.SymInt):
        return _number(value, values)
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else ()
    if all(type(size) is int for size in sizes):
        return value
    shape = [_number(size, values) for size in value.shape]
    stride = [_number(step, values) for step in value.stride()]
    with value.fake_mode:
        return torch.empty_strided(
            shape, stride, dtype=value.dtype, device=value.device, requires_grad=value.requires_grad
        )


def _number(size: Any, values: Mapping[Any, int]) -> int:
    return int(size.node.expr.xreplace(dict(values)) if isinstance(size, torch.SymInt) else size)
