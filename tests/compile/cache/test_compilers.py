"""Every compiler keeps the same four promises; which one is used follows from two fields."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from compile.cache.artifacts import OUTPUT_CODE, ArtifactError, ArtifactStore, pack, unpack
from compile.cache.compilers import (
    CompilerInterface,
    EagerAdaptor,
    compiler_name,
    graph_source,
)
from compile.cache.inductor import make_compiler
from compile.config import CompilationConfig
from compile.counters import counter
from compile.errors import FieldError

NAMES = ["eager", "inductor", "inductor_standalone"]


def scaled(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2 + y, torch.sin(x)


@pytest.fixture(scope="module")
def inputs() -> list[torch.Tensor]:
    return [torch.linspace(-1, 1, 8), torch.ones(8)]


def traced() -> fx.GraphModule:
    """A graph as Dynamo hands it on: without annotations, which here would be text."""
    graph = fx.symbolic_trace(scaled)
    for node in graph.graph.nodes:
        node.type = None
    graph.recompile()
    return graph


@pytest.fixture
def graph() -> fx.GraphModule:
    return traced()


def agrees(runnable: Any, inputs: list[torch.Tensor]) -> bool:
    pairs = zip(runnable(*inputs), scaled(*inputs), strict=True)
    return all(torch.allclose(found, wanted) for found, wanted in pairs)


# --- conformance ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each compiler a directory of artifacts. Inductor's files lie beside it."""
    found = {name: tmp_path_factory.mktemp(name) / "artifacts" for name in NAMES}
    for directory in found.values():
        directory.mkdir()
    return found


@pytest.fixture(scope="module", params=NAMES)
def compiled(
    request: pytest.FixtureRequest, directories: dict[str, Path], inputs: list[torch.Tensor]
) -> Iterator[tuple[CompilerInterface, Any, Any]]:
    """A compiler, and the runnable and handle of a piece that it compiled."""
    compiler = make_compiler(CompilationConfig(level=3, compiler=request.param))
    compiler.initialize_cache(str(directories[request.param]))
    graph = traced()
    code = graph.code
    runnable, handle = compiler.compile(graph, inputs, {}, "key")
    assert graph.code == code, "the graph is left as it was"
    yield compiler, runnable, handle


@pytest.mark.feature("H02")
def test_a_compiled_piece_computes_what_its_graph_does(
    compiled: tuple[CompilerInterface, Any, Any], inputs: list[torch.Tensor]
) -> None:
    assert agrees(compiled[1], inputs)


@pytest.mark.feature("H02")
def test_a_handle_is_plain_data_without_a_place(
    compiled: tuple[CompilerInterface, Any, Any], directories: dict[str, Path]
) -> None:
    compiler, _, handle = compiled
    assert tuple(json.loads(json.dumps(handle))) == handle
    assert handle[0] == "key" and "/" not in handle[1]
    assert (directories[compiler.name] / handle[1]).is_file()


@pytest.mark.feature("H02")
def test_another_compiler_of_the_kind_loads_a_handle_without_the_graph(
    compiled: tuple[CompilerInterface, Any, Any],
    directories: dict[str, Path],
    inputs: list[torch.Tensor],
) -> None:
    compiler, _, handle = compiled
    other = make_compiler(CompilationConfig(level=3, compiler=compiler.name))
    other.initialize_cache(str(directories[compiler.name]))
    with counter.expect(num_inductor_compiles=0, num_eager_compiles=0, num_cpp_builds=0):
        assert agrees(other.load(handle), inputs)


@pytest.mark.feature("H02")
def test_a_handle_whose_artifact_is_gone_cannot_be_loaded(
    compiled: tuple[CompilerInterface, Any, Any],
) -> None:
    with pytest.raises(ArtifactError):
        compiled[0].load(("key", "0" * 64))


@pytest.mark.feature("H02")
def test_an_artifact_without_its_code_cannot_be_loaded(
    compiled: tuple[CompilerInterface, Any, Any], directories: dict[str, Path]
) -> None:
    name = ArtifactStore(directories[compiled[0].name]).put(pack({"other": b""}))
    with pytest.raises(ArtifactError, match="wanted"):
        compiled[0].load(("key", name))


@pytest.mark.feature("H02")
def test_a_hash_is_the_same_each_time(compiled: tuple[CompilerInterface, Any, Any]) -> None:
    config = CompilationConfig(level=3)
    first = compiled[0].compute_hash(config)
    assert first and first == compiled[0].compute_hash(config)


@pytest.mark.feature("H02")
@pytest.mark.parametrize("name", [name for name in NAMES if name != "eager"])
def test_switches_of_torch_that_change_code_change_the_hash(name: str) -> None:
    config = CompilationConfig(level=3, compiler=name)
    compiler = make_compiler(config)
    first = compiler.compute_hash(config)
    torch.use_deterministic_algorithms(True)
    try:
        assert compiler.compute_hash(config) != first
    finally:
        torch.use_deterministic_algorithms(False)
    assert compiler.compute_hash(config) == first


@pytest.mark.feature("H01", "H02")
@pytest.mark.parametrize("name", NAMES)
def test_with_the_cache_disabled_a_piece_runs_and_has_no_handle(
    name: str, graph: fx.GraphModule, inputs: list[torch.Tensor], tmp_path: Path
) -> None:
    compiler = make_compiler(CompilationConfig(level=3, compiler=name))
    compiler.initialize_cache(str(tmp_path), disable_cache=True)
    is_eager = name == "eager"
    with counter.expect(num_inductor_compiles=not is_eager, num_eager_compiles=is_eager):
        runnable, handle = compiler.compile(graph, inputs, {}, "key")
    assert compiler.name == name
    assert agrees(runnable, inputs) and handle is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.feature("H01")
@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.7.1+cu126", "inductor"),
        ("2.8.0.dev20250601", "inductor_standalone"),
        ("2.13.0+cpu", "inductor_standalone"),
        ("3.0.0", "inductor_standalone"),
    ],
)
def test_auto_follows_the_version_of_torch(
    monkeypatch: pytest.MonkeyPatch, version: str, name: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert compiler_name(CompilationConfig(level=3)) == name
    assert compiler_name(CompilationConfig(level=3, compiler="inductor")) == "inductor"


@pytest.mark.feature("H04")
def test_a_piece_that_was_saved_and_cannot_be_loaded_runs_and_has_no_handle(
    graph: fx.GraphModule,
    inputs: list[torch.Tensor],
    directories: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise ArtifactError("artifact: wanted code, found noise")

    compiler = make_compiler(CompilationConfig(level=3, compiler="inductor_standalone"))
    compiler.initialize_cache(str(directories[compiler.name]))
    monkeypatch.setattr(compiler, "load", refuse)
    runnable, handle = compiler.compile(graph, inputs, {}, "key")
    assert agrees(runnable, inputs) and handle is None


@pytest.mark.feature("H04")
@pytest.mark.parametrize("name", ["inductor", "inductor_standalone"])
def test_a_piece_that_torch_cannot_serialise_runs_and_has_no_handle(
    name: str, inputs: list[torch.Tensor], directories: dict[str, Path]
) -> None:
    graph = traced()
    next(iter(graph.graph.nodes)).type = "an annotation that is text"
    graph.recompile()
    compiler = make_compiler(CompilationConfig(level=3, compiler=name))
    compiler.initialize_cache(str(directories[name]))
    runnable, handle = compiler.compile(graph, inputs, {}, "key")
    assert agrees(runnable, inputs) and handle is None


@pytest.mark.parametrize("name", ["inductor", "inductor_standalone"])
def test_an_artifact_holds_its_machine_code_also_where_inductor_had_built_it(
    name: str, graph: fx.GraphModule, inputs: list[torch.Tensor], directories: dict[str, Path]
) -> None:
    compiler = make_compiler(CompilationConfig(level=3, compiler=name))
    compiler.initialize_cache(str(directories[name]))
    for _ in range(2):
        _, handle = compiler.compile(graph, inputs, {}, "again")
        assert handle is not None
        members = unpack(ArtifactStore(directories[name]).get(handle[1]))
        assert b"def call(" in members[OUTPUT_CODE]
        assert {Path(member).suffix for member in members} == {".bin", ".py", ".so"}


@pytest.mark.parametrize("name", ["inductor", "inductor_standalone"])
def test_a_library_that_was_cut_short_is_never_loaded(
    name: str,
    graph: fx.GraphModule,
    inputs: list[torch.Tensor],
    directories: dict[str, Path],
    tmp_path: Path,
) -> None:
    # Elsewhere, because this process has loaded those that are here.
    shutil.copytree(directories[name].parent, tmp_path / "copy")
    libraries = list((tmp_path / "copy").glob("inductor/*/*.main.so"))
    assert libraries
    for path in libraries:
        path.write_bytes(path.read_bytes()[:1000])
    compiler = make_compiler(CompilationConfig(level=3, compiler=name))
    compiler.initialize_cache(str(tmp_path / "copy" / "artifacts"))
    runnable, _ = compiler.compile(graph, inputs, {}, "cut")
    assert agrees(runnable, inputs)


# --- graphs that Dynamo traced ----------------------------------------------------------------


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


@pytest.fixture(scope="module")
def symbolic() -> fx.GraphModule:
    """A graph whose number of rows is a symbol; a piece returns a tuple."""
    found: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        found.append(graph)
        return graph.forward

    x = torch.ones(7, 8)
    torch._dynamo.mark_dynamic(x, 0)
    torch.compile(normed, backend=backend, fullgraph=True)(x, torch.ones(8))
    return found[0]


def example_inputs(graph: fx.GraphModule, num_rows: int | None) -> list[Any]:
    """Return the graph's own fake inputs, or such of a fixed number of rows."""
    values = [n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"]
    if num_rows is None:
        return values
    fixed: list[Any] = []
    for value in values:
        if isinstance(value, torch.SymInt):
            fixed.append(num_rows)
        elif any(isinstance(size, torch.SymInt) for size in value.shape):
            with value.fake_mode:
                fixed.append(torch.empty(num_rows, value.shape[1]))
        else:
            fixed.append(value)
    return fixed


@pytest.mark.feature("H01")
@pytest.mark.parametrize("num_rows", [None, 4])
@pytest.mark.parametrize("name", ["inductor", "inductor_standalone"])
def test_a_traced_piece_serves_its_sizes_compiled_and_loaded(
    name: str, num_rows: int | None, symbolic: fx.GraphModule, directories: dict[str, Path]
) -> None:
    compiler = make_compiler(CompilationConfig(level=3, compiler=name))
    compiler.initialize_cache(str(directories[name]))
    inputs = example_inputs(symbolic, num_rows)
    fresh, handle = compiler.compile(symbolic, inputs, {}, "key")
    assert handle is not None
    loaded = compiler.load(handle)
    generator, weight = torch.Generator().manual_seed(0), torch.linspace(0, 1, 8)
    for rows in (1, 2, 33) if num_rows is None else (num_rows,):
        x = torch.randn(rows, 8, generator=generator)
        arguments: list[Any] = [
            rows if node.name.startswith("s") else weight if "weight" in node.name else x
            for node in symbolic.graph.nodes
            if node.op == "placeholder"
        ]
        for runnable in (fresh, loaded):
            assert runnable is not None
            [found] = runnable(*arguments)
            assert torch.allclose(found, normed(x, weight))


@pytest.mark.feature("F07")
def test_without_inductor_pieces_run_as_traced_and_inductor_is_never_called(
    graph: fx.GraphModule, inputs: list[torch.Tensor]
) -> None:
    compiler = make_compiler(CompilationConfig(level=3, use_inductor=False))
    compiler.initialize_cache("", disable_cache=True)
    with counter.expect(num_inductor_compiles=0, num_cpp_builds=0, num_eager_compiles=1):
        runnable, _ = compiler.compile(graph, inputs, {}, None)
    assert runnable is not None
    for found, wanted in zip(runnable(*inputs), scaled(*inputs), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.feature("F07")
@pytest.mark.parametrize("name", ["max_autotun", "nonsense", "TYPE_CHECKING", "TYPE_CHECKIN"])
def test_an_unknown_option_is_refused_with_the_nearest_that_inductor_takes(name: str) -> None:
    config = CompilationConfig(level=3, inductor_compile_config={name: 1})
    with pytest.raises(FieldError) as caught:
        make_compiler(config)
    named = re.search(r"such as (.+), found ", str(caught.value))
    assert named is not None and "TYPE_CHECKING" not in named[1]
    for option in named[1].split(", "):
        make_compiler(CompilationConfig(level=3, inductor_compile_config={option: 1}))


# --- the eager compiler's artifact ------------------------------------------------------------


def test_the_source_of_a_piece_is_readable_python_that_names_what_it_needs() -> None:
    source = graph_source(traced())
    assert source is not None
    assert source.startswith("import torch as torch\n") and "def forward(self, x, y):" in source
    assert graph_source(fx.symbolic_trace(scaled)) == source, "annotations do not count"


def test_a_constant_of_a_piece_survives_exactly(tmp_path: Path) -> None:
    def piece(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        below = torch.clamp(x, max=float("inf"))
        return (below * 0.1, x.to(torch.bfloat16), torch.full_like(x, float("nan")), x[:, None])

    compiler = EagerAdaptor()
    compiler.initialize_cache(str(tmp_path))
    x = torch.randn(3, generator=torch.Generator().manual_seed(0))
    fresh, handle = compiler.compile(fx.symbolic_trace(piece), [x], {}, "key")
    assert handle is not None and fresh is not None
    for found, wanted in zip(compiler.load(handle)(x), fresh(x), strict=True):
        assert torch.equal(found, wanted) or (found.isnan() & wanted.isnan()).all()


class _Stateful(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_a_piece_with_tensors_or_local_functions_of_its_own_has_no_source() -> None:
    def local(x: torch.Tensor) -> torch.Tensor:
        return x

    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(local, (x,)),))
    for piece in (fx.symbolic_trace(_Stateful()), fx.GraphModule({}, graph)):
        assert graph_source(piece) is None
        compiler = EagerAdaptor()
        compiler.initialize_cache("unused")
        assert compiler.compile(piece, [], {}, "key") == (piece, None)


def test_an_eager_artifact_is_python_in_an_archive(tmp_path: Path, graph: fx.GraphModule) -> None:
    compiler = EagerAdaptor()
    compiler.initialize_cache(str(tmp_path))
    _, handle = compiler.compile(graph, [], {}, "key")
    assert handle is not None
    source = graph_source(graph)
    assert source is not None
    assert ArtifactStore(tmp_path).get(handle[1]) == pack({OUTPUT_CODE: source.encode()})
