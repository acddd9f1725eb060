"""Paged decode attention and the write of KV on CPU: C++ where it is built, torch elsewhere.

The one thing to know: both functions take what their twins in `paged_attention` take and leave the
same values behind, so a caller does not know which one ran. What a kernel does not serve (other
dtypes, other devices, rows that are not contiguous, sliding windows) goes to the twin.

Shapes: T tokens, S sequences, H query heads, Hkv KV heads, D head dim, N blocks, B tokens per
block, M columns of the block table.
"""

from __future__ import annotations

import torch

from model.kernels import paged_attention as twin
from model.kernels.native import int64_array, native_function, native_library

MAX_HEAD_DIM = 256


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
    kernel = native_function("paged_decode", q.dtype) if q.device.type == "cpu" else None
    is_served = _has_rows(q, k_cache, v_cache, block_table, seq_lens, out)
    is_served = is_served and q.shape[2] <= MAX_HEAD_DIM and sliding_window is None
    if kernel is None or not is_served or k_cache.stride() != v_cache.stride():
        twin.paged_decode(q, k_cache, v_cache, block_table, seq_lens, scale, out, sliding_window)
        return
    num_seqs, num_heads, dim = q.shape
    block_stride, slot_stride, head_stride, _ = k_cache.stride()
    sizes = int64_array(
        num_seqs,
        num_heads,
        k_cache.shape[2],
        dim,
        block_stride,
        slot_stride,
        head_stride,
        k_cache.shape[1],
        *q.stride()[:2],
        *out.stride()[:2],
        block_table.stride(0),
        torch.get_num_threads(),
    )
    pointers = (t.data_ptr() for t in (q, k_cache, v_cache, block_table, seq_lens, out))
    kernel(*pointers, sizes, scale)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write as `paged_attention.write_kv` does."""
    library = native_library() if k.device.type == "cpu" else None
    is_served = _has_rows(k, v, k_cache, v_cache, slot_mapping) and k.dtype == k_cache.dtype
    if library is None or not is_served or k_cache.stride() != v_cache.stride():
        twin.write_kv(k, v, k_cache, v_cache, slot_mapping)
        return
    size = k.element_size()
    strides = (*k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3])
    num_tokens, num_heads, dim = k.shape
    sizes = int64_array(
        num_tokens, num_heads, dim * size, *(n * size for n in strides), k_cache.shape[1]
    )
    pointers = (t.data_ptr() for t in (k, v, k_cache, v_cache, slot_mapping))
    library.write_kv(*pointers, sizes)


def _has_rows(*tensors: torch.Tensor) -> bool:
    """Tell whether every tensor's last dimension is contiguous."""
    return all(t.stride(-1) == 1 for t in tensors)
