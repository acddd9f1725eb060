"""Products of FP8 numbers (e4m3) with scales: one for each token of the inputs, one for each output
of the weight.

These are the scales that torch multiplies by on every device (`_scaled_mm` by rows): on a GPU it
knows them from sm_89 on, with results in bfloat16, and on a CPU in any dtype, but not in all
versions. A scale for the whole weight would lose more to its largest number and save nothing.
Where torch does not multiply by rows, both sides become float32, which rounds alike.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import functools
import logging
import mmap
from typing import NamedTuple

import torch
import torch.nn.functional as F

from compile.passes.quantizers import FP8, quantize_rows

OUTPUTS_AT_ONCE = 64
"""That become FP8: what they take in float32 is bounded."""

logger = logging.getLogger(__name__)


class ScaledWeight(NamedTuple):
    numbers: torch.Tensor
    """e4m3 [O, I]"""
    scales: torch.Tensor
    """float32 [1, O]"""

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes


def scaled_weight(weight: torch.Tensor) -> ScaledWeight:
    """Round a weight [O, I], each output by its largest number."""
    if weight.device.type == "cpu":
        # A mapping of its own: in the heap, what is freed behind it would leave gaps.
        memory = mmap.mmap(-1, max(weight.numel(), 1))
        numbers = torch.frombuffer(memory, dtype=FP8)[: weight.numel()].view(weight.shape)
    else:
        numbers = torch.empty_like(weight, dtype=FP8, memory_format=torch.contiguous_format)
    scales = weight.new_empty(1, len(weight), dtype=torch.float32)
    for start in range(0, len(weight), OUTPUTS_AT_ONCE):
        some = slice(start, start + OUTPUTS_AT_ONCE)
        rounded, of_rows = quantize_rows(weight[some])
        numbers[some].copy_(rounded)
        scales[0, some] = of_rows.squeeze(1)
    return ScaledWeight(numbers, scales)


def scaled_linear(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    weight: ScaledWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return [T, O] in `dtype`. numbers: e4m3 [T, I]; scales: float32 [T, 1]; bias: [O] in
    `dtype`."""
    if numbers.is_cuda or multiplies_rows():
        return _multiply(numbers, scales, weight, bias, dtype)
    wide = F.linear(numbers.float(), weight.numbers.float()) * scales * weight.scales
    return (wide if bias is None else wide + bias).to(dtype)


@functools.cache
def multiplies_rows() -> bool:
    """Return whether torch multiplies by rows on a CPU: some versions do only by tensors."""
    weight = scaled_weight(torch.tensor([[1.0, 2.0], [4.0, 8.0]]))
    x, scales = quantize_rows(torch.eye(2))
    try:
        _multiply(x, scales, weight, None, torch.float32)
    except RuntimeError as error:
        logger.info("FP8 products become float32: %s", str(error).splitlines()[0])
        return False
    return True


def _multiply(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    weight: ScaledWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    product: torch.Tensor = torch._scaled_mm(
        numbers,
        weight.numbers.t(),
        scale_a=scales,
        scale_b=weight.scales,
        bias=bias,
        out_dtype=dtype,
    )
    return product
