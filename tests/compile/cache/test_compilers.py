"""Every compiler keeps the same promises; which one is used follows from two fields."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from compile.cache.artifacts import ArtifactError, ArtifactStore, pack
from compile.cache.compilers import EagerAdaptor, compiler_name, graph_source
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


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each compiler a directory of artifacts. Inductor's files lie beside it."""
    found = {name: tmp_path_factory.mktemp(name) / "artifacts" for name in NAMES}
    for directory in found.values():
        directory.mkdir()
    return found


@pytest.mark.feature("H02")
@pytest.mark.parametrize("name", NAMES)
def test_a_handle_is_plain_data_without_a_place_that_another_compiler_of_the_kind_loads(
    name: str, graph: fx.GraphModule, inputs: list[torch.Tensor], directories: dict[str, Path]
) -> None:
    compiler, other = (make_compiler(CompilationConfig(level=3, compiler=name)) for _ in range(2))
    for each in (compiler, other):
        each.initialize_cache(str(directories[name]))
    code = graph.code
    runnable, handle = compiler.compile(graph, inputs, {}, "key")
    assert graph.code == code, "the graph is left as it was"
    assert handle is not None and tuple(json.loads(json.dumps(handle))) == handle
    assert handle[0] == "key" and "/" not in handle[1]
    assert (directories[name] / handle[1]).is_file()
    with counter.expect(num_inductor_compiles=0, num_eager_compiles=0, num_cpp_builds=0):
        assert agrees(other.load(handle), inputs) and agrees(runnable, inputs)


@pytest.mark.feature("H02")
@pytest.mark.parametrize("name", NAMES)
def test_an_artifact_that_is_gone_or_without_its_code_cannot_be_loaded(
    name: str, directories: dict[str, Path]
) -> None:
    compiler = make_compiler(CompilationConfig(level=3, compiler=name))
    compiler.initialize_cache(str(directories[name]))
    without_code = ArtifactStore(directories[name]).put(pack({"other": b""}))
    for wrong in (without_code, "0" * 64):
        with pytest.raises(ArtifactError, match="wanted"):
            compiler.load(("key", wrong))


@pytest.mark.feature("H02")
@pytest.mark.parametrize("name", NAMES[1:])
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


@pytest.mark.feature("F07", "H01", "H02")
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
    code = graph.code
    runnable, handle = compiler.compile(graph, inputs, {}, "key")
    assert agrees(runnable, inputs) and handle is None and graph.code == code


@pytest.mark.feature("H04")
@pytest.mark.parametrize("name", NAMES[1:])
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
