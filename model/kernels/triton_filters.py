"""Top-k and top-p on a GPU; the twin of `filters.filter_top_k_top_p`.

One program filters one row and sorts nothing. The lowest logit that stays is the highest value
that has enough tokens, or enough mass, at or above it; floats of one sign are ordered as their bits
are, so the program bisects 32 bits. Each look at the row tries several values at once. Programs
for a row add in one order, so neighbours cannot change which tokens stay.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, NUM_VALUES, NUM_WARPS = 1024, 8, 8
"""Logits that a program holds at once, and values that it compares them with."""


@triton.jit
def _place(bits: tl.tensor) -> tl.tensor:
    """Return integers that order float32 of these bits; of such integers, the bits."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(place: tl.tensor) -> tl.tensor:
    return _place(place).to(tl.float32, bitcast=True)


@triton.jit
def _masses(
    row: tl.tensor,
    weights: tl.tensor,
    size: tl.tensor,
    least: tl.tensor,
    values: tl.tensor,
    BLOCK: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    IS_COUNT: tl.constexpr,
) -> tl.tensor:
    """Return how much of what is at least `least` is at least each of `values`."""
    mass = tl.zeros([BLOCK, NUM_VALUES], tl.int32 if IS_COUNT else tl.float64)
    for at in tl.range(0, size, BLOCK, num_stages=4):
        ids = at + tl.arange(0, BLOCK)
        logits = tl.load(row + ids, mask=ids < size, other=float("-inf"))
        is_in = (ids < size) & (logits >= least)
        is_in = is_in[:, None] & (logits[:, None] >= values[None, :])
        if IS_COUNT:
            mass += is_in.to(tl.int32)
        else:
            weight = tl.load(weights + ids, mask=ids < size, other=0.0)
            mass += tl.where(is_in, weight[:, None], 0.0)
    return tl.sum(mass, 0)


@triton.jit
def _highest_with(
    row: tl.tensor,
    weights: tl.tensor,
    size: tl.tensor,
    least: tl.tensor,
    highest: tl.tensor,
    wanted: tl.tensor,
    BLOCK: tl.constexpr,
    NUM_VALUES: tl.constexpr,
    IS_COUNT: tl.constexpr,
) -> tl.tensor:
    """Return the place of the highest value with tokens of the mass `wanted` at or above it."""
    low = tl.full([], -0x7F800001, tl.int64)  # of -inf, whose mass is the whole
    high = _place(highest.to(tl.int32, bitcast=True)).to(tl.int64)
    while low < high:
        step = (high - low + NUM_VALUES - 1) // NUM_VALUES
        places = tl.minimum(low + step * (1 + tl.arange(0, NUM_VALUES)), high)
        values = _value(places.to(tl.int32))
        mass = _masses(row, weights, size, least, values, BLOCK, NUM_VALUES, IS_COUNT)
        has_enough = mass >= wanted
        too_high = tl.min(tl.where(has_enough, high + 1, places), 0)
        low = tl.max(tl.where(has_enough, places, low), 0)
        high = too_high - 1
    return low.to(tl.int32)


@triton.jit
def _filter_kernel(
    logits: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
    NUM_VALUES: tl.constexpr,
) -> None:
    at_row = tl.program_id(0).to(tl.int64)
    row, weights, out = logits + at_row * stride, weights + at_row * size, out + at_row * size
    k, p = tl.load(top_k + at_row), tl.load(top_p + at_row).to(tl.float64)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for at in range(0, size, BLOCK):
        ids = at + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, tl.load(row + ids, mask=ids < size, other=float("-inf")))
    highest = tl.max(highest, 0)
    # One zero: the place behind that of -0.0 is 0.0's, and they are equal.
    highest = tl.where(highest == 0, 0.0, highest)

    least, num_least = tl.full([], float("-inf"), tl.float32), tl.full([], size, tl.int64)
    if (k > 0) & (k < size):
        place = _highest_with(row, weights, size, least, highest, k, BLOCK, NUM_VALUES, True)
        least = _value(place)
    if p < 1:
        total = tl.zeros([BLOCK], tl.float64)
        for at in range(0, size, BLOCK):
            ids = at + tl.arange(0, BLOCK)
            logit = tl.load(row + ids, mask=ids < size, other=float("-inf"))
            weight = tl.exp(logit.to(tl.float64) - highest.to(tl.float64))
            tl.store(weights + ids, weight, mask=ids < size)
            total += tl.where(logit >= least, weight, 0.0)
        # Other threads of this program read what these wrote.
        tl.debug_barrier()
        wanted = p * tl.sum(total, 0)
        place = _highest_with(row, weights, size, least, highest, wanted, BLOCK, NUM_VALUES, False)
        least = _value(place)
        # Of equals at the edge, as many stay as their mass needs.
        above = _value(place + 1 + tl.zeros([NUM_VALUES], tl.int32))
        mass = _masses(row, weights, size, least, above, BLOCK, NUM_VALUES, False)
        weight = tl.exp(least.to(tl.float64) - highest.to(tl.float64))
        num_least = tl.ceil((wanted - tl.max(mass, 0)) / weight).to(tl.int64)

    num_before = tl.zeros([], tl.int64)
    for at in range(0, size, BLOCK):
        ids = at + tl.arange(0, BLOCK)
        logit = tl.load(row + ids, mask=ids < size, other=float("-inf"))
        is_least = logit == least
        rank = num_before + tl.cumsum(is_least.to(tl.int32), 0)
        num_before += tl.sum(is_least.to(tl.int32), 0)
        is_kept = (logit > least) | (is_least & (rank <= num_least))
        tl.store(out + ids, tl.where(is_kept, logit, float("-inf")), mask=ids < size)


def filter_top_k_top_p(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Do what `filters.filter_top_k_top_p` does; waits for nothing on the device.

    Args:
        logits: float32 [B, V], the last dimension contiguous
        top_k: int64 [B], 0 keeps all
        top_p: float32 [B], 1 keeps all
    """
    num_rows, size = logits.shape
    out = logits.new_empty(logits.shape)
    weights = logits.new_empty(logits.shape, dtype=torch.float64)
    _filter_kernel[num_rows,](
        logits,
        top_k,
        top_p,
        weights,
        out,
        size,
        logits.stride(0),
        BLOCK=BLOCK,
        NUM_VALUES=NUM_VALUES,
        num_warps=NUM_WARPS,
    )
    return out
