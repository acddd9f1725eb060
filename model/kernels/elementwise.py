"""Norms and activations in torch functions: what a CPU's graph is traced from.

A Triton kernel on a GPU rounds where these round, to the model's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale rows to unit mean square in float32, then by `weight`. x: [..., n]; weight: [n]."""
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * (x32 * scale).to(x.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up. gate_up: [..., 2 * n], gate first. Returns [..., n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
