"""Ranks sum through memory that their GPUs map only if all of them can, and say why if not."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cluster.group.peer_memory import share_gpu_memory
from compile.custom_op import function_of
from compile.passes.fuse_all_reduce_rms_norm import all_reduce_add_rms_norm
from model.parallel import Shard

GPUS = ["GPU-0", "GPU-1", "GPU-2"]


class Planted:
    """Memory in which this rank finds the sum: what else it does, no CPU shows."""

    def all_reduce_add_rms_norm(self, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([1.0]), torch.tensor([2.0])


def reach_of(rank: int) -> dict[str, str]:
    return {GPUS[rank]: "", **{gpu: "" for gpu in GPUS if gpu != GPUS[rank]}}


def joined(case: str) -> tuple[list[bool], int]:
    """Let three ranks join of which the second one differs; return whose sums go through common
    memory, and how many tried to map it."""
    store, tried = dist.HashStore(), []

    def work(rank: int) -> bool:
        shard = Shard(rank, 3, dist.ProcessGroup(dist.HashStore(), rank, 3))
        is_odd = rank == 1

        def reach() -> dict[str, str]:
            found = reach_of(rank)
            if is_odd and case == "no driver":
                raise RuntimeError("no driver")
            if is_odd and case == "hidden":
                del found[GPUS[2]]
            if is_odd and case == "no link":
                found[GPUS[2]] = "no NVLink to it"
            return reach_of(0) if is_odd and case == "one GPU" else found

        def map_all(_: Shard) -> Any:
            tried.append(rank)
            if is_odd and case == "cannot map":
                raise RuntimeError("out of handles")
            return Planted()

        share_gpu_memory(store, shard, reach, map_all)
        on_gpu = function_of(all_reduce_add_rms_norm.default, "cuda")
        assert on_gpu is not None
        x = torch.ones(1, 1)
        try:
            return bool(on_gpu(x, x, x[0], 1e-5, shard.group_name)[1] == 2)
        except RuntimeError as error:  # the group has no backend: this is where it would sum
            assert "backend" in str(error), error
            return False

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(work, range(3))), len(tried)


@pytest.mark.feature("O02")
def test_all_ranks_share_memory_where_all_can(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lockstep.group"):
        assert joined("") == ([True] * 3, 3)
    (line,) = caplog.messages
    wanted = "sums of 3 ranks that a norm follows go through memory that their GPUs map"
    assert line.startswith(wanted)


@pytest.mark.feature("O02")
@pytest.mark.parametrize(
    ("case", "why", "num_tried"),
    [
        ("no driver", "rank 0: the GPU of rank 1: not on this node, or hidden", 0),
        ("hidden", "rank 1: the GPU of rank 2: not on this node, or hidden", 0),
        ("no link", "rank 1: the GPU of rank 2: no NVLink to it", 0),
        ("one GPU", "rank 0: rank 1 has the same GPU", 0),
        ("cannot map", "rank 1: RuntimeError: out of handles", 3),
    ],
)
def test_none_does_where_one_cannot(
    caplog: pytest.LogCaptureFixture, case: str, why: str, num_tried: int
) -> None:
    with caplog.at_level(logging.INFO, "lockstep.group"):
        assert joined(case) == ([False] * 3, num_tried)
    wanted = f"sums of 3 ranks that a norm follows go through NCCL, because {why}"
    assert caplog.messages == [wanted]
