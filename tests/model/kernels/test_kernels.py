"""The torch functions against plain attention, and the C++ kernels against the torch functions."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compile.context import ForwardContext, KVCacheTensor, forward_context
from model.config import Latent
from model.kernels import cpu, elementwise, latent_attention, paged_attention
from model.kernels.cpu import native, packed_linear
from model.kernels.paged_attention import FP8
from model.layers.attention import Attention, AttentionMetadata
from model.layers.latent_attention import LatentAttention
from model.parallel import Placement

ATTENTION_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 0.0}
ROPE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 0.0}
"""Where both products of a pair nearly cancel, what is left of their rounding is large."""
ROW_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 0.0}
"""Sums are taken in another order, an exponential ends in another bit; a bfloat16 may then round to
its neighbour, and so may the product of two such."""
DTYPES = [torch.float32, torch.bfloat16]
CACHES = [
    pytest.param(False, id="own cache"),
    pytest.param(True, id="fp8 cache", marks=pytest.mark.feature("S09")),
]
CPU = torch.device("cpu")
RANDOM = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    if native.native_function("rms_norm", torch.float32) is None:
        pytest.skip("needs a C++ compiler")
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a silent fall back to a torch function fail."""
    run = native.run

    def serving(*args: Any, **options: Any) -> bool:
        assert run(*args, **options), "the torch function would run in the kernel's place"
        return True

    monkeypatch.setattr(native, "run", serving)


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which each build is kept for the module."""
    return tmp_path_factory.mktemp("builds")


@pytest.fixture(params=["-mno-avx512f", pytest.param("-mno-avx", marks=pytest.mark.slow)])
def fewer_lanes(
    request: pytest.FixtureRequest, builds: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Build the kernels for a processor whose registers are narrower than this one's may be."""
    if platform.machine() != "x86_64":
        pytest.skip("the flags are x86's")
    monkeypatch.setenv("LOCKSTEP_CACHE_ROOT", str(builds))
    monkeypatch.setattr(native, "FLAGS", [*native.FLAGS, request.param])
    cached = (native.native_library, native.native_function, native._prepared)
    for each in cached:
        each.cache_clear()
    assert native.native_function("rms_norm", torch.float32) is not None
    yield
    monkeypatch.undo()
    for each in cached:
        each.cache_clear()


# --- attention ------------------------------------------------------------------------------------


class Case:
    """Random sequences in scattered blocks of one layer of a pool that holds NaN elsewhere.

    Each has one query, or a chunk of its last tokens; behind chunks lie three rows of padding.
    """

    def __init__(
        self,
        lengths: list[int],
        queries: list[int] | None = None,
        *,
        group: int = 2,
        kv_heads: int = 2,
        dim: int = 16,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        has_fp8: bool = False,
    ) -> None:
        held = FP8 if has_fp8 else dtype
        self.kv_scales = None
        if has_fp8:
            self.kv_scales = torch.tensor([[0.02], [0.3]]) * torch.arange(1, kv_heads + 1)
        counts = [-(-length // block_size) for length in lengths]
        order = (torch.randperm(sum(counts) + 3) + 1).int()
        pool = torch.full((len(order) + 1, 3, 2, block_size, kv_heads, dim), torch.nan).to(held)
        self.k, self.v = pool[:, 1, 0], pool[:, 1, 1]
        self.table = order[torch.randint(len(order), (len(lengths), max(counts) + 2))]
        self.lengths = torch.tensor(lengths).int()
        for row, blocks in zip(self.table, order.split([*counts, 3]), strict=False):
            row[: len(blocks)] = blocks
        self.sequences = []
        """Each one's keys and values."""
        for row, length in zip(self.table, lengths, strict=True):
            at = torch.arange(length)
            blocks, slots = row[at // block_size].long(), at % block_size
            new = torch.randn(2, length, kv_heads, dim).to(dtype)
            written = new
            if self.kv_scales is not None:
                by_head = self.kv_scales.unsqueeze(1)
                written = paged_attention.quantize_kv(new, by_head)
                new = (written.float() * by_head.unsqueeze(-1)).to(dtype)
            self.k[blocks, slots], self.v[blocks, slots] = written
            self.sequences.append(new)
        self.is_decode = queries is None
        self.bounds = torch.tensor([0, *(queries or [1] * len(lengths))]).cumsum(0).int()
        num_rows = int(self.bounds[-1]) + (0 if self.is_decode else 3)
        # A view into wider rows, as queries are a view of the fused projection.
        self.q = torch.randn(num_rows, group * kv_heads + 2, dim).to(dtype)[:, : group * kv_heads]

    def attend(self, kernels: Any = cpu, window: int | None = None) -> torch.Tensor:
        out = torch.full_like(self.q.contiguous(), torch.nan)
        caches, rest = (self.k, self.v, self.table), (self.lengths, self.q.shape[2] ** -0.5, out)
        if self.is_decode:
            kernels.paged_decode(self.q, *caches, *rest, window, self.kv_scales)
        else:
            kernels.paged_prefill(self.q, *caches, self.bounds, *rest, window, self.kv_scales)
        return out

    def zero_unused(self) -> None:
        """Give unused slots the value that the torch functions rely on."""
        for cache in (self.k, self.v):
            cache.copy_(cache.float().nan_to_num(0.0))
            cache[0] = 0.0

    def check(self, window: int | None = None) -> None:
        """Compare with the reference."""
        found = self.attend(cpu, window)
        self.zero_unused()
        wanted = self.attend(paged_attention, window)
        wanted[int(self.bounds[-1]) :] = 0.0
        tolerance = ATTENTION_TOLERANCE[found.dtype]
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


KINDS = {"decodes": None, "chunks": [1, 8, 0, 60, 7, 31]}
LENGTHS = [1, 9, 2, 90, 300, 31]


@pytest.fixture(params=KINDS)
def queries(request: pytest.FixtureRequest) -> list[int] | None:
    return KINDS[request.param]


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """Attend in float64 from the last tokens of a sequence. q: [Tq, H, D]; k, v: [Tk, Hkv, D]."""
    k, v = (t.double().repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[2] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(k) - len(q) + 1)
    if window is not None:
        distances = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        hidden |= distances >= window
    attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    return attended.to(q.dtype)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("has_fp8", CACHES)
@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 5, 8, 9, 100])
def test_the_references_equal_plain_attention_and_read_their_windows_alone(
    window: int | None, queries: list[int] | None, has_fp8: bool
) -> None:
    # A sequence of length 0 is padding, of one query or of several.
    lengths = [*LENGTHS, 0]
    case = Case(lengths, None if queries is None else [*queries, 3], has_fp8=has_fp8)
    case.zero_unused()
    for row, length, n in zip(case.table, lengths, case.bounds.diff(), strict=True):
        first = 0 if window is None else max(length - int(n) - window + 1, 0) // 4
        for cache in (case.k, case.v):
            cache[row[:first].long()] = torch.nan
        # A freed entry may name scratch, or, on a rank, a block that is another's by now.
        row[:first:2] = 0
    out = case.attend(paged_attention, window)
    sizes = [*case.bounds.diff().tolist(), len(out) - int(case.bounds[-1])]
    rows = zip(out.split(sizes), case.q.split(sizes), case.sequences, strict=False)
    for found, q, (k, v) in rows:
        close(found, plain_attention(q, k, v, window) if len(k) else 0 * q)


def test_reused_blocks_hide_what_they_held() -> None:
    case = Case([8])
    blocks, new = case.table[0, :2].long(), torch.randn(2, 5, 2, 16)
    case.k[blocks], case.v[blocks] = torch.inf, torch.nan
    at = torch.arange(5)
    paged_attention.write_kv(*new, case.k, case.v, blocks[at // 4] * 4 + at % 4)
    case.lengths[0] = 5
    close(case.attend(paged_attention), plain_attention(case.q, *new))


def test_writing_touches_only_its_slots() -> None:
    pool, (k, v) = torch.full((10, 3, 2, 4, 2, 16), 7.0), torch.randn(2, 2, 2, 16)
    slots = torch.tensor([5 * 4 + 1, 9 * 4 + 3])
    paged_attention.write_kv(k, v, pool[:, 1, 0], pool[:, 1, 1], slots)
    assert torch.equal(pool[5, 1, 0, 1], k[0]) and torch.equal(pool[9, 1, 1, 3], v[1])
    pool[5, 1, :, 1] = pool[9, 1, :, 3] = 7.0
    assert (pool[1:] == 7.0).all() and (pool[0, [0, 2]] == 7.0).all()


@pytest.mark.parametrize("window", [None, 3])
def test_a_layer_attends_decodes_and_chunks_and_zeroes_padding(window: int | None) -> None:
    case, num_queries = Case([7, 8], [1, 4]), [1, 4]
    case.zero_unused()
    at = [torch.arange(length - n, length) for length, n in zip([7, 8], num_queries, strict=True)]
    slots = [row[i // 4] * 4 + i % 4 for row, i in zip(case.table, at, strict=True)]
    metadata = AttentionMetadata(
        num_decodes=1,
        cu_seqlens_q=case.bounds,
        seq_lens=case.lengths,
        block_table=case.table,
        slot_mapping=torch.cat((*slots, torch.zeros(3))).long(),
    )
    layer = Attention(2, 16, layer_name="layer", sliding_window=window)
    caches = {"layer": KVCacheTensor(case.k, case.v)}
    k, v = torch.randn(2, 8, 2, 16)
    cos, sin = torch.randn(2, 8, 1, 8)
    for padded in (case.q, k, v, cos, sin):
        padded[5:] = torch.nan
    with forward_context(ForwardContext({"layer": layer}, metadata, caches)):
        out = layer(case.q, k, v, cos, sin)
    assert not out[5:].any()
    rotated = elementwise.rotate(case.q, cos, sin)
    for row, length, rows in zip(case.table, (7, 8), (slice(0, 1), slice(1, 5)), strict=True):
        i = torch.arange(length)
        held = (cache[row[i // 4].long(), i % 4] for cache in (case.k, case.v))
        close(out[rows], plain_attention(rotated[rows], *held, window))


GROUPS = [{"group": n} for n in range(1, 9)]
DIMS = [{"dim": n} for n in (8, 12, 16, 24, 33, 64, 80, 96, 128, 160, 256)]


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("has_fp8", CACHES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*GROUPS, *DIMS], ids=str)
def test_attention_equals_its_reference_for_every_group_and_head_dim(
    shape: dict[str, Any], dtype: torch.dtype, queries: list[int] | None, has_fp8: bool
) -> None:
    Case(LENGTHS, queries, dtype=dtype, has_fp8=has_fp8, **shape).check()


@pytest.mark.usefixtures("no_reference")
@RANDOM
@given(data=st.data(), are_chunks=st.booleans())
def test_attention_equals_its_reference_on_random_shapes(
    data: st.DataObject, are_chunks: bool
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    lengths = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=5))
    queries = [data.draw(st.integers(0, length)) for length in lengths] if are_chunks else None
    Case(
        lengths,
        queries,
        group=data.draw(st.integers(1, 8)),
        kv_heads=data.draw(st.integers(1, 4)),
        dim=data.draw(st.sampled_from([8, 20, 33, 64, 80, 112, 128, 256])),
        block_size=data.draw(st.sampled_from([1, 3, 16, 32])),
        dtype=data.draw(st.sampled_from(DTYPES)),
        has_fp8=data.draw(st.booleans()),
    ).check(window=data.draw(st.none() | st.integers(1, 40) | st.integers(41, 400)))


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_chunk_is_worked_on_in_stretches(dtype: torch.dtype) -> None:
    Case([700, 130], [700, 129], group=7, dtype=dtype).check()
    Case([600], [450], group=1, kv_heads=1, dtype=dtype).check(100)


@pytest.mark.usefixtures("no_reference")
def test_large_scores_neither_overflow_nor_vanish(queries: list[int] | None) -> None:
    case = Case([140, 3], None if queries is None else [140, 2])
    case.q.mul_(1e3)
    case.check()


def test_more_threads_change_nothing(queries: list[int] | None) -> None:
    case, outs = Case(LENGTHS, queries, group=4), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        outs.append(case.attend())
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_does_not_depend_on_its_neighbours(
    dtype: torch.dtype, queries: list[int] | None
) -> None:
    # With neighbours, one thread attends all KV heads of a decode; alone, one of them.
    case = Case(LENGTHS, queries, group=3, kv_heads=4, dtype=dtype)
    together, q, table = case.attend(), case.q, case.table
    lengths, bounds = case.lengths, case.bounds
    for i, (start, stop) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        case.q, case.table, case.lengths = q[start:stop], table[i : i + 1], lengths[i : i + 1]
        case.bounds = torch.tensor([0, stop - start]).int()
        assert torch.equal(case.attend(), together[start:stop])


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("window", [1, 5, 16, 17, 31, 64, 100])
@pytest.mark.parametrize("has_fp8", CACHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_before_a_sliding_window_is_read(
    window: int, dtype: torch.dtype, has_fp8: bool, queries: list[int] | None
) -> None:
    lengths, chunks = [0, *LENGTHS], None if queries is None else [0, *queries]
    case = Case(lengths, chunks, dtype=dtype, has_fp8=has_fp8)
    before = case.attend(window=window)
    for row, length, n in zip(case.table, case.lengths, case.bounds.diff(), strict=True):
        at = torch.arange(max(int(length - n) - window + 1, 0))
        for cache in (case.k, case.v):
            cache[row[at // 4].long(), at % 4] = torch.nan
        row[: len(at) // 4] = 0
    assert torch.equal(case.attend(window=window), before)
    assert before.isfinite().all()


@pytest.mark.parametrize(
    "unserved",
    [
        {"dtype": torch.float16},
        {"dim": 272},
        {"dtype": torch.float16, "has_fp8": True},
        {"dim": 272, "has_fp8": True},
    ],
    ids=str,
)
def test_what_attentions_kernels_do_not_serve_goes_to_the_reference(
    unserved: dict[str, Any], queries: list[int] | None
) -> None:
    case = Case(LENGTHS, queries, **unserved)
    case.zero_unused()
    case.check()


@pytest.mark.feature("S09")
@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2, 16, 100, 1000])
def test_fp8_attention_errs_by_no_more_than_its_cache_rounds(
    length: int, dtype: torch.dtype
) -> None:
    """Three bits of mantissa round by at most 1/16. A score errs by the roundings of its products,
    which differ in sign, a weight by the score's error, and an output by that and by its values'
    rounding, which many tokens average out."""
    queries = [min(length, 7)]
    for is_decode in (True, False):
        case = Case([length], None if is_decode else queries, dim=64, dtype=dtype)
        exact = case.attend()
        k, v = case.k.clone(), case.v.clone()
        of_both = [t.nan_to_num(0.0).float().abs().amax((0, 1, 3)) / 448 for t in (k, v)]
        case.kv_scales = torch.stack(of_both)
        case.k, case.v = (
            paged_attention.quantize_kv(t, s) for t, s in zip((k, v), case.kv_scales, strict=True)
        )
        rows = int(case.bounds[-1])
        error = (case.attend() - exact).float()[:rows]
        size = exact.float()[:rows].pow(2).mean().sqrt()
        assert error.pow(2).mean().sqrt() < 0.05 * size
        assert error.abs().max() < 0.3 * size
        assert error.abs().max() > 1e-3 * size, "nothing was rounded"


@pytest.mark.feature("S09")
def test_without_scales_an_fp8_cache_is_no_cache_of_the_models_dtype() -> None:
    case = Case([5], has_fp8=True)
    case.zero_unused()
    case.kv_scales = None
    with pytest.raises(RuntimeError):
        case.attend()


# --- attention to latents -------------------------------------------------------------------------


class LatentCase(Case):
    """Decodes of sequences whose tokens have one row each, the first part of which is their value;
    `parts` are the sizes of both parts."""

    def __init__(
        self, lengths: list[int], heads: int, parts: tuple[int, int], **kwargs: Any
    ) -> None:
        super().__init__(lengths, group=heads, kv_heads=1, dim=sum(parts), **kwargs)
        self.v = self.k[..., : parts[0]]

    def attend(self, kernels: Any = cpu, window: int | None = None) -> torch.Tensor:
        out = self.q.new_full((*self.q.shape[:2], self.v.shape[3]), torch.nan)
        args = (self.q, self.k, self.v, self.table, self.lengths, self.q.shape[2] ** -0.5, out)
        (cpu._attend_to_latents if kernels is cpu else kernels.paged_decode)(*args)
        return out


PARTS = [(1, 2), (16, 8), (20, 6), (33, 4), (64, 16), (130, 66), (512, 64)]


@pytest.mark.feature("S04")
@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3, 4, 7, 16])
def test_attention_to_latents_equals_its_reference(heads: int, dtype: torch.dtype) -> None:
    for parts in PARTS:
        for block_size in (1, 3, 16):
            LatentCase([*LENGTHS, 0], heads, parts, block_size=block_size, dtype=dtype).check()


@pytest.mark.feature("S04")
def test_attention_to_latents_depends_on_neither_threads_nor_neighbours() -> None:
    # Two threads share the heads of one sequence.
    for heads in (5, 16):
        case = LatentCase(LENGTHS, heads, (40, 8))
        together = case.attend()
        torch.set_num_threads(2)
        assert torch.equal(case.attend(), together)
        q, table, lengths = case.q, case.table, case.lengths
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for i in range(len(lengths)):
                at = slice(i, i + 1)
                case.q, case.table, case.lengths = q[at], table[at], lengths[at]
                assert torch.equal(case.attend(), together[at])
            case.q, case.table, case.lengths = q, table, lengths


@pytest.mark.feature("S04")
def test_latents_that_are_not_numbers_stay_with_their_sequence() -> None:
    case = LatentCase([20, 37, 3], 4, (24, 8))
    wanted = case.attend()
    case.k[case.table[1, 2].long(), 1] = torch.nan
    found = case.attend()
    assert found[1].isnan().all()
    assert torch.equal(found[::2], wanted[::2])


@pytest.mark.feature("S04")
@pytest.mark.parametrize("num_decodes", [1, 2])
@pytest.mark.parametrize("min_chunk", [0, 100])
def test_a_layer_attends_to_latents_and_zeroes_padding(
    num_decodes: int, min_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values that are made of latents, as the definition says, for decodes and chunks, of
    which those of few tokens attend to latents too."""
    monkeypatch.setattr(latent_attention, "MIN_CHUNK", min_chunk)
    kind = Latent(None, kv_rank=9, nope_dim=5, rope_dim=4, v_dim=7, is_interleaved=True, scale=0.3)
    layer = LatentAttention(3, kind, layer_name="layer", place=Placement(torch.float32, CPU))
    torch.nn.init.normal_(layer.allocate("weight"))
    lengths, queries = [7, 8], [1, 1 if num_decodes == 2 else 4]
    case = Case(lengths, queries, group=3, kv_heads=1, dim=13)
    case.zero_unused()
    at = [torch.arange(length - n, length) for length, n in zip(lengths, queries, strict=True)]
    slots = [row[i // 4] * 4 + i % 4 for row, i in zip(case.table, at, strict=True)]
    metadata = AttentionMetadata(
        num_decodes=num_decodes,
        cu_seqlens_q=case.bounds,
        seq_lens=case.lengths,
        block_table=case.table,
        slot_mapping=torch.cat((*slots, torch.zeros(3))).long(),
    )
    num_tokens = sum(queries)
    q, new = torch.randn(num_tokens + 3, 3, 9), torch.randn(num_tokens + 3, 13)
    q[num_tokens:] = new[num_tokens:] = torch.nan
    caches = {"layer": KVCacheTensor(case.k, case.k)}
    with (
        torch.inference_mode(),
        forward_context(ForwardContext({"layer": layer}, metadata, caches)),
    ):
        out = layer(q[..., :5], q[..., 5:], new[:, :9], new[:, 9:])
    assert not out[num_tokens:].any()
    assert not case.k[0].any()
    bounds = case.bounds.tolist()
    for i, (row, length) in enumerate(zip(case.table, lengths, strict=True)):
        rows, tokens = slice(bounds[i], bounds[i + 1]), torch.arange(length)
        held = case.k[row[tokens // 4].long(), tokens % 4, 0]
        assert torch.equal(held[length - queries[i] :], new[rows])
        made = torch.einsum("tr,hdr->thd", held[:, :9], layer.matrices)
        k = torch.cat((made[..., :5], held[:, None, 9:].expand(-1, 3, -1)), -1)
        scores = 0.3 * torch.einsum("qhd,khd->hqk", q[rows], k)
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(length - queries[i] + 1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        close(out[rows], torch.einsum("hqk,khd->qhd", weights, made[..., 5:]))


@pytest.mark.feature("S04")
def test_latents_of_other_dtypes_go_to_the_reference() -> None:
    case = LatentCase(LENGTHS, 3, (24, 8), dtype=torch.float16)
    case.zero_unused()
    case.check()


# --- rotary positions and the write of KV ---------------------------------------------------------


def check_rope(
    slots: list[int],
    heads: tuple[int, int, int],
    half: int,
    block_size: int,
    dtype: torch.dtype,
    *,
    has_fp8: bool = False,
) -> None:
    """Compare rotated queries, and pools of 200 blocks, with the reference's."""
    qkv = torch.randn(len(slots), sum(heads) + 1, 2 * half).to(dtype)[:, 1:]
    q, k, v = qkv.split_with_sizes(heads, 1)
    angles = torch.rand(len(slots), 1, half) * 7
    new = (q, k, v, angles.cos().to(dtype), angles.sin().to(dtype))
    pools = torch.full((2, 201, 3, 2, block_size, heads[1], 2 * half), 7.0, dtype=dtype)
    pools[:, 0] = 0.0
    kv_scales = None
    if has_fp8:
        pools = pools.to(FP8)
        kv_scales = torch.tensor([[0.013], [0.7]]) * torch.arange(1, heads[1] + 1)
    where = (torch.tensor(slots).long(), kv_scales)
    found, wanted = (
        kernels.rope_and_write_kv(*new, pool[:, 1, 0], pool[:, 1, 1], *where)
        for pool, kernels in zip(pools, (cpu, paged_attention), strict=True)
    )
    tolerance = ROPE_TOLERANCE[dtype]
    assert found.is_contiguous()
    torch.testing.assert_close(found, wanted, atol=8 * tolerance, rtol=tolerance)
    if kv_scales is not None:
        pools = pools.float() * kv_scales.view(2, 1, -1, 1)
        # A difference may tip a key over to the next number: of three bits, or of 2^-9.
        tolerance = max(tolerance, 0.126)
    torch.testing.assert_close(pools[0], pools[1], atol=8 * ROPE_TOLERANCE[dtype], rtol=tolerance)
    # Values are copied, and nothing is touched beside the layer.
    assert torch.equal(pools[0, :, 1, 1], pools[1, :, 1, 1])
    assert torch.equal(pools[0, :, ::2], pools[1, :, ::2])


@RANDOM
@given(data=st.data(), half=st.integers(1, 70), group=st.integers(1, 6), kv_heads=st.integers(1, 3))
def test_rotated_and_written_tokens_equal_the_references(
    data: st.DataObject, half: int, group: int, kv_heads: int
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    torch.set_num_threads(data.draw(st.sampled_from([1, 2])))
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
    dtype, has_fp8 = data.draw(st.sampled_from(list(ROPE_TOLERANCE))), data.draw(st.booleans())
    check_rope(slots, heads, half, block_size, dtype, has_fp8=has_fp8)


@pytest.mark.feature("S09")
@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_16_bit_number_is_written_and_every_8_bit_one_is_read_as_torch_does(
    dtype: torch.dtype,
) -> None:
    check_e4m3(dtype)


def check_e4m3(dtype: torch.dtype) -> None:
    numbers = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    ordered = codes.float()[codes.float().isfinite()].sort().values
    between = (ordered[1:] + ordered[:-1]) / 2
    near = (between, between.nextafter(ordered[1:]), between.nextafter(ordered[:-1]))
    v = torch.cat((numbers, *near, torch.zeros(-3 * len(between) % 64))).to(dtype).view(-1, 1, 64)
    slots, k = torch.arange(len(v)) + 16, torch.zeros_like(v)
    angles = (torch.ones(len(v), 1, 32, dtype=dtype), torch.zeros(len(v), 1, 32, dtype=dtype))
    pools = torch.zeros(2, len(v) // 16 + 2, 2, 16, 1, 64, dtype=FP8)
    scales = torch.tensor([[1.0], [0.7]])
    for pool, kernels in zip(pools, (cpu, paged_attention), strict=True):
        kernels.rope_and_write_kv(k, k, v, *angles, pool[:, 0], pool[:, 1], slots, scales)
    found, wanted = pools.view(torch.uint8)
    assert torch.equal(found, wanted) and len(wanted.unique()) >= 255
    # A sequence of one token sees that one's value alone.
    v_cache, out = codes.view(4, 1, 1, 64), torch.zeros(4, 1, 64, dtype=dtype)
    where = (torch.arange(4, dtype=torch.int32)[:, None], torch.ones(4, dtype=torch.int32))
    scales = torch.tensor([[1.0], [0.5]])
    cpu.paged_decode(out, torch.zeros_like(v_cache), v_cache, *where, 1.0, out, None, scales)
    read = codes.view(4, 1, 64).to(dtype) / 2
    torch.testing.assert_close(out, read, atol=0, rtol=0, equal_nan=True)


def test_threads_do_not_clear_slots_that_others_write() -> None:
    """Half of the tokens end within a block."""
    torch.set_num_threads(2)
    for _ in range(20):
        check_rope(list(range(64, 464)), (4, 2, 2), 16, 64, torch.float32)


# --- norms and the MLP's gate ---------------------------------------------------------------------

Call = Callable[[Any, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
CALLS: dict[str, Call] = {
    "rms_norm": lambda kernels, x, weight: (kernels.rms_norm(x, weight, 1e-5),),
    "fused_add_rms_norm": lambda kernels, x, weight: kernels.fused_add_rms_norm(
        x, x + 1, weight, 1e-5
    ),
    "silu_and_mul": lambda kernels, x, weight: (kernels.silu_and_mul(x),),
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Call:
    return CALLS[request.param]


def check_rows(call: Call, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Compare with the reference."""
    pairs = zip(call(cpu, x, weight), call(elementwise, x, weight), strict=True)
    for found, wanted in pairs:
        assert found.is_contiguous()
        torch.testing.assert_close(found, wanted, rtol=ROW_TOLERANCE[x.dtype], atol=1e-6)


@pytest.mark.usefixtures("no_reference")
@RANDOM
@given(
    data=st.data(),
    rows=st.integers(0, 40),
    width=st.integers(1, 70) | st.sampled_from([64, 300, 448, 2432]),
    gap=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
)
def test_norms_and_gates_equal_their_references(
    call: Call, data: st.DataObject, rows: int, width: int, gap: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99)))
    torch.set_num_threads(data.draw(st.sampled_from([1, 2])))
    weight = torch.randn(2 * width).to(dtype)
    wide = 3 * torch.randn(rows, 2 * width + gap).to(dtype)
    check_rows(call, wide[:, : 2 * width], weight)
    if call is CALLS["rms_norm"]:
        heads = torch.randn(rows, 5, 2 * width + gap).to(dtype)[:, 1:4, : 2 * width]
        check_rows(call, heads, weight)


@pytest.mark.usefixtures("no_reference")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_are_right_at_both_ends(dtype: torch.dtype) -> None:
    """An exponential that overflows, or underflows, is no NaN; a NaN is no number."""
    gates = torch.tensor([0.0, -0.0, 1e-30, 90.0, -50.0, -86.0, -90.0, -1e4, 1e30, -1e30])
    gates = torch.cat((gates, torch.linspace(-30, 30, 301))).to(dtype)
    x = torch.stack((gates, torch.ones_like(gates))).flatten()[None]
    found, wanted = cpu.silu_and_mul(x), elementwise.silu_and_mul(x)
    torch.testing.assert_close(found, wanted, rtol=ROW_TOLERANCE[dtype], atol=1e-30)
    x[0, 3] = torch.nan
    assert cpu.silu_and_mul(x).isnan().nonzero().tolist() == [[0, 3]]


@pytest.mark.parametrize("kind", ["columns", "four dimensions", "float16", "wider weight"])
def test_rows_that_the_kernels_do_not_serve_go_to_the_references(kind: str, call: Call) -> None:
    x, weight = torch.randn(6, 8), torch.randn(8)
    if kind == "columns":
        x = x.t().contiguous().t()
    elif kind == "four dimensions":
        x = x.view(1, 2, 3, 8)
    elif kind == "float16":
        x, weight = x.half(), weight.half()
    else:
        weight = weight.double()
    check_rows(call, x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype, call: Call) -> None:
    x, weight, row = torch.randn(33, 128).to(dtype), torch.randn(128).to(dtype), slice(20, 21)
    for together, alone in zip(call(cpu, x, weight), call(cpu, x[row], weight), strict=True):
        assert torch.equal(together[row], alone)


# --- narrower registers ---------------------------------------------------------------------------


@pytest.mark.usefixtures("fewer_lanes", "no_reference")
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_are_right_for_narrower_registers(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_e4m3(dtype)
    for dim, has_fp8 in itertools.product((12, 16, 32, 64, 80, 128, 256), (False, True)):
        check_rope([8, 9, 10, 13, 0], (3, 1, 1), dim // 2, 4, dtype, has_fp8=has_fp8)
        shape: dict[str, Any] = {"group": 3, "dim": dim, "dtype": dtype, "has_fp8": has_fp8}
        for window in (None, 6):
            Case([0, 1, 3, 5, 16, 40], **shape).check(window)
            Case([5, 90, 140, 7], [5, 80, 2, 0], **shape).check(window)
            Case([0, 1, 3, 5, 16, 40], group=3, dim=dim, dtype=dtype).check(window)
            Case([5, 90, 140, 7], [5, 80, 2, 0], group=3, dim=dim, dtype=dtype).check(window)
    for parts in PARTS:
        LatentCase([0, 1, 3, 5, 16, 40], 6, parts, dtype=dtype).check()
    for width in (1, 3, 8, 16, 37, 152):
        for call in CALLS.values():
            check_rows(call, torch.randn(9, 2 * width).to(dtype), torch.randn(2 * width).to(dtype))
    monkeypatch.setattr(packed_linear, "_is_ours", lambda _: True)
    for shape in ((100, 37), (70, 515)):
        weight, x = torch.randn(shape).to(dtype), torch.randn(45, shape[1]).to(dtype)
        packed = packed_linear.PackedWeight(weight)
        for rows in range(1, 46):
            found = packed_linear.packed_linear(x[:rows], packed.handle, None, shape[0])
            wanted = (x[:rows].double() @ weight.double().T).to(dtype)
            tolerance = 1e-4 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
