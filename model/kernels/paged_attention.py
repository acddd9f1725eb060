"""Paged attention (Kwon et al., 2023) as torch functions: the reference of all kernels, and what a
CPU without C++ kernels computes.

What a masked position holds is multiplied by zero, which does not silence a NaN. So two invariants
keep one sequence's values out of another's output, whatever they are: the scratch block is zero,
and so is every slot behind the last token of a sequence, because writing a block's first slot
clears it; or it holds what the same sequence's draft left there.

Each call copies the keys and values that it attends to into memory of its own. Kernels copy
nothing.

A cache of e4m3 (Micikevicius et al., 2022) holds x / s for a value x, cut off at the largest number
that it has; s is the scale of a head's keys or of its values (`kv_scales`: float32 [2, Hkv],
contiguous). Attention takes q * s for what is held there. Other caches are of the model's dtype,
and have no scales.

Shapes: T tokens, S sequences, H query heads, Hkv KV heads, G = H / Hkv, D head dim, N blocks in the
pool, B tokens per block, M columns of the block table, L gathered tokens (a multiple of B).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from model.kernels.elementwise import rotate

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def quantize_kv(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return x / scale in e4m3, rounded to nearest, ties to even. What is not a number stays so.
    x: [T, Hkv, D]; scale: float32 [Hkv]"""
    return (x.float() / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Write tokens into their slots, in order, blocks from their first slot on. Block 0 takes
    padding.

    k, v: [T, Hkv, D]; k_cache, v_cache: [N, B, Hkv, D], any strides; slot_mapping: int64 [T],
    block * B + offset; kv_scales: for caches of e4m3, else None
    """
    if kv_scales is not None:
        k, v = (quantize_kv(new, s) for new, s in zip((k, v), kv_scales, strict=True))
        # Of bytes torch fills and scatters what it does not of e4m3; zero is 0 in both.
        k, v, k_cache, v_cache = (t.view(torch.uint8) for t in (k, v, k_cache, v_cache))
    write_rows(((k, k_cache), (v, v_cache)), slot_mapping)


def write_rows(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], slot_mapping: torch.Tensor
) -> None:
    """Write pairs of tokens [T, heads, D] and their cache [N, B, heads, D] as `write_kv` does."""
    for new, cache in pairs:
        block_size = cache.shape[1]
        blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
        opened = blocks[offsets == 0]
        if opened.numel():
            cache.index_fill_(0, opened, 0)
        cache.index_put_((blocks, offsets), new)
        cache[0].zero_()


def rope_and_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys to their positions, write keys and values; return the queries.

    q: [T, H, D]; k, v: [T, Hkv, D]; cos, sin: [T, 1, D / 2]; the rest as `write_kv` takes it
    """
    write_kv(rotate(k, cos, sin), v, k_cache, v_cache, slot_mapping, kv_scales)
    return rotate(q, cos, sin)


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
    """Attend from one token per sequence to its last tokens, itself included.

    A sequence of length 0 is padding; its output is zero. Blocks outside of the window are not
    read.

    q, out: [S, H, D]; k_cache, v_cache: [N, B, Hkv, D], any strides; block_table: int32 [S, M];
    seq_lens: int32 [S]; token j attends to token i where j - i < sliding_window, or to all;
    kv_scales: for caches of e4m3, else None
    """
    num_seqs, num_kv_heads, block_size = q.shape[0], k_cache.shape[2], k_cache.shape[1]
    # A padding sequence sees one slot, of the scratch block: a row without any would be NaN.
    stops = seq_lens.clamp(min=1).unsqueeze(1)
    starts = torch.zeros_like(stops) if sliding_window is None else stops - sliding_window
    first = starts.clamp(min=0) // block_size
    num_columns = int((-(-stops // block_size) - first).max())
    columns = first + torch.arange(num_columns, device=seq_lens.device)
    is_behind = columns * block_size >= seq_lens.unsqueeze(1)
    columns = columns.clamp(max=block_table.shape[1] - 1)
    blocks = block_table.gather(1, columns).masked_fill(is_behind, 0).flatten()
    length = num_columns * block_size
    positions = first * block_size + torch.arange(length, device=seq_lens.device)
    mask = (positions >= starts) & (positions < stops)
    shape = (num_seqs, length, num_kv_heads, -1)
    k, v = (
        t.view(shape).transpose(1, 2) for t in _gather(k_cache, v_cache, blocks, kv_scales, q.dtype)
    )
    # The G query heads of a KV head stand where SDPA expects query tokens: nothing is repeated.
    grouped = q.unflatten(1, (num_kv_heads, -1))
    attended = F.scaled_dot_product_attention(
        grouped, k, v, attn_mask=mask[:, None, None], scale=scale
    )
    out.copy_(attended.flatten(1, 2))


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
) -> None:
    """Attend from chunks of prompts, each to its sequence's tokens up to itself.

    The queries of a sequence are its last tokens, which the cache already holds. Those of a
    sequence of length 0 are padding; their output is zero. Blocks outside of the first query's
    window are not read.

    q, out: [T, H, D]; cu_seqlens_q: int32 [S + 1]; the rest as `paged_decode` takes it
    """
    bounds, block_size = cu_seqlens_q.tolist(), k_cache.shape[1]
    for i, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(bounds[i], bounds[i + 1])
        num_queries = rows.stop - rows.start
        if seq_len == 0:
            out[rows].zero_()
        if num_queries == 0 or seq_len == 0:
            continue
        first = _first_block(seq_len - num_queries, sliding_window, block_size)
        blocks = block_table[i, first : -(-seq_len // block_size)]
        num_tokens = seq_len - first * block_size
        keys, values = _gather(k_cache, v_cache, blocks, kv_scales, q.dtype)
        seen = keys[:num_tokens], values[:num_tokens]
        out[rows] = _attend_chunk(q[rows], *seen, scale, sliding_window)


def _first_block(position: int, sliding_window: int | None, block_size: int) -> int:
    if sliding_window is None:
        return 0
    return max(position - sliding_window + 1, 0) // block_size


def _attend_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sliding_window: int | None
) -> torch.Tensor:
    """Attend from the last tokens of one sequence. q: [Tq, H, D]; k, v: [Tk, Hkv, D]."""
    num_queries, num_tokens, num_kv_heads = q.shape[0], k.shape[0], k.shape[1]
    grouped = q.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    shape = (-1, grouped.shape[1], -1, -1)
    keys = k.transpose(0, 1).unsqueeze(1).expand(shape)
    values = v.transpose(0, 1).unsqueeze(1).expand(shape)
    mask = None
    if num_queries < num_tokens or (sliding_window is not None and sliding_window < num_tokens):
        every = torch.ones(num_queries, num_tokens, dtype=torch.bool, device=q.device)
        offset = num_tokens - num_queries
        mask = every.tril(offset)
        if sliding_window is not None:
            mask = mask.triu(offset - sliding_window + 1)
    attended = F.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return attended.permute(2, 0, 1, 3).flatten(1, 2)


def _gather(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    blocks: torch.Tensor,
    kv_scales: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy `blocks` [n] of both caches, one after the other: [n * B, Hkv, D] of `dtype`."""
    k, v = (cache.index_select(0, blocks).flatten(0, 1) for cache in (k_cache, v_cache))
    if kv_scales is None:
        return k, v
    k_scale, v_scale = kv_scales.unsqueeze(-1)
    return (k.float() * k_scale).to(dtype), (v.float() * v_scale).to(dtype)
