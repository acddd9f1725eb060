"""Latent attention from chunks of prompts, on a GPU; the reference is
`latent_attention.latent_prefill`.

Each of a chunk's own tokens serves many queries, so keys and values are made of their latents, by
one product for all tokens, and attended to as in FlashAttention (Dao, 2023). What was in the cache
before them is attended to as it is, from several tokens of a chunk and many heads at once: keys and
values of a context would take memory that nothing on the host can bound, and a chunk without one
has no more to do there than to see that. The two results are joined by the logarithms of their
sums. In a step of chunks of few tokens, as drafts make, each token is like a decode.

Shapes: T tokens, S sequences, H query heads, n and p the head dim without and with positions, v of
values, r of a latent, N blocks in the pool, B tokens per block, M columns of the block table.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl

from model.kernels import latent_attention
from model.kernels.triton.latent import MAX_GROUP, attend, attend_to_latents
from model.kernels.triton.prefill import _sequence_of_tile, _tile_of_sequence
from model.kernels.triton.tiles import (
    LOG2_E,
    MIN_DOT,
    AttentionTiles,
    arch_of,
    prefill_tiles,
    weigh,
)


@triton.jit
def _chunk_of_tile(
    cu_seqlens_q: tl.tensor,
    seq_lens: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    tile: tl.tensor,
    BLOCK_Q: tl.constexpr,
) -> tl.tensor:
    """Return a tile's sequence, where its chunk starts, how many tokens that has, which of them is
    the tile's first one, and the sequence's length: 0 of padding, the tokens behind the last
    sequence included."""
    seq = _sequence_of_tile(cu_seqlens_q, num_seqs, tile, BLOCK_Q)
    is_seq = seq < num_seqs
    origin = tl.load(cu_seqlens_q)
    start = tl.load(cu_seqlens_q + seq) - origin
    stop = tl.load(cu_seqlens_q + seq + 1, mask=is_seq, other=0) - origin
    num_queries = tl.where(is_seq, stop, num_tokens) - start
    first = (tile - _tile_of_sequence(cu_seqlens_q, seq, BLOCK_Q)) * BLOCK_Q
    length = tl.load(seq_lens + seq, mask=is_seq, other=0)
    return seq, start, num_queries, first, length


# A mixed step's tables begin behind those of its decodes: their alignment is any.
@triton.jit(
    do_not_specialize=["num_tokens", "num_seqs"],
    do_not_specialize_on_alignment=["block_table", "cu_seqlens_q", "seq_lens"],
)
def _before_kernel(
    q: tl.tensor,
    cache: tl.tensor,
    block_table: tl.tensor,
    cu_seqlens_q: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    log_sums: tl.tensor,
    scale_log2: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    stride_table: tl.tensor,
    stride_out_token: tl.tensor,
    stride_out_head: tl.tensor,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile, group = tl.program_id(0), tl.program_id(1)
    seq, start, num_queries, first, length = _chunk_of_tile(
        cu_seqlens_q, seq_lens, num_tokens, num_seqs, tile, BLOCK_Q
    )
    if first >= num_queries:
        return

    rows = tl.arange(0, BLOCK_M)
    queries, heads = first + rows // GROUP, group * GROUP + rows % GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (queries < num_queries)
    tokens = (start + queries).to(tl.int64)
    dims, others = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    is_q, is_q_pe = (
        is_row[:, None] & (dims < RANK)[None, :],
        is_row[:, None] & (others < ROPE_DIM)[None, :],
    )
    q_at = q + tokens[:, None] * stride_q_token + heads[:, None] * stride_q_head
    q_tile = tl.load(q_at + dims[None, :], mask=is_q, other=0.0)
    q_pe_tile = tl.load(q_at + RANK + others[None, :], mask=is_q_pe, other=0.0)

    end = tl.where(length > 0, length - num_queries, 0)
    acc, row_max, row_sum = attend_to_latents(
        q_tile,
        q_pe_tile,
        cache,
        block_table + seq.to(tl.int64) * stride_table,
        end * 0,
        end,
        scale_log2,
        stride_block,
        stride_token,
        RANK,
        ROPE_DIM,
        BLOCK_SIZE,
        BLOCK_M,
        BLOCK_N,
        BLOCK_R,
        BLOCK_P,
    )
    filled = tl.where(row_sum > 0, row_sum, 1.0)
    out_at = out + tokens[:, None] * stride_out_token + heads[:, None] * stride_out_head
    acc = acc / filled[:, None]
    tl.store(out_at + dims[None, :], acc.to(out.dtype.element_ty), mask=is_q)
    # Of a chunk with nothing before it the maximum is -inf: so is the logarithm of 0.
    sums_at = log_sums + tokens * (tl.num_programs(1) * GROUP) + heads
    tl.store(sums_at, row_max + tl.log2(filled), mask=is_row)


@triton.jit
def _attend_to_own(
    q_nope: tl.tensor,
    q_pe: tl.tensor,
    made: tl.tensor,
    k_pe: tl.tensor,
    queries: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale_log2: tl.tensor,
    acc: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    stride_made: tl.tensor,
    stride_k_pe: tl.tensor,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tl.tensor:
    """Take a chunk's tokens from `begin` to `end` into running sums. Without a mask `end` is a
    multiple of BLOCK_N, and every query sees all of these tokens."""
    dims, others, values = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    for at in range(begin, end, BLOCK_N):
        kv = at + tl.arange(0, BLOCK_N)
        is_key, is_other = (dims < NOPE_DIM)[None, :], (others < ROPE_DIM)[None, :]
        is_value = (values < V_DIM)[None, :]
        seen = None
        if IS_MASKED:
            is_kv = (kv < end)[:, None]
            is_key, is_other, is_value = is_key & is_kv, is_other & is_kv, is_value & is_kv
            seen = (kv < end)[None, :] & (kv[None, :] <= queries[:, None])
        token = made + kv.to(tl.int64)[:, None] * stride_made
        other = k_pe + kv.to(tl.int64)[:, None] * stride_k_pe
        k_tile = tl.load(token + dims[None, :], mask=is_key, other=0.0)
        k_pe_tile = tl.load(other + others[None, :], mask=is_other, other=0.0)
        v_tile = tl.load(token + NOPE_DIM + values[None, :], mask=is_value, other=0.0)
        scores = tl.dot(q_nope, k_tile.trans(), input_precision="ieee")
        scores = tl.dot(q_pe, k_pe_tile.trans(), scores, input_precision="ieee") * scale_log2
        acc, row_max, row_sum = weigh(scores, v_tile, seen, acc, row_max, row_sum)
    return acc, row_max, row_sum


@triton.jit(
    do_not_specialize=["num_tokens", "num_seqs"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens"],
)
def _own_kernel(
    q_nope: tl.tensor,
    q_pe: tl.tensor,
    made: tl.tensor,
    k_pe: tl.tensor,
    cu_seqlens_q: tl.tensor,
    seq_lens: tl.tensor,
    log_sums: tl.tensor,
    out: tl.tensor,
    scale_log2: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_q_nope_token: tl.tensor,
    stride_q_nope_head: tl.tensor,
    stride_q_pe_token: tl.tensor,
    stride_q_pe_head: tl.tensor,
    stride_made: tl.tensor,
    stride_k_pe: tl.tensor,
    stride_out_token: tl.tensor,
    stride_out_head: tl.tensor,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    tile, head = tl.program_id(0), tl.program_id(1)
    _, start, num_queries, first, length = _chunk_of_tile(
        cu_seqlens_q, seq_lens, num_tokens, num_seqs, tile, BLOCK_M
    )
    if first >= num_queries:
        return

    queries = first + tl.arange(0, BLOCK_M)
    is_row = queries < num_queries
    dims, others, values = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    tokens = (start + queries).to(tl.int64)
    q_at = q_nope + tokens[:, None] * stride_q_nope_token + head * stride_q_nope_head
    is_q = is_row[:, None] & (dims < NOPE_DIM)[None, :]
    q_tile = tl.load(q_at + dims[None, :], mask=is_q, other=0.0)
    q_pe_at = q_pe + tokens[:, None] * stride_q_pe_token + head * stride_q_pe_head
    is_q_pe = is_row[:, None] & (others < ROPE_DIM)[None, :]
    q_pe_tile = tl.load(q_pe_at + others[None, :], mask=is_q_pe, other=0.0)

    # Padding sees nothing.
    end = tl.where(length > 0, tl.minimum(first + BLOCK_M, num_queries), 0)
    # The first row sees its own token, and all see those before.
    edge = tl.where(length > 0, (first + 1) // BLOCK_N * BLOCK_N, 0)
    made += start.to(tl.int64) * stride_made + head * (NOPE_DIM + V_DIM)
    k_pe += start.to(tl.int64) * stride_k_pe
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    begins, ends = (edge * 0, edge), (edge, end)
    for part in tl.static_range(2):
        acc, row_max, row_sum = _attend_to_own(
            q_tile,
            q_pe_tile,
            made,
            k_pe,
            queries,
            begins[part],
            ends[part],
            scale_log2,
            acc,
            row_max,
            row_sum,
            stride_made,
            stride_k_pe,
            NOPE_DIM,
            ROPE_DIM,
            V_DIM,
            BLOCK_N,
            BLOCK_K,
            BLOCK_P,
            BLOCK_V,
            part == 1,
        )

    # `out` holds the values found among the tokens before the chunk.
    out_at = out + tokens[:, None] * stride_out_token + head * stride_out_head + values[None, :]
    is_out = is_row[:, None] & (values < V_DIM)[None, :]
    before = tl.load(out_at, mask=is_out, other=0.0).to(tl.float32)
    sums_at = log_sums + tokens * tl.num_programs(1) + head
    before_max = tl.load(sums_at, mask=is_row, other=float("-inf"))
    most = tl.maximum(row_max, before_max)
    base = tl.where(most == float("-inf"), 0.0, most)
    own_weight, weight = tl.exp2(row_max - base), tl.exp2(before_max - base)
    total = row_sum * own_weight + weight
    acc = acc * own_weight[:, None] + before * weight[:, None]
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=is_out)


def latent_prefill(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    matrices: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Do what `latent_attention.latent_prefill` does; rows behind the last sequence become zero."""
    (num_tokens, num_heads, _), num_seqs = q_nope.shape, seq_lens.shape[0]
    rows, seen = latent_attention.as_decodes(cu_seqlens_q, seq_lens, num_tokens)
    if num_tokens < latent_attention.MIN_CHUNK * num_seqs:
        each = functools.partial(attend, table_rows=rows)
        latent_attention.latent_decode(
            q_nope, q_pe, cache, matrices, block_table, seen, scale, out, each
        )
        return
    log_sums = q_nope.new_empty((num_tokens, num_heads), dtype=torch.float32)
    each = functools.partial(attend_before, cu_seqlens_q=cu_seqlens_q, log_sums=log_sums)
    latent_attention.latent_decode(
        q_nope, q_pe, cache, matrices, block_table, seq_lens, scale, out, each
    )
    at = (seen - 1).clamp(min=0)
    blocks = torch.where(seen > 0, block_table[rows, at // cache.shape[1]], 0)
    own = cache[blocks, at % cache.shape[1], 0]
    attend_own(q_nope, q_pe, own, matrices, cu_seqlens_q, seq_lens, log_sums, scale, out)


def attend_before(
    q: torch.Tensor,
    cache: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    log_sums: torch.Tensor,
) -> None:
    """Attend from each token of a chunk to its sequence's tokens before the chunk; `out` is zero
    where there are none.

    q: [T, H, r + p]; cache: [N, B, 1, r + p]; values: [N, B, 1, r], of `cache`; out: [T, H, r];
    log_sums: float32 [T, H], becomes the logarithms of the sums to base 2
    """
    (num_tokens, num_heads, width), rank, num_seqs = q.shape, values.shape[3], seq_lens.shape[0]
    group = max(n for n in range(1, MAX_GROUP + 1) if num_heads % n == 0)
    tiles = before_tiles(rank, q.dtype, arch_of(q.device))
    grid = (num_tokens // (tiles.rows // group) + num_seqs + 1, num_heads // group)
    _before_kernel[grid](
        q,
        cache,
        block_table,
        cu_seqlens_q,
        seq_lens,
        out,
        log_sums,
        scale * LOG2_E,
        num_tokens,
        num_seqs,
        *q.stride()[:2],
        *cache.stride()[:2],
        block_table.stride(0),
        *out.stride()[:2],
        GROUP=group,
        RANK=rank,
        ROPE_DIM=width - rank,
        BLOCK_SIZE=cache.shape[1],
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        BLOCK_R=tiles.dims,
        BLOCK_P=max(triton.next_power_of_2(width - rank), MIN_DOT),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def before_tiles(rank: int, dtype: torch.dtype, arch: int) -> AttentionTiles:
    """Return the largest tiles that spill no register and fit into shared memory for latents of
    512, in 16 bits. What rows have found so far is in registers; each byte of a context is read
    once for all of them."""
    dims = max(triton.next_power_of_2(rank), MIN_DOT)
    if dtype.itemsize > 2:
        return AttentionTiles(MIN_DOT, MIN_DOT, dims, num_warps=4, num_stages=2)
    return AttentionTiles(32, 32 if arch == 90 else 16, dims, num_warps=8, num_stages=3)


def attend_own(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    own: torch.Tensor,
    matrices: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    log_sums: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attend from each token of a chunk to the chunk's tokens up to itself, and join that to `out`,
    [T, H, v], which has what `attend_before` found.

    own: [T, r + p], the tokens' rows of the cache; log_sums: float32 [T, H], of `attend_before`
    """
    (num_tokens, num_heads, nope_dim), (_, each, rank) = q_nope.shape, matrices.shape
    made = torch.mm(own[:, :rank], matrices.reshape(-1, rank).t())
    tiles = own_tiles(max(nope_dim, each - nope_dim), q_nope.dtype, arch_of(q_nope.device))
    k_pe = own[:, rank:]
    dims = (nope_dim, q_pe.shape[2], each - nope_dim)
    padded = (max(triton.next_power_of_2(dim), MIN_DOT) for dim in dims)
    # Each sequence, and the padding behind the last one, may leave one tile unfilled.
    grid = (num_tokens // tiles.rows + seq_lens.shape[0] + 1, num_heads)
    _own_kernel[grid](
        q_nope,
        q_pe,
        made,
        k_pe,
        cu_seqlens_q,
        seq_lens,
        log_sums,
        out,
        scale * LOG2_E,
        num_tokens,
        seq_lens.shape[0],
        *q_nope.stride()[:2],
        *q_pe.stride()[:2],
        made.stride(0),
        k_pe.stride(0),
        *out.stride()[:2],
        *dims,
        tiles.rows,
        tiles.columns,
        *padded,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def own_tiles(head_dim: int, dtype: torch.dtype, arch: int) -> AttentionTiles:
    """Return tiles for keys and values of up to `head_dim`. Rotated keys come on top: with more
    columns no second program would fit on sm_90, nor one of float32 on sm_86."""
    tiles = prefill_tiles(1, head_dim, dtype, arch)
    return replace(tiles, columns=min(tiles.columns, 32 if dtype.itemsize <= 2 else MIN_DOT))
