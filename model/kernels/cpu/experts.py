"""Routed experts on a CPU: torch functions between products of plain or packed weights."""

from __future__ import annotations

import torch

from model.kernels import sparse_mlp
from model.kernels.cpu.packed_linear import packed_products


def expert_mlp(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    first_expert: int,
) -> torch.Tensor:
    """Do what `sparse_mlp.expert_mlp` does; `gate_up`, `down` may be handles, int64 [Xr]."""
    kind = sparse_mlp.plain_products if gate_up.ndim > 1 else packed_products
    return sparse_mlp.by_expert(
        x, experts, weights, kind(gate_up), kind(down), first_expert, len(down)
    )
