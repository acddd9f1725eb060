"""A piece is spread over streams: what depends on one another stays in order, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from compile.cache.compilers import EagerAdaptor
from compile.config import CompilationConfig
from compile.errors import FieldError
from compile.passes.storages import Storages
from compile.passes.stream_ops import (
    fork_streams,
    join_streams,
    record_event,
    set_stream,
    wait_event,
)
from compile.passes.streams import cost, spread_over_streams
from compile.resolve import StepLimits, resolve

CONTROLS = (fork_streams, join_streams, record_event, set_stream, wait_event)
LIMITS = StepLimits(max_num_seqs=4, max_num_batched_tokens=32)


def traced(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def lines(graph: fx.Graph) -> list[str]:
    """Return what is called, and for whom, without placeholders and the output."""
    names = {node: node.name for node in graph.nodes}
    return [
        f"{node.target.__name__}({', '.join(str(names.get(arg, arg)) for arg in node.args)})"
        if node.target in CONTROLS
        else node.name
        for node in graph.nodes
        if node.op == "call_function"
    ]


def shared_experts(
    x: torch.Tensor, router: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """A router beside the expert that all tokens share, as the article of the pass has it."""
    shared = torch.mm(torch.relu(torch.mm(x, up)), down)
    scores = torch.mm(x, router.t())
    return shared + scores


X = torch.randn(4, 8)
WEIGHTS = (torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 8))


@pytest.mark.feature("O08")
def test_a_router_runs_beside_the_expert_that_all_tokens_share() -> None:
    module = traced(shared_experts, X, *WEIGHTS)
    spread = spread_over_streams(module.graph, 2, Storages())
    assert spread is not None
    assert (spread.num_streams, spread.num_events) == (2, 1)
    assert (spread.makespan, spread.serial) == (22, 32)
    assert lines(module.graph) == [
        "fork_streams(2)",
        "mm",
        "relu",
        "t",
        "mm_1",
        "set_stream(1)",
        "mm_2",
        "record_event(0)",
        "set_stream(0)",
        "wait_event(0)",
        "add",
        "join_streams(x_1, t, mm_2)",
    ]


@pytest.mark.feature("O08")
def test_one_stream_or_nothing_to_run_beside_changes_nothing() -> None:
    module = traced(shared_experts, X, *WEIGHTS)
    before = str(module.graph)
    assert spread_over_streams(module.graph, 1, Storages()) is None
    assert str(module.graph) == before
    chain = traced(lambda x: torch.relu(torch.mm(x, x.t())) + 1, X)
    before = str(chain.graph)
    assert spread_over_streams(chain.graph, 4, Storages()) is None
    assert str(chain.graph) == before


@pytest.mark.feature("O09")
def test_what_nothing_reads_is_still_there_after_dead_code_is_taken_out() -> None:
    module = traced(shared_experts, X, *WEIGHTS)
    spread_over_streams(module.graph, 2, Storages())
    before = lines(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    assert lines(module.graph) == before
    for control in CONTROLS:
        assert control.__name__ in module.code


@pytest.mark.feature("O09")
def test_a_later_process_loads_what_was_spread(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = traced(shared_experts, X, *WEIGHTS)
    spread_over_streams(module.graph, 2, Storages())
    module.recompile()
    adaptor = EagerAdaptor()
    adaptor.initialize_cache(str(tmp_path))
    _, handle = adaptor.compile(module, [], {}, "key")
    assert handle is not None
    calls: list[str] = []
    for control in CONTROLS:
        name = control.__name__
        monkeypatch.setattr(f"{control.__module__}.{name}", lambda *_, n=name: calls.append(n))
    loaded = adaptor.load(handle)
    torch.testing.assert_close(loaded(X, *WEIGHTS), shared_experts(X, *WEIGHTS))
    assert calls == [each.partition("(")[0] for each in lines(module.graph) if "(" in each]


def test_costs_tell_views_from_products_and_products_from_the_rest() -> None:
    def each_kind(x: torch.Tensor) -> Any:
        made = x.new_empty(8, 8)
        made.copy_(torch.mm(x, x))
        first, _ = made.chunk(2)
        return first.view(-1) + x.shape[0]

    found = {
        node.name: cost(node)
        for node in traced(each_kind, torch.randn(8, 8)).graph.nodes
        if node.op == "call_function"
    }
    assert found.pop("mm") == 10
    assert found.pop("copy_") == found.pop("add") == 1
    assert set(found.values()) == {0}


@pytest.mark.parametrize(
    ("fields", "device", "wanted"),
    [
        ({"level": 3}, "cuda", "1 where Inductor compiles"),
        ({"level": 3, "use_inductor": False}, "cpu", "1 with device=cpu"),
    ],
)
def test_streams_that_would_have_no_effect_are_refused(
    fields: dict[str, Any], device: str, wanted: str
) -> None:
    config = CompilationConfig(**fields, max_num_streams=2)
    with pytest.raises(FieldError, match="max_num_streams: wanted " + wanted):
        resolve(config, LIMITS, device=device)


def test_without_a_compiler_there_is_one_stream_and_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = CompilationConfig(level=3, use_inductor=False, max_num_streams=2)
    assert resolve(config, LIMITS).max_num_streams == 2
    with caplog.at_level(logging.WARNING):
        assert resolve(config, LIMITS, enforce_eager=True).max_num_streams == 1
    assert "compilation.max_num_streams: without effect at level 0" in caplog.text
