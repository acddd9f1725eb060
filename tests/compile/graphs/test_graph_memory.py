"""What graphs will cost: measured on the two largest of each mode, then arithmetic."""

from __future__ import annotations

import torch

from compile.config import CUDAGraphMode
from compile.context import BatchDescriptor, ForwardContext
from compile.graphs.capture import (
    MIN_GRAPH_BYTES,
    CaptureCase,
    CaptureTrial,
    capture_all,
    capture_trials,
    estimate_graph_bytes,
)
from compile.graphs.cpu.pool import CpuGraphPool
from compile.graphs.pools import GraphPools
from compile.graphs.wrapper import CUDAGraphWrapper

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
WARMUPS = {FULL: 0, PIECEWISE: 0}


def test_in_a_shared_pool_the_largest_graph_pays_for_all_tensors() -> None:
    mib = MIN_GRAPH_BYTES
    pieces = CaptureTrial((16, 8, 4), first_bytes=100 * mib, second_bytes=3 * mib)
    whole = CaptureTrial((4, 2), first_bytes=40 * mib, second_bytes=mib // 2)
    assert estimate_graph_bytes([pieces, whole]) == (100 + 2 * 3 + 1) * mib
    assert estimate_graph_bytes([pieces]) == 106 * mib
    assert estimate_graph_bytes([CaptureTrial((4,), 5, 0)]) == 5
    assert estimate_graph_bytes([CaptureTrial((), 0, 0)]) == 0


def test_separate_pools_pay_for_each_size_in_proportion() -> None:
    pieces = CaptureTrial((16, 8, 4), first_bytes=160, second_bytes=0)
    whole = CaptureTrial((3, 1), first_bytes=10, second_bytes=0)
    assert estimate_graph_bytes([pieces, whole], policy="per_bucket") == 280 + 14


class Model:
    """Makes a tensor of 4096 bytes for each token, whole or in pieces."""

    def __init__(self) -> None:
        self.pools = GraphPools(lambda: CpuGraphPool(segment_bytes=1 << 12))
        self.inputs = torch.ones(16, 1024)
        self.piece = CUDAGraphWrapper(torch.tanh, PIECEWISE, self.pools)
        self.whole = CUDAGraphWrapper(self.piece, FULL, self.pools)

    def run(self, case: CaptureCase) -> torch.Tensor:
        out: torch.Tensor = self.whole(self.inputs[: case.descriptor.num_tokens])
        return out

    def cases(self) -> list[CaptureCase]:
        pieces = [
            CaptureCase(PIECEWISE, BatchDescriptor(n, None, False), ForwardContext)
            for n in (16, 8, 1)
        ]
        whole = [CaptureCase(FULL, BatchDescriptor(n, n, True), ForwardContext) for n in (4, 2)]
        return [*pieces, *whole]

    def trials(self) -> list[CaptureTrial]:
        return capture_trials(
            self.cases(),
            self.run,
            pools=self.pools,
            warmups=WARMUPS,
            synchronize=lambda: None,
            used_bytes=lambda: self.pools.num_bytes,
        )


def test_a_trial_measures_the_two_largest_of_each_mode_and_leaves_nothing() -> None:
    model = Model()
    # In a shared pool the second one finds room in what the first has let go of.
    assert model.trials() == [
        CaptureTrial((16, 8, 1), 16 * 4096, 0),
        CaptureTrial((4, 2), 4 * 4096, 0),
    ]
    assert model.pools.num_bytes == 0
    assert not model.whole.num_replays and not model.piece.num_replays
    assert model.trials() == model.trials()


def test_the_estimate_of_a_shared_pool_is_no_less_than_what_is_captured() -> None:
    model = Model()
    estimate = estimate_graph_bytes(model.trials())
    report = capture_all(
        model.cases(),
        model.run,
        rank=0,
        pools=model.pools,
        warmups=WARMUPS,
        synchronize=lambda: None,
    )
    assert len(model.piece.num_replays) == 3 and len(model.whole.num_replays) == 2
    assert 16 * 4096 <= report.num_bytes <= estimate
