"""Norms, activations and rotary positions on CPU: C++ where it is built, torch elsewhere.

Each is one pass over its rows. They return what their twins in `elementwise` return, but for the
order of sums and the last bit of an exponential. What a kernel does not serve (other dtypes, rows
that are not contiguous) goes to the twin.

Shapes: T tokens, H query heads, Hkv KV heads, D head dim, E hidden size.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from compile.passes.fuse_add_rms_norm import add_rms_norm as added_twin
from model.kernels import elementwise as twin
from model.kernels.cpu.native import int64_array, native_function


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm of rows, contiguous. x: [T, E] or [T, H, D], else the twin does it."""
    kernel = native_function("rms_norm", x.dtype)
    if kernel is None or x.ndim not in (2, 3) or not _are_rows(x, weight):
        return twin.rms_norm(x, weight, eps).contiguous()
    num_heads, head_stride = (x.shape[1], x.stride(1)) if x.ndim == 3 else (1, 0)
    normed = x.new_empty(x.shape)
    shape = (x.shape[0], num_heads, x.shape[-1])
    sizes = _sizes(*shape, x.stride(0), head_stride, torch.get_num_threads())
    kernel(x.data_ptr(), weight.data_ptr(), normed.data_ptr(), sizes, eps)
    return normed


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return the norm of the sum, and leave the sum in the residual. x, residual: [T, E]."""
    if not _adds(x, residual, weight):
        return rms_norm(residual.add_(x), weight, eps)
    return _add_and_norm(x, residual, weight, eps, residual)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of the sum, and the sum.

    Graph passes put the op that ends here into compiled graphs; a model does not call it.

    x, residual: [T, E]; weight: [E].
    """
    if not _adds(x, residual, weight):
        return added_twin(x, residual, weight, eps)
    summed = x.new_empty(x.shape)
    return _add_and_norm(x, residual, weight, eps, summed), summed


def _adds(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the kernel adds and norms these."""
    is_built = x.ndim == 2 and native_function("add_rms_norm", x.dtype) is not None
    return is_built and x.shape == residual.shape and _are_rows(x, residual, weight)


def _add_and_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    summed: torch.Tensor,
) -> torch.Tensor:
    kernel = native_function("add_rms_norm", x.dtype)
    assert kernel is not None
    normed = x.new_empty(x.shape)
    strides = (x.stride(0), residual.stride(0), summed.stride(0))
    sizes = _sizes(*x.shape, *strides, torch.get_num_threads())
    pointers = (t.data_ptr() for t in (x, residual, weight, normed, summed))
    kernel(*pointers, sizes, eps)
    return normed


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, contiguous. gate_up: [T, 2 * n], else the twin does it."""
    kernel = native_function("silu_and_mul", gate_up.dtype)
    if kernel is None or gate_up.ndim != 2 or gate_up.shape[1] % 2 or not _are_rows(gate_up):
        return twin.silu_and_mul(gate_up)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    sizes = _sizes(num_rows, width, gate_up.stride(0), torch.get_num_threads())
    kernel(gate_up.data_ptr(), out.data_ptr(), sizes)
    return out


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys turned as `elementwise.rotate` turns each.

    q: [T, H, D]; k: [T, Hkv, D]; cos, sin: [T, 1, D / 2].
    """
    kernel = native_function("rope", q.dtype)
    is_served = _are_rows(q, k, cos, sin) and cos.is_contiguous() and sin.is_contiguous()
    if kernel is None or not is_served:
        return twin.rotate(q, cos, sin), twin.rotate(k, cos, sin)
    turned, turned_k = q.new_empty(q.shape), k.new_empty(k.shape)
    strides = (*q.stride()[:2], *k.stride()[:2])
    sizes = _sizes(*q.shape[:2], k.shape[1], q.shape[2], *strides, torch.get_num_threads())
    pointers = (t.data_ptr() for t in (q, k, cos, sin, turned, turned_k))
    kernel(*pointers, sizes)
    return turned, turned_k


def _are_rows(*tensors: torch.Tensor) -> bool:
    """Return whether all lie on the CPU, in one dtype, with contiguous last dimensions."""
    dtype = tensors[0].dtype
    return all(t.is_cpu and t.dtype == dtype and t.stride(-1) == 1 for t in tensors)


# What a step asks for is what the last one did: looking it up takes a fraction of making it.
@functools.lru_cache(maxsize=4096)
def _sizes(*values: int) -> ctypes.Array[ctypes.c_int64]:
    return int64_array(*values)
