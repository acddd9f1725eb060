"""Products of FP8 numbers on a GPU where each 128 inputs of either side have a scale. What has one
scale for a row torch multiplies. The reference is `scaled_linear.py`.

Shapes: T tokens, I inputs, O outputs, G groups of 128 inputs, the last one of what is left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile.formats import FP8_GROUP
from model.kernels.scaled_linear import ScaledWeight
from model.kernels.triton.tiles import linear_tiles


@triton.jit
def fp8_product(
    of_rows: tl.tensor,
    of_columns: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    columns: tl.tensor,
    is_column: tl.tensor,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Return the product of some rows with some outputs, float32 [M, N]. A group's products are
    summed by themselves, which also bounds what an H100 sums in 14 bits.

    of_rows: e4m3 [T, I], scales [T, G] and the numbers' stride; of_columns: e4m3 [O, I], scales
    [G, O] and their stride; rows: int64 [M]; columns: [N]
    """
    x, x_scales, stride_x = of_rows
    numbers, scales, stride_scales = of_columns
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    inputs = tl.arange(0, GROUP)
    x_at = x + rows[:, None] * stride_x + inputs[None, :]
    numbers_at = numbers + columns[None, :].to(tl.int64) * INPUTS + inputs[:, None]
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in range(GROUPS):
        is_x, is_number = is_row[:, None], is_column[None, :]
        if INPUTS % GROUP != 0:
            is_input = group * GROUP + inputs < INPUTS
            is_x, is_number = is_x & is_input[None, :], is_number & is_input[:, None]
        x_tile = tl.load(x_at + group * GROUP, mask=is_x, other=0.0)
        tile = tl.load(numbers_at + group * GROUP, mask=is_number, other=0.0)
        of_group = tl.dot(x_tile, tile)
        row_scales = tl.load(x_scales + rows * GROUPS + group, mask=is_row, other=0.0)
        own = tl.load(scales + group * stride_scales + columns, mask=is_column, other=0.0)
        product += of_group * row_scales[:, None] * own[None, :]
    return product


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_kernel(
    x: tl.tensor,
    x_scales: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_tokens, columns < OUTPUTS
    of_rows, of_columns = (x, x_scales, INPUTS), (numbers, scales, OUTPUTS)
    total = fp8_product(
        of_rows, of_columns, rows, is_row, columns, is_column, INPUTS, GROUP, BLOCK_M, BLOCK_N
    )
    if bias is not None:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_at = out + rows[:, None] * OUTPUTS + columns[None, :]
    rounded = total.to(out.dtype.element_ty)
    tl.store(out_at, rounded, mask=is_row[:, None] & is_column[None, :])


def fp8_linear(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    weight: ScaledWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Do what `scaled_linear` does with an FP8 weight of several groups, all of it contiguous."""
    num_tokens, (outputs, inputs) = len(numbers), weight.shape
    out = numbers.new_empty(num_tokens, outputs, dtype=dtype)
    if not num_tokens:
        return out
    tiles = linear_tiles(num_tokens, dtype)
    _linear_kernel[triton.cdiv(num_tokens, tiles.rows), triton.cdiv(outputs, tiles.columns)](
        numbers,
        scales,
        weight.numbers,
        weight.scales,
        bias,
        out,
        num_tokens,
        INPUTS=inputs,
        OUTPUTS=outputs,
        GROUP=FP8_GROUP,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        num_warps=tiles.num_warps,
        num_stages=3,
    )
    return out
