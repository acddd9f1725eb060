"""transformers' cache as the oracle of an FP8 one: it answers with what e4m3 holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import DynamicCache

LARGEST = 448.0


Scale = float | torch.Tensor
"""Of all heads, or of each: [H, 1, 1]."""


def held(x: torch.Tensor, scale: Scale) -> torch.Tensor:
    """Return what x is once it has been through a cache. x: [S, H, T, D]"""
    scaled = torch.clamp(x / scale, -LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn).to(x.dtype) * scale


class Fp8Cache(DynamicCache):
    """Has scales of keys and of values by layer, 1 where none are given."""

    def __init__(self, scales: Mapping[int, tuple[Scale, Scale]] | None = None) -> None:
        super().__init__()
        self.scales = scales or {}

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kw: Any
    ) -> Any:
        k_scale, v_scale = self.scales.get(layer_idx, (1.0, 1.0))
        new = held(key_states, k_scale), held(value_states, v_scale)
        return super().update(*new, layer_idx, *args, **kw)
