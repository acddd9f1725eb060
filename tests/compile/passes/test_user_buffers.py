"""Sums over ranks are moved into user buffers wherever that changes no value.

Graphs run here with one thread for each rank, whose ends of a group share memory.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import fx
from torch.distributed import HashStore, ProcessGroup

import model.user_buffers  # noqa: F401  (registers its ops)
from cluster.group.membership import make_group
from compile.config import CompilationConfig
from compile.errors import FieldError
from compile.passes.fuse_all_reduce_rms_norm import all_reduce_add_rms_norm
from compile.passes.user_buffers import use_user_buffers
from compile.resolve import DEFAULT_PASSES, StepLimits, resolve
from model import parallel
from model.kernels.cpu.communicator import ShmCommunicator, can_share, memory_bytes

LIMITS = StepLimits(8, 64)
WIDTH, SLOT_BYTES, BUFFER_BYTES = 16, 4096, 8192
SUM, FINALIZE = "user_buffers_all_reduce_add_rms_norm", "user_buffers_finalize"
COPY, PRODUCT = "copy_to_user_buffers", "mm_to_user_buffers"


@pytest.fixture(scope="module")
def groups() -> Iterator[list[tuple[str, ShmCommunicator]]]:
    """Names of two ranks' groups, as if each were in a process of its own, and their ends."""
    if not can_share():
        pytest.skip("needs a C++ compiler, found none")
    sizes = (SLOT_BYTES, BUFFER_BYTES)
    memory = memoryview(bytearray(memory_bytes(2, *sizes)))
    members = [ProcessGroup(HashStore(), rank, 2) for rank in range(2)]
    found = []
    for rank, member in enumerate(members):
        end = ShmCommunicator(memory, rank, 2, 60, *sizes)
        parallel.share_memory(member, end)
        found.append((parallel.register_group(f"user-{rank}", member), end))
    yield found
    del members


def graph_of(layers: list[str], group_name: str) -> fx.Graph:
    """Return a graph of sums in a row, each behind a product or behind something else.

    Of each layer: what is added up is a product of the last normed rows ("product"), of the first
    ones, early ("early"), or a plain sum of them ("other"); "read" also returns the residual.
    """
    graph = fx.Graph()
    x, residual, weight, scale = (graph.placeholder(name) for name in ("x", "r", "w", "s"))
    for node, shape in ((x, (2, 4)), (residual, (2, 4)), (weight, (4, 4)), (scale, (4,))):
        node.meta["val"] = torch.empty(shape)
    call, first, results = graph.call_function, x, []
    mm, add = torch.ops.aten.mm.default, torch.ops.aten.add.Tensor
    early = [call(mm, (first, weight)) for kind in layers if "early" in kind]
    for kind in layers:
        if "early" in kind:
            part = early.pop(0)
        elif "other" in kind:
            part = call(add, (x, x))
        else:
            part = call(mm, (x, weight))
        fused = call(all_reduce_add_rms_norm.default, (part, residual, scale, 1e-6, group_name))
        x, residual = (call(operator.getitem, (fused, index)) for index in range(2))
        if "read" in kind:
            results.append(call(torch.ops.aten.clone.default, (residual,)))
    graph.output((x, residual, *results))
    for node in graph.nodes:
        node.meta.setdefault("val", torch.empty(2, 4))
    return graph


def names(graph: fx.Graph) -> list[str]:
    ops = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return [str(op._schema.name).partition("::")[2] for op in ops]


LAYERS = st.lists(
    st.sampled_from(["product", "early", "other", "product read", "early read", "other read"]),
    min_size=1,
    max_size=5,
)


@pytest.mark.feature("O05")
@given(LAYERS, st.integers(1, 150), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_graph_gives_the_same_wherever_it_adds_up(
    groups: list[tuple[str, ShmCommunicator]], layers: list[str], rows: int, dtype: torch.dtype
) -> None:
    def given_to(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        common = torch.Generator().manual_seed(7)
        return [
            torch.randn(rows, WIDTH, generator=common).to(dtype),
            torch.randn(rows, WIDTH, generator=common).to(dtype),
            torch.randn(WIDTH, WIDTH, generator=generator).to(dtype),
            torch.randn(WIDTH, generator=common).to(dtype),
        ]

    def work(rank: int, *, moved: bool) -> Any:
        graph = graph_of(layers, groups[rank][0])
        if moved:
            assert use_user_buffers(graph) == len(layers)
        graph.lint()
        return fx.GraphModule(torch.nn.Module(), graph)(*given_to(rank))

    with ThreadPoolExecutor(2) as threads:
        wanted = list(threads.map(lambda rank: work(rank, moved=False), range(2)))
        found = list(threads.map(lambda rank: work(rank, moved=True), range(2)))
    for own, other in zip(wanted, found, strict=True):
        assert all(map(torch.equal, own, other))


def test_ranks_that_share_no_memory_add_up_as_usual() -> None:
    group = make_group(HashStore(), 0, 1, device="cpu", host="127.0.0.1")
    name = parallel.register_group("user-alone", group)
    given_to = [torch.randn(3, WIDTH), torch.randn(3, WIDTH), torch.randn(WIDTH, WIDTH)]
    given_to.append(torch.randn(WIDTH))
    found = []
    for is_moved in (False, True):
        graph = graph_of(["product", "other", "product read"], name)
        assert not is_moved or use_user_buffers(graph) == 3
        found.append(fx.GraphModule(torch.nn.Module(), graph)(*given_to))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("layers", "copies", "finals"),
    [
        (["product"], 0, 1),
        (["product", "product"], 0, 1),
        (["product read", "product"], 0, 2),
        (["other", "product"], 1, 1),
        # The second one is computed before the first is added up: the buffer is not free yet.
        (["product", "early"], 1, 1),
        (["early", "early"], 1, 1),
    ],
)
def test_what_is_copied_and_what_is_gathered(layers: list[str], copies: int, finals: int) -> None:
    graph = graph_of(layers, "anyone")
    assert use_user_buffers(graph) == len(layers)
    found = names(graph)
    assert (found.count(SUM), found.count(COPY)) == (len(layers), copies)
    assert found.count(FINALIZE) == finals
    assert found.count(PRODUCT) == len(layers) - copies


@pytest.mark.parametrize(
    ("fields", "device", "wanted"),
    [
        ({"use_inductor": True}, "cpu", "false where Inductor compiles"),
        ({"use_inductor": False}, "cuda", "false with device=cuda"),
        ({"use_inductor": False, "passes": []}, "cpu", "false without fuse_all_reduce_rms_norm"),
        (
            {"use_inductor": False, "passes": DEFAULT_PASSES},
            "cpu",
            "false with fuse_rms_norm_quantize",
        ),
    ],
)
def test_where_nothing_can_use_them_they_are_refused(
    fields: dict[str, Any], device: str, wanted: str
) -> None:
    config = CompilationConfig(level=3, enable_userbuffers=True, **fields)
    with pytest.raises(FieldError, match="compilation.enable_userbuffers: wanted " + wanted):
        resolve(config, LIMITS, device=device)


def test_without_pieces_they_do_nothing_and_a_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = CompilationConfig(level=3, use_inductor=False, enable_userbuffers=True)
    assert resolve(config, LIMITS, device="cpu").enable_userbuffers
    with caplog.at_level(logging.WARNING):
        found = resolve(config, LIMITS, device="cpu", enforce_eager=True)
    assert not found.enable_userbuffers
    assert "compilation.enable_userbuffers: without effect at level 0" in caplog.text
