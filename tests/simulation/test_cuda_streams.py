"""Pieces that are spread over streams give the same numbers in each order that a device may choose,
and others if one thing that keeps the streams in step is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from cuda_device import Order
from cuda_torch import simulated
from cuda_work import Case, Oracle, serve
from hypothesis import given
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from compile.graphs.pools import new_graph_pool, new_step_graph
from compile.passes.storages import Storages
from compile.passes.stream_ops import record_event, wait_event
from compile.passes.streams import Spread, _Emitter, spread_over_streams

ORDERS: list[tuple[Order, int]] = [("late", 0), ("eager", 1)]
ORDERS += [("random", seed) for seed in range(2, 6)]
Steps = list[tuple[str, int, int]]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["mm", "add", "part", "write", "write a part", "fill"]),
        st.integers(0, 20),
        st.integers(0, 20),
    ),
    min_size=2,
    max_size=14,
)


def program(steps: Steps) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """Return a function that computes, views and writes, and returns two of its values."""

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [torch.mm(x, x), x + 1]
        for kind, i, j in steps:
            one, two = values[i % len(values)], values[j % len(values)]
            if kind == "mm":
                values.append(torch.mm(one, two) / 4)
            elif kind == "add":
                values.append(one + two)
            elif kind == "part":
                values.append(one.t())
            elif kind == "write":
                one.add_(two.clone())
            elif kind == "write a part":
                one[:2].mul_(0.5)
            else:
                made = torch.empty_like(one)
                made.copy_(two)
                values.append(made)
        return values[-1], values[len(values) // 2]

    return run


def spread(steps: Steps, x: torch.Tensor) -> tuple[fx.GraphModule, Spread | None]:
    module = make_fx(program(steps), tracing_mode="fake")(x)
    found = spread_over_streams(module.graph, 3, Storages())
    module.recompile()
    return module, found


def on_device(module: fx.GraphModule, x: torch.Tensor, order: tuple[Order, int]) -> list[Any]:
    """Return what a graph gives as it is called, and replayed twice."""
    with simulated(*order) as device:
        given = torch.empty(x.shape, device="cuda")
        given.copy_(x)
        found = [[each.tolist() for each in module(given)]]
        graph = new_step_graph(new_graph_pool(torch.device("cuda")))
        outputs = graph.capture(lambda: module(given))
        device.synchronize()  # it was captured, and run, on another stream
        for factor in (1, 2):
            given.copy_(x * factor)
            graph.replay()
            found.append([each.tolist() for each in outputs])
    return found


def wanted_of(steps: Steps, x: torch.Tensor) -> list[Any]:
    return [[each.tolist() for each in program(steps)(x * factor)] for factor in (1, 1, 2)]


@given(STEPS)
def test_a_spread_graph_gives_what_it_would_on_one_stream(steps: Steps) -> None:
    x = torch.arange(16.0).reshape(4, 4) / 8
    module, found = spread(steps, x)
    if found is not None:
        assert found.makespan <= found.serial
        is_in_order(module.graph)
    wanted = wanted_of(steps, x)
    for order in ORDERS:
        assert on_device(module, x, order) == wanted


def is_in_order(graph: fx.Graph) -> None:
    """Assert that each event is recorded once, before anything waits for it."""
    recorded: set[int] = set()
    for node in graph.nodes:
        if node.target is record_event:
            assert node.args[0] not in recorded
            recorded.add(node.args[0])
        elif node.target is wait_event:
            assert node.args[0] in recorded


SIDE_BY_SIDE: Steps = [("mm", 0, 0), ("mm", 1, 1), ("mm", 2, 2), ("mm", 3, 3), ("add", 4, 5)]


def test_each_wait_is_needed() -> None:
    x = torch.arange(16.0).reshape(4, 4) / 8
    wanted = wanted_of(SIDE_BY_SIDE, x)
    module, _ = spread(SIDE_BY_SIDE, x)
    waits = module.graph.find_nodes(op="call_function", target=wait_event)
    assert waits
    for index in range(len(waits)):
        module, _ = spread(SIDE_BY_SIDE, x)
        wait = module.graph.find_nodes(op="call_function", target=wait_event)[index]
        module.graph.erase_node(wait)
        module.recompile()
        assert any(on_device(module, x, order) != wanted for order in ORDERS)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("models"))


MODE = "3-FULL_AND_PIECEWISE, 3 streams"


@pytest.mark.feature("O08", "O10")
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe", "DeepseekV3"])
def test_tokens_are_those_of_the_cpu_on_three_streams(family: str, oracle: Oracle) -> None:
    assert list(serve(Case(family, MODE), oracle, ORDERS)) == [[] for _ in ORDERS]


@pytest.mark.feature("O08", "O09")
def test_tokens_are_others_if_one_stream_does_not_wait(
    oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = _Emitter._waits

    def all_but_the_last(emitter: _Emitter) -> dict[fx.Node, list[fx.Node]]:
        waits = plan(emitter)
        waits.popitem()
        return waits

    monkeypatch.setattr(_Emitter, "_waits", all_but_the_last)
    monkeypatch.setenv("LOCKSTEP_CACHE_ROOT", str(tmp_path))  # the right pieces are in the other
    [found] = serve(Case("Qwen3", MODE), oracle, ORDERS[:1])
    assert any("tokens of request" in each for each in found)
