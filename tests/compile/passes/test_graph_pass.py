"""Patterns find an operation in every spelling, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compile.passes.graph_pass import (
    Bind,
    Cast,
    Match,
    Op,
    Scalar,
    find,
    matched_nodes,
    operation,
    value,
    writes,
)

X, Y = torch.ones(3, 4), torch.ones(3, 4)
SCALED = Op("mul", (Bind("x"), Op("add", (Bind("y"), Scalar("eps")))), name="product")


def matches(pattern: Any, module: torch.fx.GraphModule) -> list[Match]:
    """Return the first match of each node."""
    found = (next(find(pattern, node), None) for node in module.graph.nodes)
    return [match for match in found if match is not None]


SPELLINGS: dict[str, Callable[..., torch.Tensor]] = {
    "operators": lambda x, y: x * (y + 0.5),
    "functions": lambda x, y: torch.mul(x, torch.add(y, 0.5)),
    "methods": lambda x, y: x.mul(y.add(0.5)),
    "other order": lambda x, y: (0.5 + y) * x,
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_one_pattern_finds_every_spelling(graph_of: Any, name: str) -> None:
    graph = graph_of(SPELLINGS[name], X, Y)
    [match] = matches(SCALED, graph)
    assert [match[name].name.strip("l_1") for name in ("x", "y")] == ["x", "y"]
    assert match["eps"] == 0.5
    assert match["product"] in matched_nodes(match)
    assert len(matched_nodes(match)) == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x * (y + x),
        lambda x, y: x * torch.add(y, 0.5, alpha=2),
        lambda x, y: x / (y + 0.5),
        lambda x, y: x * (y - 0.5),
    ],
    ids=["tensor for scalar", "option", "other op outside", "other op inside"],
)
def test_what_is_something_else_is_not_found(graph_of: Any, function: Any) -> None:
    assert matches(SCALED, graph_of(function, X, Y)) == []


def test_a_cast_may_be_there_or_not(graph_of: Any) -> None:
    pattern = Op("rsqrt", (Cast(Op("add", (Bind("x"), Bind("y")), name="sum"), name="wide"),))

    def casts(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.rsqrt((x + y).float()), torch.rsqrt((x + y).to(torch.float64)), (x + y).rsqrt()

    found = matches(pattern, graph_of(casts, X.bfloat16(), Y.bfloat16()))
    assert [value(match["wide"]).dtype for match in found] == [
        torch.float32,
        torch.float64,
        torch.bfloat16,
    ]
    assert [match["wide"] is match["sum"] for match in found] == [False, False, True]


@pytest.mark.parametrize(
    ("function", "is_found"),
    [
        (lambda x: x.mean(-1, keepdim=True), True),
        (lambda x: torch.mean(x, 1, True), True),
        (lambda x: torch.mean(x, [1], keepdim=True), True),
        (lambda x: x.mean(0, keepdim=True), False),
        (lambda x: x.mean(-1), False),
        (lambda x: x.mean(-1, keepdim=True, dtype=torch.float64), False),
    ],
)
def test_a_mean_of_rows_keeps_its_dimension(graph_of: Any, function: Any, is_found: bool) -> None:
    kinds = [operation(node).kind for node in graph_of(function, X).graph.nodes]
    assert ("row_mean" in kinds) == is_found


@pytest.mark.parametrize("function", [lambda x: x * x, lambda x: x**2, torch.square])
def test_squares_are_squares(graph_of: Any, function: Any) -> None:
    assert "square" in [operation(node).kind for node in graph_of(function, X).graph.nodes]


def test_a_write_is_noticed(graph_of: Any) -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y.mul_(2)
        y[0] = 3
        return y

    assert sum(writes(node) for node in graph_of(write, X).graph.nodes) >= 2
    assert not any(writes(node) for node in graph_of(lambda x: x * 2 + x, X).graph.nodes)
