"""The backend does its seven steps in order, before anything is served, once per module."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compile.config import CompilationConfig, CUDAGraphMode
from compile.counters import counter
from compile.graphs.boundary import recording
from compile.pieces.backend import PiecewiseCompiler
from compile.pieces.decorator import support_torch_compile
from compile.pieces.piecewise import PiecewiseBackend
from compile.pieces.plan import BackendError
from compile.pieces.split import PieceInvariantError
from compile.report import CompileReport
from compile.scope import CompileScope, compile_scope, model_tag

PIECEWISE = CUDAGraphMode.PIECEWISE


# --- levels -----------------------------------------------------------------------------------


@pytest.mark.feature("A03")
def test_level_2_compiles_the_whole_graph_once_for_all_sizes(toys: Any) -> None:
    toy = toys.build(level=2)
    with counter.expect(
        num_graphs_seen=1,
        num_piecewise_graphs_seen=1,
        num_piecewise_capturable_graphs_seen=1,
        num_backend_compilations=1,
    ):
        for n in range(2, 65):
            assert torch.equal(toy(*toys.inputs(n)), toys.expected(toy, n))


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


@pytest.mark.feature("A04")
@pytest.mark.parametrize("num_layers", [1, 4])
def test_level_3_makes_two_pieces_a_layer_and_one(toys: Any, num_layers: int) -> None:
    toy = toys.build(lambda: toys.Compiled(num_layers))
    with counter.expect(
        num_graphs_seen=1,
        num_piecewise_graphs_seen=2 * num_layers + 1,
        num_piecewise_capturable_graphs_seen=num_layers + 1,
    ):
        for n in (8, 1, 2, 33):
            assert torch.equal(toy(*toys.inputs(n)), toys.expected(toy, n))


@pytest.mark.feature("E05")
@pytest.mark.parametrize("num_sizes", [0, 2])
def test_three_pieces_are_unique_however_many_layers_there_are(toys: Any, num_sizes: int) -> None:
    sizes = (4, 8)[:num_sizes]
    toy = toys.build(lambda: toys.Compiled(16), compile_sizes=sizes)
    with counter.expect(num_backend_compilations=3 * (1 + num_sizes)):
        toy(*toys.inputs(6))
    keys = [piece.key for piece in toy.compiled_forward.plan.pieces]
    assert len(keys) == 17
    assert len(set(keys[1:16])) == 1 and len({keys[0], keys[1], keys[16]}) == 3


@pytest.mark.feature("I05")
def test_a_compiler_serves_one_graph(toys: Any) -> None:
    toy = toys.build()
    toy(*toys.inputs(5))
    compiler = toy.compiled_forward.compiler
    with pytest.raises(BackendError, match="wanted one graph for each module, found a second"):
        compiler(compiler.graph, [])


@pytest.mark.feature("I05")
def test_two_instances_share_nothing(toys: Any) -> None:
    first, second = toys.build(), toys.build()
    with torch.no_grad():
        second.embed.weight.mul_(3)
    with counter.expect(num_graphs_seen=2):
        for toy in (first, second, first):
            assert torch.equal(toy(*toys.inputs(5)), toys.expected(toy, 5))
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


def test_the_files_that_were_traced_reach_the_toolchain(toys: Any) -> None:
    tools = toys.Tools()
    toys.build(tools=tools)(*toys.inputs(3))
    names = [Path(name).name for name in tools.files]
    assert "conftest.py" in names and "linear.py" in names
    assert len(set(tools.files)) == len(tools.files)
    assert not [name for name in tools.files if name.startswith("<")]


# --- the steps --------------------------------------------------------------------------------


@pytest.mark.feature("F08")
def test_the_steps_happen_in_order_and_before_the_first_result(
    toys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import compile.pieces.backend as backend

    events: list[str] = []

    def spy(name: str) -> None:
        function = getattr(backend, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(backend, name, call)

    for name in (
        "split_graph",
        "PiecewiseBackend",
        "wrapped",
        "generate_execution_code",
        "compile_execution_fn",
        "with_copies",
    ):
        spy(name)
    write = PiecewiseCompiler.write_readable
    monkeypatch.setattr(
        PiecewiseCompiler,
        "write_readable",
        lambda self, name, text: (events.append(name), write(self, name, text))[1],
    )
    tools = toys.Tools(events=events)
    toy = toys.build(
        lambda: toys.Compiled(1), tools, cudagraph_mode=PIECEWISE, debug_dump_path=str(tmp_path)
    )
    toy(*toys.inputs(4))
    steps = events[: events.index("with_copies") + 1]
    assert steps == [
        "look",
        "open",
        "dynamo_graph.py",
        "split_graph",
        *["PiecewiseBackend", "wrapped"] * 2,
        "computation_graph.py",
        "generate_execution_code",
        "compile_execution_fn",
        "with_copies",
    ]
    assert "wrapper" not in steps and "wrapper" in events


class RealTensors(TorchDispatchMode):
    """Notes ops on tensors that have memory."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [a for a in tree_leaves((args, result)) if torch.is_tensor(a)]
        if any(type(tensor) in (torch.Tensor, nn.Parameter) for tensor in tensors):
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
    assert torch.equal(toy(*toys.inputs(6)), toys.expected(toy, 6))
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


@pytest.mark.feature("E08")
def test_the_stitching_graph_with_compiled_pieces_is_the_oracle(toys: Any) -> None:
    config = CompilationConfig(level=3, splitting_ops=("lockstep::toy_attention",))
    compiler = PiecewiseCompiler(CompileScope(config, toolchain=toys.Tools()), "backbone")
    results: list[tuple[torch.Tensor, torch.Tensor]] = []

    def backend(graph: Any, inputs: Any) -> Any:
        written = compiler(graph, inputs)

        def both(*passed: Any) -> Any:
            results.append((written(*passed)[0], compiler.split_gm(*passed)[0]))
            return written(*passed)

        return both

    toy, given = toys.Plain(), toys.inputs(9)
    for arg in given:
        torch._dynamo.mark_dynamic(arg, 0)
    torch.compile(toy.forward, backend=backend, fullgraph=True, dynamic=False)(*given)
    torch._dynamo.reset()
    ((by_text, by_graph),) = results
    assert torch.equal(by_text, by_graph) and torch.equal(by_text, toy(*given))


@pytest.mark.feature("E06", "E09", "E11")
def test_compiled_pieces_get_fake_inputs_that_share_the_symbol_of_input_ids(toys: Any) -> None:
    tools = toys.Tools()
    toy = toys.build(tools=tools)
    toy(*toys.inputs(6))
    assert [index for index, _ in tools.manager.calls] == [0, 1, 2, 3]
    assert "num_tokens = input_ids.shape[0]" in toy.compiled_forward.plan.source
    for _, given in tools.manager.inputs:
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        assert tensors and all(type(t).__name__ == "FakeTensor" for t in tensors)
        sizes = [size for tensor in tensors for size in tensor.shape]
        numbers = [v for v in given if isinstance(v, torch.SymInt)]
        symbols = {str(s) for s in (*sizes, *numbers) if isinstance(s, torch.SymInt)}
        assert len(symbols) == 1
        assert any(isinstance(size, torch.SymInt) for size in sizes)


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
    expected = toys.Wrapped if use_cudagraph and mode.requires_piecewise_compilation() else None
    for item in compiler.items:
        entry = getattr(compiler.split_gm, item.name)
        if item.is_splitting:
            assert entry is item.graph
        else:
            assert type(entry) is (expected or PiecewiseBackend)
    if expected:
        assert [p.is_first for p in compiler.pieces.values()] == [True, False, False, False]


@pytest.mark.feature("M07")
def test_the_layers_are_copy_then_stitch_then_wrapper_then_piece_then_kernel(
    toys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import compile.pieces.stitch as stitch

    events: list[str] = []
    tools = toys.Tools(events=events)
    toy = toys.build(
        lambda: toys.Compiled(1), tools, cudagraph_mode=PIECEWISE, cudagraph_copy_inputs=True
    )
    call, choose = PiecewiseBackend.__call__, stitch.compile_execution_fn

    def piece(self: Any, *args: Any) -> Any:
        events.append("piece")
        return call(self, *args)

    def stitched(*args: Any) -> Any:
        run = choose(*args)
        return lambda *inputs: (events.append("stitch"), run(*inputs))[1]

    class Kernels:
        def call(self, fn: Any, args: Any) -> Any:
            events.append("kernel")
            return fn(*args)

    copy_ = torch.Tensor.copy_
    monkeypatch.setattr(PiecewiseBackend, "__call__", piece)
    monkeypatch.setattr("compile.pieces.plan.compile_execution_fn", stitched)
    toy(*toys.inputs(4))
    events.clear()
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda self, other: (events.append("copy"), copy_(self, other))[1]
    )
    with recording(Kernels()):
        toy(*toys.inputs(3))
    piece_calls = ["wrapper", "piece", "kernel"]
    assert [e for i, e in enumerate(events) if e != "copy" or i < 2] == [
        "copy",
        "copy",
        "stitch",
        *piece_calls,
        *piece_calls,
    ]


@pytest.mark.feature("M06")
@pytest.mark.parametrize(
    ("mode", "copies", "expected"),
    [
        (PIECEWISE, True, True),
        (PIECEWISE, False, False),
        (CUDAGraphMode.FULL_DECODE_ONLY, False, False),
    ],
)
def test_inputs_are_copied_only_where_it_is_asked_for_and_pieces_are_captured(
    toys: Any, mode: CUDAGraphMode, copies: bool, expected: bool
) -> None:
    toy = toys.build(cudagraph_mode=mode, cudagraph_copy_inputs=copies)
    seen: list[int] = []
    given = [toys.inputs(8), toys.inputs(8), toys.inputs(5)]
    toy(*given[0])
    piece = toy.compiled_forward.compiler.backends["submod_0"]
    general = piece.runnables[None]

    def note(*args: Any) -> Any:
        seen.append(
            next(a for a in args if torch.is_tensor(a) and a.dtype == torch.int64).data_ptr()
        )
        return general(*args)

    piece.runnables[None] = note
    piece._by_count.clear()
    for args in given:
        assert torch.equal(toy(*args), toys.expected(toy, len(args[0])))
    assert (len(set(seen)) == 1) == expected


def test_the_copy_layer_holds_as_many_tokens_as_a_step_can_have(toys: Any) -> None:
    config = CompilationConfig(
        level=3,
        splitting_ops=("lockstep::toy_attention",),
        cudagraph_mode=PIECEWISE,
        cudagraph_copy_inputs=True,
    )
    scope = CompileScope(config, toolchain=toys.Tools(), max_num_tokens=8)
    with compile_scope(scope):
        toy = toys.Compiled()
    toy(*toys.inputs(2))
    assert torch.equal(toy(*toys.inputs(8)), toys.expected(toy, 8))
    with pytest.raises(ValueError, match="cudagraph_copy_inputs: wanted at most 8 tokens, found 9"):
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
def test_a_dump_holds_the_graph_and_dynamos_code_under_the_rank_and_is_made_if_asked_for(
    toys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    toys.build()(*toys.inputs(5))
    assert list(tmp_path.iterdir()) == []
    config = CompilationConfig(
        level=3, splitting_ops=("lockstep::toy_attention",), debug_dump_path=str(tmp_path)
    )
    with compile_scope(CompileScope(config, tp_rank=1, dp_rank=2, toolchain=toys.Tools())):
        toy = toys.Compiled()
    toy(*toys.inputs(5))
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.py"))
    assert [str(path) for path in files] == [
        "rank_1_2/backbone/computation_graph.py",
        "rank_1_2/backbone/dynamo_graph.py",
        "rank_1_2/backbone/transformed_code.py",
    ]


def test_a_directory_that_cannot_be_written_is_a_warning(
    toys: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    toy = toys.build(debug_dump_path=str(tmp_path / "file"))
    assert torch.equal(toy(*toys.inputs(5)), toys.expected(toy, 5))
    assert "computation_graph.py is not written" in caplog.text


@pytest.mark.feature("G09")
def test_readable_files_lie_beside_the_plan_and_parse(toys: Any, tmp_path: Path) -> None:
    cache = toys.PlanDirectory(tmp_path)
    toys.build(tools=toys.Tools(cache=cache))(*toys.inputs(5))
    graph = (tmp_path / "computation_graph.py").read_text()
    code = (tmp_path / "transformed_code.py").read_text()
    whole = (tmp_path / "dynamo_graph.py").read_text()
    for text in (graph, code, whole):
        ast.parse(text)
    assert "submod" not in whole and whole.count("torch.ops.lockstep.toy_attention") == 3
    assert "class submod_6" in graph and ', 8]"' in graph and "toy_attention" in graph
    assert "__compiled_fn" in code and "RETURN_VALUE" in code
    assert "def forward(input_ids, positions):" in code and "submod_6(" in code


@pytest.mark.feature("I07")
def test_a_report_says_what_was_found_and_how_long_it_took(toys: Any, tmp_path: Path) -> None:
    tools = toys.Tools(cache=toys.PlanDirectory(tmp_path))
    tools.manager.misses.append("nothing was compiled before")
    toy = toys.build(tools=tools)
    toy(*toys.inputs(5))
    report = CompileReport.from_json((tmp_path / "report.json").read_text())
    assert (report.prefix, report.misses) == ("backbone", ("nothing was compiled before",))
    assert [piece.is_splitting for piece in report.pieces] == [False, True] * 3 + [False]
    keys = [piece.key for piece in report.pieces if not piece.is_splitting]
    assert keys == [piece.key for piece in toy.compiled_forward.plan.pieces]
    assert list(report.timings_s) == ["dynamo", "split", "compile"]
    assert all(took >= 0 for took in report.timings_s.values())
    assert any("TENSOR_MATCH" in line for line in report.guards_dropped)
    assert str(Path(__file__).with_name("conftest.py")) in report.traced_files


@pytest.mark.feature("G10")
def test_each_tag_has_a_directory_of_its_own(toys: Any, tmp_path: Path) -> None:
    prefixes: list[str] = []

    class Noting(toys.Tools):  # type: ignore[misc]
        def open(self, scope: Any, prefix: str, traced_files: Sequence[str] | None) -> Any:
            if traced_files is not None:
                prefixes.append(prefix)
            return super().open(scope, prefix, traced_files)

    def two() -> Any:
        main = toys.Compiled(1)
        with model_tag("draft"):
            return main, toys.Compiled(2)

    main, draft = toys.build(two, Noting(), debug_dump_path=str(tmp_path))
    for toy in (main, draft):
        assert torch.equal(toy(*toys.inputs(5)), toys.expected(toy, 5))
    assert prefixes == ["backbone", "draft"]
    assert sorted(p.name for p in (tmp_path / "rank_0_0").iterdir()) == ["backbone", "draft"]


@pytest.mark.feature("G10")
def test_one_tag_for_two_modules_of_a_scope_is_an_error(toys: Any) -> None:
    first, second = toys.build(lambda: (toys.Compiled(1), toys.Compiled(1)))
    first(*toys.inputs(3))
    with pytest.raises(ValueError, match=r"model_tag: .* found 'backbone' twice"):
        second(*toys.inputs(3))


@pytest.mark.feature("Q03")
@pytest.mark.feature("I07")
def test_every_decision_is_logged(
    toys: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toy = toys.build(tools=toys.Tools(cache=toys.PlanDirectory(tmp_path)), compile_sizes=(4,))
    with caplog.at_level(logging.DEBUG, logger="compile"):
        toy(*toys.inputs(5))
    text = "\n".join(r.getMessage() for r in caplog.records if r.name.startswith("compile"))
    for wanted in (
        r"backbone: tracing .*Toy\.forward \(.*conftest\.py:\d+\)",
        r"backbone: traced files: .*conftest\.py",
        r"backbone: \d+ guards dropped",
        r"submod_1: eager, \d+ nodes",
        r"graph 3, shape 4: key [0-9a-f]{64}, ready in \d+\.\d+ s",
        r"wrote .*computation_graph\.py",
        r"wrote .*transformed_code\.py",
        r"backbone took \d+\.\d+ s \(dynamo .* s, split .* s, compile .* s\): 7 pieces, 4 compiled",
    ):
        assert re.search(wanted, text), wanted


# --- refused ----------------------------------------------------------------------------------


def test_without_a_toolchain_compiling_is_refused_when_the_model_is_built(toys: Any) -> None:
    config = CompilationConfig(level=3)
    with compile_scope(CompileScope(config)), pytest.raises(BackendError, match="a toolchain"):
        toys.Compiled()
