"""Paged attention and the write of KV on CPU: C++ where it is built, torch elsewhere.

All functions take what their twins in `paged_attention` take and leave the same values behind, so
a caller does not know which one ran. What a kernel does not serve (other dtypes, other devices,
rows that are not contiguous) goes to the twin.

Shapes: T tokens, S sequences, H query heads, Hkv KV heads, D head dim, N blocks, B tokens per
block, M columns of the block table.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from model.kernels import paged_attention as twin
from model.kernels.cpu import elementwise
from model.kernels.cpu.native import int64_array, native_function, native_library

MAX_HEAD_DIM = 256

Strides = tuple[int, ...]
"""Or a shape."""


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
    sizes = None
    if kernel is not None:
        sizes = _decode_sizes(
            q.shape,
            k_cache.shape,
            q.stride(),
            k_cache.stride(),
            v_cache.stride(),
            block_table.stride(),
            seq_lens.stride(),
            out.stride(),
            torch.get_num_threads(),
            sliding_window or 0,
        )
    if kernel is None or sizes is None:
        twin.paged_decode(q, k_cache, v_cache, block_table, seq_lens, scale, out, sliding_window)
        return
    kernel(
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_table.data_ptr(),
        seq_lens.data_ptr(),
        out.data_ptr(),
        sizes,
        scale,
    )


# What a step asks for is what the last one did: looking it up takes a tenth of working it out.
@functools.lru_cache(maxsize=4096)
def _decode_sizes(
    q_shape: Strides,
    cache_shape: Strides,
    q: Strides,
    k_cache: Strides,
    v_cache: Strides,
    block_table: Strides,
    seq_lens: Strides,
    out: Strides,
    num_threads: int,
    sliding_window: int,
) -> ctypes.Array[ctypes.c_int64] | None:
    """Return what the kernel is told of shapes and strides; None if it does not serve them."""
    num_seqs, num_heads, dim = q_shape
    if dim > MAX_HEAD_DIM or k_cache != v_cache:
        return None
    if not _has_rows(q, k_cache, block_table, seq_lens, out):
        return None
    return int64_array(
        num_seqs,
        num_heads,
        cache_shape[2],
        dim,
        *k_cache[:3],
        cache_shape[1],
        *q[:2],
        *out[:2],
        block_table[0],
        num_threads,
        sliding_window,
    )


def paged_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
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
    kernel = native_function("paged_prefill", q.dtype) if q.device.type == "cpu" else None
    sizes = None
    if kernel is not None and q.dtype == k_cache.dtype:
        sizes = _prefill_sizes(
            q.shape,
            seq_lens.shape,
            k_cache.shape,
            q.stride(),
            k_cache.stride(),
            v_cache.stride(),
            block_table.stride(),
            cu_seqlens_q.stride(),
            seq_lens.stride(),
            out.stride(),
            torch.get_num_threads(),
            sliding_window or 0,
        )
    if kernel is None or sizes is None:
        where = (k_cache, v_cache, block_table, cu_seqlens_q, seq_lens)
        twin.paged_prefill(q, k, v, *where, scale, out, sliding_window)
        out[int(cu_seqlens_q[-1]) :].zero_()
        return
    kernel(
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_table.data_ptr(),
        cu_seqlens_q.data_ptr(),
        seq_lens.data_ptr(),
        out.data_ptr(),
        sizes,
        scale,
    )


@functools.lru_cache(maxsize=4096)
def _prefill_sizes(
    q_shape: Strides,
    seqs_shape: Strides,
    cache_shape: Strides,
    q: Strides,
    k_cache: Strides,
    v_cache: Strides,
    block_table: Strides,
    cu_seqlens_q: Strides,
    seq_lens: Strides,
    out: Strides,
    num_threads: int,
    sliding_window: int,
) -> ctypes.Array[ctypes.c_int64] | None:
    """Return what the kernel is told of shapes and strides; None if it does not serve them."""
    if q_shape[2] > MAX_HEAD_DIM or k_cache != v_cache:
        return None
    if not _has_rows(q, k_cache, block_table, cu_seqlens_q, seq_lens, out):
        return None
    return int64_array(
        q_shape[0],
        seqs_shape[0],
        q_shape[1],
        cache_shape[2],
        q_shape[2],
        *k_cache[:3],
        cache_shape[1],
        *q[:2],
        *out[:2],
        block_table[0],
        num_threads,
        sliding_window,
    )


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write as `paged_attention.write_kv` does."""
    library = native_library() if k.device.type == "cpu" else None
    sizes = None
    if library is not None and k.dtype == k_cache.dtype:
        sizes = _write_sizes(
            k.shape,
            k_cache.shape[1],
            k.element_size(),
            k.stride(),
            v.stride(),
            k_cache.stride(),
            v_cache.stride(),
            slot_mapping.stride(),
        )
    if library is None or sizes is None:
        twin.write_kv(k, v, k_cache, v_cache, slot_mapping)
        return
    library.write_kv(
        k.data_ptr(),
        v.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        slot_mapping.data_ptr(),
        sizes,
    )


@functools.lru_cache(maxsize=4096)
def _write_sizes(
    shape: Strides,
    block_size: int,
    itemsize: int,
    k: Strides,
    v: Strides,
    k_cache: Strides,
    v_cache: Strides,
    slot_mapping: Strides,
) -> ctypes.Array[ctypes.c_int64] | None:
    """Return what the kernel is told, strides in bytes; None if it does not serve them."""
    if k_cache != v_cache or not _has_rows(k, v, k_cache, slot_mapping):
        return None
    num_tokens, num_heads, dim = shape
    strides = (n * itemsize for n in (*k[:2], *v[:2], *k_cache[:3]))
    return int64_array(num_tokens, num_heads, dim * itemsize, *strides, block_size)


def rope_and_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write turned keys and values into their slots; return turned queries and keys.

    Args:
        q: [T, H, D]; k, v: [T, Hkv, D]; cos, sin: [T, 1, D / 2]
        k_cache, v_cache: [N, B, Hkv, D], any strides but the last
        slot_mapping: int64 [T], block * B + offset
    """
    q, k = elementwise.rotate(q, k, cos, sin)
    write_kv(k, v, k_cache, v_cache, slot_mapping)
    return q, k


def _has_rows(*strides: Strides) -> bool:
    """Return whether every tensor's last dimension is contiguous."""
    return all(each[-1] == 1 for each in strides)
