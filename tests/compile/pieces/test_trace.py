"""A plan is plain data: another process binds it and runs the forward without tracing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compile.pieces.decorator import support_torch_compile
from compile.pieces.plan import ForwardPlan, PlanError, bind
from compile.pieces.stitch import StitchError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def compiled(toys: Any) -> Any:
    """A toy that was called once."""
    toy = toys.build()
    toy(*toys.inputs(6))
    return toy


@pytest.fixture
def plan(compiled: Any) -> ForwardPlan:
    found: ForwardPlan = compiled.compiled_forward.plan
    return found


def pieces(compiled: Any, plan: ForwardPlan) -> Any:
    return compiled.compiled_forward.compiler.pieces_of(plan)


def test_a_module_of_another_shape_is_refused(toys: Any, compiled: Any, plan: ForwardPlan) -> None:
    other = toys.Plain()
    other.layers[1].q = nn.Linear(8, 4)
    wanted = r"layers.1.q.weight: wanted torch.float32 \[8, 8\] .*, found torch.float32 \[4, 8\]"
    with pytest.raises(PlanError, match=wanted):
        bind(toys.scope(), plan, other, pieces(compiled, plan))
    with pytest.raises(PlanError, match=r"layers.2.q.weight: wanted a tensor of Toy, found None"):
        bind(toys.scope(), plan, toys.Plain(2), pieces(compiled, plan))


def test_an_op_that_is_missing_is_refused(toys: Any, compiled: Any, plan: ForwardPlan) -> None:
    other = replace(plan, ops={"toy_attention": "lockstep::gone.default"})
    with pytest.raises(StitchError, match="lockstep::gone"):
        bind(toys.scope(), other, compiled, pieces(compiled, plan))


CHILD = """
import importlib.util, json, sys
conftest = sys.argv[1] + "/tests/compile/pieces/conftest.py"
spec = importlib.util.spec_from_file_location("toys", conftest)
toys = importlib.util.module_from_spec(spec)
sys.modules["toys"] = toys
import torch
before = set(sys.modules)
spec.loader.exec_module(toys)
from compile.scope import CompileScope
from compile.pieces.piecewise import PiecewiseBackend, PieceShapes
from compile.pieces.plan import ForwardPlan, bind
given = json.load(open(sys.argv[2]))
plan = ForwardPlan.from_json(given["plan"])
def piece(one):
    names = {}
    exec(given["code"][str(one.index)], {"torch": torch}, names)
    return PiecewiseBackend(
        index=one.index,
        num_graphs=len(plan.pieces),
        tokens=one.tokens,
        shapes=PieceShapes(),
        compiled_runnables={None: lambda *args: names["forward"](None, *args)},
    )
torch.manual_seed(0)
module = toys.Toy()
run = bind(CompileScope(), plan, module, {one.name: piece(one) for one in plan.pieces})
same = [torch.equal(run(*toys.inputs(n)), module(*toys.inputs(n))) for n in (1, 5, 33)]
heavy = ("torch._dynamo", "torch._inductor")
print(json.dumps({
    "same": same,
    "before": sorted(m for m in before if m in heavy),
    "after": sorted(m for m in sys.modules if m in heavy),
}))
"""


@pytest.fixture(scope="module")
def in_a_fresh_process(compiled: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Bind the plan in a process that never traced, with the pieces' code as text."""
    state = compiled.compiled_forward
    code = {}
    for item in state.compiler.items:
        if not item.is_splitting:
            code[state.compiler.backends[item.name].index] = item.graph.code
    path = tmp_path_factory.mktemp("plan") / "given.json"
    path.write_text(json.dumps({"plan": state.plan.to_json(), "code": code}))
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(ROOT), str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def test_another_process_runs_the_plan_and_imports_neither_dynamo_nor_inductor(
    in_a_fresh_process: Any,
) -> None:
    # Importing torch alone imports neither, so their absence afterwards says something.
    assert in_a_fresh_process == {"same": [True, True, True], "before": [], "after": []}


class Odd(nn.Module):
    """Takes tensors from where a plan can and cannot find them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("buffer", torch.ones(8))
        self.scale = torch.full((8,), 2.0)
        self.table = [torch.ones(8)]
        self.inner = nn.ModuleDict({"a": nn.LayerNorm(8)})
        self.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = input_ids.float().unsqueeze(-1).expand(-1, 8)
        if self.kind == "buffer":
            return x + self.buffer
        if self.kind == "attribute":
            return x * self.scale
        if self.kind == "inner":
            return self.inner["a"](x)
        if self.kind == "item":
            return x + self.table[0]
        return x + GLOBAL


GLOBAL = torch.ones(8)
CompiledOdd = support_torch_compile(Odd)


@pytest.mark.parametrize(
    ("kind", "paths"),
    [
        ("buffer", ["buffer"]),
        ("attribute", ["scale"]),
        ("inner", ["inner.a.weight", "inner.a.bias"]),
    ],
)
def test_tensors_below_the_module_are_found(toys: Any, kind: str, paths: list[str]) -> None:
    module = toys.build(lambda: CompiledOdd(kind))
    ids = torch.arange(5)
    assert torch.equal(module(ids), Odd.forward(module, ids))
    assert [weight.path for weight in module.compiled_forward.plan.weights] == paths


@pytest.mark.parametrize(("kind", "name"), [("item", "table"), ("global", "GLOBAL")])
def test_tensors_from_elsewhere_are_refused_by_name(toys: Any, kind: str, name: str) -> None:
    module = toys.build(lambda: CompiledOdd(kind))
    with pytest.raises(
        PlanError, match=f"graph input (?i:.*{name}).*: wanted an argument, its number"
    ):
        module(torch.arange(5))
