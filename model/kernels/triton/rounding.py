"""Inputs of products with FP8 and FP4 weights on a GPU; the references are in
`compile.passes.quantizers`. Last dimensions are contiguous."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from compile.formats import FP4_BLOCK, FP8_GROUP
from compile.passes.quantizers import FP8
from model.kernels.triton.e4m3 import UNIT, from_e4m3, to_e4m3
from model.kernels.triton.routing import Pairs

COLUMNS = 2048
LARGEST = tl.constexpr(448.0)
LEAST_SCALE = tl.constexpr(torch.finfo(torch.float32).tiny)
LARGEST_FP4 = tl.constexpr(6.0)
CODE_OF_ZEROS = tl.constexpr(0x20)
"""e4m3 of the scale of a block whose own would be zero."""
NAN = tl.constexpr(0x7F)
ROUNDING = tl.constexpr(1.5 * 2**23)
"""A sum with it, less it, is the nearest integer, the even one of two."""


@triton.jit
def _scale(largest: tl.tensor, num_bad: tl.tensor) -> tl.tensor:
    """Return the scale of numbers of which so many are not finite."""
    scale = tl.maximum(tl.div_rn(largest, LARGEST), LEAST_SCALE)
    return tl.where(num_bad > 0, float("nan"), scale)


@triton.jit
def _rows_kernel(
    x: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    num_rows: tl.tensor,
    stride_x: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if num_rows is not None:  # noqa: SIM102 (a kernel without it does not compile the other)
        if row >= tl.load(num_rows):
            return
    columns = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    num_bad = tl.zeros([BLOCK], tl.int32)
    for at in range(0, SIZE, BLOCK):
        values = tl.load(x + row * stride_x + at + columns, mask=at + columns < SIZE, other=0.0)
        size = tl.abs(values.to(tl.float32))
        num_bad += (size < float("inf")).to(tl.int32) ^ 1
        largest = tl.maximum(largest, size)
    scale = _scale(tl.max(largest, 0), tl.sum(num_bad, 0))
    tl.store(scales + row, scale)
    for at in range(0, SIZE, BLOCK):
        is_column = at + columns < SIZE
        values = tl.load(x + row * stride_x + at + columns, mask=is_column, other=0.0)
        codes = to_e4m3(tl.div_rn(values.to(tl.float32), scale))
        tl.store(numbers + row * SIZE + at + columns, codes, mask=is_column)


@triton.jit
def _groups_kernel(
    x: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    num_rows: tl.tensor,
    stride_x: tl.tensor,
    SIZE: tl.constexpr,
    SHARED: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    if num_rows is not None:  # noqa: SIM102 (a kernel without it does not compile the other)
        if row >= tl.load(num_rows):
            return
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * SHARED + tl.arange(0, SHARED)[None, :]
    values = tl.load(x + row * stride_x + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    size = tl.abs(values)
    is_bad = (size < float("inf")).to(tl.int32) ^ 1
    scale = _scale(tl.max(size, 1), tl.sum(is_bad, 1))
    num_groups: tl.constexpr = (SIZE + SHARED - 1) // SHARED
    tl.store(scales + row * num_groups + groups, scale, mask=groups < num_groups)
    codes = to_e4m3(tl.div_rn(values, scale[:, None]))
    tl.store(numbers + row * SIZE + columns, codes, mask=columns < SIZE)


def quantize_rows(
    x: torch.Tensor, num_rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `quantizers.quantize_rows` does, of x [..., I]; rows from `num_rows` on, int32
    [1], stay unset."""
    columns = min(triton.next_power_of_2(x.shape[-1]), COLUMNS)
    return _rounded(_rows_kernel, x, num_rows, num_scales=1, num_programs=1, BLOCK=columns)


def quantize_groups(
    x: torch.Tensor, num_rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `quantizers.quantize_groups` does, of x [..., I]; rows from `num_rows` on, int32
    [1], stay unset."""
    num_groups = triton.cdiv(x.shape[-1], FP8_GROUP)
    groups = min(triton.next_power_of_2(num_groups), COLUMNS // FP8_GROUP)
    return _rounded(
        _groups_kernel,
        x,
        num_rows,
        num_scales=num_groups,
        num_programs=triton.cdiv(num_groups, groups),
        SHARED=FP8_GROUP,
        GROUPS=groups,
    )


def _rounded(
    kernel: Any,
    x: torch.Tensor,
    num_rows: torch.Tensor | None,
    *,
    num_scales: int,
    num_programs: int,
    **constants: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch so many programs for each row, which has so many scales."""
    rows = x.reshape(-1, x.shape[-1])
    codes = x.new_empty(x.shape, dtype=torch.uint8)
    scales = x.new_empty((*x.shape[:-1], num_scales), dtype=torch.float32)
    if len(rows):
        where = (rows, codes, scales, num_rows, rows.stride(0))
        kernel[len(rows), num_programs](*where, SIZE=rows.shape[1], **constants, num_warps=4)
    return codes.view(FP8), scales


@triton.jit
def _round(x: tl.tensor) -> tl.tensor:
    return (x + ROUNDING) - ROUNDING


@triton.jit
def _e2m1(values: tl.tensor, unit: tl.tensor) -> tl.tensor:
    """Return codes of float32 numbers over `unit`, rounded to nearest, ties to even."""
    size = tl.minimum(tl.div_rn(tl.abs(values), unit), LARGEST_FP4)
    # Numbers are half a unit apart below 2, one from there to 4, and two above.
    codes = tl.where(size < 4.0, _round(size) + 2.0, _round(size * 0.5) + 4.0)
    codes = tl.where(size < 2.0, _round(size * 2.0), codes)
    return tl.where(values < 0.0, codes + 8.0, codes).to(tl.uint8)


@triton.jit(do_not_specialize=["first_expert"])
def _blocks_kernel(
    x: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    global_scales: tl.tensor,
    order: tl.tensor,
    num_own: tl.tensor,
    experts: tl.tensor,
    first_expert: tl.tensor,
    stride_x: tl.tensor,
    SIZE: tl.constexpr,
    SHARED: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    source = row
    if order is not None:
        if row >= tl.load(num_own):
            return
        pair = tl.load(order + row)
        global_scales += tl.load(experts + pair) - first_expert
        if TOP_K is not None:
            source = pair // TOP_K
    global_scale = tl.load(global_scales)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    bytes_at = blocks[:, None] * (SHARED // 2) + tl.arange(0, SHARED // 2)[None, :]
    is_byte = bytes_at < SIZE // 2
    x_at = x + source * stride_x + 2 * bytes_at
    first = tl.load(x_at, mask=is_byte, other=0.0).to(tl.float32)
    second = tl.load(x_at + 1, mask=is_byte, other=0.0).to(tl.float32)
    size = tl.maximum(tl.abs(first), tl.abs(second))
    is_bad = ((tl.abs(first) < float("inf")) & (tl.abs(second) < float("inf"))).to(tl.int32) ^ 1
    wanted = tl.div_rn(tl.max(size, 1), LARGEST_FP4) * global_scale
    codes = to_e4m3(wanted)
    codes = tl.where(codes == 0, CODE_OF_ZEROS, codes)
    codes = tl.where(tl.sum(is_bad, 1) > 0, NAN, codes).to(tl.uint8)
    tl.store(scales + row * (SIZE // SHARED) + blocks, codes, mask=blocks < SIZE // SHARED)
    unit = tl.div_rn(from_e4m3(codes).to(tl.float32) * UNIT, global_scale)[:, None]
    packed = _e2m1(first, unit) | (_e2m1(second, unit) << 4)
    tl.store(numbers + row * (SIZE // 2) + bytes_at, packed, mask=is_byte)


def quantize_blocks(
    x: torch.Tensor,
    global_scales: torch.Tensor,
    pairs: Pairs | None = None,
    *,
    is_sorted: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `quantizers.quantize_blocks` does, of x [..., I] and one scale; of pairs a row
    [P, I / 2] for each, in sorted order, by the scale of its expert [Xr]: x has a row for each
    token, or is sorted already, and rows of other ranks' experts stay unset."""
    rows = x.reshape(-1, x.shape[-1])
    size = rows.shape[1]
    sizes = x.shape[:-1] if pairs is None else (pairs.experts.numel(),)
    numbers = x.new_empty((*sizes, size // 2), dtype=torch.uint8)
    scales = x.new_empty((*sizes, size // FP4_BLOCK), dtype=torch.uint8)
    if not numbers.numel():
        return numbers, scales.view(FP8)
    blocks = min(triton.next_power_of_2(size // FP4_BLOCK), COLUMNS // FP4_BLOCK)
    order, _, experts, first_expert = pairs or (None, None, None, 0)
    num_own = None if pairs is None else pairs.num_own
    top_k = None if experts is None or is_sorted else experts.shape[1]
    _blocks_kernel[numbers.numel() // (size // 2), triton.cdiv(size, blocks * FP4_BLOCK)](
        rows,
        numbers,
        scales,
        global_scales,
        order,
        num_own,
        experts,
        first_expert,
        rows.stride(0),
        SIZE=size,
        SHARED=FP4_BLOCK,
        TOP_K=top_k,
        BLOCKS=blocks,
        num_warps=4,
    )
    return numbers, scales.view(FP8)
