"""Paged decode attention on a GPU; the reference is `paged_attention.paged_decode`.

Flash-decoding (Dao et al., 2023): a sequence's tokens are split over programs, whose partial
results a second kernel joins. The grid follows from tensor shapes and the device alone, so a
captured graph fits every batch of its size. Into how many of the grid's splits a sequence is cut is
decided on the device: each split takes about an equal share of the whole batch, and programs
without a split exit at once.

Shapes: S sequences, H query heads, Hkv KV heads, G = H / Hkv, D head dim, N blocks in the pool, B
tokens per block, M columns of the block table, P splits in the grid.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from model.kernels.triton.e4m3 import UNIT
from model.kernels.triton.tiles import LOG2_E, decode_tiles, softmax_step

MIN_SPLIT_TOKENS = 256
"""A shorter split would cost more to join than to compute in another program's row."""

MIN_SPLITS = 8
MIN_SEQUENCE_PROGRAMS = 64
"""What a grid has for every long sequence: splits of each KV head, and programs of all. One long
sequence in a batch of short ones would otherwise be as few programs as it has KV heads."""

FINE_SPLITS, MAX_FINE_PARTS = 32, 2048
"""Splits for a long sequence among short ones, as long as those of all sequences are not more than
memory for partial results is worth."""

MAX_SPLITS = 64
"""The joining kernel holds one partial result per split in registers."""

PROGRAMS_PER_SM = 8
"""Among which a full batch is shared. Four or more run side by side on sm_80 and sm_90, up to a
head dim of 128; the others begin when short ones end."""


@triton.jit
def _splits_of(
    seq_lens: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    num_kv_heads: tl.tensor,
    max_splits: tl.tensor,
    num_programs: tl.tensor,
    window: tl.tensor,
    MIN_SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> tl.tensor:
    """Return a sequence's number of splits, and the tiles of each; the last may have fewer."""
    # A scalar: over a tensor that a loop carries, Triton 3.9 loses sight of how addresses behind it
    # lie, and neither joins loads nor copies ahead.
    total = num_kv_heads.to(tl.int64) * 0
    for at in range(0, num_seqs, 128):
        rows = at + tl.arange(0, 128)
        tokens = tl.load(seq_lens + rows, mask=rows < num_seqs, other=0)
        if HAS_WINDOW:
            tokens = tl.minimum(tokens, window)
        total += tl.sum(tokens, 0)
    share = tl.cdiv(total * num_kv_heads, num_programs).to(tl.int32)
    tiles = tl.cdiv(num_tokens, BLOCK_N)
    tiles_per_split = tl.maximum(
        tl.cdiv(tl.maximum(share, MIN_SPLIT), BLOCK_N), tl.cdiv(tiles, max_splits)
    )
    # Halves of less than one and a half shares would be more programs than have room, and a join.
    tiles_per_split = tl.where(
        2 * tiles < 3 * tiles_per_split, tl.maximum(tiles, 1), tiles_per_split
    )
    # Of 12 tiles, at most 8 in a split, are made 6 and 6.
    tiles_per_split = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, tiles_per_split), 1))
    return tl.cdiv(tiles, tl.maximum(tiles_per_split, 1)), tiles_per_split


@triton.jit(do_not_specialize=["num_programs", "window"])
def _split_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    log_sums: tl.tensor,
    scale_log2: tl.tensor,
    num_programs: tl.tensor,
    window: tl.tensor,
    kv_scales: tl.tensor,
    stride_q_seq: tl.tensor,
    stride_q_head: tl.tensor,
    stride_k_block: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_block: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_table: tl.tensor,
    stride_out_seq: tl.tensor,
    stride_out_head: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> None:
    kv_head, split = tl.program_id(1), tl.program_id(2)
    seq = tl.program_id(0).to(tl.int64)
    end = tl.load(seq_lens + seq)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(end - window, 0)
    num_splits = 1
    if HAS_SPLITS:
        # Most programs of a batch of short sequences end here.
        if (split > 0) & (split * MIN_SPLIT >= end - begin):
            return
        num_splits, tiles_per_split = _splits_of(
            seq_lens,
            end - begin,
            tl.num_programs(0),
            tl.num_programs(1),
            tl.num_programs(2),
            num_programs,
            window,
            MIN_SPLIT,
            BLOCK_N,
            HAS_WINDOW,
        )
        if (split > 0) & (split >= num_splits):
            return
        # Whole tiles per split: only the last split of a sequence computes on less than a tile.
        begin += split * tiles_per_split * BLOCK_N
        end = tl.minimum(begin + tiles_per_split * BLOCK_N, end)

    rows = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + rows
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    is_q = (rows < GROUP)[:, None] & is_dim[None, :]
    q_at = q + seq * stride_q_seq + heads[:, None] * stride_q_head + dims[None, :]
    q_tile = tl.load(q_at, mask=is_q, other=0.0)
    if kv_scales is not None:
        scale_log2 *= tl.load(kv_scales + kv_head) * UNIT

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    k_cache += kv_head * stride_k_head
    v_cache += kv_head * stride_v_head
    table_at = block_table + seq * stride_table
    kv = begin + tl.arange(0, BLOCK_N)
    block = tl.load(table_at + kv // BLOCK_SIZE, mask=kv < end, other=0)
    for at in range(begin, end, BLOCK_N):
        kv = at + tl.arange(0, BLOCK_N)
        # Behind a sequence's length may lie another one's block: nothing is loaded from there.
        is_kv = kv < end
        is_loaded = is_kv[:, None]
        if HEAD_DIM != BLOCK_D:
            is_loaded = is_loaded & is_dim[None, :]
        offset = kv % BLOCK_SIZE
        k_at = block.to(tl.int64) * stride_k_block + offset * stride_k_token
        v_at = block.to(tl.int64) * stride_v_block + offset * stride_v_token
        k_tile = tl.load(k_cache + k_at[:, None] + dims[None, :], mask=is_loaded, other=0)
        v_tile = tl.load(v_cache + v_at[:, None] + dims[None, :], mask=is_loaded, other=0)
        acc, row_max, row_sum = softmax_step(
            q_tile, k_tile, v_tile, is_kv[None, :], scale_log2, acc, row_max, row_sum
        )
        # One tile ahead, and carried over: the compiler takes a load that another one of the same
        # turn needs for a stage of its own, and then copies tiles singly, behind the products.
        kv += BLOCK_N
        block = tl.load(table_at + kv // BLOCK_SIZE, mask=kv < end, other=0)

    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    if kv_scales is not None:
        acc *= tl.load(kv_scales + tl.num_programs(1) + kv_head) * UNIT
    # What a single split finds is the result; there is nothing to join.
    if num_splits <= 1:
        out_at = out + seq * stride_out_seq + heads[:, None] * stride_out_head + dims[None, :]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=is_q)
    else:
        part = (seq * tl.num_programs(1) * GROUP + heads) * tl.num_programs(2) + split
        tl.store(partial + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_q)
        tl.store(log_sums + part, row_max + tl.log2(row_sum), mask=rows < GROUP)


@triton.jit(do_not_specialize=["num_programs", "window", "max_splits"])
def _join_kernel(
    partial: tl.tensor,
    log_sums: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    num_programs: tl.tensor,
    window: tl.tensor,
    max_splits: tl.tensor,
    stride_out_seq: tl.tensor,
    stride_out_head: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> None:
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_tokens = tl.load(seq_lens + seq)
    if HAS_WINDOW:
        num_tokens = tl.minimum(num_tokens, window)
    if num_tokens <= MIN_SPLIT:
        return
    num_splits, _ = _splits_of(
        seq_lens,
        num_tokens,
        tl.num_programs(0),
        tl.num_programs(1) // GROUP,
        max_splits,
        num_programs,
        window,
        MIN_SPLIT,
        BLOCK_N,
        HAS_WINDOW,
    )
    if num_splits <= 1:
        return
    row = (seq * tl.num_programs(1) + head) * max_splits
    splits, dims = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    is_split, is_dim = splits < num_splits, dims < HEAD_DIM
    log_sum = tl.load(log_sums + row + splits, mask=is_split, other=float("-inf"))
    # A split has tokens, so that its log-sum is finite and so is the largest.
    weights = tl.exp2(log_sum - tl.max(log_sum, 0))
    at = (row + splits)[:, None] * HEAD_DIM + dims[None, :]
    parts = tl.load(partial + at, mask=is_split[:, None] & is_dim[None, :], other=0.0)
    joined = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    out_at = out + seq * stride_out_seq + head * stride_out_head + dims
    tl.store(out_at, joined.to(out.dtype.element_ty), mask=is_dim)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    sliding_window: int | None = None,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Do what `paged_attention.paged_decode` does. The last dimensions are contiguous."""
    if kv_scales is not None:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    max_tokens = block_table.shape[1] * block_size
    seen_tokens = min(max_tokens, sliding_window or max_tokens)
    splits = num_splits(num_seqs, num_kv_heads, seen_tokens, num_sms(q.device))
    num_programs = PROGRAMS_PER_SM * num_sms(q.device)
    tiles = decode_tiles(group, head_dim, q.dtype)
    shape = (num_seqs, num_heads, splits if splits > 1 else 0)
    partial = q.new_empty((*shape, head_dim), dtype=torch.float32)
    log_sums = q.new_empty(shape, dtype=torch.float32)
    _split_kernel[(num_seqs, num_kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        out,
        partial,
        log_sums,
        scale * LOG2_E,
        num_programs,
        sliding_window or 0,
        kv_scales,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        *out.stride()[:2],
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        MIN_SPLIT=MIN_SPLIT_TOKENS,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        BLOCK_D=tiles.dims,
        HAS_SPLITS=splits > 1,
        HAS_WINDOW=sliding_window is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if splits > 1:
        _join_kernel[(num_seqs, num_heads)](
            partial,
            log_sums,
            seq_lens,
            out,
            num_programs,
            sliding_window or 0,
            splits,
            *out.stride()[:2],
            GROUP=group,
            HEAD_DIM=head_dim,
            MIN_SPLIT=MIN_SPLIT_TOKENS,
            BLOCK_N=tiles.columns,
            BLOCK_P=triton.next_power_of_2(splits),
            BLOCK_D=tiles.dims,
            HAS_WINDOW=sliding_window is not None,
            num_warps=4,
        )


def num_splits(num_seqs: int, num_kv_heads: int, max_tokens: int, num_sms: int) -> int:
    """Return into how many parts at most each KV head of each sequence is split: enough to occupy
    the device if all sequences are long, and enough for a single one that is."""
    for_all = -(-PROGRAMS_PER_SM * num_sms // (num_seqs * num_kv_heads))
    fine = min(FINE_SPLITS, MAX_FINE_PARTS // num_seqs)
    wanted = max(for_all, fine, MIN_SPLITS, MIN_SEQUENCE_PROGRAMS // num_kv_heads)
    return min(wanted, max(max_tokens // MIN_SPLIT_TOKENS, 1), MAX_SPLITS)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return the device's multiprocessors; without a GPU, as many as splits can use."""
    if device.type != "cuda":
        return MAX_SPLITS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
