"""Ranks exchange data through memory that they share: what they get, and who is named if one does
not come."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from model.kernels.cpu.communicator import ShmCommunicator, can_share, memory_bytes
from model.parallel import Shard

SLOT_BYTES = 40960
"""Of more than two ranks, sums of that many bytes take two shots."""
BUFFER_BYTES = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    """Builds them here, not when tests are collected."""
    if not can_share():
        pytest.skip("needs a C++ compiler, found none")


def run(num_ranks: int, work: Callable[[ShmCommunicator, int], Any], timeout_s: float = 60) -> Any:
    """Do the work of each rank on a thread of its own; return the results."""
    sizes = (SLOT_BYTES, BUFFER_BYTES)
    memory = memoryview(bytearray(memory_bytes(num_ranks, *sizes)))
    ends = [
        ShmCommunicator(memory, rank, num_ranks, timeout_s, *sizes) for rank in range(num_ranks)
    ]
    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(work, ends, range(num_ranks)))


def given_to(rank: int, step: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, generator=generator).to(dtype)


Steps = list[tuple[str, int, torch.dtype]]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["all_reduce", "reduce_scatter", "broadcast", "gather", "all_gather"]),
        st.sampled_from([1, 63, 1000, 9000, 10240, 30000]),
        st.sampled_from([torch.float32, torch.bfloat16]),
    ),
    min_size=1,
    max_size=12,
)


@given(st.sampled_from([2, 3, 4]), STEPS, st.integers(0, 1000))
def test_all_ranks_get_what_the_others_gave(num_ranks: int, steps: Steps, seed: int) -> None:
    def work(end: ShmCommunicator, rank: int) -> list[torch.Tensor]:
        moments = random.Random(seed + rank)
        found = []
        for step, (kind, size, dtype) in enumerate(steps):
            if moments.random() < 0.3:
                time.sleep(moments.random() / 1000)
            found.append(exchanged(end, kind, given_to(rank, step, size * num_ranks, dtype)))
        return found

    def exchanged(end: ShmCommunicator, kind: str, x: torch.Tensor) -> torch.Tensor:
        """Return what a rank gets of the others."""
        if kind in ("all_reduce", "broadcast"):
            assert getattr(end, kind)(x)
            return x
        out = x.new_zeros((num_ranks, *x.shape) if "gather" in kind else len(x) // num_ranks)
        if kind == "reduce_scatter":
            assert end.reduce_scatter(x, out)
        else:
            assert end.gather(x, out, to_all=kind == "all_gather")
        return out

    results = run(num_ranks, work)
    for step, (kind, size, dtype) in enumerate(steps):
        gave = [given_to(rank, step, size * num_ranks, dtype) for rank in range(num_ranks)]
        found = [result[step] for result in results]
        total = gave[0].float()
        for each in gave[1:]:
            total = total + each.float()
        wanted = {
            "all_reduce": [total.to(dtype)] * num_ranks,
            "reduce_scatter": list(total.to(dtype).chunk(num_ranks)),
            "broadcast": gave[:1] * num_ranks,
            "gather": [torch.stack(gave)],
            "all_gather": [torch.stack(gave)] * num_ranks,
        }[kind]
        assert all(map(torch.equal, found, wanted))


ROWS = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 3, 5, 8, 97, 600]),
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@given(st.sampled_from([2, 3, 4]), ROWS, st.integers(0, 1000))
def test_each_rank_adds_up_its_rows_and_gets_the_others(
    num_ranks: int, steps: list[tuple[int, torch.dtype, bool]], seed: int
) -> None:
    """What lies in the user buffer is not copied, and what is too large for it is."""

    def work(end: ShmCommunicator, rank: int) -> list[torch.Tensor]:
        moments, found, num_copied = random.Random(seed + rank), [], 0
        for step, (rows, dtype, is_in_buffer) in enumerate(steps):
            x = given_to(rank, step, rows * 768, dtype).view(rows, 768)
            buffer = end.user_buffer(x.shape, dtype) if is_in_buffer else None
            assert (buffer is not None) == (is_in_buffer and x.nbytes <= BUFFER_BYTES)
            num_copied += buffer is None
            x = x if buffer is None else buffer.copy_(x)
            out = x.new_zeros(rows, 768)
            own = Shard(rank, num_ranks).slice(rows)
            part = x.new_empty(out[own].shape)
            assert end.reduce_scatter(x, part)
            out[own] = part
            if moments.random() < 0.3:
                time.sleep(moments.random() / 1000)
            assert end.gather_rows(out)
            found.append(out)
        assert end.num_copied_sums == num_copied
        return found

    results = run(num_ranks, work)
    for step, (rows, dtype, _) in enumerate(steps):
        total = sum(given_to(rank, step, rows * 768, dtype).float() for rank in range(num_ranks))
        assert isinstance(total, torch.Tensor)
        assert all(torch.equal(found[step], total.to(dtype).view(rows, 768)) for found in results)


def test_what_it_does_not_serve_it_leaves_alone() -> None:
    def work(end: ShmCommunicator, rank: int) -> bool:
        numbers = torch.arange(4) + rank
        every_other = torch.ones(8)[::2]
        assert not end.all_reduce(numbers) and not end.all_reduce(every_other)
        return numbers.tolist() == [rank, rank + 1, rank + 2, rank + 3]

    assert run(2, work) == [True, True]


@pytest.mark.parametrize("method", ["all_reduce", "broadcast"])
def test_a_rank_that_does_not_come_is_named(method: str) -> None:
    def work(end: ShmCommunicator, rank: int) -> str:
        missing = 1 if method == "all_reduce" else 0
        if rank == missing:
            return ""
        with pytest.raises(RuntimeError) as error:
            getattr(end, method)(torch.ones(4))
        return str(error.value)

    found = "".join(run(2, work, timeout_s=0.1))
    missing = {"all_reduce": 1, "broadcast": 0}[method]
    timed_out = f"{method} over shared memory timed out"
    assert found == f"{timed_out}: wanted all 2 ranks in 0.1 s, found no rank {missing}"
