"""The gated MLP of dense decoder layers, and its activation.

Shapes: T tokens, E hidden size.
"""

from __future__ import annotations

import torch
from torch import nn

from model.kernels import dispatch, elementwise
from model.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from model.parallel import Placement


class GatedMLP(nn.Module):
    """Two projections up, one of which gates the other, and one down."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, place: Placement, *, bias: bool
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, intermediate_size, ("gate_proj", "up_proj"), place, bias=bias
        )
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, place, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, E]"""
        out: torch.Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up (SwiGLU; Shazeer, 2020).

    gate_up: [..., 2 * n], gate first. Returns [..., n].
    """
    if dispatch.uses_ops(gate_up):
        gated: torch.Tensor = dispatch.silu_and_mul(gate_up)
        return gated
    return elementwise.silu_and_mul(gate_up)
