"""Root mean square normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from model.kernels import dispatch
from model.layers.slices import WeightedLayer, WeightSlice, whole
from model.parallel import Placement


class RMSNorm(WeightedLayer):
    """Scale rows to unit mean square in float32, then by a weight in the model's dtype."""

    def __init__(self, hidden_size: int, eps: float, place: Placement) -> None:
        super().__init__(place)
        self.eps = eps
        self.weight = self.declare(hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., hidden_size]"""
        normed: torch.Tensor = dispatch.rms_norm(x, self.weight, self.eps)
        return normed

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of the sum, and the sum. x, residual: [T, hidden_size]"""
        normed, summed = dispatch.fused_add_rms_norm(x, residual, self.weight, self.eps)
        return normed, summed

    def weight_slices(self, name: str, held: Collection[str]) -> Iterator[WeightSlice]:
        yield whole(f"{name}.weight", self, "weight")
