"""Graphs as passes meet them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx


def _torch_graph(function: Callable[..., Any], *args: Any) -> torch.fx.GraphModule:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True)(*args)
    torch._dynamo.reset()
    return graphs[0]


def _aten_graph(function: Callable[..., Any], *args: Any) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


@pytest.fixture(params=[_torch_graph, _aten_graph], ids=["torch", "aten"])
def graph_of(request: pytest.FixtureRequest) -> Any:
    """Traces a function: as Dynamo writes it, or to ATen ops."""
    return request.param
