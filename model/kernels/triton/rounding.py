"""Inputs of products with FP8 and FP4 weights on a GPU; the references are in
`compile.passes.quantizers`. Last dimensions are contiguous."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile.formats import FP4_BLOCK
from compile.passes.quantizers import FP8
from model.kernels.triton.e4m3 import UNIT, from_e4m3, to_e4m3

COLUMNS = 2048
LARGEST = tl.constexpr(448.0)
LEAST_SCALE = tl.constexpr(torch.finfo(torch.float32).tiny)
LARGEST_FP4 = tl.constexpr(6.0)
SCALE_OF_ZEROS = tl.constexpr(0.125)
ROUNDING = tl.constexpr(1.5 * 2**23)
"""A sum with it, less it, is the nearest integer, the even one of two."""


@triton.jit
def _rows_kernel(
    x: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    stride_x: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    num_bad = tl.zeros([BLOCK], tl.int32)
    for at in range(0, SIZE, BLOCK):
        values = tl.load(x + row * stride_x + at + columns, mask=at + columns < SIZE, other=0.0)
        size = tl.abs(values.to(tl.float32))
        num_bad += (size < float("inf")).to(tl.int32) ^ 1
        largest = tl.maximum(largest, size)
    scale = tl.maximum(tl.div_rn(tl.max(largest, 0), LARGEST), LEAST_SCALE)
    scale = tl.where(tl.sum(num_bad, 0) > 0, float("nan"), scale)
    tl.store(scales + row, scale)
    for at in range(0, SIZE, BLOCK):
        is_column = at + columns < SIZE
        values = tl.load(x + row * stride_x + at + columns, mask=is_column, other=0.0)
        codes = to_e4m3(tl.div_rn(values.to(tl.float32), scale))
        tl.store(numbers + row * SIZE + at + columns, codes, mask=is_column)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `quantizers.quantize_rows` does, of x [..., I]."""
    rows = x.reshape(-1, x.shape[-1])
    codes = x.new_empty(x.shape, dtype=torch.uint8)
    scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    if len(rows):
        _rows_kernel[(len(rows),)](
            rows,
            codes,
            scales,
            rows.stride(0),
            SIZE=rows.shape[1],
            BLOCK=min(triton.next_power_of_2(rows.shape[1]), COLUMNS),
            num_warps=4,
        )
    return codes.view(FP8), scales


@triton.jit
def _round(x: tl.tensor) -> tl.tensor:
    return (x + ROUNDING) - ROUNDING


@triton.jit(do_not_specialize=["num_experts", "first_expert"])
def _blocks_kernel(
    x: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    bounds: tl.tensor,
    experts: tl.tensor,
    global_scales: tl.tensor,
    num_experts: tl.tensor,
    first_expert: tl.tensor,
    stride_x: tl.tensor,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(bounds + num_experts):
        return
    pair = tl.load(order + row).to(tl.int64)
    global_scale = tl.load(global_scales + tl.load(experts + pair) - first_expert)
    x_at = x + (row if TOP_K is None else pair // TOP_K) * stride_x
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    columns = blocks[:, None] * SHARED + tl.arange(0, SHARED)[None, :]
    is_column = columns < SIZE
    values = tl.load(x_at + columns, mask=is_column, other=0.0).to(tl.float32)
    size = tl.abs(values)
    largest = tl.max(size, 1)
    wanted = tl.minimum(tl.div_rn(largest, LARGEST_FP4) * global_scale, LARGEST)
    scale = from_e4m3(to_e4m3(wanted)).to(tl.float32) * UNIT
    scale = tl.where(scale == 0.0, SCALE_OF_ZEROS, scale)
    num_bad = tl.sum((size < float("inf")).to(tl.int32) ^ 1, 1)
    scale = tl.where(num_bad > 0, float("nan"), scale)
    unit = tl.div_rn(scale, global_scale)
    size = tl.minimum(tl.div_rn(size, unit[:, None]), LARGEST_FP4)
    # Numbers are half a unit apart below 2, one from there to 4, and two above.
    wide = tl.where(size < 4.0, _round(size), _round(size * 0.5) * 2.0)
    wide = tl.where(size < 2.0, _round(size * 2.0) * 0.5, wide)
    wide = tl.where(values < 0.0, -wide, wide) * scale[:, None]
    tl.store(out + row * SIZE + columns, wide.to(out.dtype.element_ty), mask=is_column)


def rounded_blocks(
    x: torch.Tensor,
    order: torch.Tensor,
    bounds: torch.Tensor,
    experts: torch.Tensor,
    global_scales: torch.Tensor,
    first_expert: int,
    *,
    is_sorted: bool,
) -> torch.Tensor:
    """Return what FP4 numbers and their blocks' scales, as `quantizers.quantize_blocks` makes them,
    stand for, times the global scale, in the dtype of x: [P, I], sorted by expert; rows of other
    ranks' experts stay unset.

    x: tokens [T, I], or rows [P, I] if sorted already; order, bounds: as `sort_pairs` returns them;
    experts: [T, K]; global_scales: of each of this rank's experts [Xr]
    """
    num_pairs, (_, size) = experts.numel(), x.shape
    out = x.new_empty(num_pairs, size)
    blocks = min(triton.next_power_of_2(size // FP4_BLOCK), COLUMNS // FP4_BLOCK)
    _blocks_kernel[num_pairs, triton.cdiv(size, blocks * FP4_BLOCK)](
        x,
        out,
        order,
        bounds,
        experts,
        global_scales,
        len(global_scales),
        first_expert,
        x.stride(0),
        SIZE=size,
        TOP_K=None if is_sorted else experts.shape[1],
        SHARED=FP4_BLOCK,
        BLOCKS=blocks,
        num_warps=4,
    )
    return out
