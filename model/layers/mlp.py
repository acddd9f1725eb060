"""The gated MLP of dense decoder layers.

Shapes: T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from model.layers.activation import silu_and_mul
from model.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from model.layers.slices import WeightSlice
from model.parallel import Shard


class GatedMLP(nn.Module):
    """Two projections up, one of which gates the other, and one down."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, intermediate_size, 2, bias=bias, shard=shard, dtype=dtype, device=device
        )
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, bias=bias, shard=shard, dtype=dtype, device=device
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, E]"""
        out: torch.Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return out

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        """Describe the checkpoint's tensors."""
        yield from self.gate_up_proj.weight_slices(f"{name}.gate_proj", f"{name}.up_proj")
        yield from self.down_proj.weight_slices(f"{name}.down_proj")
