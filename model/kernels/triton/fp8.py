"""Products of FP8 numbers on a GPU where torch has none: of weights with a scale for each 128
inputs, of sizes and dtypes that it refuses, and of all before sm_89, which does not multiply FP8.
There they become wide in registers, which is exact. The reference is `scaled_linear.py`.

Shapes: T tokens, I inputs, O outputs, G groups of 128 inputs, the last one of what is left, or one
of all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile.formats import FP8_GROUP
from model.kernels.scaled_linear import ScaledWeight, multiplies_fp8
from model.kernels.triton.e4m3 import UNIT, from_e4m3
from model.kernels.triton.tiles import linear_tile, linear_tiles, store_linear


def fp8_operand(numbers: torch.Tensor) -> torch.Tensor:
    """Return FP8 numbers as kernels take them: as codes where they become wide."""
    return numbers if multiplies_fp8(numbers.device) else numbers.view(torch.uint8)


def fp8_group(weight: ScaledWeight) -> int:
    """Return how many inputs share a scale."""
    return FP8_GROUP if weight.form.is_grouped else weight.shape[-1]


@triton.jit
def fp8_product(
    of_rows: tl.tensor,
    of_columns: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    columns: tl.tensor,
    is_column: tl.tensor,
    DTYPE: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return the product of some rows with some outputs, float32 [M, N].

    of_rows: e4m3 [T, I], scales [T, G] and the numbers' stride; of_columns: e4m3 [O, I], scales
    [G, O] and their stride; rows: int64 [M]; columns: [N]; DTYPE: what codes become; GROUP: inputs
    that share a scale, of which those at once are a part; TILE: M, N and inputs at once
    """
    x, x_scales, stride_x = of_rows
    numbers, scales, stride_scales = of_columns
    IS_WIDE: tl.constexpr = x.dtype.element_ty == tl.uint8
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    BLOCK_K: tl.constexpr = TILE[2]
    # An H100 sums products of FP8 in 14 bits until told to stop.
    FEW: tl.constexpr = None if IS_WIDE else BLOCK_K
    inputs = tl.arange(0, BLOCK_K)
    x_at = x + rows[:, None] * stride_x + inputs[None, :]
    numbers_at = numbers + columns[None, :].to(tl.int64) * INPUTS + inputs[:, None]
    product = tl.zeros([TILE[0], TILE[1]], tl.float32)
    of_group = tl.zeros([TILE[0], TILE[1]], tl.float32)
    for at in range(0, INPUTS, BLOCK_K):
        is_x, is_number = is_row[:, None], is_column[None, :]
        if INPUTS % BLOCK_K != 0:
            is_input = at + inputs < INPUTS
            is_x, is_number = is_x & is_input[None, :], is_number & is_input[:, None]
        x_tile = tl.load(x_at + at, mask=is_x, other=0.0)
        tile = tl.load(numbers_at + at, mask=is_number, other=0.0)
        if IS_WIDE:
            x_tile, tile = from_e4m3(x_tile).to(DTYPE), from_e4m3(tile).to(DTYPE)
        of_group = tl.dot(x_tile, tile, of_group, input_precision="ieee", max_num_imprecise_acc=FEW)
        if GROUPS > 1:
            group = at // GROUP
            is_last = ((at + BLOCK_K) % GROUP == 0) | (at + BLOCK_K >= INPUTS)
            row_scales = tl.load(x_scales + rows * GROUPS + group, mask=is_row, other=0.0)
            own = tl.load(scales + group * stride_scales + columns, mask=is_column, other=0.0)
            scaled = of_group * row_scales[:, None] * own[None, :]
            product += tl.where(is_last, scaled, 0.0)
            of_group = tl.where(is_last, 0.0, of_group)
    if GROUPS == 1:
        row_scales = tl.load(x_scales + rows, mask=is_row, other=0.0)
        own = tl.load(scales + columns, mask=is_column, other=0.0)
        product = of_group * row_scales[:, None] * own[None, :]
    if IS_WIDE:
        product *= UNIT * UNIT
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
    BLOCK_K: tl.constexpr,
) -> None:
    rows, is_row, columns, is_column = linear_tile(num_tokens, OUTPUTS, BLOCK_M, BLOCK_N)
    of_rows, of_columns = (x, x_scales, INPUTS), (numbers, scales, OUTPUTS)
    own = (rows, is_row, columns, is_column)
    TILE: tl.constexpr = (BLOCK_M, BLOCK_N, BLOCK_K)
    dtype = out.dtype.element_ty
    total = fp8_product(of_rows, of_columns, *own, dtype, INPUTS, GROUP, TILE)
    store_linear(total, bias, out, rows, is_row, columns, is_column, OUTPUTS)


def fp8_linear(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    weight: ScaledWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Do what `scaled_linear` does with an FP8 weight, all of it contiguous."""
    num_tokens, (outputs, inputs) = len(numbers), weight.shape
    out = numbers.new_empty(num_tokens, outputs, dtype=dtype)
    if not num_tokens:
        return out
    tiles, x = linear_tiles(num_tokens, dtype), fp8_operand(numbers)
    _linear_kernel[tiles.grid(num_tokens, outputs)](
        x,
        scales,
        fp8_operand(weight.numbers),
        weight.scales,
        bias,
        out,
        num_tokens,
        INPUTS=inputs,
        OUTPUTS=outputs,
        GROUP=fp8_group(weight),
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        BLOCK_K=tiles.inputs if x.dtype == torch.uint8 else FP8_GROUP,
        num_warps=tiles.num_warps,
        num_stages=3,
    )
    return out
