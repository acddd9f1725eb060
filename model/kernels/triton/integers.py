"""Products with weights of integers on a GPU. The reference is float32 of the same numbers.

Tiles lie as `cpu.packed_linear` makes them: of N outputs side by side a group's scales, in float32,
and behind them its words. A word has consecutive inputs of one output, 4 of 8 bits or 8 of 4. The
first inputs of some words make one product, the second ones another, so that no number changes its
place in registers. Integers are exact in the dtype of the inputs; a group's sum is scaled.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from model.kernels.scaled_linear import IntegerWeight
from model.kernels.triton.tiles import MIN_DOT, linear_tile, linear_tiles, store_linear

WORDS_AT_ONCE = 32


def layout_of(weight: IntegerWeight) -> tuple[int, ...]:
    """Return a kernel's constant for such a weight: the integers' bits, inputs of a group, groups,
    words of a group, outputs side by side, and words at once."""
    (groups, words, outputs), integers = weight.tiles.shape[-3:], weight.integers
    block = min(max(triton.next_power_of_2(words - 1), MIN_DOT), WORDS_AT_ONCE)
    return integers.bits, integers.group, groups, words - 1, outputs, block


@triton.jit
def integer_product(
    x_at: tl.tensor,
    tiles: tl.tensor,
    is_row: tl.tensor,
    columns: tl.tensor,
    is_column: tl.tensor,
    LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Return the product of rows with some outputs of a weight, float32 [M, N].

    x_at: the rows' first inputs, [M]; tiles: of this weight; columns: [N]
    """
    BITS: tl.constexpr = LAYOUT[0]
    GROUP: tl.constexpr = LAYOUT[1]
    GROUPS: tl.constexpr = LAYOUT[2]
    WORDS: tl.constexpr = LAYOUT[3]
    TILE: tl.constexpr = LAYOUT[4]
    BLOCK_W: tl.constexpr = LAYOUT[5]
    PER_WORD: tl.constexpr = 32 // BITS
    dtype = x_at.dtype.element_ty
    words = tl.arange(0, BLOCK_W)
    of_columns = tiles + (columns // TILE).to(tl.int64) * (GROUPS * (1 + WORDS) * TILE)
    of_columns += columns % TILE
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in range(GROUPS):
        scales_at = of_columns + group * (1 + WORDS) * TILE
        scales = tl.load(scales_at, mask=is_column, other=0).to(tl.float32, bitcast=True)
        product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for at in range(0, WORDS, BLOCK_W):
            is_word = (at + words < WORDS)[:, None] & is_column[None, :]
            words_at = scales_at[None, :] + (1 + at + words)[:, None] * TILE
            packed = tl.load(words_at, mask=is_word, other=0)
            for i in tl.static_range(PER_WORD):
                # To the top and back: the sign fills what is above.
                numbers = (packed << ((PER_WORD - 1 - i) * BITS)) >> (32 - BITS)
                inputs = (at + words) * PER_WORD + i
                is_input = is_row[:, None] & (inputs < GROUP)[None, :]
                x_tile = tl.load(
                    x_at[:, None] + (group * GROUP + inputs)[None, :], mask=is_input, other=0.0
                )
                product = tl.dot(x_tile, numbers.to(dtype), product, input_precision="ieee")
        total += product * scales[None, :]
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_kernel(
    x: tl.tensor,
    tiles: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    stride_x: tl.tensor,
    OUTPUTS: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    rows, is_row, columns, is_column = linear_tile(num_tokens, OUTPUTS, BLOCK_M, BLOCK_N)
    x_at = x + rows * stride_x
    total = integer_product(x_at, tiles, is_row, columns, is_column, LAYOUT, BLOCK_M, BLOCK_N)
    store_linear(total, bias, out, rows, is_row, columns, is_column, OUTPUTS)


def integer_linear(
    x: torch.Tensor, weight: IntegerWeight, bias: torch.Tensor | None, out_features: int
) -> torch.Tensor:
    """Multiply x [T, I], whose rows are contiguous. Returns [T, O]."""
    num_tokens = x.shape[0]
    out = x.new_empty(num_tokens, out_features)
    if not num_tokens:
        return out
    tiles = linear_tiles(num_tokens, x.dtype)
    _linear_kernel[tiles.grid(num_tokens, out_features)](
        x,
        weight.tiles,
        bias,
        out,
        num_tokens,
        x.stride(0),
        OUTPUTS=out_features,
        LAYOUT=layout_of(weight),
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        num_warps=tiles.num_warps,
        num_stages=3,
    )
    return out
