"""Norms and activations in torch functions: what a CPU's graph is traced from, and where a kernel
rounds to the model's dtype. `rotate` is a part of the attention op.

Shapes: T tokens, H heads, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale rows to unit mean square in float32, then by `weight`. x: [..., n]; weight: [n]."""
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * (x32 * scale).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of the sum, and the sum. x, residual: [T, n]"""
    summed = residual + x
    return rms_norm(summed, weight, eps), summed


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up (SwiGLU; Shazeer, 2020). gate_up: [..., 2 * n], gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate_pairs(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool
) -> torch.Tensor:
    """Turn as `rotate` does; if `is_interleaved`, turn pairs (x[2 * i], x[2 * i + 1]) instead, and
    return their first halves before their second ones."""
    if is_interleaved:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return rotate(x, cos, sin)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (x[i], x[i + D / 2]) by its position's angle. x: [T, H, D]; cos, sin: [T, 1, D
    / 2]."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat(
        (torch.addcmul(x1 * cos, x2, sin, value=-1), torch.addcmul(x2 * cos, x1, sin)), dim=-1
    )
