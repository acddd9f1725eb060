"""The engine and the KV block store on the simulated CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_device import (
    EVENT_WAITS,
    PAGEABLE,
    RUBBISH,
    STREAM_WAITS,
    CudaDevice,
    NotSimulated,
    Order,
    Stream,
)
from cuda_torch import simulated
from cuda_work import Outcome, run_on_cpu, run_on_device

from cluster.kv.transport.store import BlockStore

ORDERS: list[tuple[Order, int]] = [("late", 0), ("eager", 0), *(("random", i) for i in range(10))]
RUNS: list[tuple[str, Order, int]] = [
    ("eager-plain", "late", 0),
    ("eager-overlapped", "late", 0),
    ("eager-overlapped", "random", 0),
    ("full-overlapped", "late", 0),
    ("pieces-overlapped", "late", 0),
]


@pytest.fixture(params=ORDERS, ids=str)
def device(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    with simulated(*request.param) as device:
        yield device


def hand_over() -> tuple[list[bytes], torch.Tensor]:
    """Read blocks of one pool and write them into another; return what was read and written."""
    source = torch.arange(6 * 4, dtype=torch.uint8).view(6, 4).to("cuda")
    target = torch.full((6, 4), RUBBISH, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    read = BlockStore(source).gather([5, 1, 2])
    found = [bytes(block) for block in read]
    BlockStore(target).scatter([1, 4, 3], read)
    written = torch.full((6, 4), 0, dtype=torch.uint8, pin_memory=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        written.copy_(target, non_blocking=True)
        torch.cuda.current_stream().synchronize()
    return found, written


def test_blocks_cross_whole_on_the_second_streams(device: CudaDevice) -> None:
    found, target = hand_over()
    assert found == [bytes(range(4 * i, 4 * i + 4)) for i in (5, 1, 2)]
    assert [bytes(target[i].tolist()) for i in (1, 4, 3)] == found
    # One for each direction, and one of the test's own.
    assert device.counts[STREAM_WAITS] == 3


def test_a_store_that_does_not_wait_for_its_stream_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Stream, "synchronize", lambda self: None)
    with simulated("late"):
        found, _ = hand_over()
    assert found == [bytes([RUBBISH] * 4)] * 3


def test_what_is_not_modelled_raises_by_name() -> None:
    with simulated("late"), pytest.raises(NotSimulated, match="add"):
        torch.zeros(4, device="cuda").add(torch.zeros(4))


@pytest.fixture(scope="module")
def wanted() -> Outcome:
    return run_on_cpu()


@pytest.mark.parametrize(("configuration", "order", "seed"), RUNS)
def test_the_engine_gives_the_tokens_of_the_cpu_and_waits_once_a_step(
    wanted: Outcome, configuration: str, order: Order, seed: int
) -> None:
    found = run_on_device(configuration, order, seed)
    assert found.token_ids == wanted.token_ids
    assert found.counts is not None
    waits = {what: n for what, n in found.counts.items() if "wait" in what or "hidden" in what}
    assert waits == {EVENT_WAITS: found.num_steps}
    assert not found.counts[PAGEABLE]
