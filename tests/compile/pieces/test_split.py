"""A graph is cut around its splitting ops, loses nothing, and equal pieces have equal keys."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx, nn

from compile.config import DEFAULT_SPLITTING_OPS
from compile.custom_op import direct_register_custom_op
from compile.errors import FieldError
from compile.pieces.split import (
    PieceInvariantError,
    SplitItem,
    canonical_key,
    check_pieces,
    example_value,
    placeholders,
    split_graph,
)

ATTENTION = "lockstep::toy_attention"


def _pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x * 2


def _pair_fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


def _attention_with_result(q: torch.Tensor) -> torch.Tensor:
    return q * 2


pair = direct_register_custom_op("toy_pair", _pair, fake_impl=_pair_fake)
norm = direct_register_custom_op("toy_norm", _norm, fake_impl=torch.empty_like)
silu = direct_register_custom_op("toy_silu", _norm, fake_impl=torch.empty_like)
returning = direct_register_custom_op(
    "toy_returning_attention", _attention_with_result, fake_impl=torch.empty_like
)


@dataclass
class Split:
    """A traced function of tensors [T, ...] and what it was split into."""

    graph: fx.GraphModule
    root: fx.GraphModule
    items: list[SplitItem]
    passed: tuple[Any, ...]

    @property
    def kinds(self) -> str:
        """`c` for a compiled piece, `e` for an eager one."""
        return "".join("e" if item.is_splitting else "c" for item in self.items)

    @property
    def symbol(self) -> Any:
        values = [example_value(node) for node in placeholders(self.graph)]
        sizes = [size for value in values for size in getattr(value, "shape", ())]
        return next(size for size in sizes if isinstance(size, torch.SymInt)).node.expr

    def run(self, x: torch.Tensor | None = None) -> Any:
        """Run the root on what was traced with, or on another first argument."""
        passed = [self._replaced(value, x) for value in self.passed]
        return self.root(*passed)

    @staticmethod
    def _replaced(value: Any, x: torch.Tensor | None) -> Any:
        if x is None:
            return value
        return x.shape[0] if isinstance(value, int) else x


@pytest.fixture
def split(toys: Any) -> Callable[..., Split]:
    """Trace a function and split it."""

    def do(forward: Callable[..., Any], *args: torch.Tensor, ops: Any = (ATTENTION,)) -> Split:
        graph, passed = toys.trace(forward, *args)
        return Split(graph, *split_graph(graph, ops), passed)

    return do


def attend(x: torch.Tensor, name: str = "layer") -> torch.Tensor:
    out = torch.empty_like(x)
    torch.ops.lockstep.toy_attention(x, out, name)
    return out


def ops_of(item: SplitItem) -> list[str]:
    """Names of what a piece calls."""
    calls = [node for node in item.graph.graph.nodes if node.op.startswith("call_")]
    return [str(getattr(node.target, "__name__", node.target)) for node in calls]


def key_of(item: SplitItem) -> str:
    return canonical_key(item.graph, [example_value(node) for node in placeholders(item.graph)])


X = torch.randn(5, 8)


# --- where it cuts ----------------------------------------------------------------------------


@pytest.mark.feature("E03")
def test_memory_reserved_between_splitting_ops_does_not_part_them(split: Any) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        a = attend(h, "a")
        return a + attend(h, "b")

    found = split(forward, X)
    assert found.kinds == "cec"
    assert ops_of(found.items[0]) == ["mul", "empty_like", "empty_like"]
    assert torch.equal(found.run()[0], forward(X))


def test_memory_for_what_a_splitting_op_returns_stays_behind_it(split: Any) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        first, _ = pair(x * 2)
        out = torch.empty_like(first)
        torch.ops.lockstep.toy_attention(first, out, "a")
        return out

    found = split(forward, X, ops=(ATTENTION, "lockstep::toy_pair"))
    assert found.kinds == "cece"
    assert ops_of(found.items[2]) == ["empty_like"]
    assert torch.equal(found.run()[0], forward(X))


def test_a_tuple_stays_with_its_op(split: Any) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        first, second = pair(x * 2)
        y = attend(x)
        a, b = y.chunk(2, dim=-1)
        return attend(torch.cat((a * 2, b), dim=-1)) + first * second

    found = split(forward, X, ops=(ATTENTION, "lockstep::toy_pair"))
    for item in found.items:
        for node in placeholders(item.graph):
            assert not isinstance(example_value(node), tuple | list)
    assert ops_of(found.items[1]) == ["toy_pair", "getitem", "getitem", "toy_attention"]
    assert torch.equal(found.run()[0], forward(X))


def test_an_indexed_tensor_is_read_after_the_op_that_writes_it(split: Any) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return attend(x * 2)[..., torch.tensor([1, 0])]

    found = split(forward, X)
    assert "getitem" in ops_of(found.items[2])
    assert torch.equal(found.run()[0], forward(X))


def test_sizes_cross_borders_one_by_one(split: Any) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        wide = x.repeat(2, 2)
        size = wide.size()
        y = attend(wide * 2)
        return y.reshape(size).sum(-1) + torch.ones(x.size(0) * 2)

    found = split(forward, X)
    for item in found.items:
        for node in item.graph.graph.nodes:
            assert not isinstance(example_value(node), torch.Size)
    for n in (5, 3):
        x = torch.randn(n, 8)
        assert torch.equal(found.run(x)[0], forward(x))


@pytest.mark.feature("E12")
def test_ops_that_are_not_listed_stay_in_compiled_pieces(split: Any) -> None:
    found = split(lambda x: norm(silu(attend(norm(x)))), X)
    assert [ops_of(item) for item in found.items] == [
        ["toy_norm", "empty_like"],
        ["toy_attention"],
        ["toy_silu", "toy_norm"],
    ]
    assert found.kinds == "cec"


@pytest.mark.feature("E13")
def test_a_splitting_op_at_the_start_or_the_end_leaves_no_empty_piece(split: Any) -> None:
    def first(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.ops.lockstep.toy_attention(x, out, "a")
        return out + 1

    def last(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.ops.lockstep.toy_attention(x + 1, out, "a")
        return out

    for forward, kinds in ((first, "ec"), (last, "ce"), (lambda x, out: x + out, "c")):
        found = split(forward, X, torch.zeros(5, 8))
        assert found.kinds == kinds
        assert all(ops_of(item) for item in found.items)


# --- the root ---------------------------------------------------------------------------------


@pytest.mark.feature("E02", "E04")
@pytest.mark.parametrize("num_layers", [1, 5])
def test_each_layer_adds_two_pieces_and_the_root_only_calls_them_and_hands_values_on(
    toys: Any, split: Any, num_layers: int
) -> None:
    toy, given = toys.Plain(num_layers), toys.inputs(6)
    found = split(toy.forward, *given)
    assert found.kinds == "ce" * num_layers + "c"
    assert [item.name for item in found.items] == [f"submod_{i.index}" for i in found.items]
    assert torch.equal(found.run()[0], toy(*given))
    allowed = {"placeholder", "get_attr", "call_module", "output"}
    for node in found.root.graph.nodes:
        assert node.op in allowed or node.target is operator.getitem
    calls = [node.target for node in found.root.graph.nodes if node.op == "call_module"]
    assert calls == [item.name for item in found.items]


# --- which ops --------------------------------------------------------------------------------


@pytest.mark.feature("E01")
@pytest.mark.parametrize("name", [ATTENTION, f"{ATTENTION}.default"])
def test_an_op_is_named_with_or_without_its_overload(split: Any, name: str) -> None:
    def overload(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.lockstep.toy_attention.default(x, out, "a")
        return out * 2

    for forward in (lambda x: attend(x) * 2, overload):
        assert split(forward, X, ops=(name,)).kinds == "cec"
        # One of the defaults may be missing in a model.
        assert split(forward, X, ops=DEFAULT_SPLITTING_OPS).kinds == "c"


@pytest.mark.feature("E01")
@pytest.mark.parametrize(
    "name", ["lockstep::no_such_op", f"{ATTENTION}.out", "nowhere::op", "toy_attention"]
)
def test_an_unknown_op_is_refused_by_name(split: Any, name: str) -> None:
    with pytest.raises(FieldError) as error:
        split(lambda x: x + 1, X, ops=(name,))
    assert error.value.field == "compilation.splitting_ops" and name in str(error.value)


# --- keys -------------------------------------------------------------------------------------


def test_what_changes_code_changes_the_key(split: Any) -> None:
    variants = [
        (lambda x: x * 2, X),
        (lambda x: x * 3, X),
        (lambda x: x * 2.0, X),
        (lambda x: x + 2, X),
        (lambda x: x * 2 + 1, X),
        (lambda x: x * 2, X.double()),
        (lambda x: x * 2, X.t().contiguous().t()),
        (lambda x: x * 2, X[:, :4].contiguous()),
        (lambda x: x.sum(0), X),
        (lambda x: x.sum(0, keepdim=True), X),
        (lambda x: x.sum(0, dtype=torch.float64), X),
        (lambda x: x[1:], X),
        (lambda x: x[2:], X),
    ]
    keys = [key_of(split(forward, x).items[0]) for forward, x in variants]
    assert len(set(keys)) == len(keys)


def test_names_and_symbols_do_not_change_the_key(split: Any) -> None:
    def one(first: torch.Tensor) -> torch.Tensor:
        doubled = first * 2
        return doubled + first.shape[0]

    def two(other_name: torch.Tensor) -> torch.Tensor:
        return other_name * 2 + other_name.shape[0]

    a, b = split(one, X), split(two, X)
    assert str(a.symbol) != str(b.symbol)
    assert key_of(a.items[0]) == key_of(b.items[0])


def test_constants_that_tracing_keeps_count_by_their_content() -> None:
    class Add(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.register_buffer("c", torch.full((2,), value))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.c

    keys = [canonical_key(fx.symbolic_trace(Add(value)), [X]) for value in (1.0, 1.0, 2.0)]
    assert keys[0] == keys[1] != keys[2]


# --- what piecewise graphs rely on ------------------------------------------------------------


def doubled_between(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.ops.lockstep.toy_attention(x, out, "a")
    doubled = WEIGHT * 2
    torch.ops.lockstep.toy_attention(x, out, "b")
    return out + doubled[0]


WEIGHT = nn.Parameter(torch.randn(3, 8), requires_grad=False)
RETURNING = "lockstep::toy_returning_attention"


@pytest.mark.feature("N08")
@pytest.mark.parametrize(
    ("forward", "others", "captured", "found"),
    [
        (lambda x: returning(x + 1) * 2, (), True, "submod_1: wanted attention that writes"),
        (doubled_between, (), True, "submod_2: wanted an input with the token dim"),
        (
            lambda x, y: (x * 2, y * 2),
            (torch.randn(7, 8),),
            False,
            "submod_0: wanted no dynamic dimension but",
        ),
    ],
)
def test_what_piecewise_graphs_rely_on_is_checked(
    split: Any, forward: Any, others: Any, captured: bool, found: str
) -> None:
    broken = split(forward, X, *others, ops=(ATTENTION, RETURNING))
    if captured:
        check_pieces(broken.items, broken.symbol, captured=False)
    with pytest.raises(PieceInvariantError, match=found):
        check_pieces(broken.items, broken.symbol, captured=captured)
