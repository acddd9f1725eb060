"""The attention op and its kernels against plain attention, with caches anywhere in memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from compile.context import ForwardContext, KVCacheTensor, forward_context
from model.kernels.elementwise import rotate
from model.kernels.paged_attention import paged_decode, paged_prefill, write_kv
from model.kv_cache import KVCacheSpec
from model.layers.attention import Attention, AttentionMetadata

H, HKV, D, BLOCK = 6, 2, 8, 4
SCALE = D**-0.5


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """Attend in float64 from the last tokens of a sequence. q: [Tq, H, D]; k, v: [Tk, Hkv, D]."""
    k, v = (t.double().repeat_interleave(H // HKV, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * SCALE
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(k) - len(q) + 1)
    if window is not None:
        distances = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        hidden |= distances >= window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


class Cache:
    """One layer's view of a pool of NaN, in which sequences take scattered blocks."""

    def __init__(self, num_blocks: int = 40, dtype: torch.dtype = torch.float32) -> None:
        spec = KVCacheSpec(3, HKV, D, BLOCK, dtype)
        self.pool = spec.allocate(num_blocks, torch.device("cpu"))
        self.pool[1:] = torch.nan
        self.k, self.v = self.pool[:, 1, 0], self.pool[:, 1, 1]
        self.free = (torch.randperm(num_blocks) + 1).tolist()

    def fill(self, lengths: list[int]) -> tuple[torch.Tensor, list[Any], list[Any]]:
        """Write random sequences; return the block table and each one's keys and values."""
        columns = max(-(-n // BLOCK) for n in lengths) + 2
        table = torch.randint(1, 41, (len(lengths), columns), dtype=torch.int32)
        keys, values = [], []
        for row, length in zip(table, lengths, strict=True):
            used = -(-length // BLOCK)
            row[:used] = torch.tensor([self.free.pop() for _ in range(used)])
            k, v = torch.randn(2, length, HKV, D)
            positions = torch.arange(length)
            slots = row[positions // BLOCK].long() * BLOCK + positions % BLOCK
            write_kv(k, v, self.k, self.v, slots)
            keys.append(k)
            values.append(v)
        return table, keys, values


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


WINDOWS = [None, 1, 2, 3, 4, 5, 8, 9, 100]


def drop_outside(cache: Cache, table: torch.Tensor, position: int, window: int | None) -> None:
    """Fill with NaN and name no more the blocks before the window of the token at `position`."""
    first = 0 if window is None else max(position - window + 1, 0) // BLOCK
    for tensor in (cache.k, cache.v):
        tensor[table[:first].long()] = torch.nan
    # A freed entry may name scratch, or, on a rank, a block that is another's by now.
    table[:first:2] = 0


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", [[1], [4], [17, 1, 4, 30], [5, 0, 9], [0, 0]])
def test_decode_equals_plain_attention_and_reads_its_window_alone(
    lengths: list[int], window: int | None
) -> None:
    cache = Cache()
    table, keys, values = cache.fill(lengths)
    for row, length in zip(table, lengths, strict=True):
        drop_outside(cache, row, length - 1, window)
    q = torch.randn(len(lengths), H, D)
    out = torch.full_like(q, torch.nan)
    paged_decode(q, cache.k, cache.v, table, torch.tensor(lengths).int(), SCALE, out, window)
    for i, length in enumerate(lengths):
        row = q[i : i + 1]
        wanted = plain_attention(row, keys[i], values[i], window) if length else 0 * row
        torch.testing.assert_close(out[i : i + 1].double(), wanted.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("lengths", "queries"),
    [([9], [9]), ([9], [2]), ([17, 5, 30], [17, 5, 9]), ([12, 7, 0, 30], [5, 7, 3, 3])],
)
def test_prefill_equals_plain_attention_and_reads_its_windows_alone(
    lengths: list[int], queries: list[int], window: int | None
) -> None:
    cache = Cache()
    table, keys, values = cache.fill(lengths)
    for row, length, n in zip(table, lengths, queries, strict=True):
        drop_outside(cache, row, length - n, window)
    q = torch.randn(sum(queries), H, D)
    out = torch.full_like(q, torch.nan)
    bounds, lens = torch.tensor([0, *queries]).cumsum(0).int(), torch.tensor(lengths).int()
    paged_prefill(q, cache.k, cache.v, table, bounds, lens, SCALE, out, window)
    for i, (found, chunk) in enumerate(zip(out.split(queries), q.split(queries), strict=True)):
        # A sequence of length 0 is padding.
        has_tokens = lengths[i] > 0
        wanted = plain_attention(chunk, keys[i], values[i], window) if has_tokens else 0 * chunk
        torch.testing.assert_close(found.double(), wanted.double(), atol=1e-5, rtol=1e-5)


def test_a_layers_window_reaches_decodes_and_chunks() -> None:
    context, (*new, _, name) = op_inputs()
    layer = Attention(H, HKV, D, layer_name=name, sliding_window=3)
    context = dataclasses.replace(context, no_compile_layers={name: layer})
    with forward_context(context), torch.no_grad():
        out = layer(*new)
    q = rotate(new[0], *new[3:])
    cache, table = context.kv_cache_data[name], context.attn_metadata.block_table
    for row, rows, length in ((0, slice(0, 1), 7), (1, slice(1, 5), 8)):
        at = torch.arange(length)
        blocks = table[row, at // BLOCK].long()
        keys, values = cache.k_cache[blocks, at % BLOCK], cache.v_cache[blocks, at % BLOCK]
        wanted = plain_attention(q[rows], keys, values, 3)
        torch.testing.assert_close(out[rows].double(), wanted, atol=1e-5, rtol=1e-5)


def test_reused_blocks_hide_what_they_held() -> None:
    cache = Cache()
    table, _, _ = cache.fill([8])
    k = torch.randn(5, HKV, D)
    slots = table[0, torch.arange(5) // BLOCK].long() * BLOCK + torch.arange(5) % BLOCK
    cache.k[table[0, :2].long()] = torch.inf
    cache.v[table[0, :2].long()] = torch.nan
    write_kv(k, k, cache.k, cache.v, slots)
    q, out = torch.randn(1, H, D), torch.empty(1, H, D)
    paged_decode(q, cache.k, cache.v, table, torch.tensor([5]).int(), SCALE, out)
    torch.testing.assert_close(out.double(), plain_attention(q, k, k), atol=1e-5, rtol=1e-5)


def test_writing_touches_only_its_slots() -> None:
    cache = Cache()
    cache.pool.fill_(7.0)
    k, v = torch.randn(2, 2, HKV, D)
    write_kv(k, v, cache.k, cache.v, torch.tensor([5 * BLOCK + 1, 9 * BLOCK + 3]))
    assert torch.equal(cache.k[5, 1], k[0])
    assert torch.equal(cache.v[9, 3], v[1])
    cache.pool[5, 1, :, 1] = cache.pool[9, 1, :, 3] = 7.0
    assert (cache.pool[1:] == 7.0).all()
    assert (cache.pool[0, [0, 2]] == 7.0).all()


def op_inputs() -> tuple[ForwardContext, tuple[Any, ...]]:
    """A mixed batch: one decode and one later chunk."""
    cache = Cache()
    table, _, _ = cache.fill([6, 7])
    layer = Attention(H, HKV, D, layer_name="layer")
    slots = [table[0, 6 // BLOCK] * BLOCK + 6 % BLOCK, *(table[1, 1] * BLOCK + torch.arange(4))]
    metadata = AttentionMetadata(
        num_decodes=1,
        cu_seqlens_q=torch.tensor([0, 1, 5]).int(),
        seq_lens=torch.tensor([7, 8]).int(),
        block_table=table,
        slot_mapping=torch.tensor(slots).long(),
    )
    context = ForwardContext({"layer": layer}, metadata, {"layer": KVCacheTensor(cache.k, cache.v)})
    q = torch.randn(5, H, D)
    k, v = torch.randn(2, 5, HKV, D)
    cos, sin = torch.randn(2, 5, 1, D // 2)
    return context, (q, k, v, cos, sin, torch.empty_like(q), "layer")


def test_output_is_finite_behind_the_last_sequence() -> None:
    context, (*new, _, name) = op_inputs()
    pad = torch.zeros(3, dtype=torch.int64)
    metadata = context.attn_metadata
    slots = torch.cat((metadata.slot_mapping, pad))
    padded = dataclasses.replace(
        context, attn_metadata=dataclasses.replace(metadata, slot_mapping=slots)
    )
    layer = context.no_compile_layers[name]
    with forward_context(context), torch.no_grad():
        alone = layer(*new)
    new = [torch.cat((t, torch.full_like(t[:3], torch.nan))) for t in new]
    with forward_context(padded), torch.no_grad():
        out = layer(*new)
    assert torch.equal(out[:5], alone)
    assert not out[5:].any()
