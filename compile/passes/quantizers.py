"""What makes short numbers of a product's inputs, as ops that passes know, each a row of a table.

They are registered here with torch functions, so graphs that passes have rewritten run anywhere.
Shapes: T tokens, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from compile.custom_op import LIBRARY, direct_register_custom_op

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Of rows of zeros, and of such that a division by the largest number would make one of."""


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


class Quantizer(NamedTuple):
    kind: str
    """What fused ops are called after."""
    op: Any
    reference: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """Returns numbers and their scales."""
    results: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """The op's shape function."""

    @property
    def name(self) -> str:
        return f"{LIBRARY}::{self.op.default._schema.name.rpartition('::')[2]}"


QUANTIZERS = (Quantizer("fp8", quantize_fp8_per_token, quantize_rows, _fp8_results),)
