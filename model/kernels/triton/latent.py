"""Multi-head latent attention on a GPU; the references are in `model.kernels.latent_attention`.

All query heads attend to one row for each token, a latent and a rotated key, and the latent is
their value too: a tile that is loaded once is both operands. Sequences are split and joined as in
`triton.decode`.

Shapes: T tokens, S sequences, H query heads, G of them in a program, n and p the head dim without
and with positions, v of values, r of a latent, N blocks in the pool, B tokens per block, M columns
of the block table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from model.kernels import latent_attention
from model.kernels.triton import decode
from model.kernels.triton.decode import _join_kernel, _splits_of
from model.kernels.triton.rope import _clear
from model.kernels.triton.tiles import LOG2_E, MIN_DOT

MAX_GROUP = 16
"""Heads of a program: what they have found so far is [G, r] in registers."""
MAX_PARTIAL_BYTES = 1 << 28
"""Of what splits have found, which are as many for the tokens of drafts as for sequences."""
TILE_BYTES = 1 << 15
"""Of rows, at most, of which two tiles are on their way."""


@triton.jit(do_not_specialize=["num_tokens"])
def _write_kernel(
    c: tl.tensor,
    k_pe: tl.tensor,
    cache: tl.tensor,
    slot_mapping: tl.tensor,
    num_tokens: tl.tensor,
    stride_c: tl.tensor,
    stride_k_pe: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    rows = cache + block * stride_block
    if block > 0:
        if offset == 0:
            ahead = tl.arange(0, BLOCK_B)
            is_token = token + ahead < num_tokens
            later = tl.load(slot_mapping + token + ahead, mask=is_token, other=-1)
            is_kept = later == slot + ahead
            _clear(rows, is_kept, stride_token, RANK + ROPE_DIM, BLOCK_SIZE, BLOCK_B, BLOCK_D)
        row = rows + offset * stride_token
        dims, others = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
        latent = tl.load(c + token * stride_c + dims, mask=dims < RANK, other=0.0)
        tl.store(row + dims, latent, mask=dims < RANK)
        key = tl.load(k_pe + token * stride_k_pe + others, mask=others < ROPE_DIM, other=0.0)
        tl.store(row + RANK + others, key, mask=others < ROPE_DIM)


def write_latents(
    c: torch.Tensor, k_pe: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Do what `latent_attention.write_latents` does. Slots of the scratch block are skipped."""
    num_tokens, rank = c.shape
    block_size, width = cache.shape[1], cache.shape[3]
    if num_tokens:
        _write_kernel[(num_tokens,)](
            c,
            k_pe,
            cache,
            slot_mapping,
            num_tokens,
            c.stride(0),
            k_pe.stride(0),
            *cache.stride()[:2],
            RANK=rank,
            ROPE_DIM=width - rank,
            BLOCK_SIZE=block_size,
            BLOCK_R=triton.next_power_of_2(rank),
            BLOCK_P=triton.next_power_of_2(width - rank),
            BLOCK_B=triton.next_power_of_2(block_size),
            BLOCK_D=triton.next_power_of_2(width),
            num_warps=4,
        )


@triton.jit
def attend_to_latents(
    q_tile: tl.tensor,
    q_pe_tile: tl.tensor,
    cache: tl.tensor,
    table_at: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale_log2: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> tl.tensor:
    """Attend from rows to a sequence's tokens from `begin` to `end`, which all of them see; return
    the sums of weighted latents, [BLOCK_M, BLOCK_R], the maxima and the sums of weights. A row
    that sees nothing has -inf and 0. `table_at`: the sequence's row of the block table."""
    dims, others = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    is_dim, is_other = dims < RANK, others < ROPE_DIM
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    kv = begin + tl.arange(0, BLOCK_N)
    block = tl.load(table_at + kv // BLOCK_SIZE, mask=kv < end, other=0)
    for at in range(begin, end, BLOCK_N):
        kv = at + tl.arange(0, BLOCK_N)
        # Behind a sequence's length may lie another one's block: nothing is loaded from there.
        is_kv = kv < end
        is_loaded, is_key = is_kv[:, None], is_kv[:, None]
        if RANK != BLOCK_R:
            is_loaded = is_loaded & is_dim[None, :]
        if ROPE_DIM != BLOCK_P:
            is_key = is_key & is_other[None, :]
        row_at = block.to(tl.int64) * stride_block + (kv % BLOCK_SIZE) * stride_token
        latents = tl.load(cache + row_at[:, None] + dims[None, :], mask=is_loaded, other=0.0)
        keys = tl.load(cache + row_at[:, None] + RANK + others[None, :], mask=is_key, other=0.0)
        scores = tl.dot(q_tile, latents.trans(), input_precision="ieee")
        scores = tl.dot(q_pe_tile, keys.trans(), scores, input_precision="ieee") * scale_log2
        scores = tl.where(is_kv[None, :], scores, float("-inf"))
        # The first token of a tile is one of the sequence: the maximum is a number.
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        acc = tl.dot(
            weights.to(latents.dtype), latents, acc * decay[:, None], input_precision="ieee"
        )
        row_sum = row_sum * decay + tl.sum(weights, 1)
        row_max = new_max
        # One tile ahead, as in `decode`.
        kv += BLOCK_N
        block = tl.load(table_at + kv // BLOCK_SIZE, mask=kv < end, other=0)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["num_programs"])
def _latent_kernel(
    q: tl.tensor,
    cache: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    table_rows: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    log_sums: tl.tensor,
    scale_log2: tl.tensor,
    num_programs: tl.tensor,
    stride_q_seq: tl.tensor,
    stride_q_head: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    stride_table: tl.tensor,
    stride_out_seq: tl.tensor,
    stride_out_head: tl.tensor,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
) -> None:
    group, split = tl.program_id(1), tl.program_id(2)
    seq = tl.program_id(0).to(tl.int64)
    end = tl.load(seq_lens + seq)
    begin = 0
    num_splits = 1
    if HAS_SPLITS:
        if (split > 0) & (split * MIN_SPLIT >= end):
            return
        num_splits, tiles_per_split = _splits_of(
            seq_lens,
            end,
            tl.num_programs(0),
            tl.num_programs(1),
            tl.num_programs(2),
            num_programs,
            0,
            MIN_SPLIT,
            BLOCK_N,
            False,
        )
        if (split > 0) & (split >= num_splits):
            return
        begin += split * tiles_per_split * BLOCK_N
        end = tl.minimum(begin + tiles_per_split * BLOCK_N, end)

    rows = tl.arange(0, BLOCK_M)
    heads = group * GROUP + rows
    is_head = rows < GROUP
    dims, others = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    is_dim, is_other = dims < RANK, others < ROPE_DIM
    q_at = q + seq * stride_q_seq + heads[:, None] * stride_q_head
    is_q = is_head[:, None] & is_dim[None, :]
    q_tile = tl.load(q_at + dims[None, :], mask=is_q, other=0.0)
    is_q_pe = is_head[:, None] & is_other[None, :]
    q_pe_tile = tl.load(q_at + RANK + others[None, :], mask=is_q_pe, other=0.0)

    table_row = seq
    if HAS_ROWS:
        table_row = tl.load(table_rows + seq).to(tl.int64)
    acc, row_max, row_sum = attend_to_latents(
        q_tile,
        q_pe_tile,
        cache,
        block_table + table_row * stride_table,
        begin,
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
    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    if num_splits <= 1:
        out_at = out + seq * stride_out_seq + heads[:, None] * stride_out_head + dims[None, :]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=is_q)
    else:
        part = (seq * tl.num_programs(1) * GROUP + heads) * tl.num_programs(2) + split
        tl.store(partial + part[:, None] * RANK + dims[None, :], acc, mask=is_q)
        tl.store(log_sums + part, row_max + tl.log2(row_sum), mask=is_head)


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    table_rows: torch.Tensor | None = None,
) -> None:
    """Do what `paged_attention.paged_decode` does for one KV head whose values are the first part
    of its keys.

    q: [S, H, r + p]; cache: [N, B, 1, r + p]; values: [N, B, 1, r], of `cache`; out: [S, H, r];
    table_rows: the rows of the block table, int32 [S], if not one for each
    """
    (num_seqs, num_heads, width), rank, block_size = q.shape, values.shape[3], cache.shape[1]
    group = max(n for n in range(1, MAX_GROUP + 1) if num_heads % n == 0)
    num_groups, sms = num_heads // group, decode.num_sms(q.device)
    max_tokens = block_table.shape[1] * block_size
    splits = decode.num_splits(num_seqs, num_groups, max_tokens, sms)
    splits = min(splits, max(MAX_PARTIAL_BYTES // (4 * num_seqs * num_heads * rank), 1))
    dims, others = (max(triton.next_power_of_2(n), MIN_DOT) for n in (rank, width - rank))
    columns = max(TILE_BYTES // ((dims + others) * q.element_size()), 1)
    columns = min(max(1 << columns.bit_length() - 1, MIN_DOT), 64)
    num_programs = decode.PROGRAMS_PER_SM * sms
    shape = (num_seqs, num_heads, splits if splits > 1 else 0)
    partial = q.new_empty((*shape, rank), dtype=torch.float32)
    log_sums = q.new_empty(shape, dtype=torch.float32)
    _latent_kernel[(num_seqs, num_groups, splits)](
        q,
        cache,
        block_table,
        seq_lens,
        table_rows,
        out,
        partial,
        log_sums,
        scale * LOG2_E,
        num_programs,
        *q.stride()[:2],
        *cache.stride()[:2],
        block_table.stride(0),
        *out.stride()[:2],
        GROUP=group,
        RANK=rank,
        ROPE_DIM=width - rank,
        BLOCK_SIZE=block_size,
        MIN_SPLIT=decode.MIN_SPLIT_TOKENS,
        BLOCK_M=max(triton.next_power_of_2(group), MIN_DOT),
        BLOCK_N=columns,
        BLOCK_R=dims,
        BLOCK_P=others,
        HAS_SPLITS=splits > 1,
        HAS_ROWS=table_rows is not None,
        num_warps=4,
        # Of float32 two tiles and the queries would be more than sm_86 has.
        num_stages=3 if q.element_size() <= 2 else 2,
    )
    if splits > 1:
        _join_kernel[(num_seqs, num_heads)](
            partial,
            log_sums,
            seq_lens,
            out,
            num_programs,
            0,
            splits,
            *out.stride()[:2],
            GROUP=group,
            HEAD_DIM=rank,
            MIN_SPLIT=decode.MIN_SPLIT_TOKENS,
            BLOCK_N=columns,
            BLOCK_P=triton.next_power_of_2(splits),
            BLOCK_D=dims,
            HAS_WINDOW=False,
            # Of twice as many results for each split as heads of 256 have: four would spill.
            num_warps=8,
        )


def latent_decode(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cache: torch.Tensor,
    matrices: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Do what `latent_attention.latent_decode` does."""
    latent_attention.latent_decode(
        q_nope, q_pe, cache, matrices, block_table, seq_lens, scale, out, attend
    )
