"""Real Inductor pieces, stitched, equal the forward as it is written: the one slow fixture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compile.config import DynamicShapes
from compile.counters import counter


@pytest.fixture(autouse=True, scope="module")
def _inductor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files of Inductor lie in a directory of this run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        import torch._inductor.config as inductor_config

        with inductor_config.patch(compile_threads=1):
            yield


@pytest.fixture(scope="module")
def piecewise(toys: Any, _inductor: None) -> Any:
    options = {"coordinate_descent_tuning": False, "max_autotune": False}
    fields = {"compile_sizes": (4,), "inductor_compile_config": options}
    toy = toys.build(compiler="inductor_standalone", **fields)
    with counter.expect(num_inductor_compiles=3 * 2, num_graphs_seen=1):
        toy(*toys.inputs(6))
    return toy


@pytest.mark.feature("F01", "F02")
def test_the_general_artifact_of_a_piece_and_that_of_a_size_serve_all_sizes(
    toys: Any, piecewise: Any
) -> None:
    with counter.expect(num_inductor_compiles=0, num_graphs_seen=0):
        for n in (1, 2, 3, 4, 5, 8, 33, 64):
            found = piecewise(*toys.inputs(n))
            torch.testing.assert_close(found, toys.expected(piecewise, n))


@pytest.mark.feature("A03", "H01")
@pytest.mark.parametrize(
    ("compiler", "mode"),
    [
        ("inductor", DynamicShapes.BACKED_SIZE_OBLIVIOUS),
        ("inductor_standalone", DynamicShapes.UNBACKED),
    ],
)
def test_level_2_goes_through_inductor_once_and_later_starts_load_it(
    toys: Any, compiler: str, mode: DynamicShapes, cache_dir: Path
) -> None:
    fields = {"compiler": compiler, "level": 2, "dynamic_shapes": mode}
    for is_first in (1, 0):
        toy = toys.build(cache_dir=str(cache_dir), **fields)
        with counter.expect(num_inductor_compiles=is_first, num_graphs_seen=is_first):
            for n in (8, 1, 2, 33):
                torch.testing.assert_close(toy(*toys.inputs(n)), toys.expected(toy, n))
