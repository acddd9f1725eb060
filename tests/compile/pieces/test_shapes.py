"""Which code makes a graph for each size, how it is found, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from compile.custom_op import direct_register_custom_op
from compile.pieces.diagnose import recompile_hazards
from compile.pieces.shapes import next_pow2

X = torch.ones(3)


@pytest.fixture(autouse=True)
def _forget_traces() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def num_graphs(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> int:
    """Return how many graphs the calls take, and hold their results against the function's own."""
    torch._dynamo.reset()
    graphs = []

    def keep(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(function, backend=keep, fullgraph=True)
    for args in calls:
        if args[0] is not X:
            torch._dynamo.mark_dynamic(args[0], 0)
        assert torch.equal(compiled(*args), function(*args))
    return len(graphs)


# --- a power of two -----------------------------------------------------------------------------


@pytest.mark.feature("J05")
def test_next_pow2_is_exact() -> None:
    power = 1
    for n in range(2**20 + 1):
        if n > power:
            power *= 2
        assert next_pow2(n) == power
    for k in range(2, 62):
        assert [next_pow2(2**k + i) for i in (-1, 0, 1)] == [2**k, 2**k, 2 ** (k + 1)]
    assert [next_pow2(n) for n in (2**62 - 1, 2**62, 2**62 + 1)] == [2**62, 2**62, 2**63]
    assert [next_pow2(n) for n in (-5, 0, 1)] == [1, 1, 1]


# --- what makes graphs, and what does not ---------------------------------------------------------


def by_bit_length(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * (1 << (n - 1).bit_length())


def by_next_pow2(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * next_pow2(n)


def by_max(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    return x + max(sizes)


def by_sym_max(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    return x + torch.sym_max(sizes[0], sizes[1])


def by_branch(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] > 16 else x + 1


def by_where(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.tensor(x.shape[0] > 16), x * 2, x + 1)


def by_loop(x: torch.Tensor) -> torch.Tensor:
    while x.shape[0] > 1:
        x = x[: x.shape[0] // 2]
    return x


def with_integer(op: Any) -> Callable[..., Any]:
    def by_op(x: torch.Tensor, n: int) -> torch.Tensor:
        found: torch.Tensor = op(x, n)
        return found

    return by_op


def times(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * n


def times_fake(x: torch.Tensor, n: int) -> torch.Tensor:
    return torch.empty_like(x)


VALUES = [(X, n) for n in (5, 9, 17, 33, 100)]
LISTS = [(X, sizes) for sizes in ([3, 4], [5, 9], [7, 2], [6, 11])]
LENGTHS = [(torch.ones(n),) for n in (5, 9, 17, 33, 100)]


@pytest.mark.feature("J05")
def test_bit_length_makes_a_graph_for_each_value_and_next_pow2_two_for_all() -> None:
    assert num_graphs(by_bit_length, VALUES) == len(VALUES)
    # The first value is taken for a constant, the second makes it a symbol.
    assert num_graphs(by_next_pow2, VALUES) == 2


@pytest.mark.feature("J05")
def test_next_pow2_of_a_dynamic_size_is_one_graph() -> None:
    assert num_graphs(lambda x: x.new_zeros(next_pow2(x.shape[0])), LENGTHS) == 1


@pytest.mark.feature("J05")
def test_a_branch_on_a_size_makes_a_graph_for_each_side_and_where_one_for_both() -> None:
    assert num_graphs(by_branch, LENGTHS) == 2
    assert num_graphs(by_where, LENGTHS) == 1


@pytest.mark.feature("J05")
def test_the_largest_of_a_changing_list_makes_no_graph_for_each_order() -> None:
    # Current torch serves max() of symbols as well; what matters is that nothing depends on it.
    assert num_graphs(by_sym_max, LISTS) == 2
    assert num_graphs(by_max, LISTS) >= 2


@pytest.mark.feature("J05")
def test_an_op_with_a_plain_integer_makes_a_graph_for_each_value() -> None:
    library = torch.library.Library("test_shapes", "FRAGMENT")
    library.define("times(Tensor x, int n) -> Tensor")
    library.impl("times", times, "CompositeExplicitAutograd")
    torch.library.register_fake("test_shapes::times", times_fake, lib=library)
    plain = torch.ops.test_shapes.times
    ours = direct_register_custom_op("test_shapes_times", times, fake_impl=times_fake)
    assert num_graphs(with_integer(plain), VALUES) == len(VALUES)
    assert num_graphs(with_integer(ours), VALUES) == 2


# --- finding them ---------------------------------------------------------------------------------


@pytest.mark.feature("J05")
@pytest.mark.parametrize(
    ("function", "better", "pattern", "remedy"),
    [
        (by_bit_length, by_next_pow2, "bit_length()", "next_pow2"),
        (by_max, by_sym_max, "max() of a list", "torch.sym_max"),
        (by_branch, by_where, "a branch on a size", "torch.where"),
        (by_loop, by_where, "a loop on a size", "torch.where"),
    ],
)
def test_a_hazard_is_named_with_its_line_and_its_remedy_which_is_none(
    function: Callable[..., Any], better: Callable[..., Any], pattern: str, remedy: str
) -> None:
    assert recompile_hazards(better) == []
    (hazard,) = recompile_hazards(function)
    line = f"{__file__}:{function.__code__.co_firstlineno + 1}"
    assert hazard.startswith(f"{line}: wanted {remedy}") and hazard.endswith(f", found {pattern}")


def test_hazards_stand_in_the_order_of_their_lines() -> None:
    def both(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        n = min(sizes)
        if n > 3 and x.numel() > n:
            n = n.bit_length()
        return x + max(n, 3)

    found = recompile_hazards(both)
    assert [hazard.rpartition("found ")[2] for hazard in found] == [
        "min() of a list",
        "a branch on a size",
        "bit_length()",
    ]


# --- data that decides --------------------------------------------------------------------------


def by_sum(x: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.sum(data) >= 4 else x / 2


def by_bool(x: torch.Tensor, is_large: bool) -> torch.Tensor:
    return x * 2 if is_large else x / 2


def by_tensor(x: torch.Tensor, is_large: torch.Tensor) -> torch.Tensor:
    return torch.where(is_large, x * 2, x / 2)


DATA = [torch.tensor([a, b]) for a, b in ((1, 2), (2, 2), (5, 0), (0, 1), (9, 9))]


def test_a_decision_made_before_the_forward_takes_two_graphs_as_a_bool_and_one_as_a_tensor() -> (
    None
):
    precomputed = [torch.sum(data) >= 4 for data in DATA]
    for decided in (by_bool, by_tensor):
        for data, is_large in zip(DATA, precomputed, strict=True):
            value = bool(is_large) if decided is by_bool else is_large
            assert torch.equal(decided(X, value), by_sum(X, data))
    assert num_graphs(by_bool, [(X, bool(is_large)) for is_large in precomputed]) == 2
    assert num_graphs(by_tensor, [(X, is_large) for is_large in precomputed]) == 1
