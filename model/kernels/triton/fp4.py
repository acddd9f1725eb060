"""Products of FP4 numbers on a GPU that does not multiply them: they become wide in registers. A
number times its block's scale is exact in 16 bits. The reference is `scaled_linear.py`.

Shapes: T tokens, I inputs, O outputs, B = I / 16 blocks; two numbers are a byte.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from model.kernels.scaled_linear import BlockScaledWeight
from model.kernels.triton.e4m3 import UNIT, from_e4m3
from model.kernels.triton.tiles import linear_tile, linear_tiles, store_linear

PER_SCALE = tl.constexpr(8)
"""Bytes of a block."""


@triton.jit
def _scales(codes: tl.tensor) -> tl.tensor:
    return from_e4m3(codes).to(tl.float32) * UNIT


@triton.jit
def _wide(codes: tl.tensor, scales: tl.tensor) -> tl.tensor:
    """Return float32 of e2m1 codes, the four lowest bits, times scales of their blocks."""
    # Where float16 has its exponent and the first bit behind it, for exponents that begin at 1.
    bits = (codes & 7).to(tl.uint16) << 9 | (codes & 8).to(tl.uint16) << 12
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * (16384.0 * scales)


@triton.jit
def fp4_product(
    both: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    columns: tl.tensor,
    is_column: tl.tensor,
    DTYPE: tl.constexpr,
    INPUTS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return the product of some rows with some outputs, float32 [M, N], without global scales. The
    first numbers of bytes make one product, the second ones another.

    both: bytes [T, I / 2] and codes of e4m3 [T, B], and those of the weight; rows: int64 [M];
    columns: [N]; TILE: M, N and inputs at once
    """
    x, x_blocks, numbers, blocks = both
    BLOCK_K: tl.constexpr = TILE[2]
    BYTES: tl.constexpr = INPUTS // 2
    places = tl.arange(0, BLOCK_K // 2)
    of_rows = rows[:, None] * BYTES
    of_columns = columns[None, :].to(tl.int64) * BYTES
    product = tl.zeros([TILE[0], TILE[1]], tl.float32)
    for at in range(0, BYTES, BLOCK_K // 2):
        bytes_at = at + places
        is_x = is_row[:, None] & (bytes_at < BYTES)[None, :]
        is_weight = is_column[None, :] & (bytes_at < BYTES)[:, None]
        x_at, weight_at = of_rows + bytes_at[None, :], of_columns + bytes_at[:, None]
        x_bytes = tl.load(x + x_at, mask=is_x, other=0)
        x_scales = _scales(tl.load(x_blocks + x_at // PER_SCALE, mask=is_x, other=0))
        weight_bytes = tl.load(numbers + weight_at, mask=is_weight, other=0)
        scales = _scales(tl.load(blocks + weight_at // PER_SCALE, mask=is_weight, other=0))
        first, low = _wide(x_bytes, x_scales), _wide(weight_bytes, scales)
        product = tl.dot(first.to(DTYPE), low.to(DTYPE), product, input_precision="ieee")
        second, high = _wide(x_bytes >> 4, x_scales), _wide(weight_bytes >> 4, scales)
        product = tl.dot(second.to(DTYPE), high.to(DTYPE), product, input_precision="ieee")
    return product


@triton.jit
def over_global_scales(
    product: tl.tensor,
    of_columns: tl.tensor,
    of_inputs: tl.tensor,
    columns: tl.tensor,
    is_column: tl.tensor,
) -> tl.tensor:
    """Return a product over the global scales of outputs and the one of inputs."""
    scales = tl.load(of_columns + columns, mask=is_column, other=1.0) * tl.load(of_inputs)
    return tl.div_rn(product, scales[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_kernel(
    x: tl.tensor,
    x_blocks: tl.tensor,
    numbers: tl.tensor,
    blocks: tl.tensor,
    of_columns: tl.tensor,
    of_inputs: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    rows, is_row, columns, is_column = linear_tile(num_tokens, OUTPUTS, BLOCK_M, BLOCK_N)
    both = (x, x_blocks, numbers, blocks)
    dtype = out.dtype.element_ty
    TILE: tl.constexpr = (BLOCK_M, BLOCK_N, BLOCK_K)
    total = fp4_product(both, rows, is_row, columns, is_column, dtype, INPUTS, TILE)
    total = over_global_scales(total, of_columns, of_inputs, columns, is_column)
    store_linear(total, bias, out, rows, is_row, columns, is_column, OUTPUTS)


def fp4_linear(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    weight: BlockScaledWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Do what `scaled_linear` does with an FP4 weight, all of it contiguous, whose scales are
    [O, B]."""
    num_tokens, (outputs, inputs) = len(numbers), weight.shape
    out = numbers.new_empty(num_tokens, outputs, dtype=dtype)
    if not num_tokens:
        return out
    tiles = linear_tiles(num_tokens, dtype)
    _linear_kernel[tiles.grid(num_tokens, outputs)](
        numbers,
        scales.view(torch.uint8),
        weight.numbers,
        weight.blocks.view(torch.uint8),
        weight.global_scales,
        weight.input_scale,
        bias,
        out,
        num_tokens,
        INPUTS=inputs,
        OUTPUTS=outputs,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        BLOCK_K=tiles.inputs,
        num_warps=tiles.num_warps,
        num_stages=3,
    )
    return out
