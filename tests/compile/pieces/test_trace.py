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
from compile.pieces.plan import (
    ForwardPlan,
    Guard,
    GuardError,
    PlanError,
    bind,
    check_guards,
    sources_of,
)
from compile.pieces.stitch import BoundInput, StitchError

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


def test_a_plan_says_where_its_inputs_are(plan: ForwardPlan) -> None:
    assert plan.arguments == ("input_ids", "positions")
    assert plan.symbolic_dims == ((0,), (0,))
    paths = [weight.path for weight in plan.weights]
    assert "embed.weight" in paths and "layers.2.o.bias" in paths
    assert plan.ops == {"toy_attention": "lockstep::toy_attention.default"}
    assert [piece.index for piece in plan.pieces] == [0, 1, 2, 3]


def test_a_plan_survives_json(plan: ForwardPlan) -> None:
    text = plan.to_json()
    assert ForwardPlan.from_json(text) == plan
    assert ForwardPlan.from_json(text).to_json() == text


@pytest.mark.parametrize(
    "broken",
    ["", "[]", "{}", '{"version": 0}', '{"version": 1}', '{"version": 1, "pieces": [1]}'],
)
def test_a_broken_plan_is_one_error(broken: str) -> None:
    with pytest.raises(PlanError, match="plan: wanted"):
        ForwardPlan.from_json(broken)


def test_a_bound_plan_equals_the_forward(toys: Any, compiled: Any, plan: ForwardPlan) -> None:
    again = ForwardPlan.from_json(plan.to_json())
    run = bind(again, compiled, pieces(compiled, plan))
    for n in (1, 2, 17):
        assert torch.equal(run(*toys.inputs(n)), toys.expected(compiled, n))


def test_a_module_of_another_shape_is_refused(toys: Any, compiled: Any, plan: ForwardPlan) -> None:
    other = toys.Plain()
    other.layers[1].q = nn.Linear(8, 4)
    wanted = r"layers.1.q.weight: wanted torch.float32 \[8, 8\] .*, found torch.float32 \[4, 8\]"
    with pytest.raises(PlanError, match=wanted):
        bind(plan, other, pieces(compiled, plan))
    with pytest.raises(PlanError, match=r"layers.2.q.weight: wanted a tensor of Toy, found None"):
        bind(plan, toys.Plain(2), pieces(compiled, plan))


def test_an_op_that_is_missing_is_refused(compiled: Any, plan: ForwardPlan) -> None:
    other = replace(plan, ops={"toy_attention": "lockstep::gone.default"})
    with pytest.raises(StitchError, match="lockstep::gone"):
        bind(other, compiled, pieces(compiled, plan))


# --- in another process -----------------------------------------------------------------------

CHILD = """
import importlib.util, json, sys
conftest = sys.argv[1] + "/tests/compile/pieces/conftest.py"
spec = importlib.util.spec_from_file_location("toys", conftest)
toys = importlib.util.module_from_spec(spec)
sys.modules["toys"] = toys
import torch
before = set(sys.modules)
spec.loader.exec_module(toys)
from compile.pieces.plan import kept
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
run = bind(plan, module, {one.name: piece(one) for one in plan.pieces})
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
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def test_another_process_runs_the_plan_and_imports_neither_dynamo_nor_inductor(
    in_a_fresh_process: Any,
) -> None:
    # Importing torch alone imports neither, so their absence afterwards says something.
    assert in_a_fresh_process == {"same": [True, True, True], "before": [], "after": []}


# --- sources ----------------------------------------------------------------------------------


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


def test_arguments_sizes_and_weights_are_told_apart(toys: Any) -> None:
    toy = toys.Plain()
    ids, positions = toys.inputs(5)
    call = {"input_ids": ids, "positions": positions}, {"input_ids": (0,)}
    passed = {"ids": ids, "positions": positions, "size": 5, "bias": toy.layers[1].o.bias}
    assert sources_of(passed, toy, *call) == [
        BoundInput(argument="input_ids"),
        BoundInput(argument="positions"),
        BoundInput(argument="input_ids", dim=0),
        BoundInput(weight="layers.1.o.bias"),
    ]
    for stranger in (4, ids.clone(), toys.Plain().layers[1].o.bias):
        with pytest.raises(PlanError, match="graph input other: wanted an argument, its number"):
            sources_of({"other": stranger}, toy, *call)


# --- guards -----------------------------------------------------------------------------------


def test_a_guard_names_its_line_where_it_does_not_hold() -> None:
    guards = (Guard("num_tokens <= 16", "model.py:7"), Guard("num_tokens % 2 == 0", "model.py:9"))
    check_guards(guards, 16)
    with pytest.raises(GuardError, match=r"num_tokens: wanted num_tokens <= 16, as model.py:7"):
        check_guards(guards, 18)
    with pytest.raises(GuardError, match=r"model.py:9 asked when traced, found 7"):
        check_guards(guards, 7)
