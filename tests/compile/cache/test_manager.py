"""Load before compile, compile equal pieces once, store what was compiled, and say so."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from compile.cache.artifacts import ArtifactError
from compile.cache.compilers import CompilerInterface, Handle
from compile.cache.index import CompileCache
from compile.cache.manager import UNCHECKED_OPTIONS, CacheMissError, CompilerManager
from compile.config import CompilationConfig
from compile.counters import counter
from compile.graphs.capture import LateCompilation, seal
from compile.passes.manager import PassManager
from compile.scope import CompileScope, Runnable, Shape

KEY = "what the piece computes"


class ScriptedCompiler(CompilerInterface):
    """Its artifact is text, and its answers are what a test sets."""

    name = "scripted"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.is_saveable = True
        self.is_failing = False
        self.load_error: Exception | None = None

    def compute_hash(self, config: CompilationConfig) -> str:
        return "scripted"

    def compile(
        self,
        graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        compiler_config: Mapping[str, Any],
        key: str | None = None,
    ) -> tuple[Runnable | None, Handle | None]:
        self.calls.append(("compile", dict(compiler_config)))
        if self.is_failing:
            return None, None
        if self._store is None or key is None or not self.is_saveable:
            return graph, None
        name = self._store.offer(f"code of {key}".encode())
        return graph, None if name is None else (key, name)

    def load(self, handle: Handle) -> Runnable:
        assert self._store is not None
        self.calls.append(("load", {}))
        if self.load_error is not None:
            raise self.load_error
        assert self._store.get(handle[1]) == f"code of {handle[0]}".encode()
        return lambda x: (x * 2,)

    @property
    def verbs(self) -> list[str]:
        return [call[0] for call in self.calls]


def double(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * 2,)


@pytest.fixture
def graph() -> fx.GraphModule:
    return fx.symbolic_trace(double)


@pytest.fixture
def compiler() -> ScriptedCompiler:
    return ScriptedCompiler()


@pytest.fixture
def start(tmp_path: Path, compiler: ScriptedCompiler) -> Iterator[Callable[..., CompilerManager]]:
    """Returns the manager of a new start over the same directory."""

    def manager(*, cached: bool = True, **fields: Any) -> CompilerManager:
        config = CompilationConfig(level=3, compiler="eager", cache_dir=str(tmp_path), **fields)
        scope = CompileScope(config)
        cache = CompileCache.open(scope, "backbone", [__file__]) if cached else None
        return CompilerManager(scope, cache, compiler=compiler)

    yield manager


def compiled(manager: CompilerManager, graph: fx.GraphModule, **changes: Any) -> Runnable:
    arguments: dict[str, Any] = {"index": 0, "shape": None, "num_graphs": 1, "key": KEY, **changes}
    return manager.compile(graph, [torch.ones(2)], **arguments)


def doubles(runnable: Runnable) -> bool:
    return torch.equal(runnable(torch.ones(3))[0], torch.full((3,), 2.0))


@pytest.mark.feature("H05")
def test_the_first_start_compiles_and_stores_and_the_second_loads(
    start: Callable[..., CompilerManager], graph: fx.GraphModule, compiler: ScriptedCompiler
) -> None:
    with counter.expect(
        num_backend_compilations=1, num_compiled_artifacts_saved=1, num_cache_entries_updated=1
    ):
        assert doubles(compiled(start(), graph))
    with counter.expect(num_backend_compilations=0, num_compiled_artifacts_loaded=1):
        assert doubles(compiled(start(), graph))
    assert compiler.verbs == ["compile", "load"]


@pytest.mark.feature("H05")
def test_a_piece_is_loaded_without_its_graph(
    start: Callable[..., CompilerManager], graph: fx.GraphModule, compiler: ScriptedCompiler
) -> None:
    compiled(start(), graph, shape=8, key=KEY)
    manager = start()
    assert doubles(manager.load(KEY, index=0, shape=8, num_graphs=1))
    for key, shape in ((KEY, 4), (KEY, None), ("another", 8)):
        with pytest.raises(CacheMissError, match=r"^graph 0 of 1 for shape .*: wanted an artifact"):
            manager.load(key, index=0, shape=shape, num_graphs=1)
    assert compiler.verbs == ["compile", "load"]


@pytest.mark.feature("H05")
def test_a_failed_load_is_logged_with_its_reason_compiled_and_stored(
    start: Callable[..., CompilerManager],
    graph: fx.GraphModule,
    compiler: ScriptedCompiler,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiled(start(), graph)
    compiler.load_error = ArtifactError("artifact 0: wanted code, found noise")
    manager = start()
    with caplog.at_level(logging.WARNING), counter.expect(num_compiled_artifacts_saved=1):
        assert doubles(compiled(manager, graph))
    reason = "graph 0 of 1 for shape general"
    assert manager.misses == [f"{reason}: artifact 0: wanted code, found noise"]
    [line] = [record.getMessage() for record in caplog.records]
    assert line == f"{reason} is compiled again: artifact 0: wanted code, found noise"
    assert compiler.verbs == ["compile", "load", "compile"]


@pytest.mark.feature("H05")
def test_a_failed_load_of_a_warm_start_asks_for_a_trace(
    start: Callable[..., CompilerManager], graph: fx.GraphModule, compiler: ScriptedCompiler
) -> None:
    compiled(start(), graph)
    compiler.load_error = OSError("cannot be read")
    with pytest.raises(CacheMissError):
        start().load(KEY, index=0, shape=None, num_graphs=1)


def test_equal_pieces_are_compiled_once_and_each_is_entered(
    start: Callable[..., CompilerManager], graph: fx.GraphModule, compiler: ScriptedCompiler
) -> None:
    manager = start()
    with counter.expect(num_backend_compilations=1, num_cache_entries_updated=3):
        runnables = [compiled(manager, graph, index=index, num_graphs=3) for index in range(3)]
    assert runnables[0] is runnables[1] is runnables[2]
    assert compiler.verbs == ["compile"]


def test_shapes_of_a_piece_are_compiled_apart(
    start: Callable[..., CompilerManager], graph: fx.GraphModule, compiler: ScriptedCompiler
) -> None:
    manager = start()
    shapes: tuple[Shape, ...] = (None, 4, (1, 8), (9, 16))
    for shape in shapes:
        compiled(manager, graph, shape=shape)
    assert compiler.verbs == ["compile"] * len(shapes)


def test_without_a_cache_pieces_are_compiled_and_equal_ones_still_once(
    start: Callable[..., CompilerManager], graph: fx.GraphModule, compiler: ScriptedCompiler
) -> None:
    manager = start(cached=False)
    with counter.expect(num_backend_compilations=1, num_compiled_artifacts_saved=0):
        compiled(manager, graph)
        compiled(manager, graph, index=1)
    with pytest.raises(CacheMissError):
        manager.load("another", index=0, shape=None, num_graphs=1)


@pytest.mark.feature("H04")
def test_pieces_that_cannot_be_saved_are_kept_and_one_line_says_so(
    start: Callable[..., CompilerManager],
    graph: fx.GraphModule,
    compiler: ScriptedCompiler,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler.is_saveable = False
    manager = start()
    with caplog.at_level(logging.WARNING), counter.expect(num_compiled_artifacts_saved=0):
        first = compiled(manager, graph)
        compiled(manager, graph, shape=4)
        assert compiled(manager, graph) is first
    [line] = [record.getMessage() for record in caplog.records]
    assert line == "graph 0 of 1 for shape general cannot be saved: every start compiles it again"
    assert compiler.verbs == ["compile", "compile"]
    compiled(start(), graph)
    assert compiler.verbs == ["compile"] * 3


def test_a_compiler_that_returns_nothing_is_an_error(
    start: Callable[..., CompilerManager], graph: fx.GraphModule, compiler: ScriptedCompiler
) -> None:
    compiler.is_failing = True
    with pytest.raises(RuntimeError, match="wanted a runnable from scripted, found none"):
        compiled(start(), graph)


@pytest.mark.feature("F06", "F07", "F09")
@pytest.mark.parametrize("shape", [1, 64, None, (1, 16), (4, 4)])
@pytest.mark.parametrize("given", [{"max_fusion_size": 3}, {"max_autotune": False}, {}])
def test_a_piece_of_one_size_is_tuned_and_options_of_the_configuration_win(
    start: Callable[..., CompilerManager],
    graph: fx.GraphModule,
    compiler: ScriptedCompiler,
    shape: Shape,
    given: dict[str, Any],
) -> None:
    compiled(start(inductor_compile_config={**given, "size_asserts": True}), graph, shape=shape)
    tuned = {"max_autotune": True, "coordinate_descent_tuning": True}
    static = tuned if isinstance(shape, int) else {}
    assert compiler.calls[0][1] == {**UNCHECKED_OPTIONS, **static, **given, "size_asserts": True}


@pytest.mark.feature("F09")
def test_a_second_start_tunes_nothing(
    start: Callable[..., CompilerManager], graph: fx.GraphModule, compiler: ScriptedCompiler
) -> None:
    compiled(start(), graph, shape=4)
    compiled(start(), graph, shape=4)
    tuned = [call for call in compiler.calls if call[1].get("max_autotune")]
    assert len(tuned) == 1 and compiler.verbs == ["compile", "load"]


@pytest.mark.feature("F06", "F07", "F09")
@pytest.mark.parametrize(
    ("name", "is_cached"),
    [("inductor", True), ("inductor", False), ("inductor_standalone", True)],
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
    start: Callable[..., CompilerManager], graph: fx.GraphModule, compiler: ScriptedCompiler
) -> None:
    seal("warn")
    with counter.expect(num_late_compilations=1, num_backend_compilations=1):
        compiled(start(), graph)
    seal("strict")
    with (
        counter.expect(num_late_compilations=1, num_backend_compilations=0),
        pytest.raises(LateCompilation, match="graph 0 of 1 for shape 8"),
    ):
        compiled(start(), graph, shape=8)
    with counter.expect(num_late_compilations=0):
        assert doubles(compiled(start(), graph))  # it is loaded
    assert compiler.verbs == ["compile", "load"]


@pytest.mark.feature("Q03")
def test_store_and_load_are_logged_with_graph_shape_key_and_path(
    start: Callable[..., CompilerManager],
    graph: fx.GraphModule,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG, logger="compile"):
        compiled(start(), graph, index=2, shape=8, num_graphs=3)
        compiled(start(), graph, index=2, shape=8, num_graphs=3)
    pattern = r"(store|load) graph 2 of 3 for shape 8 from scripted: key (\w+), path (\S+)"
    found = [match.groups() for match in map(re.compile(pattern).match, caplog.messages) if match]
    assert [verb for verb, _, _ in found] == ["store", "load"]
    assert found[0][1:] == found[1][1:]
    assert Path(found[0][2]).read_bytes() == f"code of {found[0][1]}".encode()


@pytest.mark.feature("I07")
def test_each_graph_is_logged_with_its_seconds_and_they_add_up(
    start: Callable[..., CompilerManager],
    graph: fx.GraphModule,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cold, warm = start(), start()
    with caplog.at_level(logging.DEBUG, logger="compile"):
        compiled(cold, graph)
        compiled(cold, graph, shape=4)
        compiled(warm, graph)
    pattern = re.compile(r"(compiled|loaded) graph 0 of 1 for shape (\w+) in (\d+\.\d\d) s")
    found = [match.groups() for match in map(pattern.fullmatch, caplog.messages) if match]
    assert [line[:2] for line in found] == [
        ("compiled", "general"),
        ("compiled", "4"),
        ("loaded", "general"),
    ]
    assert cold.timings_s["compile"] > 0 == cold.timings_s["load"]
    assert warm.timings_s["load"] > 0 == warm.timings_s["compile"]
