"""Norms and activations on a CPU, each in one pass over its rows.

The C++ kernel computes where it is built and serves the tensors; the torch reference does elsewhere
(other dtypes, rows that are not contiguous). They differ in the order of sums and in the last bit
of an exponential.

Shapes: T tokens, H heads, D head dim, E hidden size.
"""

from __future__ import annotations

import torch

from compile.passes.fuse_add_rms_norm import add_rms_norm as added_reference
from model.kernels import elementwise as reference
from model.kernels.cpu import native


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm of rows, contiguous. x: [T, E] or [T, H, D]; weight: [E] or [D]."""
    normed = x.new_empty(x.shape)
    if native.run("rms_norm", x, weight, normed, scalar=eps):
        return normed
    return reference.rms_norm(x, weight, eps).contiguous()


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of the sum, and the sum. x, residual: [T, E]; weight: [E]."""
    normed, summed = x.new_empty(x.shape), x.new_empty(x.shape)
    if native.run("fused_add_rms_norm", x, residual, weight, normed, summed, scalar=eps):
        return normed, summed
    return added_reference(x, residual, weight, eps)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, contiguous. gate_up: [T, 2 * n], gate first."""
    out = gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
    if native.run("silu_and_mul", gate_up, out):
        return out
    return reference.silu_and_mul(gate_up)
