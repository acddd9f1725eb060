"""What makes short numbers of a product's inputs, as ops that passes know, each a row of a table.

They are registered here with torch functions, so graphs that passes have rewritten run anywhere.
Shapes: T tokens, I inputs, B = I / 16 blocks, G groups of 128 inputs, the last one of what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from compile.custom_op import LIBRARY, direct_register_custom_op
from compile.formats import FP4_BLOCK, FP8_GROUP

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Of rows of zeros, and of such that a division by the largest number would make one of."""
_LARGEST_FP4 = 6.0
_SCALE_OF_ZEROS = 0.125
"""Of blocks whose own scale would be rounded to zero, as compressed-tensors has it: all of their
numbers become zero."""


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what each row is as e4m3 [..., I] times a float32 scale [..., 1]: its largest number
    becomes 448, and the others are rounded to nearest, ties to even. A row with a NaN or an
    infinity becomes NaN, and no other one does. x: [..., I]"""
    wide = x.float()
    scales = (wide.abs().amax(-1, keepdim=True) / _LARGEST).clamp_min(_LEAST_SCALE)
    return (wide / scales).clamp(-_LARGEST, _LARGEST).to(FP8).contiguous(), scales


def _fp8_results(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=FP8), scales


quantize_fp8_per_token = direct_register_custom_op(
    "quantize_fp8_per_token", quantize_rows, fake_impl=_fp8_results
)


def quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `quantize_rows` does with each 128 numbers of a row. x: [..., I]. Returns e4m3
    [..., I] and float32 [..., G]."""
    size = x.shape[-1]
    groups = F.pad(x, (0, -size % FP8_GROUP)).unflatten(-1, (-1, FP8_GROUP))
    numbers, scales = quantize_rows(groups)
    return numbers.flatten(-2)[..., :size].contiguous(), scales.squeeze(-1)


def _group_results(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    *rows, inputs = x.shape
    scales = x.new_empty((*rows, -(-inputs // FP8_GROUP)), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=FP8), scales


quantize_fp8_per_token_group = direct_register_custom_op(
    "quantize_fp8_per_token_group", quantize_groups, fake_impl=_group_results
)


def quantize_blocks(
    x: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what each 16 numbers are as e2m1 times an e4m3 scale [..., B] over `global_scale`
    (NVFP4): the largest becomes 6, and the others are rounded to nearest, ties to even. Two numbers
    are a byte, the first one its low half: uint8 [..., I / 2]. A block with a NaN or an infinity
    becomes NaN, by its scale. x: [..., I]; global_scale: float32 [1]"""
    blocks = x.float().unflatten(-1, (-1, FP4_BLOCK))
    largest = blocks.abs().amax(-1)
    wanted = (largest / _LARGEST_FP4 * global_scale).clamp(max=_LARGEST)
    scales = torch.where(largest.isfinite(), wanted, torch.nan).to(FP8).float()
    scales = torch.where(scales == 0, _SCALE_OF_ZEROS, scales)
    scaled = blocks / (scales / global_scale).unsqueeze(-1)
    # Numbers are half a unit apart below 2, one from there to 4, and two above.
    size = scaled.abs().clamp(max=_LARGEST_FP4)
    codes = torch.where(size < 4, size.round() + 2, (size / 2).round() + 4)
    codes = torch.where(size < 2, (size * 2).round(), codes)
    codes = torch.where(scaled < 0, codes + 8, codes).to(torch.uint8).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales.to(FP8)


def fp4_values(packed: torch.Tensor) -> torch.Tensor:
    """Return bytes [..., N] of two e2m1 numbers each as float32 [..., 2 * N]."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(torch.int16)
    # Where float16 has its exponent and the first bit behind it, for exponents that begin at 1.
    halves = ((codes & 7) << 9) | ((codes & 8) << 12)
    return halves.view(torch.float16).float() * 2.0**14


def _nvfp4_results(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *rows, inputs = x.shape
    scales = x.new_empty((*rows, inputs // FP4_BLOCK), dtype=FP8)
    return x.new_empty((*rows, inputs // 2), dtype=torch.uint8), scales


quantize_nvfp4 = direct_register_custom_op(
    "quantize_nvfp4", quantize_blocks, fake_impl=_nvfp4_results
)


class Quantizer(NamedTuple):
    kind: str
    """What fused ops are called after."""
    op: Any
    reference: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """Returns numbers and their scales."""
    results: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """The op's shape function."""
    names: tuple[str, ...] = ()
    """Of what the op is given behind the numbers: tensors that do not follow from a step's."""

    @property
    def name(self) -> str:
        return f"{LIBRARY}::{self.op.default._schema.name.rpartition('::')[2]}"


QUANTIZERS = (
    Quantizer("fp8", quantize_fp8_per_token, quantize_rows, _fp8_results),
    Quantizer("fp8_group", quantize_fp8_per_token_group, quantize_groups, _group_results),
    Quantizer("nvfp4", quantize_nvfp4, quantize_blocks, _nvfp4_results, ("global_scale",)),
)
