"""A piece runs the artifact for the number of tokens at hand, and compiles when it may."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import fx

from compile.config import CompilationConfig
from compile.graphs.capture import capture_window
from compile.pieces.piecewise import (
    PieceError,
    PieceShapes,
    PiecewiseBackend,
    Range,
    TokenSource,
    find_tokens,
    first_gap,
)
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


# --- dispatch ---------------------------------------------------------------------------------


@pytest.mark.feature("F02")
def test_an_exact_size_wins_and_others_run_the_general_artifact(traced: Any) -> None:
    backend = piece(traced, Named(), sizes=(1, 4))
    assert [chosen(backend, n) for n in (4, 7, 1, 4, 7)] == [4, None, 1, 4, None]


@pytest.mark.feature("F03")
def test_exact_sizes_come_before_ranges_and_gaps_run_the_general_artifact(traced: Any) -> None:
    backend = piece(traced, Named(), sizes=(6,), ranges=(Range(5, 8), Range(16, 32)))
    table = {4: None, 5: (5, 8), 6: 6, 8: (5, 8), 9: None, 16: (16, 32), 32: (16, 32), 33: None}
    table |= {1: None, 100_000: None}
    assert Range() == (1, sys.maxsize)
    assert {n: chosen(backend, n) for n in table} == table


@given(
    sizes=st.sets(st.integers(1, 40), max_size=5),
    cuts=st.sets(st.integers(1, 40), max_size=6),
    counts=st.lists(st.integers(1, 60), max_size=20),
)
def test_dispatch_agrees_with_a_search_through_all_shapes(
    traced: Any, sizes: set[int], cuts: set[int], counts: list[int]
) -> None:
    ends = sorted(cuts)
    ranges = tuple(Range(a, b - 1) for a, b in zip(ends[::2], ends[1::2], strict=False))
    backend = piece(traced, Named(), sizes=tuple(sizes), ranges=ranges)
    for n in counts:
        inside = [tuple(r) for r in ranges if r.low <= n <= r.high]
        wanted = n if n in sizes else inside[0] if inside else None
        assert chosen(backend, n) == wanted


@pytest.mark.feature("F02")
def test_a_count_is_searched_for_once(traced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = piece(traced, Named(), sizes=(4,), ranges=(Range(5, 8),))
    searched: list[int] = []
    search = backend._choose
    monkeypatch.setattr(backend, "_choose", lambda n: (searched.append(n), search(n))[1])
    for n in (4, 6, 9) * 3:
        chosen(backend, n)
    assert searched == [4, 6, 9]


def test_the_number_of_tokens_may_be_a_dimension_of_a_tensor(traced: Any) -> None:
    number, tensor = traced[1]
    tokens = find_tokens([tensor], number.node.expr)
    assert tokens == TokenSource(0, 0)
    backend = PiecewiseBackend(
        index=0,
        num_graphs=1,
        tokens=tokens,
        shapes=PieceShapes((4,)),
        compiled_runnables={None: lambda x: None, 4: lambda x: 4},
    )
    assert [backend(torch.empty(n, 8)) for n in (4, 5)] == [4, None]


# --- compiling --------------------------------------------------------------------------------


@pytest.mark.feature("F01", "F02", "F04")
def test_every_shape_is_compiled_with_inputs_of_its_size_before_the_first_call(traced: Any) -> None:
    manager = Named()
    backend = piece(traced, manager, sizes=(2, 4), ranges=(Range(8, 16),))
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
def test_a_lazy_size_is_compiled_once_when_it_is_met_again(traced: Any) -> None:
    manager = Named()
    backend = piece(traced, manager, sizes=(2, 4), lazily=True)
    assert manager.calls == [None]
    assert [chosen(backend, n) for n in (4, 3, 4, 4, 2)] == [None, None, 4, 4, None]
    assert manager.calls == [None, 4]


def test_a_lazy_size_is_not_compiled_while_a_graph_is_captured(traced: Any) -> None:
    """A compiler may run kernels of its own, which no capture survives."""
    manager = Named()
    backend = piece(traced, manager, sizes=(2, 4), lazily=True)
    assert chosen(backend, 4) is None
    with capture_window():
        assert chosen(backend, 4) is None
    assert manager.calls == [None]
    assert chosen(backend, 4) == 4


def test_shapes_are_read_from_a_resolved_configuration() -> None:
    config = CompilationConfig(
        level=3, compile_sizes=(4, 1), compile_ranges=((9, 16), (2, 8)), compile_lazily=True
    )
    assert PieceShapes.of(config) == PieceShapes((4, 1), (Range(2, 8), Range(9, 16)), True)
    assert PieceShapes.of(CompilationConfig(level=2)) == PieceShapes()


# --- loading ----------------------------------------------------------------------------------


def loaded(runnables: dict[Shape, Runnable]) -> PiecewiseBackend:
    return PiecewiseBackend(
        index=3,
        num_graphs=4,
        tokens=TokenSource(0, None),
        shapes=PieceShapes(),
        compiled_runnables=runnables,
    )


@pytest.mark.feature("F05")
def test_compiled_runnables_are_used_without_a_compiler() -> None:
    backend = loaded({None: lambda n: "general", 4: lambda n: "four", (8, 16): lambda n: "range"})
    assert [backend(n) for n in (4, 5, 9)] == ["four", "general", "range"]


@pytest.mark.feature("F05")
def test_a_piece_has_a_graph_or_runnables_and_never_both_or_neither(traced: Any) -> None:
    common: dict[str, Any] = {
        "index": 0,
        "num_graphs": 1,
        "tokens": TokenSource(0, None),
        "shapes": PieceShapes(),
    }
    with pytest.raises(PieceError, match="found neither"):
        PiecewiseBackend(**common)
    with pytest.raises(PieceError, match="found both"):
        PiecewiseBackend(**common, graph=traced[0], compiled_runnables={None: lambda: None})


@pytest.mark.feature("F03")
@pytest.mark.parametrize(
    ("shapes", "count"),
    [([2, (3, 9)], 1), ([(1, 8), (10, sys.maxsize)], 9), ([(1, 8), 9], 10), ([], 1)],
)
def test_without_a_general_artifact_a_gap_is_an_error_before_serving(
    shapes: list[Any], count: int
) -> None:
    assert first_gap(shapes) == count
    with pytest.raises(PieceError, match=f"piece 3: wanted an artifact .*, found none for {count}"):
        loaded({shape: lambda n: n for shape in shapes})


@pytest.mark.feature("F03")
def test_ranges_without_a_gap_need_no_general_artifact() -> None:
    backend = loaded(
        {(2, 8): lambda n: "low", 1: lambda n: "one", (9, sys.maxsize): lambda n: "up"}
    )
    assert [backend(n) for n in (1, 2, 8, 9, 10_000)] == ["one", "low", "low", "up", "up"]
