"""What is spent between the pieces of a step."""

from __future__ import annotations

import pytest
import torch

from compile.config import CUDAGraphMode
from compile.context import BatchDescriptor, ForwardContext, forward_context
from compile.gaps import GapTimer
from compile.graphs.boundary import boundary
from compile.graphs.capture import capture_window
from compile.graphs.cpu.pool import CpuGraphPool
from compile.graphs.pools import GraphPools
from compile.graphs.wrapper import CUDAGraphWrapper

PIECEWISE, KEY = CUDAGraphMode.PIECEWISE, BatchDescriptor(4, None, False)


class Clock:
    """Shows what a test says."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_step_is_its_replays_and_its_gaps() -> None:
    clock = Clock()
    timer = GapTimer(clock)
    assert (timer.share, timer.num_steps) == (0.0, 0)

    @boundary  # so that a replay calls it again
    def piece(x: torch.Tensor) -> torch.Tensor:
        clock.now += 3
        return x + 1

    wrapped = CUDAGraphWrapper(piece, PIECEWISE, GraphPools(CpuGraphPool))
    x = torch.zeros(4)
    step = ForwardContext(batch_descriptor=KEY, cudagraph_runtime_mode=PIECEWISE)
    with capture_window(), forward_context(step):
        wrapped(x)
    timed = ForwardContext(
        batch_descriptor=KEY, cudagraph_runtime_mode=PIECEWISE, replay=timer.replay
    )
    for gap in (1.0, 9.0):
        with timer.step(), forward_context(timed):
            wrapped(x)
            clock.now += gap
    assert timer.num_steps == 2
    assert timer.last_share == pytest.approx(9 / 12)
    assert timer.share == pytest.approx(10 / 16)


def test_a_step_that_fails_is_not_booked() -> None:
    clock = Clock()
    timer = GapTimer(clock)
    with pytest.raises(RuntimeError, match="lost"), timer.step():
        clock.now += 1
        raise RuntimeError("lost")
    assert (timer.num_steps, timer.share) == (0, 0.0)
