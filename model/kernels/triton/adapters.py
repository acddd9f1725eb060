"""What adapters add to a linear layer's outputs on a GPU; the reference is `adapters.add_adapters`.

A program is for one block of tokens and one adapter, and ends at once if none of the tokens has it:
no value is read in the host, so that a graph can be captured, and a step without adapters reads
none of their matrices. Tokens of a prompt lie side by side, so that a block has few adapters.

One kernel takes the inputs to an adapter's rank, in slices of the inputs where there are too few
tokens to keep a GPU busy; the other one sums over the slices, in order, and adds the outputs. An
output is written by the program of its token's only adapter, so that neither needs atomics.

Shapes: T tokens, I inputs, O outputs, N slots of adapters, R the largest rank, P parts, S slices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from model.kernels.triton.tiles import MIN_DOT

MAX_PARTS = 3
NUM_PROGRAMS = 128
"""About as many as a GPU has multiprocessors."""
SLICE_INPUTS = 256
"""Of the shortest slice: what comes after it, a sum of R numbers, takes as long."""


@triton.jit
def _tokens_of(adapters: tl.tensor, num_tokens: tl.tensor, BLOCK_T: tl.constexpr) -> tl.tensor:
    """Return the block's tokens, and which of them have the program's adapter."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    adapter = tl.load(adapters + tokens, mask=tokens < num_tokens, other=0)
    return tokens.to(tl.int64), adapter == tl.program_id(1) + 1


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    x: tl.tensor,
    a: tl.tensor,
    low: tl.tensor,
    adapters: tl.tensor,
    num_tokens: tl.tensor,
    stride_x: tl.tensor,
    INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    tokens, is_own = _tokens_of(adapters, num_tokens, BLOCK_T)
    if tl.max(is_own.to(tl.int32), 0) == 0:
        return
    slice_ = tl.program_id(2) % SLICES
    columns = tl.program_id(2) // SLICES * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < COLUMNS
    inputs = slice_ * SLICE + tl.arange(0, BLOCK_K)
    x_at = x + tokens[:, None] * stride_x + inputs[None, :]
    a_at = a + tl.program_id(1).to(tl.int64) * COLUMNS * INPUTS
    a_at += columns[None, :] * INPUTS + inputs[:, None]
    sums = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for at in range(0, SLICE, BLOCK_K):
        is_input = at + inputs < INPUTS
        x_tile = tl.load(x_at + at, mask=is_own[:, None] & is_input[None, :], other=0.0)
        a_tile = tl.load(a_at + at, mask=is_column[None, :] & is_input[:, None], other=0.0)
        sums = tl.dot(x_tile, a_tile, sums, input_precision="ieee")
    low_at = low + (slice_ * num_tokens + tokens[:, None]) * COLUMNS + columns[None, :]
    tl.store(low_at, sums, mask=is_own[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    low: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    adapters: tl.tensor,
    num_tokens: tl.tensor,
    stride_out: tl.tensor,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    tokens, is_own = _tokens_of(adapters, num_tokens, BLOCK_T)
    if tl.max(is_own.to(tl.int32), 0) == 0:
        return
    # A block of outputs is of one part.
    first_1: tl.constexpr = (SIZE_0 + BLOCK_N - 1) // BLOCK_N
    first_2: tl.constexpr = first_1 + (SIZE_1 + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(2)
    part = (block >= first_1).to(tl.int32) + (block >= first_2).to(tl.int32)
    first = tl.where(part == 0, 0, tl.where(part == 1, first_1, first_2))
    start = tl.where(part == 0, 0, tl.where(part == 1, SIZE_0, SIZE_0 + SIZE_1))
    stop = start + tl.where(part == 0, SIZE_0, tl.where(part == 1, SIZE_1, SIZE_2))
    columns = start + (block - first) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < stop
    OUTPUTS: tl.constexpr = SIZE_0 + SIZE_1 + SIZE_2

    ranks = tl.arange(0, BLOCK_R)
    low_at = low + tokens[:, None] * (PARTS * RANK) + part * RANK + ranks[None, :]
    b_at = b + tl.program_id(1).to(tl.int64) * RANK * OUTPUTS
    b_at += ranks[:, None] * OUTPUTS + columns[None, :]
    added = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    dtype = b.dtype.element_ty
    for at in range(0, RANK, BLOCK_R):
        is_rank = at + ranks < RANK
        sums = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        for slice_ in range(SLICES):
            slice_at = low_at + (slice_ * num_tokens).to(tl.int64) * (PARTS * RANK) + at
            sums += tl.load(slice_at, mask=is_own[:, None] & is_rank[None, :], other=0.0)
        b_tile = tl.load(b_at + at * OUTPUTS, mask=is_rank[:, None] & is_column[None, :], other=0.0)
        added = tl.dot(sums.to(dtype), b_tile, added, input_precision="ieee")
    # Products are rounded to the model's dtype before they are added, as torch does.
    out_at = out + tokens[:, None] * stride_out + columns[None, :]
    is_out = is_own[:, None] & is_column[None, :]
    before = tl.load(out_at, mask=is_out, other=0.0).to(tl.float32)
    tl.store(out_at, (before + added.to(dtype).to(tl.float32)).to(dtype), mask=is_out)


def add_adapters(
    out: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    sizes: Sequence[int],
    adapters: torch.Tensor,
) -> None:
    """Do what `adapters.add_adapters` does, without waiting for the device. Last dimensions are
    contiguous, and so are `a` and `b`; at most three parts."""
    (num_tokens, inputs), (num_adapters, columns, _) = x.shape, a.shape
    if not num_tokens:
        return
    rank, parts = b.shape[1], len(sizes)
    assert parts <= MAX_PARTS, f"sizes: wanted at most {MAX_PARTS} parts, found {parts}"
    is_half = x.dtype.itemsize <= 2
    block_t = 64 if num_tokens > 256 and is_half else MIN_DOT
    block_n, block_k = min(max(triton.next_power_of_2(columns), MIN_DOT), 64), 64
    num_blocks = triton.cdiv(num_tokens, block_t)
    tiles = num_blocks * triton.cdiv(columns, block_n)
    # Of all adapters, the tokens' own alone have work.
    slices = min(max(NUM_PROGRAMS // tiles, 1), triton.cdiv(inputs, SLICE_INPUTS))
    slice_inputs = triton.cdiv(triton.cdiv(inputs, slices), block_k) * block_k
    slices = triton.cdiv(inputs, slice_inputs)
    low = x.new_empty(slices, num_tokens, columns, dtype=torch.float32)
    _shrink_kernel[num_blocks, num_adapters, triton.cdiv(columns, block_n) * slices](
        x,
        a,
        low,
        adapters,
        num_tokens,
        x.stride(0),
        INPUTS=inputs,
        COLUMNS=columns,
        SLICES=slices,
        SLICE=slice_inputs,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
    )
    outputs_block = 128 if is_half else 64
    sizes = [*sizes, *[0] * (MAX_PARTS - parts)]
    num_outputs = sum(triton.cdiv(size, outputs_block) for size in sizes)
    _expand_kernel[num_blocks, num_adapters, num_outputs](
        low,
        b,
        out,
        adapters,
        num_tokens,
        out.stride(0),
        RANK=rank,
        PARTS=parts,
        SIZE_0=sizes[0],
        SIZE_1=sizes[1],
        SIZE_2=sizes[2],
        SLICES=slices,
        BLOCK_T=block_t,
        BLOCK_R=min(max(triton.next_power_of_2(rank), MIN_DOT), 64),
        BLOCK_N=outputs_block,
        num_warps=4,
    )
