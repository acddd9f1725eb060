"""The C++ kernels of attention against the torch functions whose references they are."""

from __future__ import annotations

import random
import shutil
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.kernels import paged_attention as reference
from model.kernels.cpu import attention as cpu_attention
from model.kernels.cpu import native, packed_linear

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    assert native.native_library() is not None, "wanted the kernels to build, found none"


class Case:
    """Random sequences in scattered blocks of one layer of a pool that holds NaN elsewhere."""

    def __init__(
        self,
        lengths: list[int],
        *,
        group: int = 2,
        kv_heads: int = 2,
        dim: int = 16,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        counts = [-(-length // block_size) for length in lengths]
        order = (torch.randperm(sum(counts) + 3) + 1).int()
        pool = torch.full((len(order) + 1, 3, 2, block_size, kv_heads, dim), torch.nan)
        self.pool = pool.to(dtype)
        self.k, self.v = self.pool[:, 1, 0], self.pool[:, 1, 1]
        self.table = order[torch.randint(len(order), (len(lengths), max(counts) + 2))]
        self.lengths = torch.tensor(lengths).int()
        for row, blocks in zip(self.table, order.split([*counts, 3]), strict=False):
            row[: len(blocks)] = blocks
        for row, length in zip(self.table, lengths, strict=True):
            at = torch.arange(length)
            blocks, slots = row[at // block_size].long(), at % block_size
            self.k[blocks, slots] = torch.randn(length, kv_heads, dim).to(dtype)
            self.v[blocks, slots] = torch.randn(length, kv_heads, dim).to(dtype)
        # A view into wider rows, as queries are a view of the fused projection.
        wide = torch.randn(len(lengths), group * kv_heads + 2, dim).to(dtype)
        self.q = wide[:, : group * kv_heads]
        self.scale = dim**-0.5

    def check(self, window: int | None = None) -> None:
        """Compare decodes with the reference's, to which unused slots are zero."""
        found = torch.full_like(self.q.contiguous(), torch.nan)
        wanted = torch.full_like(found, torch.nan)
        args = self.table, self.lengths, self.scale
        cpu_attention.paged_decode(self.q, self.k, self.v, *args, found, window)
        k, v = self.k.nan_to_num(0.0), self.v.nan_to_num(0.0)
        k[0], v[0] = 0.0, 0.0
        reference.paged_decode(self.q, k, v, *args, wanted, window)
        tolerance = TOLERANCE[self.q.dtype]
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


class Chunks(Case):
    """The same, of which each sequence's last tokens are queries; three rows are padding."""

    def __init__(self, lengths: list[int], queries: list[int], **shape: Any) -> None:
        super().__init__(lengths, **shape)
        heads, dim = self.q.shape[1:]
        self.queries = torch.randn(sum(queries) + 3, heads + 2, dim).to(self.q.dtype)[:, :heads]
        self.bounds = torch.tensor([0, *queries]).cumsum(0).int()

    def attend(self, window: int | None = None) -> torch.Tensor:
        """Return what the kernel makes of it."""
        out = torch.full_like(self.queries.contiguous(), torch.nan)
        where = (self.k, self.v, self.table, self.bounds, self.lengths, self.scale)
        cpu_attention.paged_prefill(self.queries, *where, out, window)
        return out

    def check(self, window: int | None = None) -> None:
        """Compare with the reference."""
        found, num_tokens = self.attend(window), int(self.bounds[-1])
        wanted = torch.zeros_like(found)
        k, v = self.k.nan_to_num(0.0), self.v.nan_to_num(0.0)
        where = (k, v, self.table, self.bounds, self.lengths, self.scale)
        k[0], v[0] = 0.0, 0.0
        reference.paged_prefill(self.queries[:num_tokens], *where, wanted[:num_tokens], window)
        tolerance = TOLERANCE[self.q.dtype]
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a silent fall back to the torch function fail."""

    def refusing(own: Any) -> Any:
        def refuse(q: torch.Tensor, k: torch.Tensor, *args: Any) -> None:
            assert not k.isnan().any(), "the torch function ran in the kernel's place"
            own(q, k, *args)

        return refuse

    for name in ("paged_decode", "paged_prefill"):
        monkeypatch.setattr(reference, name, refusing(getattr(reference, name)))


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", range(1, 9))
def test_decode_equals_its_reference_for_every_group(group: int, dtype: torch.dtype) -> None:
    Case([1, 15, 16, 17, 40], group=group, dtype=dtype).check()


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [160, 256])
def test_wide_heads_sum_in_several_rounds(dim: int, dtype: torch.dtype) -> None:
    Case([7, 33], dim=dim, dtype=dtype).check()


@pytest.mark.usefixtures("fewer_lanes", "no_reference")
def test_kernels_are_right_for_narrower_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for dim in (12, 16, 32, 64, 80, 128, 256):
            check_rope([8, 9, 10, 13, 0], (3, 1, 1), dim // 2, 4, dtype)
            for window in (None, 6):
                Case([0, 1, 3, 5, 16, 40], group=3, dim=dim, dtype=dtype).check(window)
                shape: dict[str, Any] = {"group": 3, "dim": dim, "dtype": dtype}
                Chunks([5, 90, 140, 7], [5, 80, 2, 0], **shape).check(window)
        monkeypatch.setattr(packed_linear, "_is_ours", lambda _: True)
        for shape in ((100, 37), (70, 515)):
            weight, x = torch.randn(shape).to(dtype), torch.randn(45, shape[1]).to(dtype)
            packed = packed_linear.PackedWeight(weight)
            for rows in range(1, 46):
                found = packed_linear.packed_linear(x[:rows], packed.handle, None, shape[0])
                wanted = (x[:rows].double() @ weight.double().T).to(dtype)
                tolerance = 1e-4 if dtype == torch.float32 else 2**-7
                torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 24, 64, 80, 96, 128, 8, 12, 33])
def test_decode_equals_its_reference_for_every_head_dim(dim: int, dtype: torch.dtype) -> None:
    Case([7, 33], dim=dim, dtype=dtype).check()


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("seed", range(20))
def test_decode_equals_its_reference_on_random_shapes(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, rng.randint(2, 500)]) for _ in range(rng.randint(1, 6))]
    Case(
        lengths,
        group=rng.randint(1, 8),
        kv_heads=rng.randint(1, 4),
        dim=rng.choice([16, 20, 32, 64, 112, 128]),
        block_size=rng.choice([1, 3, 16, 32]),
        dtype=rng.choice([torch.float32, torch.bfloat16]),
    ).check(window=rng.choice([None, 1, rng.randint(2, 40), rng.randint(41, 600)]))


def test_padding_sequences_are_zero() -> None:
    case = Case([0, 3, 0])
    out = torch.full_like(case.q.contiguous(), torch.nan)
    cpu_attention.paged_decode(case.q, case.k, case.v, case.table, case.lengths, case.scale, out)
    assert not out[0].any()
    assert not out[2].any()
    assert out[1].all()


def test_large_scores_neither_overflow_nor_vanish() -> None:
    case = Case([40, 3])
    case.q.mul_(1e3)
    case.check()


def test_more_threads_change_nothing() -> None:
    case = Case([100, 7, 0, 31], group=4)
    outs = [torch.empty_like(case.q.contiguous()) for _ in range(2)]
    try:
        for threads, out in enumerate(outs, 1):
            torch.set_num_threads(threads)
            cpu_attention.paged_decode(
                case.q, case.k, case.v, case.table, case.lengths, case.scale, out
            )
    finally:
        torch.set_num_threads(1)
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    # With neighbours, one thread attends all KV heads of a sequence; alone, one of them.
    case = Case([100, 7, 31, 64, 65, 1, 200, 90], group=3, kv_heads=4, dtype=dtype)

    def attend(rows: slice) -> torch.Tensor:
        out = torch.empty_like(case.q[rows].contiguous())
        where = (case.table[rows], case.lengths[rows], case.scale, out)
        cpu_attention.paged_decode(case.q[rows], case.k, case.v, *where)
        return out

    together = attend(slice(None))
    for row in range(len(case.lengths)):
        assert torch.equal(attend(slice(row, row + 1)), together[row : row + 1])


ROPE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 0.0}
"""Where both products of a pair nearly cancel, what is left of their rounding is large."""


def check_rope(
    slots: list[int], heads: tuple[int, int, int], half: int, block_size: int, dtype: torch.dtype
) -> None:
    """Compare rotated queries, and pools of 200 blocks, with the reference's."""
    qkv = torch.randn(len(slots), sum(heads) + 1, 2 * half).to(dtype)[:, 1:]
    q, k, v = qkv.split_with_sizes(heads, 1)
    angles = torch.rand(len(slots), 1, half) * 7
    new = (q, k, v, angles.cos().to(dtype), angles.sin().to(dtype))
    pools = torch.full((2, 201, 3, 2, block_size, heads[1], 2 * half), 7.0, dtype=dtype)
    pools[:, 0] = 0.0
    found, wanted = (
        room.rope_and_write_kv(*new, pool[:, 1, 0], pool[:, 1, 1], torch.tensor(slots).long())
        for pool, room in zip(pools, (cpu_attention, reference), strict=True)
    )
    tolerance = ROPE_TOLERANCE[dtype]
    assert found.is_contiguous()
    torch.testing.assert_close(found, wanted, atol=8 * tolerance, rtol=tolerance)
    torch.testing.assert_close(pools[0], pools[1], atol=8 * tolerance, rtol=tolerance)
    # Values are copied, and nothing is touched beside the layer.
    assert torch.equal(pools[0, :, 1, 1], pools[1, :, 1, 1])
    assert torch.equal(pools[0, :, ::2], pools[1, :, ::2])


@settings(max_examples=80, deadline=None)
@given(data=st.data(), half=st.integers(1, 70), group=st.integers(1, 6), kv_heads=st.integers(1, 3))
def test_rotated_and_written_tokens_equal_the_references(
    data: st.DataObject, half: int, group: int, kv_heads: int
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    block_size = data.draw(st.integers(1, 9))
    # Chunks of sequences, of which some go on in an open block, and padding between them.
    chunks = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=4)
    slots, blocks = [], iter(torch.randperm(200).add(1).tolist())
    for start, length in data.draw(chunks):
        own = [next(blocks) for _ in range(-(-(start + length) // block_size))]
        at = range(start, start + length)
        slots += [own[i // block_size] * block_size + i % block_size for i in at]
        slots += [data.draw(st.integers(0, block_size - 1))] * data.draw(st.integers(0, 2))
    heads = (group * kv_heads, kv_heads, kv_heads)
    torch.set_num_threads(data.draw(st.sampled_from([1, 2])))
    try:
        check_rope(slots, heads, half, block_size, data.draw(st.sampled_from(list(ROPE_TOLERANCE))))
    finally:
        torch.set_num_threads(1)


def test_threads_do_not_clear_slots_that_others_write() -> None:
    """Half of the tokens end within a block."""
    torch.set_num_threads(2)
    try:
        for _ in range(20):
            check_rope(list(range(64, 464)), (4, 2, 2), 16, 64, torch.float32)
    finally:
        torch.set_num_threads(1)


def test_what_a_kernel_does_not_serve_goes_to_its_reference() -> None:
    case = Case([9, 2], dtype=torch.float16)
    case.k.nan_to_num_(0.0)
    case.v.nan_to_num_(0.0)
    found, wanted = (torch.empty_like(case.q.contiguous()) for _ in range(2))
    args = case.q, case.k, case.v, case.table, case.lengths, case.scale
    cpu_attention.paged_decode(*args, found)
    reference.paged_decode(*args, wanted)
    assert torch.equal(found, wanted)


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("window", [1, 5, 16, 17, 31, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_before_a_sliding_window_is_read(window: int, dtype: torch.dtype) -> None:
    case = Case([0, 1, 9, 2, 31, 90], dtype=dtype)
    case.check(window)
    out = torch.empty_like(case.q.contiguous())
    args = case.q, case.k, case.v, case.table, case.lengths, case.scale
    cpu_attention.paged_decode(*args, out, window)
    for row, length in zip(case.table, case.lengths.tolist(), strict=True):
        at = torch.arange(max(length - window, 0))
        for cache in (case.k, case.v):
            cache[row[at // 4].long(), at % 4] = torch.nan
    again = torch.empty_like(out)
    cpu_attention.paged_decode(*args, again, window)
    assert torch.equal(out, again)


# --- chunks of prompts ----------------------------------------------------------------------------


@pytest.mark.usefixtures("no_reference")
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_chunks_equal_their_reference_on_random_shapes(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    lengths = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=5))
    queries = [data.draw(st.integers(0, length)) for length in lengths]
    Chunks(
        lengths,
        queries,
        group=data.draw(st.integers(1, 8)),
        kv_heads=data.draw(st.integers(1, 4)),
        dim=data.draw(st.sampled_from([8, 20, 33, 64, 80, 128, 256])),
        block_size=data.draw(st.sampled_from([1, 3, 16, 32])),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
    ).check(window=data.draw(st.none() | st.integers(1, 40) | st.integers(41, 400)))


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_chunk_is_worked_on_in_stretches(dtype: torch.dtype) -> None:
    Chunks([700, 130], [700, 129], group=7, dtype=dtype).check()
    Chunks([600], [450], group=1, kv_heads=1, dtype=dtype).check(100)


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("window", [1, 5, 17, 64, 100])
def test_chunks_read_nothing_before_their_first_window(window: int) -> None:
    lengths, queries = [9, 31, 190, 300], [4, 31, 60, 7]
    case = Chunks(lengths, queries)
    before = case.attend(window)
    for row, length, n in zip(case.table, lengths, queries, strict=True):
        at = torch.arange(max(length - n - window + 1, 0))
        for cache in (case.k, case.v):
            cache[row[at // 4].long(), at % 4] = torch.nan
        row[: len(at) // 4] = 0
    assert torch.equal(case.attend(window), before)
    assert before.isfinite().all()


def test_more_threads_change_nothing_in_chunks() -> None:
    case = Chunks([300, 7, 64], [300, 7, 60], group=4)
    try:
        outs = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outs.append(case.attend())
    finally:
        torch.set_num_threads(1)
    assert torch.equal(*outs)


def test_a_chunk_does_not_depend_on_its_neighbours() -> None:
    case = Chunks([120, 40, 77], [100, 40, 3])
    together = case.attend()
    alone = Chunks([40], [40])
    alone.k, alone.v, alone.table = case.k, case.v, case.table[1:2]
    alone.queries = case.queries[100:140]
    assert torch.equal(alone.attend(), together[100:140])


def test_chunks_with_large_scores_neither_overflow_nor_vanish() -> None:
    case = Chunks([140, 3], [140, 2])
    case.queries.mul_(1e3)
    case.check()


@pytest.mark.parametrize("kind", ["float16", "wide heads"])
def test_chunks_that_the_kernel_does_not_serve_go_to_the_reference(kind: str) -> None:
    is_half = kind == "float16"
    case = Chunks(
        [9, 20],
        [9, 4],
        dim=16 if is_half else 272,
        dtype=torch.float16 if is_half else torch.float32,
    )
    for tensor in (case.k, case.v):
        tensor.nan_to_num_(0.0)
    found, wanted = case.attend(), torch.zeros_like(case.queries.contiguous())
    where = (case.k, case.v, case.table, case.bounds, case.lengths, case.scale)
    reference.paged_prefill(case.queries[:13], *where, wanted[:13])
    assert torch.equal(found, wanted)
