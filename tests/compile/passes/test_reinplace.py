"""Ops write in place again in a functional graph, and nobody who reads an older value notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from compile.custom_op import direct_register_custom_op
from compile.passes.aten import functional
from compile.passes.graph_pass import AUTO_FUNCTIONALIZED, operation
from compile.passes.reinplace import reinplace
from compile.passes.storages import Storages


def _triple(x: torch.Tensor) -> None:
    x.mul_(3)


def _swap(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)
    return kept + y


triple = direct_register_custom_op("test_triple", _triple, mutates_args=["x"])
swap = direct_register_custom_op(
    "test_swap", _swap, mutates_args=["x", "y"], fake_impl=lambda x, _: x.new_empty(x.shape)
)
CLONE = torch.ops.aten.clone.default


def num(graph: fx.Graph, target: Any) -> int:
    return len(graph.find_nodes(op="call_function", target=target))


def returned(x: torch.Tensor) -> Any:
    y, z = x * 2, x * 3
    found = swap(y, z)
    triple(y)
    return found, y, z


def argument(x: torch.Tensor) -> Any:
    triple(x)
    return x + 1


def viewed(x: torch.Tensor) -> Any:
    y = x * 2
    view = y[0]
    triple(y)
    return view + 1, y.view(-1)


def part(x: torch.Tensor) -> Any:
    y = x * 2
    triple(y[1])
    return y


WRITES: dict[Callable[..., Any], int] = {returned: 2, argument: 1, viewed: 1, part: 0}


@pytest.mark.parametrize("function", WRITES, ids=lambda function: function.__name__)
def test_a_piece_writes_as_its_source_does(function: Callable[..., Any]) -> None:
    """Into its own argument too. What is written through a view alone stays wrapped."""
    graphs: list[tuple[fx.GraphModule, Any]] = []

    def keep(module: fx.GraphModule, inputs: Any) -> Any:
        graphs.append((module, inputs))
        return module.forward

    torch._dynamo.reset()
    x = torch.arange(6.0).reshape(2, 3)
    one, two = x.clone(), x.clone()
    torch.compile(function, backend=keep, fullgraph=True)(x)
    module = functional(*graphs[0])
    assert all("val" in node.meta for node in module.graph.nodes if node.op != "output")
    num_wrapped = num(module.graph, AUTO_FUNCTIONALIZED)
    assert reinplace(module.graph, Storages()) == WRITES[function]
    module.graph.lint()
    module.recompile()
    assert num(module.graph, AUTO_FUNCTIONALIZED) == num_wrapped - WRITES[function]
    assert num(module.graph, CLONE) == 0
    wanted = function(one)
    for found, each in zip(
        module(two), wanted if isinstance(wanted, tuple) else (wanted,), strict=True
    ):
        assert torch.equal(found, each)
    assert torch.equal(one, two)


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "view", "triple", "swap"]), st.integers(0), st.integers(0)),
    min_size=1,
    max_size=12,
)


def program(steps: list[tuple[str, int, int]]) -> Callable[[torch.Tensor], tuple[Any, ...]]:
    """Return a function that keeps every value, older ones as well, to choose from."""

    def run(x: torch.Tensor) -> tuple[Any, ...]:
        values, bases = [x, x * 2], [1]
        for kind, i, j in steps:
            if kind == "add":
                values.append(values[i % len(values)] + values[j % len(values)])
                bases.append(len(values) - 1)
            elif kind == "view":
                values.append(values[i % len(values)].view(2, 3))
            else:
                chosen = [values[bases[i % len(bases)]], values[bases[j % len(bases)]]]
                op, names = (swap, "xy") if kind == "swap" else (triple, "x")
                if kind == "swap" and chosen[0] is chosen[1]:
                    continue
                bound = {f"_{name}_base_index": at for at, name in enumerate(names)}
                written = AUTO_FUNCTIONALIZED(op.default, **bound, _all_bases=chosen[: len(names)])
                for value in written:
                    if value is not None:
                        values.append(value)
                        bases.append(len(values) - 1)
        return tuple(values[max(0, len(values) - 3) :])

    return run


@given(STEPS)
def test_whoever_reads_an_older_value_finds_it(steps: list[tuple[str, int, int]]) -> None:
    """With as few copies as torch's own pass makes, for graphs that Inductor compiles."""
    from torch._inductor.fx_passes.post_grad import decompose_auto_functionalized
    from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops_core

    run, x = program(steps), torch.arange(6.0).reshape(2, 3)
    module, theirs = (make_fx(run, tracing_mode="fake")(x) for _ in range(2))
    wanted = module(x.clone())
    reinplace(module.graph, Storages())
    module.graph.lint()
    module.recompile()
    assert num(module.graph, AUTO_FUNCTIONALIZED) == 0
    found = module(x.clone())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    reinplace_inplaceable_ops_core(theirs.graph)
    decompose_auto_functionalized(theirs.graph)
    assert num(module.graph, CLONE) <= num(theirs.graph, CLONE)


def test_an_op_is_seen_through_its_wrapper() -> None:
    def run(x: torch.Tensor) -> Any:
        _, written = AUTO_FUNCTIONALIZED(triple.default, _x_base_index=0, _all_bases=[x * 2])
        return written + 1

    graph = make_fx(run, tracing_mode="fake")(torch.ones(2)).graph
    [seen] = [each for each in map(operation, graph.nodes) if each.kind == "lockstep::test_triple"]
    [base] = graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    assert seen.args == (base,)
