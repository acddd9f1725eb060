"""Paged attention, rotary positions and the write of KV on a CPU.

Each function takes what its reference in `paged_attention` takes and has the same effect. The C++
kernel computes where it is built and serves the tensors; the reference does elsewhere (other
dtypes, head dims above 256, rows that are not contiguous).
"""

from __future__ import annotations

import torch

from model.kernels import paged_attention as reference
from model.kernels.cpu import native


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
    """Attend as `paged_attention.paged_decode` does, reading each byte of KV once."""
    tensors = (q, k_cache, v_cache, block_table, seq_lens, out)
    if not native.run("paged_decode", *tensors, scalar=scale, window=sliding_window or 0):
        reference.paged_decode(*tensors[:-1], scale, out, sliding_window)


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
) -> None:
    """Attend as `paged_attention.paged_prefill` does; rows behind the last sequence become zero."""
    tensors = (q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, out)
    if not native.run("paged_prefill", *tensors, scalar=scale, window=sliding_window or 0):
        reference.paged_prefill(*tensors[:-1], scale, out, sliding_window)
        out[int(cu_seqlens_q[-1]) :].zero_()


def rope_and_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Rotate and write as `paged_attention.rope_and_write_kv` does."""
    rotated = q.new_empty(q.shape)
    tensors = (q, k, v, cos, sin, k_cache, v_cache, slot_mapping)
    if native.run("rope_and_write_kv", *tensors, rotated):
        return rotated
    return reference.rope_and_write_kv(*tensors)
