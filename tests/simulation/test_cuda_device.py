"""The KV block store on the simulated CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_device import RUBBISH, CudaDevice, NotSimulated, Order, Stream, on_device, simulated

from cluster.kv.transport.store import BlockStore

ORDERS: list[tuple[Order, int]] = [("late", 0), ("eager", 0), *(("random", i) for i in range(10))]


@pytest.fixture(params=ORDERS, ids=str)
def device(request: pytest.FixtureRequest) -> Iterator[CudaDevice]:
    with simulated(*request.param) as device:
        yield device


def hand_over(device: CudaDevice) -> tuple[list[bytes], torch.Tensor]:
    """Read blocks of one pool and write them into another; return what was read and written."""
    source = torch.arange(6 * 4, dtype=torch.uint8).view(6, 4)
    target = torch.full_like(source, RUBBISH)
    read = BlockStore(on_device(source, device)).gather([5, 1, 2])
    found = [bytes(block) for block in read]
    BlockStore(on_device(target, device)).scatter([1, 4, 3], read)
    return found, target.clone()


def test_blocks_cross_whole_on_the_second_streams(device: CudaDevice) -> None:
    found, target = hand_over(device)
    assert found == [bytes(range(4 * i, 4 * i + 4)) for i in (5, 1, 2)]
    assert [bytes(target[i].tolist()) for i in (1, 4, 3)] == found
    # One wait for each direction, and one copy for each block.
    assert device.counts == {"copies": 6, "stream waits": 2}


def test_a_store_that_does_not_wait_for_its_stream_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Stream, "synchronize", lambda self: None)
    with simulated("late") as device:
        found, target = hand_over(device)
    assert found == [bytes([RUBBISH] * 4)] * 3
    assert bool((target == RUBBISH).all())


def test_what_is_not_modelled_raises_by_name() -> None:
    with simulated("late") as device, pytest.raises(NotSimulated, match="add"):
        on_device(torch.zeros(4), device).add(1)
