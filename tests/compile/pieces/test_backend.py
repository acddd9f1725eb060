"""The backend does its steps in order, before anything is served, once per module."""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compile.config import CUDAGraphMode
from compile.counters import counter
from compile.graphs.wrapper import CUDAGraphWrapper
from compile.pieces import plan
from compile.pieces.backend import PiecewiseCompiler
from compile.pieces.decorator import support_torch_compile
from compile.pieces.piecewise import PiecewiseBackend
from compile.pieces.split import PieceInvariantError
from compile.report import CompileReport
from compile.scope import model_tag

PIECEWISE = CUDAGraphMode.PIECEWISE


# --- levels -----------------------------------------------------------------------------------


@pytest.mark.feature("A03")
def test_level_2_enters_neither_dynamo_nor_a_guard_after_the_first_call(
    toys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = toys.build(level=2)
    toy(*toys.inputs(4))
    set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame
    entered: list[Any] = []

    def note(callback: Any) -> Any:
        entered.append(callback)
        return set_eval_frame(callback)

    monkeypatch.setattr(torch._dynamo.eval_frame, "set_eval_frame", note)
    toy(*toys.inputs(7))
    assert entered == []
    # The hook is the one that Dynamo goes through.
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert entered


@pytest.mark.feature("I05")
def test_two_instances_share_nothing(toys: Any) -> None:
    first, second = toys.build(), toys.build()
    with torch.no_grad():
        second.embed.weight.mul_(3)
    with counter.expect(num_graphs_seen=2):
        for toy in (first, second, first):
            toys.check(toy, 5)
    assert not torch.equal(first(*toys.inputs(5)), second(*toys.inputs(5)))
    assert first.compiled_forward.compiler is not second.compiled_forward.compiler


def test_many_instances_of_a_class_do_not_use_dynamos_limit_up(toys: Any) -> None:
    limit = torch._dynamo.config.recompile_limit
    for _ in range(limit + 2):
        toys.build(lambda: toys.Compiled(1))(*toys.inputs(3))


def test_an_instance_of_another_width_is_traced_with_fixed_weights(toys: Any) -> None:
    class Wide(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            # Of parameters Dynamo keeps the shape fixed by itself, of other tensors it does not.
            self.weight = torch.arange(width)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids.unsqueeze(-1) * self.weight

    made = support_torch_compile(Wide)
    ids = torch.arange(5)
    for width in (3, 4, 6):
        module = toys.build(lambda width=width: made(width))
        assert torch.equal(module(ids), ids.unsqueeze(-1) * torch.arange(width))


class RealTensors(TorchDispatchMode):
    """Notes ops on tensors that have memory."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [a for a in tree_leaves((args, result)) if torch.is_tensor(a)]
        plain = [tensor for tensor in tensors if type(tensor) in (torch.Tensor, nn.Parameter)]
        if any(not torch._is_functional_tensor(each) and each.untyped_storage() for each in plain):
            self.ops.append(str(func))
        return result


@pytest.mark.feature("E06")
def test_compiling_runs_no_kernel(toys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = PiecewiseCompiler.__call__
    seen: list[str] = []

    def watched(self: Any, graph: Any, inputs: Any) -> Any:
        with RealTensors() as mode:
            torch.ones(1).mul(2)
            assert mode.ops == ["aten.ones.default", "aten.mul.Tensor"]
            mode.ops.clear()
            forward = run(self, graph, inputs)
            seen.extend(["compiled", *mode.ops])
        return forward

    class Making(toys.Plain):  # type: ignore[misc]
        """Makes a tensor of nothing but a size, and broadcasts symbolic ones."""

        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            x = super().forward(input_ids, positions)
            ramp = torch.arange(x.shape[0], dtype=torch.float32).unsqueeze(-1)
            return torch.addcmul(x, ramp, ramp)

    monkeypatch.setattr(PiecewiseCompiler, "__call__", watched)
    toy = toys.build(support_torch_compile(Making), compile_sizes=(4,))
    toys.check(toy, 6)
    assert seen == ["compiled"]


@pytest.mark.feature("E07")
def test_compiled_pieces_shadow_graphs_that_stay_registered(toys: Any) -> None:
    toy = toys.build()
    toy(*toys.inputs(6))
    compiler = toy.compiled_forward.compiler
    root = compiler.split_gm
    compiled = [item.name for item in compiler.items if not item.is_splitting]
    for item in compiler.items:
        assert root._modules[item.name] is item.graph
        is_replaced = getattr(root, item.name) is not item.graph
        assert is_replaced == (item.name in compiled)
        assert (item.name in root.__dict__) == (item.name in compiled)
    assert [name for name, _ in root.named_children()] == [item.name for item in compiler.items]
    assert list(root.state_dict()) == []
    assert root.to("cpu") is root


@pytest.mark.feature("E06", "E09", "E11")
def test_compiled_pieces_get_fake_inputs_that_share_the_symbol_of_input_ids(
    toys: Any, asked: list[Any]
) -> None:
    toy = toys.build()
    toy(*toys.inputs(6))
    assert [call.index for call in asked] == [0, 1, 2, 3]
    assert "num_tokens = input_ids.shape[0]" in toy.compiled_forward.plan.source
    for call in asked:
        tensors = [value for value in call.inputs if isinstance(value, torch.Tensor)]
        assert tensors and all(type(t).__name__ == "FakeTensor" for t in tensors)
        sizes = [size for tensor in tensors for size in tensor.shape]
        symbolic = [s for s in (*sizes, *call.inputs) if isinstance(s, torch.SymInt)]
        assert len({str(size) for size in symbolic}) == 1


# --- graphs around pieces ---------------------------------------------------------------------


@pytest.mark.feature("M10")
@pytest.mark.parametrize("mode", list(CUDAGraphMode))
@pytest.mark.parametrize("use_cudagraph", [True, False])
def test_pieces_are_wrapped_exactly_where_steps_replay_pieces(
    toys: Any, mode: CUDAGraphMode, use_cudagraph: bool
) -> None:
    toy = toys.build(cudagraph_mode=mode, use_cudagraph=use_cudagraph)
    toy(*toys.inputs(4))
    compiler = toy.compiled_forward.compiler
    is_wrapped = use_cudagraph and mode.requires_piecewise_compilation()
    for item in compiler.items:
        entry = getattr(compiler.split_gm, item.name)
        if item.is_splitting:
            assert entry is item.graph
        else:
            assert type(entry) is (CUDAGraphWrapper if is_wrapped else PiecewiseBackend)


@pytest.mark.feature("M07")
def test_the_layers_are_copy_then_stitch_then_wrapper_then_piece_then_kernel(
    toys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def spy(owner: Any, name: str, event: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any) -> Any:
            events.append(event)
            return original(*args)

        monkeypatch.setattr(owner, name, call)

    stitch = plan.compile_execution_fn
    monkeypatch.setattr(
        plan,
        "compile_execution_fn",
        lambda *args: (run := stitch(*args)) and (lambda *a: (events.append("stitch"), run(*a))[1]),
    )
    toy = toys.build(lambda: toys.Compiled(1), cudagraph_mode=PIECEWISE, cudagraph_copy_inputs=True)
    toy(*toys.inputs(4))
    spy(CUDAGraphWrapper, "__call__", "wrapper")
    spy(PiecewiseBackend, "__call__", "piece")
    spy(torch.fx.GraphModule, "__call__", "kernel")
    spy(torch.Tensor, "copy_", "copy")
    events.clear()
    toy(*toys.inputs(3))
    calls = ["wrapper", "piece", "kernel"]
    # Attention copies as well, between the pieces.
    assert events == ["copy", "copy", "stitch", *calls, "copy", *calls]


@pytest.mark.feature("M06")
@pytest.mark.parametrize(
    ("mode", "copies", "is_fixed"),
    [(PIECEWISE, True, True), (PIECEWISE, False, False), ("FULL_DECODE_ONLY", False, False)],
)
def test_inputs_are_copied_only_where_it_is_asked_for_and_pieces_are_captured(
    toys: Any, mode: Any, copies: bool, is_fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = toys.build(cudagraph_mode=mode, cudagraph_copy_inputs=copies, max_num_tokens=8)
    toy(*toys.inputs(2))
    seen: list[int] = []
    call = PiecewiseBackend.__call__

    def note(self: Any, *args: Any) -> Any:
        seen.extend(a.data_ptr() for a in args if torch.is_tensor(a) and a.dtype == torch.int64)
        return call(self, *args)

    monkeypatch.setattr(PiecewiseBackend, "__call__", note)
    given = [toys.inputs(n) for n in (8, 8, 5)]
    for args in given:
        assert torch.equal(toy(*args), toys.expected(toy, len(args[0])))
    assert (len(set(seen)) == 2) == is_fixed
    if copies:
        with pytest.raises(ValueError, match="cudagraph_copy_inputs: wanted at most 8 tokens"):
            toy(*toys.inputs(9))


@pytest.mark.feature("N08")
def test_what_cannot_be_captured_is_refused_where_pieces_are(toys: Any) -> None:
    class Unsized(toys.Plain):  # type: ignore[misc]
        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            x = super().forward(input_ids, positions)
            out = torch.empty_like(x)
            torch.ops.lockstep.toy_attention(x, out, "extra")
            scale = self.embed.weight * 2
            torch.ops.lockstep.toy_attention(out, x, "another")
            return x * scale.sum(0)

    toy = toys.build(support_torch_compile(Unsized), cudagraph_mode=PIECEWISE)
    with pytest.raises(PieceInvariantError, match="wanted an input with the token dimension"):
        toy(*toys.inputs(4))


# --- what readers get -------------------------------------------------------------------------


@pytest.mark.feature("I06")
def test_a_dump_holds_the_graph_and_dynamos_code_under_the_rank_if_asked_for(
    toys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    toys.build()(*toys.inputs(5))
    assert list(tmp_path.iterdir()) == []
    toys.build(tp_rank=1, debug_dump_path=str(tmp_path))(*toys.inputs(5))
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py"))
    names = ("computation_graph", "dynamo_graph", "transformed_code")
    assert files == [f"rank_1_0/backbone/{name}.py" for name in names]


def test_a_directory_that_cannot_be_written_is_a_warning(
    toys: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    toy = toys.build(debug_dump_path=str(tmp_path / "file"))
    toys.check(toy, 5)
    assert "computation_graph.py is not written" in caplog.text


@pytest.mark.feature("G09", "I07")
def test_readable_files_and_a_report_lie_beside_the_plan(toys: Any, cache_dir: Path) -> None:
    toy = toys.build(cache_dir=str(cache_dir))
    toy(*toys.inputs(5))
    [path] = cache_dir.rglob("report.json")
    graph, code, whole = (
        path.with_name(f"{name}.py").read_text()
        for name in ("computation_graph", "transformed_code", "dynamo_graph")
    )
    for text in (graph, code, whole):
        ast.parse(text)
    assert "submod" not in whole and whole.count("torch.ops.lockstep.toy_attention") == 3
    assert "class submod_6" in graph and ', 8]"' in graph and "toy_attention" in graph
    assert "__compiled_fn" in code and "RETURN_VALUE" in code
    assert "def forward(input_ids, positions):" in code and "submod_6(" in code
    report = CompileReport.from_json(path.read_text())
    assert (report.prefix, report.misses) == ("backbone", ("nothing was compiled before",))
    assert [piece.is_splitting for piece in report.pieces] == [False, True] * 3 + [False]
    keys = [piece.key for piece in report.pieces if not piece.is_splitting]
    assert keys == [piece.key for piece in toy.compiled_forward.plan.pieces]
    assert list(report.timings_s) == ["dynamo", "split", "compile"]
    assert any("TENSOR_MATCH" in line for line in report.guards_dropped)
    names = [Path(name).name for name in report.traced_files]
    assert {"conftest.py", "linear.py"} < set(names) and len(set(names)) == len(names)


@pytest.mark.feature("G10")
def test_each_tag_has_a_directory_of_its_own_and_one_module(toys: Any, tmp_path: Path) -> None:
    def three() -> Any:
        main, again = toys.Compiled(1), toys.Compiled(1)
        with model_tag("draft"):
            return main, toys.Compiled(2), again

    main, draft, again = toys.build(three, debug_dump_path=str(tmp_path))
    for toy in (main, draft):
        toys.check(toy, 5)
    assert sorted(p.name for p in (tmp_path / "rank_0_0").iterdir()) == ["backbone", "draft"]
    with pytest.raises(ValueError, match=r"model_tag: .* found 'backbone' twice"):
        again(*toys.inputs(3))


@pytest.mark.feature("F08", "I07", "Q03")
def test_every_step_is_logged_in_its_order_before_the_first_call_returns(
    toys: Any, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toy = toys.build(cache_dir=str(cache_dir), compile_sizes=(4,))
    with caplog.at_level(logging.DEBUG, logger="compile"):
        toy.prepare(*toys.inputs(5))
    text = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("compile"))
    steps = (
        r"backbone: tracing .*Toy\.forward \(.*conftest\.py:\d+\)",
        r"compile cache: \S+rank_0_0/backbone",
        r"compile cache: traced \S+",
        r"wrote .*dynamo_graph\.py",
        r"submod_1: eager, \d+ nodes",
        r"graph 0, shape None: key [0-9a-f]{64}, ready in \d+\.\d+ s",
        r"graph 3, shape 4: key [0-9a-f]{64}, ready in \d+\.\d+ s",
        r"wrote .*computation_graph\.py",
        r"backbone: traced files: .*conftest\.py",
        r"backbone: \d+ guards dropped",
        r"backbone took \d+\.\d+ s \(dynamo .* s, split .* s, compile .* s\): 7 pieces, 4 compiled",
        r"wrote .*transformed_code\.py",
    )
    assert re.search(".*".join(steps), text, re.DOTALL), text
