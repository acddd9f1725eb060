"""Routed experts on a GPU; the reference is `sparse_mlp.expert_mlp`.

1. Pairs (token, one of its experts) of this rank's experts are sorted by expert.
2. A grouped product gathers each pair's token, multiplies it with its expert's two matrices up,
   and gates one with the other.
3. A second one multiplies down, scales by the pair's weight, and writes where the pair stood before
   sorting, so that the sum over a token's experts needs no atomics.
4. That sum takes the pairs of this rank's experts; what other pairs have is unset.

Grids follow from shapes alone: each expert's pairs are cut into tiles, and a program finds its
expert by bisecting their numbering on the device. An expert without tokens has no tile.

Matrices are numbers of the tokens' dtype, or integers with scales in tiles of their own
(`integers.py`).

Shapes: T tokens, E hidden size, X experts of this rank, K experts of a token, P = T * K pairs, I
intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from compile.pieces.shapes import next_pow2
from model.kernels.scaled_linear import IntegerWeight
from model.kernels.triton.integers import integer_product, layout_of
from model.kernels.triton.routing import sort_pairs
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
    num_pairs: int, num_experts: int, dtype: torch.dtype, *, has_integers: bool = False
) -> ProductTiles:
    """Return tiles as high as an expert has pairs on average, within what spills no register."""
    is_half = dtype.itemsize <= 2
    mean = next_pow2(-(-num_pairs // num_experts))
    rows = min(max(mean, MIN_DOT), 64 if is_half else 32)
    is_high = rows > 32
    return ProductTiles(
        rows=rows,
        columns=128 if is_high else 64,
        # A few rows are bound by memory: more of a matrix is on its way at a time.
        inputs=(64 if is_high else 128) if is_half else 32,
        # A group's sum of products is beside the sum of all.
        num_warps=8 if is_high and has_integers else 4,
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
    for at in range(0, INPUTS, BLOCK_K):
        is_x, is_weight = is_row[:, None], is_column[None, :]
        if INPUTS % BLOCK_K != 0:
            is_input = at + inputs < INPUTS
            is_x, is_weight = is_x & is_input[None, :], is_weight & is_input[:, None]
        x_tile = tl.load(x_at + at, mask=is_x, other=0.0)
        weight_tile = tl.load(weight_at + at, mask=is_weight, other=0.0)
        product = tl.dot(x_tile, weight_tile, product, input_precision="ieee")
        if HAS_OTHER:
            other_tile = tl.load(other_at + at, mask=is_weight, other=0.0)
            other = tl.dot(x_tile, other_tile, other, input_precision="ieee")
    return product, other


@triton.jit(do_not_specialize=["num_experts"])
def _up_kernel(
    x: tl.tensor,
    weight: tl.tensor,
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
    inputs = tl.arange(0, BLOCK_K)
    x_at = x + (pairs // TOP_K) * stride_x
    own = weight + expert * stride_expert
    if LAYOUT is None:
        gate_at = own + columns[None, :].to(tl.int64) * stride_weight + inputs[:, None]
        up_at = gate_at + stride_weight.to(tl.int64) * OUTPUTS
        x_at = x_at[:, None] + inputs[None, :]
        gate, up = _products(
            x_at, gate_at, up_at, is_row, is_column, INPUTS, BLOCK_M, BLOCK_N, BLOCK_K, True
        )
    else:
        gate = integer_product(x_at, own, is_row, columns, is_column, LAYOUT, BLOCK_M, BLOCK_N)
        up = integer_product(
            x_at, own, is_row, columns + OUTPUTS, is_column, LAYOUT, BLOCK_M, BLOCK_N
        )

    # torch rounds both products, and the activation, to the model's dtype.
    dtype = out.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    out_at = out + rows[:, None] * OUTPUTS + columns[None, :]
    tl.store(out_at, (activated * up).to(dtype), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_experts"])
def _down_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    order: tl.tensor,
    bounds: tl.tensor,
    first_tile: tl.tensor,
    num_experts: tl.tensor,
    stride_expert: tl.tensor,
    stride_weight: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
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
    inputs = tl.arange(0, BLOCK_K)
    x_at = x + rows * INPUTS
    own = weight + expert * stride_expert
    if LAYOUT is None:
        own = own + columns[None, :].to(tl.int64) * stride_weight + inputs[:, None]
        x_at = x_at[:, None] + inputs[None, :]
        acc, _ = _products(
            x_at, own, own, is_row, is_column, INPUTS, BLOCK_M, BLOCK_N, BLOCK_K, False
        )
    else:
        acc = integer_product(x_at, own, is_row, columns, is_column, LAYOUT, BLOCK_M, BLOCK_N)

    # The products are rounded to the model's dtype, as torch does; sums over experts are float32.
    acc = acc.to(x.dtype.element_ty).to(tl.float32)
    acc = acc * tl.load(scales + pairs, mask=is_row, other=0.0)[:, None]
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


def _matrices(
    weight: torch.Tensor | IntegerWeight,
) -> tuple[tuple[torch.Tensor, int, int], tuple[int, ...] | None]:
    """Return what kernels read of all experts' matrices, with strides; and integers' layout."""
    if isinstance(weight, IntegerWeight):
        return (weight.tiles, weight.tiles.stride(0), 0), layout_of(weight)
    return (weight, weight.stride(0), weight.stride(1)), None


def expert_mlp(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor | IntegerWeight,
    down: torch.Tensor | IntegerWeight,
    first_expert: int,
) -> torch.Tensor:
    """Do what `sparse_mlp.expert_mlp` does. Last dimensions are contiguous, and so are experts and
    weights. gate_up, down: matrices, or integers of all experts"""
    (num_tokens, hidden_size), top_k = x.shape, experts.shape[1]
    num_pairs = num_tokens * top_k
    if not num_pairs:
        return x.new_empty(x.shape)
    (up, up_layout), (back, back_layout) = _matrices(gate_up), _matrices(down)
    num_experts = len(up[0])
    size = back[0].shape[2] if back_layout is None else back_layout[1] * back_layout[2]
    tiles = product_tiles(num_pairs, num_experts, x.dtype, has_integers=up_layout is not None)
    where = (*sort_pairs(experts, num_experts, first_expert, tiles.rows), num_experts)
    # Each tile has a pair, and each expert may leave one tile unfilled.
    num_tiles = min(num_pairs, num_pairs // tiles.rows + num_experts)
    gated = x.new_empty(num_pairs, size)
    _up_kernel[num_tiles, triton.cdiv(size, tiles.gated_columns)](
        x,
        up[0],
        gated,
        *where,
        x.stride(0),
        *up[1:],
        INPUTS=hidden_size,
        OUTPUTS=size,
        TOP_K=top_k,
        LAYOUT=up_layout,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.gated_columns,
        BLOCK_K=tiles.inputs,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    found = x.new_empty(num_pairs, hidden_size, dtype=torch.float32)
    _down_kernel[num_tiles, triton.cdiv(hidden_size, tiles.columns)](
        gated,
        back[0],
        found,
        weights,
        *where,
        *back[1:],
        INPUTS=size,
        OUTPUTS=hidden_size,
        LAYOUT=back_layout,
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
