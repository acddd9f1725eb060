"""A wrapper captures in its own mode, replays by key, checks addresses and holds no memory."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from compile.config import CUDAGraphMode
from compile.context import BatchDescriptor, ForwardContext, forward_context
from compile.counters import counter
from compile.errors import LateCapture, ReplayError
from compile.graphs.capture import capture_window, seal
from compile.graphs.pools import GraphPools, new_graph_pool
from compile.graphs.wrapper import CUDAGraphWrapper, StableOutputs

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
CPU = torch.device("cpu")


def shared_pools() -> GraphPools:
    return GraphPools(lambda: new_graph_pool(CPU))


def step(mode: CUDAGraphMode, key: BatchDescriptor | None) -> Any:
    """Enter the context of a step."""
    return forward_context(ForwardContext(cudagraph_runtime_mode=mode, batch_descriptor=key))


def counting(fn: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    calls: list[int] = []

    def call(*args: Any) -> Any:
        calls.append(1)
        return fn(*args)

    return call, calls


@pytest.mark.feature("L03", "M01", "M05")
def test_the_first_call_of_a_key_captures_and_the_next_ones_replay() -> None:
    runnable, calls = counting(lambda x: x * 2)
    wrapper = CUDAGraphWrapper(runnable, PIECEWISE, shared_pools())
    x = torch.ones(8)
    # Equal token counts of different query lengths are two graphs.
    keys = [BatchDescriptor(*key) for key in ((8, None, False), (4, 4, True), (4, 2, True))]
    for key in keys:
        with (
            capture_window(),
            step(PIECEWISE, key),
            counter.expect(num_cudagraph_captured=1, num_cudagraph_replayed=2),
        ):
            outputs = [wrapper(x[: key.num_tokens]).clone() for _ in range(3)]
        assert all(torch.equal(output, torch.full((key.num_tokens,), 2.0)) for output in outputs)
    with step(NONE, None), counter.expect(num_cudagraph_replayed=0):
        wrapper(x)
    assert len(calls) == 3 + 1
    assert wrapper.num_replays == {key: 2 for key in keys}


@pytest.mark.feature("M02")
def test_an_input_that_moved_is_an_error_with_both_lists() -> None:
    wrapper = CUDAGraphWrapper(lambda x, y: x + y[0], PIECEWISE, shared_pools())
    x, y, moved = torch.ones(2), [torch.ones(2)], [torch.ones(2)]
    with capture_window(), step(PIECEWISE, BatchDescriptor(2, None, False)):
        wrapper(x, y)
        wrapper(x, y)
        with pytest.raises(ReplayError) as caught:
            wrapper(x, moved)
    lists = [str([hex(t.data_ptr()) for t in (x, *each)]) for each in (y, moved)]
    assert (caught.value.wanted, caught.value.found) == tuple(lists)
    assert "PIECEWISE graph for BatchDescriptor(num_tokens=2" in str(caught.value)


@pytest.mark.feature("M04")
def test_garbage_is_collected_before_the_first_piece_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    collections: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda *_: collections.append(1))
    pools = shared_pools()
    pieces = [CUDAGraphWrapper(torch.sin, PIECEWISE, pools, trims_pool=i == 0) for i in range(3)]
    counts = []
    with capture_window(), step(PIECEWISE, BatchDescriptor(2, None, False)):
        for piece in pieces:
            piece(torch.ones(2))
            counts.append(len(collections))
    assert counts == [1, 1, 1]


@pytest.mark.feature("C11")
@pytest.mark.parametrize("policy", [None, "warn"])
def test_a_key_that_was_not_captured_runs_eagerly_and_is_counted(
    policy: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    if policy:
        seal(policy)
    wrapper = CUDAGraphWrapper(lambda x: x * 2, FULL, shared_pools())
    x = torch.ones(2)
    with (
        step(FULL, BatchDescriptor(2, None, False)),
        counter.expect(num_late_captures=3, num_cudagraph_captured=0, num_cudagraph_replayed=0),
    ):
        outputs = [wrapper(x) for _ in range(3)]
    assert all(output.tolist() == [2.0, 2.0] for output in outputs)
    named = [r.getMessage() for r in caplog.records if "BatchDescriptor(num_tokens=2" in r.message]
    assert len(named) == 1


@pytest.mark.feature("X01")
def test_a_strict_seal_refuses_a_key_that_was_not_captured() -> None:
    wrapper = CUDAGraphWrapper(lambda x: x * 2, FULL, shared_pools())
    x = torch.ones(2)
    with capture_window(), step(FULL, BatchDescriptor(2, None, False)):
        wrapper(x)
    seal("strict")
    with step(FULL, BatchDescriptor(2, None, False)):
        assert wrapper(x).tolist() == [2.0, 2.0]
    with (
        counter.expect(num_late_captures=1),
        pytest.raises(LateCapture, match=r"found FULL graph for BatchDescriptor\(num_tokens=1,"),
        step(FULL, BatchDescriptor(1, None, False)),
    ):
        wrapper(x[:1])


@pytest.mark.feature("M08")
def test_outputs_of_eager_ops_between_pieces_have_one_address_per_key() -> None:
    pools = shared_pools()
    first = CUDAGraphWrapper(lambda x: x * 2, PIECEWISE, pools)
    between = StableOutputs(lambda x: x + 1)
    second = CUDAGraphWrapper(lambda y, x: y - x, PIECEWISE, pools, trims_pool=False)
    kept: list[torch.Tensor] = []  # so that new tensors lie at new addresses

    def stable(x: torch.Tensor) -> torch.Tensor:
        kept.append(between(first(x)))
        found: torch.Tensor = second(kept[-1], x)
        return found

    x = torch.ones(8)
    keys = [BatchDescriptor(8, None, False), BatchDescriptor(3, None, False)]
    with capture_window():
        for key in keys:
            with step(PIECEWISE, key):
                stable(x[: key.num_tokens])
    torch.manual_seed(0)
    for _, key in itertools.product(range(3), keys):
        x.copy_(torch.rand(8))
        part = x[: key.num_tokens]
        with step(PIECEWISE, key):
            assert torch.equal(stable(part), part * 2 + 1 - part)


def test_a_slot_leaves_alone_what_already_lies_still() -> None:
    static = torch.zeros(3)
    op = StableOutputs(lambda x: {"same": x, "part": x[1:], "new": x + 1})
    with capture_window(), step(PIECEWISE, BatchDescriptor(3, None, False)):
        found = [op(static) for _ in range(2)]
    assert found[0]["same"] is static
    assert found[0]["part"].data_ptr() == static.data_ptr() + 4
    assert found[0]["new"] is found[1]["new"]


@pytest.mark.feature("M09")
@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.deepcopy])
def test_a_wrapper_cannot_leave_its_process(duplicate: Callable[[Any], Any]) -> None:
    wrapper = CUDAGraphWrapper(torch.sin, FULL, shared_pools())
    with pytest.raises(TypeError, match="wanted a capture in each process"):
        duplicate(wrapper)
