"""Routed experts on a CPU: torch functions between products of plain or packed weights."""

from __future__ import annotations

import torch

from model.kernels import sparse_mlp as twin
from model.kernels.cpu.packed_linear import packed_product


def expert_mlp(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    intermediate_size: int,
    first_expert: int,
) -> torch.Tensor:
    """Do what `sparse_mlp.expert_mlp` does; `gate_up`, `down` may be handles, int64 [Xr]."""
    if gate_up.ndim > 1:
        return twin.expert_mlp(x, experts, weights, gate_up, down, first_expert)
    up_indices, down_indices = gate_up.tolist(), down.tolist()

    def up(rows: torch.Tensor, expert: int) -> torch.Tensor:
        return packed_product(rows, up_indices[expert], None, 2 * intermediate_size)

    def back(rows: torch.Tensor, expert: int) -> torch.Tensor:
        return packed_product(rows, down_indices[expert], None, x.shape[1])

    own = range(first_expert, first_expert + len(down))
    return twin.by_expert(x, experts, weights, up, back, own)
