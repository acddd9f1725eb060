"""The angles of rotary position embedding (RoFormer; Su et al., 2021).

A token's angles follow from its position alone, in every kind of scaling, so that its key can be
cached, shared between sequences and moved between processes.

Shapes: T tokens, D head dim.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from model.rope import DynamicRope, LinearRope, Llama3Rope, Rope, YarnRope


class RotaryEmbedding(nn.Module):
    """Cosines and sines of a step's positions. `inv_freq` is float32 [D / 2] and equal on every
    rank and device, because it is computed on the CPU. A table by position would be large."""

    inv_freq: torch.Tensor
    exponents: torch.Tensor

    def __init__(self, rope: Rope, head_dim: int, *, device: torch.device) -> None:
        super().__init__()
        self.attention_factor = rope.attention_factor if isinstance(rope, YarnRope) else 1.0
        inv_freq = inverse_frequencies(rope, head_dim).to(device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self._dynamic = rope if isinstance(rope, DynamicRope) else None
        self.register_buffer("exponents", _exponents(head_dim).to(device), persistent=False)

    def forward(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines for `positions` [T], each [T, 1, D / 2] in `dtype`."""
        inv_freq = self.inv_freq
        if self._dynamic is not None:
            inv_freq = self._grown(positions, self._dynamic)
        angles = positions.unsqueeze(-1).float() * inv_freq
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)

    def _grown(self, positions: torch.Tensor, rope: DynamicRope) -> torch.Tensor:
        """Return each token's frequencies [T, D / 2], those of a sequence that ends with it."""
        dim = 2 * self.exponents.shape[0]
        lengths = (positions + 1).unsqueeze(-1)
        growth = rope.factor * lengths.float() / rope.original_len - (rope.factor - 1)
        # Below the original length growth may be negative; nothing is used of it.
        bases = rope.theta * growth.clamp(min=1) ** (dim / (dim - 2))
        grown = 1.0 / bases**self.exponents
        return torch.where(lengths > rope.original_len, grown, self.inv_freq)


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return the angle of each pair of a head at position 1, float32 [D / 2] on the CPU."""
    wavelengths = rope.theta ** _exponents(head_dim)
    match rope:
        case LinearRope():
            return 1.0 / wavelengths / rope.factor
        case Llama3Rope():
            return _llama3(rope, 1.0 / wavelengths)
        case YarnRope():
            return _yarn(rope, wavelengths, head_dim)
        case _:
            return 1.0 / wavelengths


def _exponents(head_dim: int) -> torch.Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim


def _llama3(rope: Llama3Rope, inv_freq: torch.Tensor) -> torch.Tensor:
    """Divide frequencies that turn less than `low_freq_factor` times in the original length."""
    turns = rope.original_len / (2 * math.pi / inv_freq)
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = ramp.clamp(0, 1)
    return (1 - kept) * inv_freq / rope.factor + kept * inv_freq


def _yarn(rope: YarnRope, wavelengths: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Divide the frequencies behind a ramp over the dimensions."""
    low = _yarn_dim(rope, rope.beta_fast, head_dim)
    high = _yarn_dim(rope, rope.beta_slow, head_dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    dims = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    kept = 1 - ((dims - low) / (high - low)).clamp(0, 1)
    # As transformers rounds it: at position 100,000 the last bit of a frequency shows.
    divided = 1.0 / (rope.factor * wavelengths)
    return divided * (1 - kept) + (1.0 / wavelengths) * kept


def _yarn_dim(rope: YarnRope, num_turns: float, head_dim: int) -> float:
    """Return the dimension whose angle turns so often in the original length."""
    wavelength = rope.original_len / (num_turns * 2 * math.pi)
    return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))
