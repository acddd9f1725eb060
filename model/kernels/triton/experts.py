"""Routed experts on a GPU; the reference is `sparse_mlp.expert_mlp`.

1. Pairs (token, one of its experts) of this rank's experts are sorted by expert.
2. A grouped product gathers each pair's token, multiplies it with its expert's two matrices up,
   and gates one with the other.
3. A second one multiplies down, scales by the pair's weight, and writes where the pair stood before
   sorting, so that the sum over a token's experts needs no atomics.
4. That sum takes the pairs of this rank's experts; what other pairs have is unset.

Grids follow from shapes alone: each expert's pairs are cut into tiles, and a program finds its
expert by bisecting their numbering on the device. An expert without tokens has no tile.

Matrices are numbers of the tokens' dtype, integers with scales in tiles of their own
(`integers.py`), or FP8 or FP4 numbers with scales. For FP8 each row of either product's inputs, or
each 128 inputs of it (`fp8.py`), is rounded with a scale of its own, for FP4 in blocks by its
expert's (`rounding.py`).

Shapes: T tokens, E hidden size, X experts of this rank, K experts of a token, P = T * K pairs, I
intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from compile.formats import FP4_BLOCK
from compile.passes.quantizers import FP8
from compile.pieces.shapes import next_pow2
from model.kernels.scaled_linear import BlockScaledWeight, IntegerWeight, ScaledWeight
from model.kernels.triton.fp4 import fp4_product, over_global_scales
from model.kernels.triton.fp8 import fp8_group, fp8_operand, fp8_product
from model.kernels.triton.integers import integer_product, layout_of
from model.kernels.triton.rounding import quantize_blocks, quantize_groups, quantize_rows
from model.kernels.triton.routing import Pairs, sort_pairs
from model.kernels.triton.tiles import MIN_DOT

SUM_COLUMNS = 1024


@dataclass(frozen=True)
class ProductTiles:
    """How much one program holds at a time. All sizes are powers of two."""

    rows: int
    columns: int
    inputs: int
    num_warps: int
    num_stages: int

    @property
    def gated_columns(self) -> int:
        """Of each of two products that one program computes side by side."""
        return self.columns // 2


def product_tiles(
    num_pairs: int,
    num_experts: int,
    dtype: torch.dtype,
    *,
    is_short: bool = False,
    is_widened: bool = False,
) -> ProductTiles:
    """Return tiles as high as an expert has pairs on average, within what spills no register.
    dtype: of what is multiplied; is_short: by `_short_product`; is_widened: matrices are not that
    in memory"""
    is_half = dtype.itemsize <= 2
    mean = next_pow2(-(-num_pairs // num_experts))
    rows = min(max(mean, MIN_DOT), 64 if is_half else 32)
    is_high = rows > 32
    # A few rows are bound by memory: more of a matrix is on its way at a time.
    inputs = 128 if is_half else 32
    if is_high:
        inputs = 32 if is_widened else 128 // dtype.itemsize
    return ProductTiles(
        rows=rows,
        # What a matrix is widened from, or a group's sum of products, is beside the sum of all.
        columns=128 if is_high and not is_short else 64,
        inputs=inputs,
        num_warps=4,
        num_stages=3,
    )


@triton.jit
def _expert_of_tile(first_tile: tl.tensor, tile: tl.tensor, num_experts: tl.tensor) -> tl.tensor:
    """Return the last expert whose first tile is not behind `tile`: one that has tiles."""
    low = tile * 0
    high = low + num_experts - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(first_tile + middle) <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _rows_of_tile(
    order: tl.tensor,
    bounds: tl.tensor,
    first_tile: tl.tensor,
    tile: tl.tensor,
    num_experts: tl.tensor,
    BLOCK_M: tl.constexpr,
) -> tl.tensor:
    """Return a tile's expert, its rows in sorted order, which of them are, and their pairs."""
    expert = _expert_of_tile(first_tile, tile, num_experts)
    first = tl.load(bounds + expert) + (tile - tl.load(first_tile + expert)) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    is_row = rows < tl.load(bounds + expert + 1)
    pairs = tl.load(order + rows, mask=is_row, other=0)
    return expert.to(tl.int64), rows.to(tl.int64), is_row, pairs


@triton.jit
def _products(
    x_at: tl.tensor,
    weight_at: tl.tensor,
    other_at: tl.tensor,
    is_row: tl.tensor,
    is_column: tl.tensor,
    INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_OTHER: tl.constexpr,
) -> tl.tensor:
    """Return the product of a tile's rows with a matrix, and with another one or zero.

    x_at: [M, K], weight_at, other_at: [K, N], all at the first inputs. Only what `is_row` and
    `is_column` tell is loaded: rows of other ranks' experts are unset.
    """
    inputs = tl.arange(0, BLOCK_K)
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    other = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # An H100 sums products of FP8 in 14 bits until told to stop.
    FEW: tl.constexpr = BLOCK_K if x_at.dtype.element_ty.is_fp8() else None
    for at in range(0, INPUTS, BLOCK_K):
        is_x, is_weight = is_row[:, None], is_column[None, :]
        if INPUTS % BLOCK_K != 0:
            is_input = at + inputs < INPUTS
            is_x, is_weight = is_x & is_input[None, :], is_weight & is_input[:, None]
        x_tile = tl.load(x_at + at, mask=is_x, other=0.0)
        weight_tile = tl.load(weight_at + at, mask=is_weight, other=0.0)
        product = tl.dot(
            x_tile, weight_tile, product, input_precision="ieee", max_num_imprecise_acc=FEW
        )
        if HAS_OTHER:
            other_tile = tl.load(other_at + at, mask=is_weight, other=0.0)
            other = tl.dot(
                x_tile, other_tile, other, input_precision="ieee", max_num_imprecise_acc=FEW
            )
    return product, other


@triton.jit
def _short_product(
    of_rows: tl.tensor,
    of_expert: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    columns: tl.tensor,
    is_column: tl.tensor,
    DTYPE: tl.constexpr,
    SHAPE: tl.constexpr,
    LAYOUT: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return the product of rows with some outputs of an expert's integers, FP4 numbers, or FP8
    numbers that have several scales for an output or become wide.

    of_rows: x, its scales and stride; of_expert: the matrix, its scales of blocks and columns, and
    that of inputs; SHAPE: the matrix's outputs and inputs; TILE: rows, columns and inputs at once
    """
    x, row_scales, stride_x = of_rows
    weight, blocks, column_scales, input_scale = of_expert
    if blocks is None:
        x_at = x + rows * stride_x
        product = integer_product(
            x_at, weight, is_row, columns, is_column, LAYOUT, TILE[0], TILE[1]
        )
    elif column_scales is None:
        own = (weight, blocks, SHAPE[0])
        where = (rows, is_row, columns, is_column)
        product = fp8_product(of_rows, own, *where, DTYPE, SHAPE[1], LAYOUT[0], TILE)
    else:
        both = (x, row_scales, weight, blocks)
        product = fp4_product(both, rows, is_row, columns, is_column, DTYPE, SHAPE[1], TILE)
        product = over_global_scales(product, column_scales, input_scale, columns, is_column)
    return product


@triton.jit
def _scaled(
    product: tl.tensor,
    row_scales: tl.tensor,
    column_scales: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    columns: tl.tensor,
    is_column: tl.tensor,
) -> tl.tensor:
    """Return a product times the scales of its rows and columns, if it is of FP8."""
    if row_scales is not None:
        product *= tl.load(row_scales + rows, mask=is_row, other=0.0)[:, None]
        product *= tl.load(column_scales + columns, mask=is_column, other=0.0)[None, :]
    return product


@triton.jit(do_not_specialize=["num_experts"])
def _up_kernel(
    x: tl.tensor,
    row_scales: tl.tensor,
    weight: tl.tensor,
    blocks: tl.tensor,
    column_scales: tl.tensor,
    input_scales: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    bounds: tl.tensor,
    first_tile: tl.tensor,
    num_experts: tl.tensor,
    stride_x: tl.tensor,
    stride_expert: tl.tensor,
    stride_weight: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    if tile >= tl.load(first_tile + num_experts):
        return
    expert, rows, is_row, pairs = _rows_of_tile(
        order, bounds, first_tile, tile, num_experts, BLOCK_M
    )
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < OUTPUTS
    tokens = rows if TOP_K is None else pairs // TOP_K
    own = weight + expert * stride_expert
    if column_scales is not None:
        column_scales += expert * (2 * OUTPUTS)
    if blocks is not None:
        blocks += expert * (2 * OUTPUTS * ((INPUTS + LAYOUT[0] - 1) // LAYOUT[0]))
    if input_scales is not None:
        input_scales += expert
    dtype = out.dtype.element_ty
    if LAYOUT is None:
        inputs = tl.arange(0, BLOCK_K)
        gate_at = own + columns[None, :].to(tl.int64) * stride_weight + inputs[:, None]
        up_at = gate_at + stride_weight.to(tl.int64) * OUTPUTS
        x_at = x + tokens[:, None] * stride_x + inputs[None, :]
        gate, up = _products(
            x_at, gate_at, up_at, is_row, is_column, INPUTS, BLOCK_M, BLOCK_N, BLOCK_K, True
        )
        gate = _scaled(gate, row_scales, column_scales, tokens, is_row, columns, is_column)
        others = columns + OUTPUTS
        up = _scaled(up, row_scales, column_scales, tokens, is_row, others, is_column)
    else:
        of_rows = (x, row_scales, stride_x)
        of_expert = (own, blocks, column_scales, input_scales)
        TILE: tl.constexpr = (BLOCK_M, BLOCK_N, BLOCK_K)
        SHAPE: tl.constexpr = (2 * OUTPUTS, INPUTS)
        gate = _short_product(
            of_rows, of_expert, tokens, is_row, columns, is_column, dtype, SHAPE, LAYOUT, TILE
        )
        others = columns + OUTPUTS
        up = _short_product(
            of_rows, of_expert, tokens, is_row, others, is_column, dtype, SHAPE, LAYOUT, TILE
        )

    # torch rounds both products, and the activation, to the model's dtype.
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    out_at = out + rows[:, None] * OUTPUTS + columns[None, :]
    tl.store(out_at, (activated * up).to(dtype), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_experts"])
def _down_kernel(
    x: tl.tensor,
    row_scales: tl.tensor,
    weight: tl.tensor,
    blocks: tl.tensor,
    column_scales: tl.tensor,
    input_scales: tl.tensor,
    out: tl.tensor,
    weights: tl.tensor,
    order: tl.tensor,
    bounds: tl.tensor,
    first_tile: tl.tensor,
    num_experts: tl.tensor,
    stride_x: tl.tensor,
    stride_expert: tl.tensor,
    stride_weight: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DTYPE: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    if tile >= tl.load(first_tile + num_experts):
        return
    expert, rows, is_row, pairs = _rows_of_tile(
        order, bounds, first_tile, tile, num_experts, BLOCK_M
    )
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < OUTPUTS
    own = weight + expert * stride_expert
    if column_scales is not None:
        column_scales += expert * OUTPUTS
    if blocks is not None:
        blocks += expert * (OUTPUTS * ((INPUTS + LAYOUT[0] - 1) // LAYOUT[0]))
    if input_scales is not None:
        input_scales += expert
    if LAYOUT is None:
        inputs = tl.arange(0, BLOCK_K)
        own = own + columns[None, :].to(tl.int64) * stride_weight + inputs[:, None]
        x_at = x + rows[:, None] * stride_x + inputs[None, :]
        acc, _ = _products(
            x_at, own, own, is_row, is_column, INPUTS, BLOCK_M, BLOCK_N, BLOCK_K, False
        )
        acc = _scaled(acc, row_scales, column_scales, rows, is_row, columns, is_column)
    else:
        of_rows = (x, row_scales, stride_x)
        of_expert = (own, blocks, column_scales, input_scales)
        TILE: tl.constexpr = (BLOCK_M, BLOCK_N, BLOCK_K)
        SHAPE: tl.constexpr = (OUTPUTS, INPUTS)
        acc = _short_product(
            of_rows, of_expert, rows, is_row, columns, is_column, DTYPE, SHAPE, LAYOUT, TILE
        )

    # The products are rounded to the model's dtype, as torch does; sums over experts are float32.
    acc = acc.to(DTYPE).to(tl.float32)
    acc = acc * tl.load(weights + pairs, mask=is_row, other=0.0)[:, None]
    out_at = out + pairs[:, None] * OUTPUTS + columns[None, :]
    tl.store(out_at, acc, mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_experts", "first_expert"])
def _sum_kernel(
    found: tl.tensor,
    experts: tl.tensor,
    out: tl.tensor,
    num_experts: tl.tensor,
    first_expert: tl.tensor,
    OUTPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        pair = token * TOP_K + i
        number = tl.load(experts + pair) - first_expert
        num_read = tl.where((number >= 0) & (number < num_experts), OUTPUTS, 0)
        total += tl.load(found + pair * OUTPUTS + columns, mask=columns < num_read, other=0.0)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + token * OUTPUTS + columns, rounded, mask=columns < OUTPUTS)


Matrices = torch.Tensor | IntegerWeight | ScaledWeight | BlockScaledWeight
"""Of all experts: [Xr, O, I]."""


class _Operand(NamedTuple):
    """What kernels read of all experts' matrices, and its strides."""

    numbers: torch.Tensor
    blocks: torch.Tensor | None
    """Scales of FP4's blocks, as bytes, or FP8's that `fp8_product` multiplies, float32 [Xr, G,
    O]."""
    column_scales: torch.Tensor | None
    """Of other FP8, or FP4's global ones: float32 [Xr, 1, O]."""
    input_scales: torch.Tensor | None
    """FP4's global ones: float32 [Xr, 1]."""
    num_inputs: int
    layout: tuple[int, ...] | None
    """A kernel's constant for integers, FP4 numbers, or FP8 for `fp8_product`; None: what is
    multiplied as it is."""

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self[:4]

    @property
    def strides(self) -> tuple[int, int]:
        """Of experts and of rows."""
        return self.numbers.stride(0), self.numbers.stride(1)


def _operand(matrices: Matrices) -> _Operand:
    if isinstance(matrices, IntegerWeight):
        layout = layout_of(matrices)
        return _Operand(matrices.tiles, None, None, None, layout[1] * layout[2], layout)
    num_inputs = matrices.shape[-1]
    if isinstance(matrices, BlockScaledWeight):
        numbers, blocks, of_outputs, of_inputs = matrices
        codes = blocks.view(torch.uint8)
        return _Operand(numbers, codes, of_outputs, of_inputs, num_inputs, (FP4_BLOCK,))
    if isinstance(matrices, ScaledWeight):
        numbers, scales = fp8_operand(matrices.numbers), matrices.scales
        if matrices.form.is_grouped or numbers.dtype == torch.uint8:
            return _Operand(numbers, scales, None, None, num_inputs, (fp8_group(matrices),))
        return _Operand(numbers, None, scales, None, num_inputs, None)
    return _Operand(matrices, None, None, None, num_inputs, None)


def _rounded(
    rows: torch.Tensor, matrices: Matrices, pairs: Pairs, *, is_sorted: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return rows as matrices are multiplied with them, and their scales; for FP4 a row for each
    pair, sorted by expert."""
    if isinstance(matrices, ScaledWeight):
        quantize = quantize_groups if matrices.form.is_grouped else quantize_rows
        numbers, scales = quantize(rows, pairs.num_own if is_sorted else None)
        return fp8_operand(numbers), scales
    if isinstance(matrices, BlockScaledWeight):
        numbers, scales = quantize_blocks(rows, matrices.input_scale, pairs, is_sorted=is_sorted)
        return numbers, scales.view(torch.uint8)
    return rows, None


def expert_mlp(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Matrices,
    down: Matrices,
    first_expert: int,
) -> torch.Tensor:
    """Do what `sparse_mlp.expert_mlp` does. Last dimensions are contiguous, and so are experts,
    weights and short numbers."""
    (num_tokens, hidden_size), top_k = x.shape, experts.shape[1]
    num_pairs = num_tokens * top_k
    if not num_pairs:
        return x.new_empty(x.shape)
    up, back = _operand(gate_up), _operand(down)
    num_experts, size = len(up.numbers), back.num_inputs
    is_short = up.layout is not None
    is_widened = is_short and up.numbers.dtype != FP8
    dtype = x.dtype if is_widened else up.numbers.dtype
    tiles = product_tiles(num_pairs, num_experts, dtype, is_short=is_short, is_widened=is_widened)
    order, bounds, first_tile = sort_pairs(experts, num_experts, first_expert, tiles.rows)
    pairs = Pairs(order, bounds, experts, first_expert)
    where = (order, bounds, first_tile, num_experts)
    # Each tile has a pair, and each expert may leave one tile unfilled.
    num_tiles = min(num_pairs, num_pairs // tiles.rows + num_experts)
    gated = x.new_empty(num_pairs, size)
    rows, row_scales = _rounded(x, gate_up, pairs, is_sorted=False)
    _up_kernel[num_tiles, triton.cdiv(size, tiles.gated_columns)](
        rows,
        row_scales,
        *up.tensors,
        gated,
        *where,
        rows.stride(0),
        *up.strides,
        INPUTS=hidden_size,
        OUTPUTS=size,
        TOP_K=None if isinstance(gate_up, BlockScaledWeight) else top_k,
        LAYOUT=up.layout,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.gated_columns,
        BLOCK_K=tiles.inputs,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    found = x.new_empty(num_pairs, hidden_size, dtype=torch.float32)
    rows, row_scales = _rounded(gated, down, pairs, is_sorted=True)
    _down_kernel[num_tiles, triton.cdiv(hidden_size, tiles.columns)](
        rows,
        row_scales,
        *back.tensors,
        found,
        weights,
        *where,
        rows.stride(0),
        *back.strides,
        INPUTS=size,
        OUTPUTS=hidden_size,
        DTYPE=getattr(tl, str(x.dtype).removeprefix("torch.")),
        LAYOUT=back.layout,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        BLOCK_K=tiles.inputs,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    out = x.new_empty(x.shape)
    _sum_kernel[num_tokens, triton.cdiv(hidden_size, SUM_COLUMNS)](
        found,
        experts,
        out,
        num_experts,
        first_expert,
        OUTPUTS=hidden_size,
        TOP_K=top_k,
        BLOCK=SUM_COLUMNS,
        num_warps=4,
    )
    return out
