"""Rotary positions and the KV write in one launch: `paged_attention.rope_and_write_kv` on a GPU.

A program takes one token and one KV head. Slots of the scratch block are skipped, so that it stays
zero. Whoever writes a block's first slot clears the slots that no later token of this step writes:
programs run at the same time, and could not clear the whole block first.

Shapes: T tokens, H query heads, Hkv KV heads, G = H / Hkv, D head dim, N blocks in the pool, B
tokens per block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from model.kernels.triton.e4m3 import to_e4m3


@triton.jit
def _clear(
    cache: tl.tensor,
    is_kept: tl.tensor,
    stride_token: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Write zeros into a block's slots but the kept ones. `cache` points at one head's first."""
    offsets, dims = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_D)
    is_slot = (offsets < BLOCK_SIZE) & (is_kept == 0)
    at = cache + offsets[:, None] * stride_token + dims[None, :]
    tl.store(at, 0, mask=is_slot[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit
def _store(at: tl.tensor, values: tl.tensor, scale: tl.tensor, mask: tl.tensor) -> None:
    """Store values of the model's dtype, in bytes as e4m3 by their scale."""
    if at.dtype.element_ty == tl.uint8:
        values = to_e4m3(tl.div_rn(values.to(tl.float32), scale))
    tl.store(at, values, mask=mask)


@triton.jit
def _rotate(
    x: tl.tensor,
    out: tl.tensor,
    c: tl.tensor,
    s: tl.tensor,
    scale: tl.tensor,
    mask: tl.tensor,
    HALF: tl.constexpr,
) -> None:
    """Rotate the pairs (x[i], x[i + D / 2]) behind the pointers `x` by cosines and sines."""
    x1 = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    _store(out, (x1 * c - x2 * s).to(dtype), scale, mask)
    _store(out + HALF, (x2 * c + x1 * s).to(dtype), scale, mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _rope_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slot_mapping: tl.tensor,
    kv_scales: tl.tensor,
    q_out: tl.tensor,
    num_tokens: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_cos: tl.tensor,
    stride_kc_block: tl.tensor,
    stride_kc_token: tl.tensor,
    stride_kc_head: tl.tensor,
    stride_vc_block: tl.tensor,
    stride_vc_token: tl.tensor,
    stride_vc_head: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_B: tl.constexpr,
) -> None:
    HALF: tl.constexpr = HEAD_DIM // 2
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims, halves = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_H)
    is_dim, is_half = dims < HEAD_DIM, halves < HALF
    k += token * stride_k_token + kv_head * stride_k_head
    v += token * stride_v_token + kv_head * stride_v_head

    c = tl.load(cos + token * stride_cos + halves, mask=is_half, other=0.0).to(tl.float32)
    s = tl.load(sin + token * stride_cos + halves, mask=is_half, other=0.0).to(tl.float32)
    group = tl.arange(0, BLOCK_G)
    heads = (kv_head * GROUP + group)[:, None]
    is_q = (group < GROUP)[:, None] & is_half[None, :]
    q_at = q + token * stride_q_token + heads * stride_q_head + halves[None, :]
    num_heads = tl.num_programs(1) * GROUP
    out_at = q_out + (token * num_heads + heads) * HEAD_DIM + halves[None, :]
    _rotate(q_at, out_at, c[None, :], s[None, :], 1.0, is_q, HALF)

    slot = tl.load(slot_mapping + token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    k_block = k_cache + block * stride_kc_block + kv_head * stride_kc_head
    v_block = v_cache + block * stride_vc_block + kv_head * stride_vc_head
    if block > 0:
        if offset == 0:
            ahead = tl.arange(0, BLOCK_B)
            is_token = token + ahead < num_tokens
            later = tl.load(slot_mapping + token + ahead, mask=is_token, other=-1)
            is_kept = later == slot + ahead
            _clear(k_block, is_kept, stride_kc_token, HEAD_DIM, BLOCK_SIZE, BLOCK_B, BLOCK_D)
            _clear(v_block, is_kept, stride_vc_token, HEAD_DIM, BLOCK_SIZE, BLOCK_B, BLOCK_D)
        k_scale, v_scale = 1.0, 1.0
        if kv_scales is not None:
            kv_scales += kv_head
            k_scale, v_scale = tl.load(kv_scales), tl.load(kv_scales + tl.num_programs(1))
        values = tl.load(v + dims, mask=is_dim, other=0.0)
        _store(v_block + offset * stride_vc_token + dims, values, v_scale, is_dim)
        k_at = k_block + offset * stride_kc_token + halves
        _rotate(k + halves, k_at, c, s, k_scale, is_half, HALF)


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
    """Do what `paged_attention.rope_and_write_kv` does. cos and sin have q's dtype and equal
    strides."""
    if kv_scales is not None:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    num_tokens, num_kv_heads, head_dim = k.shape
    group = q.shape[1] // num_kv_heads
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not num_tokens:
        return q_out
    _rope_kernel[(num_tokens, num_kv_heads)](
        q,
        k,
        v,
        cos,
        sin,
        k_cache,
        v_cache,
        slot_mapping,
        kv_scales,
        q_out,
        num_tokens,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        cos.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_G=triton.next_power_of_2(group),
        BLOCK_H=triton.next_power_of_2(max(head_dim // 2, 1)),
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_B=triton.next_power_of_2(k_cache.shape[1]),
        num_warps=1 if group * head_dim <= 512 else 4,
    )
    return q_out
