"""The largest step that all decode is the bound of capture sizes."""

from __future__ import annotations

import pytest
import sim_engine as sim

from compile.config import CompilationConfig, CUDAGraphMode
from compile.resolve import StepLimits, resolve


@pytest.mark.feature("C03")
@pytest.mark.parametrize(("max_num_seqs", "budget"), [(1, 1), (4, 4), (5, 16), (8, 9)])
def test_the_scheduler_fills_the_largest_captured_batch_and_none_above(
    max_num_seqs: int, budget: int
) -> None:
    shape = sim.Shape(num_blocks=64, max_num_seqs=max_num_seqs, budget=budget, caching=False)
    engine = sim.FakeEngine(shape)
    for i in range(12):
        engine.submit(sim.make_request(str(i), [i], max_tokens=16))
    engine.run()
    decodes = {len(plan.rows) for plan in engine.plans if plan.num_decodes == len(plan.rows)}
    asked = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL, cudagraph_capture_sizes=tuple(range(1, 17))
    )
    captured = resolve(asked, StepLimits(max_num_seqs, budget)).graph_bs
    assert max(decodes) == max(captured)
