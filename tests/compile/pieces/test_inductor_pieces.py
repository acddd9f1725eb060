"""Real Inductor pieces, stitched, equal the forward as it is written: the one slow fixture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from compile.config import DynamicShapes
from compile.counters import counter
from compile.scope import Runnable, Shape


class InductorManager:
    """Compiles pieces with Inductor and keeps them in memory."""

    def __init__(self) -> None:
        self.artifacts: dict[tuple[str, Shape], Any] = {}
        self.misses: list[str] = []

    def compile(
        self, graph: Any, example_inputs: Sequence[Any], *, shape: Shape, key: str, **_: Any
    ) -> Runnable:
        from torch._inductor import standalone_compile

        if (key, shape) not in self.artifacts:
            counter.num_inductor_compiles += 1
            sizes = "from_example_inputs" if isinstance(shape, int) else "from_graph"
            self.artifacts[key, shape] = standalone_compile(
                graph, list(example_inputs), dynamic_shapes=sizes, aot=True
            )
        found: Runnable = self.artifacts[key, shape]
        return found

    def load(self, key: str, *, shape: Shape, **_: Any) -> Runnable:
        found: Runnable = self.artifacts[key, shape]
        return found


@pytest.fixture(scope="module")
def inductor(toys: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A toolchain of Inductor whose files lie in a directory of this run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        import torch._inductor.config as inductor_config

        with inductor_config.patch(compile_threads=1):
            yield toys.Tools(manager=InductorManager())


@pytest.fixture(scope="module")
def piecewise(toys: Any, inductor: Any) -> Any:
    toy = toys.build(tools=inductor, compile_sizes=(4,))
    with counter.expect(num_inductor_compiles=3 * 2, num_graphs_seen=1):
        toy(*toys.inputs(6))
    return toy


@pytest.mark.feature("F01")
def test_one_general_artifact_a_piece_serves_all_sizes(toys: Any, piecewise: Any) -> None:
    with counter.expect(num_inductor_compiles=0, num_graphs_seen=0):
        for n in (1, 2, 3, 5, 8, 33, 64):
            found = piecewise(*toys.inputs(n))
            torch.testing.assert_close(found, toys.expected(piecewise, n))


@pytest.mark.feature("F02")
def test_an_exact_size_runs_its_own_artifact_with_equal_outputs(toys: Any, piecewise: Any) -> None:
    piece = piecewise.compiled_forward.compiler.backends["submod_2"]
    used: list[Shape] = []
    for shape, run in list(piece.runnables.items()):
        piece.runnables[shape] = lambda *args, _shape=shape, _run=run: (
            used.append(_shape),
            _run(*args),
        )[1]
    piece._by_count.clear()
    for n in (4, 7, 1):
        torch.testing.assert_close(piecewise(*toys.inputs(n)), toys.expected(piecewise, n))
    assert used == [4, None, None]


@pytest.mark.feature("A03")
@pytest.mark.parametrize("mode", [DynamicShapes.BACKED_SIZE_OBLIVIOUS, DynamicShapes.UNBACKED])
def test_level_2_goes_through_inductor_once(toys: Any, inductor: Any, mode: DynamicShapes) -> None:
    toy = toys.build(tools=inductor, level=2, dynamic_shapes=mode)
    with counter.expect(num_inductor_compiles=1, num_graphs_seen=1):
        for n in (8, 1, 2, 33):
            torch.testing.assert_close(toy(*toys.inputs(n)), toys.expected(toy, n))
