"""A real family, traced once and run in pieces, equals itself as it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compile.config import CompilationConfig, DynamicShapes
from compile.counters import counter
from compile.environment import DISABLE_COMPILE_CACHE
from compile.pieces.decorator import compile_as_is
from compile.scope import CompileScope, compile_scope

pytestmark = pytest.mark.usefixtures("torch_functions")


@pytest.fixture
def build(
    load: Any, make_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Any, Any]]:
    """Load a family as it is written, and again with a decoder whose pieces run as traced."""
    monkeypatch.setenv(DISABLE_COMPILE_CACHE, "1")

    def do(family: str = "Llama", **config: Any) -> tuple[Any, Any]:
        path, _ = make_checkpoint(family=family)
        plain, _ = load(path)
        scope = CompileScope(CompilationConfig(compiler="eager", **config))
        with compile_scope(scope):
            compiled, _ = load(path)
        return plain, compiled

    return do


def run(paged: Any, model: Any) -> list[torch.Tensor]:
    """Prefill two prompts, decode, and mix both with padding."""
    runner = paged(model)
    ids = torch.arange(60) * 11 % 509
    steps = [
        runner.step({"a": ids[:7], "b": ids[7:20]}),
        runner.step({"a": ids[20:21], "b": ids[21:22]}, num_padding_decodes=2),
        runner.step({"a": ids[22:23]}),
        runner.step({"b": ids[23:24], "c": ids[24:40]}, num_padding_tokens=3),
    ]
    return [logits for step in steps for logits in step.values()]


@pytest.mark.feature("A04")
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mixtral"])
def test_a_family_is_one_graph_of_pieces_with_equal_outputs(
    paged: Any, build: Any, family: str
) -> None:
    plain, compiled = build(family, level=3)
    expected = run(paged, plain)
    with counter.expect(num_graphs_seen=1, num_piecewise_graphs_seen=5):
        found = run(paged, compiled)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.feature("J01")
@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
@pytest.mark.parametrize("mode", list(DynamicShapes))
def test_every_mode_of_dynamic_shapes_traces_a_family(
    paged: Any, build: Any, mode: DynamicShapes, family: str
) -> None:
    plain, compiled = build(family, level=2, dynamic_shapes=mode)
    with counter.expect(num_graphs_seen=1, num_piecewise_graphs_seen=1):
        found = run(paged, compiled)
    for a, b in zip(run(paged, plain), found, strict=True):
        assert torch.equal(a, b)
    assert compiled.model.compiled_forward.plan.guards == ()


@pytest.mark.feature("A02")
@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_level_1_traces_a_whole_family_as_one_graph(paged: Any, build: Any, family: str) -> None:
    plain, compiled = build(family, level=1)
    traced = compile_as_is(compiled.model)
    compiled.forward = lambda ids, positions: traced(ids, positions)
    with counter.expect(num_graphs_seen=1):
        found = run(paged, compiled)
    for a, b in zip(run(paged, plain), found, strict=True):
        assert torch.equal(a, b)
