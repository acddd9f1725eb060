"""A piece runs the artifact for the number of tokens at hand, and compiles when it may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import fx

from compile.graphs.capture import capture_window
from compile.pieces.piecewise import PieceShapes, PiecewiseBackend, TokenSource, find_tokens
from compile.pieces.split import example_value, placeholders
from compile.scope import Runnable, Shape


class Named:
    """A manager whose artifacts return the shape that they are for."""

    def __init__(self) -> None:
        self.calls: list[Shape] = []
        self.misses: list[str] = []
        self.inputs: dict[Shape, list[Any]] = {}

    def compile(
        self, graph: Any, example_inputs: Sequence[Any], *, shape: Shape, **_: Any
    ) -> Runnable:
        self.calls.append(shape)
        self.inputs[shape] = list(example_inputs)
        return lambda *args: (shape,)

    def load(self, key: str, **_: Any) -> Runnable:
        raise KeyError(key)


@pytest.fixture(scope="module")
def traced(toys: Any) -> tuple[fx.GraphModule, list[Any]]:
    """A graph of (number of tokens, tensor [T, 8]) and its fake inputs."""
    graph, _ = toys.trace(lambda x: x * 2 + x.shape[0], torch.randn(5, 8))
    return graph, [example_value(node) for node in placeholders(graph)]


def piece(traced: Any, manager: Any, **shapes: Any) -> PiecewiseBackend:
    graph, fake = traced
    symbol = fake[0].node.expr
    return PiecewiseBackend(
        index=0,
        num_graphs=1,
        tokens=find_tokens(fake, symbol),
        shapes=PieceShapes(**shapes),
        manager=manager,
        graph=graph,
        example_inputs=fake,
    )


def chosen(backend: PiecewiseBackend, num_tokens: int) -> Shape:
    (shape,) = backend(num_tokens, torch.empty(num_tokens, 8))
    return shape


@pytest.mark.feature("F02", "F03")
@given(
    sizes=st.sets(st.integers(1, 40), max_size=5),
    cuts=st.sets(st.integers(1, 40), max_size=6),
    counts=st.lists(st.integers(1, 60), max_size=20),
)
def test_dispatch_agrees_with_a_search_through_all_shapes(
    traced: Any, sizes: set[int], cuts: set[int], counts: list[int]
) -> None:
    ends = sorted(cuts)
    ranges = tuple((a, b - 1) for a, b in zip(ends[::2], ends[1::2], strict=False))
    backend = piece(traced, Named(), sizes=tuple(sizes), ranges=ranges)
    for n in (*counts, *counts, 100_000):
        inside = [r for r in ranges if r[0] <= n <= r[1]]
        wanted = n if n in sizes else inside[0] if inside else None
        assert chosen(backend, n) == wanted


@pytest.mark.feature("F01", "F02", "F04")
def test_every_shape_is_compiled_with_inputs_of_its_size_before_the_first_call(traced: Any) -> None:
    manager = Named()
    backend = piece(traced, manager, sizes=(2, 4), ranges=((8, 16),))
    for n in (1, 2, 3, 4, 9, 4, 2):
        chosen(backend, n)
    assert manager.calls == [None, 2, 4, (8, 16)]
    number, tensor = manager.inputs[4]
    assert number == 4 and type(number) is int
    assert (tensor.shape, tensor.stride()) == ((4, 8), (8, 1))
    for shape in (None, (8, 16)):
        number, tensor = manager.inputs[shape]
        assert isinstance(number, torch.SymInt) and isinstance(tensor.shape[0], torch.SymInt)


@pytest.mark.feature("F04")
def test_a_lazy_size_is_compiled_once_when_it_is_met_again_outside_of_a_capture(
    traced: Any,
) -> None:
    manager = Named()
    backend = piece(traced, manager, sizes=(2, 4), lazily=True)
    assert manager.calls == [None]
    assert [chosen(backend, n) for n in (4, 3)] == [None, None]
    with capture_window():  # a compiler may run kernels of its own, which no capture survives
        assert chosen(backend, 4) is None
    assert manager.calls == [None]
    assert [chosen(backend, n) for n in (4, 4, 2)] == [4, 4, None]
    assert manager.calls == [None, 4]


@pytest.mark.feature("F05")
def test_compiled_runnables_are_used_without_a_compiler(traced: Any) -> None:
    number, tensor = traced[1]
    runnables = {None: lambda x: "general", 4: lambda x: "four", (8, 16): lambda x: "range"}
    backend = PiecewiseBackend(
        index=0,
        num_graphs=1,
        tokens=find_tokens([tensor], number.node.expr),
        shapes=PieceShapes(),
        compiled_runnables=runnables,  # type: ignore[arg-type]
    )
    assert backend.tokens == TokenSource(0, 0)
    assert [backend(torch.empty(n, 8)) for n in (4, 5, 9)] == ["four", "general", "range"]
