"""Paged decode attention on a GPU; the twin of `paged_attention.paged_decode`.

Flash-decoding (Dao et al., 2023): with one query token per sequence there are too few rows to fill
a device, so a sequence's tokens are split over programs, whose partial results a second kernel
joins. How many splits there are follows from tensor shapes and the device,
never from `seq_lens`; how long a split is, each program computes from its own sequence's length.
So a captured graph fits every batch of its size.

Shapes: S sequences, H query heads, Hkv KV heads, G = H / Hkv, D head dim, N blocks in the pool,
B tokens per block, M columns of the block table, P splits.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from model.kernels.triton_tiles import LOG2_E, decode_tiles, softmax_step

MIN_SPLIT_TOKENS = 256
"""A shorter split would cost more to join than to compute in another program's row."""

MAX_SPLITS = 64
"""The joining kernel holds one partial result per split in registers."""

PROGRAMS_PER_SM = 2


@triton.jit(do_not_specialize=["window"])
def _split_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    partial: tl.tensor,
    log_sums: tl.tensor,
    scale_log2: tl.tensor,
    window: tl.tensor,
    stride_q_seq: tl.tensor,
    stride_q_head: tl.tensor,
    stride_k_block: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_block: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_table: tl.tensor,
    stride_partial_seq: tl.tensor,
    stride_partial_head: tl.tensor,
    stride_partial_split: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
) -> None:
    kv_head, split = tl.program_id(1), tl.program_id(2)
    seq = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(seq_lens + seq)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(seq_len - window, 0)
    # Whole tiles per split: only the last split of a sequence computes on less than a tile.
    tiles_per_split = tl.cdiv(tl.cdiv(seq_len - begin, NUM_SPLITS), BLOCK_N)
    begin += split * tiles_per_split * BLOCK_N
    end = tl.minimum(begin + tiles_per_split * BLOCK_N, seq_len)

    rows = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + rows
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    is_q = (rows < GROUP)[:, None] & is_dim[None, :]
    q_at = q + seq * stride_q_seq + heads[:, None] * stride_q_head + dims[None, :]
    q_tile = tl.load(q_at, mask=is_q, other=0.0)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    columns = tl.arange(0, BLOCK_N)
    for at in range(begin, end, BLOCK_N):
        kv = at + columns
        # Behind a sequence's length may lie another one's block: nothing is loaded from there.
        is_kv = kv < end
        block = tl.load(
            block_table + seq * stride_table + kv // BLOCK_SIZE, mask=is_kv, other=0
        ).to(tl.int64)
        offset = kv % BLOCK_SIZE
        k_at = block * stride_k_block + offset * stride_k_token + kv_head * stride_k_head
        v_at = block * stride_v_block + offset * stride_v_token + kv_head * stride_v_head
        k_tile = tl.load(
            k_cache + k_at[None, :] + dims[:, None],
            mask=is_kv[None, :] & is_dim[:, None],
            other=0.0,
        )
        v_tile = tl.load(
            v_cache + v_at[:, None] + dims[None, :],
            mask=is_kv[:, None] & is_dim[None, :],
            other=0.0,
        )
        acc, row_max, row_sum = softmax_step(
            q_tile, k_tile, v_tile, is_kv[None, :], scale_log2, acc, row_max, row_sum
        )

    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    partial += seq * stride_partial_seq + split * stride_partial_split
    partial_at = partial + heads[:, None] * stride_partial_head + dims[None, :]
    tl.store(partial_at, acc.to(partial.dtype.element_ty), mask=is_q)
    if NUM_SPLITS > 1:
        log_sum = row_max + tl.log2(tl.where(row_sum > 0, row_sum, 1.0))
        num_heads = tl.num_programs(1) * GROUP
        tl.store(
            log_sums + (seq * num_heads + heads) * NUM_SPLITS + split, log_sum, mask=rows < GROUP
        )


@triton.jit
def _join_kernel(
    partial: tl.tensor,
    log_sums: tl.tensor,
    out: tl.tensor,
    stride_out_seq: tl.tensor,
    stride_out_head: tl.tensor,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = seq * tl.num_programs(1) + head
    splits, dims = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    is_split, is_dim = splits < NUM_SPLITS, dims < HEAD_DIM
    log_sum = tl.load(log_sums + row * NUM_SPLITS + splits, mask=is_split, other=float("-inf"))
    best = tl.max(log_sum, 0)
    weights = tl.exp2(log_sum - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(weights, 0)
    at = (row * NUM_SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :]
    parts = tl.load(partial + at, mask=is_split[:, None] & is_dim[None, :], other=0.0)
    joined = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
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
) -> None:
    """Attend from one token per sequence to all of its tokens, itself included.

    A sequence of length 0 is padding; its output is zero. Waits for nothing on the device.

    Args:
        q, out: [S, H, D], the last dimension contiguous
        k_cache, v_cache: [N, B, Hkv, D], the last dimension contiguous
        block_table: int32 [S, M]
        seq_lens: int32 [S]
        sliding_window: how many tokens a query sees, itself included; None: all before it
    """
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    max_tokens = block_table.shape[1] * block_size
    splits = num_splits(
        num_seqs * num_kv_heads, min(max_tokens, sliding_window or max_tokens), num_sms(q.device)
    )
    tiles = decode_tiles(group, head_dim, q.dtype)
    # What a single split finds is the result; there is nothing to join.
    partial = out.unsqueeze(2)
    if splits > 1:
        partial = q.new_empty((num_seqs, num_heads, splits, head_dim), dtype=torch.float32)
    log_sums = q.new_empty((num_seqs, num_heads, splits), dtype=torch.float32)
    _split_kernel[(num_seqs, num_kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        partial,
        log_sums,
        scale * LOG2_E,
        sliding_window or 0,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        *partial.stride()[:3],
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        NUM_SPLITS=splits,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        BLOCK_D=tiles.dims,
        HAS_WINDOW=sliding_window is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if splits > 1:
        _join_kernel[(num_seqs, num_heads)](
            partial,
            log_sums,
            out,
            *out.stride()[:2],
            HEAD_DIM=head_dim,
            NUM_SPLITS=splits,
            BLOCK_P=triton.next_power_of_2(splits),
            BLOCK_D=tiles.dims,
            num_warps=4,
        )


def num_splits(num_rows: int, max_tokens: int, num_sms: int) -> int:
    """Return into how many parts each of `num_rows` sequences' KV heads is split.

    A power of two, so that few kernels are compiled; enough to occupy the device if all sequences
    are long.
    """
    wanted = -(-PROGRAMS_PER_SM * num_sms // num_rows)
    useful = max(max_tokens // MIN_SPLIT_TOKENS, 1)
    limit = min(wanted, useful, MAX_SPLITS)
    return 1 << (limit.bit_length() - 1)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return the device's multiprocessors; without a GPU, as many as splits can use."""
    if device.type != "cuda":
        return MAX_SPLITS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
