"""Tile sizes of attention and of linear layers, and a step of attention's online softmax."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from model.kernels.triton.e4m3 import from_e4m3

LOG2_E = 1.4426950408889634
"""exp(x) = exp2(x * LOG2_E): the hardware's exponential has base 2."""

MIN_DOT = 16
"""Rows that `tl.dot` needs at least."""


@dataclass(frozen=True)
class AttentionTiles:
    """How much one program holds at a time. All sizes are powers of two."""

    rows: int
    """Pairs of a query token and a query head."""
    columns: int
    """KV tokens per step of the softmax."""
    dims: int
    """Head dim, padded."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class LinearTiles:
    """How much one program of a linear layer of short numbers holds at a time."""

    rows: int
    columns: int
    inputs: int
    """Where numbers become wide in registers."""
    num_warps: int

    def grid(self, num_tokens: int, num_outputs: int) -> tuple[int, int]:
        return triton.cdiv(num_tokens, self.rows), triton.cdiv(num_outputs, self.columns)


def linear_tiles(num_tokens: int, dtype: torch.dtype) -> LinearTiles:
    """Few rows are bound by memory: more programs have more of the weight on their way."""
    is_half = dtype.itemsize <= 2
    rows = min(max(triton.next_power_of_2(num_tokens), MIN_DOT), 64 if is_half else 32)
    if rows == 64:
        return LinearTiles(rows, 128, inputs=32, num_warps=8)
    return LinearTiles(rows, 32, inputs=128 if is_half else 32, num_warps=4)


@triton.jit
def linear_tile(
    num_tokens: tl.tensor,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Return a program's tokens, which of them there are, and its outputs likewise."""
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    return rows, rows < num_tokens, columns, columns < OUTPUTS


@triton.jit
def store_linear(
    total: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    columns: tl.tensor,
    is_column: tl.tensor,
    OUTPUTS: tl.constexpr,
) -> None:
    """Store a tile of a linear layer's outputs [T, O], with its bias if it has one."""
    if bias is not None:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_at = out + rows[:, None] * OUTPUTS + columns[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def decode_tiles(group: int, head_dim: int, dtype: torch.dtype) -> AttentionTiles:
    """Return tiles for one query token: keys and values of 16 KiB together, of which two are on
    their way, let four programs run on a multiprocessor of sm_80."""
    dims = max(triton.next_power_of_2(head_dim), MIN_DOT)
    return AttentionTiles(
        rows=max(triton.next_power_of_2(group), MIN_DOT),
        columns=min(max(8192 // (dims * dtype.itemsize), MIN_DOT), 64),
        dims=dims,
        num_warps=4,
        num_stages=3,
    )


_SM_90_COLUMNS = {64: 128, 128: 64}
"""Of 64 rows and four warps, by head dim, on sm_90: of two programs one loads while the other
multiplies. For a chunk behind a long context they are faster than one of eight warps."""


def prefill_tiles(group: int, head_dim: int, dtype: torch.dtype, arch: int) -> AttentionTiles:
    """Return the largest tiles for many query tokens that spill no register on sm_80 and sm_90, in
    16 bits."""
    dims = max(triton.next_power_of_2(head_dim), MIN_DOT)
    row_bytes = dims * dtype.itemsize
    is_half = dtype.itemsize <= 2
    if arch == 90 and is_half and dims in _SM_90_COLUMNS:
        rows, columns = max(64, triton.next_power_of_2(group)), _SM_90_COLUMNS[dims]
        return AttentionTiles(rows, columns, dims, num_warps=rows // 16, num_stages=3)
    rows = 128 if is_half and row_bytes <= 256 else 32
    rows = max(rows, triton.next_power_of_2(group))
    return AttentionTiles(
        rows=rows,
        columns=64 if row_bytes <= 128 else 32 if row_bytes <= 512 else 16,
        dims=dims,
        num_warps=8 if rows * dims >= 8192 else 4,
        num_stages=3,
    )


@functools.cache
def arch_of(device: torch.device) -> int:
    """Return a device's compute capability, 90 for sm_90; without a GPU, the oldest supported."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@triton.jit
def softmax_step(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    seen: tl.tensor,
    scale_log2: tl.tensor,
    acc: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
) -> tl.tensor:
    """Take KV tokens into the running sums. q: [R, D]; k, v: [C, D], uint8 for e4m3 without UNIT;
    seen: [R, C], None: all."""
    if k.dtype == tl.uint8:
        k, v = from_e4m3(k).to(q.dtype), from_e4m3(v).to(q.dtype)
    scores = tl.dot(q, k.trans(), input_precision="ieee") * scale_log2
    return weigh(scores, v, seen, acc, row_max, row_sum)


@triton.jit
def weigh(
    scores: tl.tensor,
    v: tl.tensor,
    seen: tl.tensor,
    acc: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
) -> tl.tensor:
    """Take the values of KV tokens into the running sums. scores: [R, C], to base 2; v: [C, D];
    seen: [R, C], None: all.

    A row that has seen nothing yet keeps the maximum -inf, which must not be subtracted from
    itself.
    """
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(row_max - base)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_max, row_sum * decay + tl.sum(weights, 1)
