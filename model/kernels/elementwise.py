"""Norms and activations in torch functions: what a CPU's graph is traced from.

A Triton kernel on a GPU rounds where these round, to the model's dtype. What graph passes put into
compiled graphs ends in C++ on a CPU, where it is built (`add_rms_norm`).

Shapes: T tokens, E hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compile.passes.fuse_add_rms_norm import add_rms_norm as twin
from model.kernels.native import int64_array, native_function


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale rows to unit mean square in float32, then by `weight`. x: [..., n]; weight: [n]."""
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * (x32 * scale).to(x.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up. gate_up: [..., 2 * n], gate first. Returns [..., n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of the sum, and the sum: in C++ where it is built, in torch elsewhere.

    Graph passes put the op that ends here into compiled graphs; a model does not call it.

    x, residual: [T, E]; weight: [E].
    """
    kernel = native_function("add_rms_norm", x.dtype) if x.ndim == 2 else None
    is_served = x.stride(-1) == residual.stride(-1) == weight.stride(-1) == 1
    is_served = is_served and x.dtype == residual.dtype == weight.dtype
    if kernel is None or not is_served or x.shape != residual.shape:
        return twin(x, residual, weight, eps)
    normed, summed = x.new_empty(x.shape), x.new_empty(x.shape)
    sizes = int64_array(*x.shape, x.stride(0), residual.stride(0), torch.get_num_threads())
    pointers = (t.data_ptr() for t in (x, residual, weight, normed, summed))
    kernel(*pointers, sizes, eps)
    return normed, summed
