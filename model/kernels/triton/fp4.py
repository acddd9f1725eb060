"""Products with FP4 weights on a GPU, whose numbers become wide in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from model.kernels.triton.e4m3 import UNIT, from_e4m3

PER_SCALE = tl.constexpr(8)
"""Bytes of a block."""


@triton.jit
def _wide(codes: tl.tensor, scales: tl.tensor) -> tl.tensor:
    """Return float32 of e2m1 codes, the four lowest bits, times scales of their blocks."""
    # Where float16 has its exponent and the first bit behind it, for exponents that begin at 1.
    bits = (codes & 7).to(tl.uint16) << 9 | (codes & 8).to(tl.uint16) << 12
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * (16384.0 * scales)


@triton.jit
def fp4_product(
    x_at: tl.tensor,
    numbers: tl.tensor,
    blocks: tl.tensor,
    is_row: tl.tensor,
    columns: tl.tensor,
    is_column: tl.tensor,
    INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Return the product of rows with some outputs of a weight, float32 [M, N], without global
    scales. The first numbers of bytes make one product, the second ones another.

    x_at: the rows' first inputs, [M]; numbers: uint8 [O, INPUTS / 2], blocks: codes of e4m3
    [O, INPUTS / 16], each contiguous; columns: [N]; BLOCK_K: inputs at once
    """
    dtype = x_at.dtype.element_ty
    BYTES: tl.constexpr = INPUTS // 2
    places = tl.arange(0, BLOCK_K // 2)
    of_columns = columns[None, :].to(tl.int64) * BYTES
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, BYTES, BLOCK_K // 2):
        bytes_at = at + places
        is_byte = bytes_at < BYTES
        is_weight = is_byte[:, None] & is_column[None, :]
        packed = tl.load(numbers + of_columns + bytes_at[:, None], mask=is_weight, other=0)
        scales_at = blocks + (of_columns + bytes_at[:, None]) // PER_SCALE
        codes = tl.load(scales_at, mask=is_weight, other=0)
        scales = from_e4m3(codes).to(tl.float32) * UNIT
        is_input = is_row[:, None] & is_byte[None, :]
        first_at = x_at[:, None] + 2 * bytes_at[None, :]
        first = tl.load(first_at, mask=is_input, other=0.0)
        second = tl.load(first_at + 1, mask=is_input, other=0.0)
        low, high = _wide(packed, scales).to(dtype), _wide(packed >> 4, scales).to(dtype)
        product = tl.dot(first, low, product, input_precision="ieee")
        product = tl.dot(second, high, product, input_precision="ieee")
    return product
