"""Load before compile, compile equal pieces once, store what was compiled, and say so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from compile.cache.artifacts import ArtifactError
from compile.cache.compilers import EagerAdaptor, Handle
from compile.cache.index import CompileCache
from compile.cache.manager import CacheMissError, CompilerManager
from compile.config import CompilationConfig
from compile.counters import counter
from compile.graphs.capture import LateCompilation, seal
from compile.passes.manager import PassManager
from compile.scope import CompileScope, Runnable, Shape

KEY = "what the piece computes"


class ScriptedCompiler(EagerAdaptor):
    """Notes what is asked of it, and answers as a test says."""

    name = "scripted"

    def __init__(self) -> None:
        super().__init__()
        self.verbs: list[str] = []
        self.is_saveable = True
        self.load_error: Exception | None = None

    def compile(self, graph: fx.GraphModule, *args: Any, **named: Any) -> Any:
        self.verbs.append("compile")
        return super().compile(graph, *args, **named) if self.is_saveable else (graph, None)

    def load(self, handle: Handle) -> Runnable:
        self.verbs.append("load")
        if self.load_error is not None:
            raise self.load_error
        return super().load(handle)


def double(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * 2,)


class Starts:
    """Each call is a new start over one directory."""

    def __init__(self, directory: Path) -> None:
        self.compiler = ScriptedCompiler()
        config = CompilationConfig(level=3, compiler="eager", cache_dir=str(directory))
        self._scope = CompileScope(config)

    def __call__(self) -> CompilerManager:
        cache = CompileCache.open(self._scope, "backbone", [__file__])
        return CompilerManager(self._scope, cache, compiler=self.compiler)


@pytest.fixture
def start(tmp_path: Path) -> Starts:
    return Starts(tmp_path)


def compiled(manager: CompilerManager, shape: Shape = None) -> Runnable:
    graph, x = fx.symbolic_trace(double), torch.ones(2)
    return manager.compile(graph, [x], index=0, shape=shape, num_graphs=1, key=KEY)


def doubles(runnable: Runnable) -> bool:
    return torch.equal(runnable(torch.ones(3))[0], torch.full((3,), 2.0))


@pytest.mark.feature("H05")
def test_a_piece_is_loaded_without_its_graph(start: Starts) -> None:
    compiled(start(), shape=8)
    manager = start()
    with counter.expect(num_backend_compilations=0, num_compiled_artifacts_loaded=1):
        assert doubles(manager.load(KEY, index=0, shape=8, num_graphs=1))
    for key, shape in ((KEY, 4), (KEY, None), ("another", 8)):
        with pytest.raises(CacheMissError, match=r"^graph 0 of 1 for shape .*: wanted an artifact"):
            manager.load(key, index=0, shape=shape, num_graphs=1)
    assert start.compiler.verbs == ["compile", "load"]


@pytest.mark.feature("H05")
def test_a_failed_load_is_logged_with_its_reason_compiled_and_stored(
    start: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    compiled(start())
    start.compiler.load_error = ArtifactError("artifact 0: wanted code, found noise")
    manager = start()
    with caplog.at_level(logging.WARNING), counter.expect(num_compiled_artifacts_saved=1):
        assert doubles(compiled(manager))
    reason = "graph 0 of 1 for shape general"
    assert manager.misses == [f"{reason}: artifact 0: wanted code, found noise"]
    [line] = [record.getMessage() for record in caplog.records]
    assert line == f"{reason} is compiled again: artifact 0: wanted code, found noise"
    assert start.compiler.verbs == ["compile", "load", "compile"]
    with pytest.raises(CacheMissError):
        start().load(KEY, index=0, shape=None, num_graphs=1)


@pytest.mark.feature("H04")
def test_pieces_that_cannot_be_saved_are_kept_and_one_line_says_so(
    start: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    start.compiler.is_saveable = False
    manager = start()
    with caplog.at_level(logging.WARNING), counter.expect(num_compiled_artifacts_saved=0):
        first = compiled(manager)
        compiled(manager, shape=4)
        assert compiled(manager) is first
    [line] = [record.getMessage() for record in caplog.records]
    assert line == "graph 0 of 1 for shape general cannot be saved: every start compiles it again"
    assert start.compiler.verbs == ["compile", "compile"]
    compiled(start())
    assert start.compiler.verbs == ["compile"] * 3


@pytest.mark.feature("F06", "F07", "F09")
@pytest.mark.parametrize(
    ("name", "is_cached"), [("inductor", True), ("inductor", False), ("inductor_standalone", True)]
)
def test_inductor_compiles_under_the_options_of_a_shape_and_of_the_configuration(
    name: str, is_cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config as inductor

    seen: list[tuple[Any, ...]] = []

    def look(passes: PassManager, graph: fx.Graph) -> int:
        tuned = inductor.max_autotune, inductor.coordinate_descent_tuning
        seen.append((*tuned, inductor.max_fusion_size))
        return 0

    monkeypatch.setattr(PassManager, "__call__", look)  # runs while Inductor compiles
    config = CompilationConfig(
        level=3,
        compiler=name,
        cache_dir=str(tmp_path),
        passes=("fuse_add_rms_norm",),
        inductor_compile_config={"max_fusion_size": 3},
    )
    scope = CompileScope(config)
    cache = CompileCache.open(scope, "backbone", [__file__]) if is_cached else None
    manager = CompilerManager(scope, cache)
    graph, x = fx.symbolic_trace(double), torch.arange(4.0)
    for index, shape in enumerate((4, None)):
        runnable = manager.compile(
            graph, [x], index=index, shape=shape, num_graphs=2, key=f"{KEY} {index}"
        )
        [found] = runnable(x)
        assert torch.equal(found, x * 2)
    assert seen == [(True, True, 3), (False, False, 3)]


@pytest.mark.feature("J04", "X01")
def test_a_piece_that_is_compiled_after_the_seal_is_counted_and_a_strict_one_refuses_it(
    start: Starts,
) -> None:
    seal("warn")
    with counter.expect(num_late_compilations=1, num_backend_compilations=1):
        compiled(start())
    seal("strict")
    with (
        counter.expect(num_late_compilations=1, num_backend_compilations=0),
        pytest.raises(LateCompilation, match="graph 0 of 1 for shape 8"),
    ):
        compiled(start(), shape=8)
    with counter.expect(num_late_compilations=0):
        assert doubles(compiled(start()))  # it is loaded
    assert start.compiler.verbs == ["compile", "load"]
