"""Paged prefill attention on a GPU; the reference is `paged_attention.paged_prefill`.

FlashAttention's online softmax (Dao, 2023) over paged keys. The grid follows from tensor shapes
alone: tiles of query tokens are numbered over all sequences, and a program finds its sequence by
bisecting `cu_seqlens_q` on the device, as vLLM's unified attention does. Query tokens behind the
last sequence count as one more of length 0, so that padding is written too, with zeros. The rows of
a tile are (query token, query head of one KV head) pairs: heads of a group share what they load.

Shapes: T tokens, S sequences, H query heads, Hkv KV heads, G = H / Hkv, D head dim, N blocks in the
pool, B tokens per block, M columns of the block table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from model.kernels.triton.e4m3 import UNIT
from model.kernels.triton.tiles import LOG2_E, AttentionTiles, arch_of, prefill_tiles, softmax_step


@triton.jit
def _tile_of_sequence(cu_seqlens_q: tl.tensor, seq: tl.tensor, BLOCK_Q: tl.constexpr) -> tl.tensor:
    return (tl.load(cu_seqlens_q + seq) - tl.load(cu_seqlens_q)) // BLOCK_Q + seq


@triton.jit
def _sequence_of_tile(
    cu_seqlens_q: tl.tensor, num_seqs: tl.tensor, tile: tl.tensor, BLOCK_Q: tl.constexpr
) -> tl.tensor:
    """Return the last sequence whose first tile is not behind `tile`; num_seqs is padding."""
    low = tile * 0
    high = low + num_seqs
    while low < high:
        middle = (low + high + 1) // 2
        if _tile_of_sequence(cu_seqlens_q, middle, BLOCK_Q) <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _attend(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_table: tl.tensor,
    positions: tl.tensor,
    lowest: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale_log2: tl.tensor,
    window: tl.tensor,
    acc: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    stride_k_block: tl.tensor,
    stride_k_token: tl.tensor,
    stride_v_block: tl.tensor,
    stride_v_token: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> tl.tensor:
    """Take a sequence's tokens from `begin`, a multiple of BLOCK_N, to `end` into running sums.

    Before `lowest` lies what the window has left. Without a mask `end` is a multiple too, and
    every row sees all of these tokens.
    """
    dims = tl.arange(0, BLOCK_D)
    kv = begin + tl.arange(0, BLOCK_N)
    block = tl.load(block_table + kv // BLOCK_SIZE, mask=kv < end, other=0)
    for at in range(begin, end, BLOCK_N):
        kv = at + tl.arange(0, BLOCK_N)
        offset = kv % BLOCK_SIZE
        k_token = block.to(tl.int64) * stride_k_block + offset * stride_k_token
        v_token = block.to(tl.int64) * stride_v_block + offset * stride_v_token
        k_at = k_cache + k_token[:, None] + dims[None, :]
        v_at = v_cache + v_token[:, None] + dims[None, :]
        is_loaded = None
        if IS_MASKED:
            # Outside may lie another sequence's block: nothing is loaded from there.
            is_loaded = ((kv >= lowest) & (kv < end))[:, None]
            if HEAD_DIM != BLOCK_D:
                is_loaded = is_loaded & (dims < HEAD_DIM)[None, :]
        elif HEAD_DIM != BLOCK_D:
            is_loaded = (dims < HEAD_DIM)[None, :]
        if is_loaded is None:
            k_tile, v_tile = tl.load(k_at), tl.load(v_at)
        else:
            k_tile = tl.load(k_at, mask=is_loaded, other=0)
            v_tile = tl.load(v_at, mask=is_loaded, other=0)
        seen = None
        if IS_MASKED:
            seen = (kv < end)[None, :] & (kv[None, :] <= positions[:, None])
            if HAS_WINDOW:
                seen = seen & (kv[None, :] > positions[:, None] - window)
        acc, row_max, row_sum = softmax_step(
            q, k_tile, v_tile, seen, scale_log2, acc, row_max, row_sum
        )
        # One tile ahead, as in decoding.
        kv += BLOCK_N
        block = tl.load(block_table + kv // BLOCK_SIZE, mask=kv < end, other=0)
    return acc, row_max, row_sum


# A mixed step's tables begin behind those of its decodes: their alignment is any, and a kernel of
# each would be compiled while requests wait.
@triton.jit(
    do_not_specialize=["num_tokens", "num_seqs", "window"],
    do_not_specialize_on_alignment=["block_table", "cu_seqlens_q", "seq_lens"],
)
def _prefill_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_table: tl.tensor,
    cu_seqlens_q: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    scale_log2: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    window: tl.tensor,
    kv_scales: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_k_block: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_block: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_table: tl.tensor,
    stride_out_token: tl.tensor,
    stride_out_head: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> None:
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    seq = _sequence_of_tile(cu_seqlens_q, num_seqs, tile, BLOCK_Q)
    is_seq = seq < num_seqs
    start = tl.load(cu_seqlens_q + seq)
    stop = tl.load(cu_seqlens_q + seq + 1, mask=is_seq, other=num_tokens)
    seq_len = tl.load(seq_lens + seq, mask=is_seq, other=0)
    first = (tile - _tile_of_sequence(cu_seqlens_q, seq, BLOCK_Q)) * BLOCK_Q
    num_queries = stop - start
    if first >= num_queries:
        return

    rows = tl.arange(0, BLOCK_M)
    queries, heads = first + rows // GROUP, kv_head * GROUP + rows % GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (queries < num_queries)
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    tokens = (start + queries).to(tl.int64)
    q_at = q + tokens[:, None] * stride_q_token + heads[:, None] * stride_q_head + dims[None, :]
    is_q = is_row[:, None] & is_dim[None, :]
    q_tile = tl.load(q_at, mask=is_q, other=0.0)
    if kv_scales is not None:
        scale_log2 *= tl.load(kv_scales + kv_head) * UNIT

    # A negative context belongs to a padding sequence, whose loop below is empty.
    context = seq_len - num_queries
    positions = context + queries
    end = tl.minimum(context + first + BLOCK_Q, seq_len)
    lowest, begin, inner = 0, 0, 0
    if HAS_WINDOW:
        lowest = tl.maximum(context + first - window + 1, 0)
        begin = lowest // BLOCK_N * BLOCK_N
        last = tl.minimum(first + BLOCK_Q, num_queries) - 1
        inner = tl.maximum(tl.cdiv(context + last - window + 1, BLOCK_N) * BLOCK_N, begin)
    # Every row sees the whole of the tiles between `inner`, the end of what the last row's window
    # has left, and `edge`, behind which the first row's own token lies. These are most tiles.
    edge = tl.maximum((context + first + 1) // BLOCK_N * BLOCK_N, inner)
    k_cache += kv_head * stride_k_head
    v_cache += kv_head * stride_v_head
    block_table += seq.to(tl.int64) * stride_table
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    begins, ends = (begin, inner, edge), (tl.minimum(inner, end), edge, end)
    for part in tl.static_range(0 if HAS_WINDOW else 1, 3):
        acc, row_max, row_sum = _attend(
            q_tile,
            k_cache,
            v_cache,
            block_table,
            positions,
            lowest,
            begins[part],
            ends[part],
            scale_log2,
            window,
            acc,
            row_max,
            row_sum,
            stride_k_block,
            stride_k_token,
            stride_v_block,
            stride_v_token,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_N,
            BLOCK_D,
            part != 1,
            HAS_WINDOW,
        )

    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    if kv_scales is not None:
        acc *= tl.load(kv_scales + tl.num_programs(1) + kv_head) * UNIT
    out_at = out + tokens[:, None] * stride_out_token + heads[:, None] * stride_out_head
    tl.store(out_at + dims[None, :], acc.to(out.dtype.element_ty), mask=is_q)


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    sliding_window: int | None = None,
    kv_scales: torch.Tensor | None = None,
    tiles: AttentionTiles | None = None,
) -> None:
    """Do what `paged_attention.paged_prefill` does, and make padding behind the last sequence zero.

    Last dimensions are contiguous; `tiles` are others than `prefill_tiles`, to be compared.
    """
    if kv_scales is not None:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_seqs = k_cache.shape[2], seq_lens.shape[0]
    group = num_heads // num_kv_heads
    tiles = tiles or prefill_tiles(group, head_dim, q.dtype, arch_of(q.device))
    block_q = tiles.rows // group
    # Each sequence, and the padding behind the last one, may leave one tile unfilled.
    grid = (num_tokens // block_q + num_seqs + 1, num_kv_heads)
    _prefill_kernel[grid](
        q,
        k_cache,
        v_cache,
        block_table,
        cu_seqlens_q,
        seq_lens,
        out,
        scale * LOG2_E,
        num_tokens,
        num_seqs,
        sliding_window or 0,
        kv_scales,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        *out.stride()[:2],
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        BLOCK_D=tiles.dims,
        HAS_WINDOW=sliding_window is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
