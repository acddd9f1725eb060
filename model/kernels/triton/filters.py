"""Top-k and top-p on a GPU; the reference is `filters.filter_top_k_top_p`.

Nothing is sorted. The lowest logit that stays is found by a radix search: floats are ordered as
keys of 32 bits, and each pass finds four bits of the key. A row is divided into chunks, one per
program, and each pass is a launch: its programs read what all chunks of the row found in the pass
before.

Masses are integers in fixed point, so their sum does not depend on the order: neither chunks nor
neighbours in the batch can change which tokens stay.

Shapes: B rows, V vocabulary, C chunks of a row.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from model.kernels import drawing

CHUNK, NUM_WARPS = 4096, 8
"""Logits that a program holds, and the warps that hold them. A row of 152k has 38 programs."""

DIGIT_BITS = tl.constexpr(4)
NUM_DIGITS = tl.constexpr(16)
SHIFTS = (28, 24, 20, 16, 12, 8, 4, 0)
"""Where each pass's digit lies in a key."""

ONE = tl.constexpr(2.0**44)
"""A weight of 1 in fixed point. The sum of fewer than 2^19 of them fits into 63 bits, and what is
rounded off fewer than 2^19 is less than a float32 below 1 can lack of 1."""

LOW, ABOVE, TOTAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Columns of a search's state: the key as far as it is known, the mass of greater keys that differ
in the digits known, and the mass of all keys."""


@triton.jit
def _key(logits: tl.tensor) -> tl.tensor:
    """Return uint32 that are ordered as float32 are, with one key for both zeros."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    flipped = (bits >> 31).to(tl.uint32, bitcast=True) | 0x80000000
    return bits.to(tl.uint32, bitcast=True) ^ flipped


@triton.jit
def _weight(logits: tl.tensor, highest: tl.tensor) -> tl.tensor:
    return (tl.exp(logits.to(tl.float64) - highest.to(tl.float64)) * ONE + 0.5).to(tl.int64)


@triton.jit
def _highest(maxima: tl.tensor, NUM_CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr) -> tl.tensor:
    chunks = tl.arange(0, BLOCK_C)
    return tl.max(tl.load(maxima + chunks, mask=chunks < NUM_CHUNKS, other=float("-inf")), 0)


@triton.jit
def _next_digit(
    state: tl.tensor,
    masses: tl.tensor,
    shift: tl.tensor,
    k: tl.tensor,
    p: tl.tensor,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    IS_COUNT: tl.constexpr,
) -> tl.tensor:
    """Return the key's new digit, the state behind it, the mass wanted, and each chunk's mass of
    that digit and all digits known: [BLOCK_C]."""
    digits, chunks = tl.arange(0, NUM_DIGITS), tl.arange(0, BLOCK_C)
    at = masses + chunks[:, None] * NUM_DIGITS + digits[None, :]
    of_chunks = tl.load(at, mask=chunks[:, None] < NUM_CHUNKS, other=0)
    above = tl.load(state + ABOVE)
    # At or above each digit: the first has the mass of all digits.
    mass = above + tl.sum(of_chunks, 0)
    if IS_COUNT:
        total, wanted = tl.max(mass, 0), k
    else:
        total = tl.load(state + TOTAL)
        if shift == 32 - DIGIT_BITS:
            total = tl.max(mass, 0)
        wanted = tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    digit = tl.max(tl.where(mass >= wanted, digits, 0), 0)
    above = tl.max(tl.where(digits > digit, mass, above), 0)
    low = tl.load(state + LOW) + (digit.to(tl.int64) << shift)
    is_digit, is_next = digits == digit, digits == digit + 1
    own = tl.where(is_digit[None, :], of_chunks, 0) - tl.where(is_next[None, :], of_chunks, 0)
    return low, above, total, wanted, tl.sum(own, 1)


@triton.jit(do_not_specialize=["shift"])
def _search_kernel(
    logits: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    maxima: tl.tensor,
    floors: tl.tensor,
    old_states: tl.tensor,
    old_masses: tl.tensor,
    states: tl.tensor,
    masses: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    shift: tl.tensor,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    IS_COUNT: tl.constexpr,
    IS_FIRST: tl.constexpr,
) -> None:
    """One pass: find the digit before `shift` and sum what each digit at `shift` has."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    has_k, has_p = (k > 0) & (k < size), p < 1
    old_states, states = old_states + row * 3, states + row * 3
    old_masses += row * NUM_CHUNKS * NUM_DIGITS
    maxima += row * NUM_CHUNKS
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    is_id = ids < size
    at = logits + row * stride + ids

    low, above, total = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    if IS_COUNT:
        if IS_FIRST:
            highest = tl.max(tl.load(at, mask=is_id, other=float("-inf")), 0)
            tl.store(maxima + chunk, highest)
        if not has_k:
            return
    elif IS_FIRST:
        # The search for top-k has ended: what is below its key has no mass in this one.
        floor = low
        if has_k:
            floor, _, _, _, _ = _next_digit(
                old_states, old_masses, 0, k, p, NUM_CHUNKS, BLOCK_C, True
            )
        if chunk == 0:
            tl.store(floors + row, floor)
        if not has_p:
            return
    else:
        floor = tl.load(floors + row)
        if not has_p:
            return
    if not IS_FIRST:
        low, above, total, _, _ = _next_digit(
            old_states, old_masses, shift + DIGIT_BITS, k, p, NUM_CHUNKS, BLOCK_C, IS_COUNT
        )
    if chunk == 0:
        tl.store(states + LOW, low)
        tl.store(states + ABOVE, above)
        tl.store(states + TOTAL, total)

    logit = tl.load(at, mask=is_id, other=float("-inf"))
    key = _key(logit)
    digit = (key ^ low.to(tl.uint32)) >> shift.to(tl.uint32)
    # A key that differs in a digit known makes a larger number.
    is_in = is_id & (digit < NUM_DIGITS)
    if not IS_COUNT:
        is_in = is_in & (key >= floor.to(tl.uint32))
    masses += (row * NUM_CHUNKS + chunk) * NUM_DIGITS
    # From about the fourth pass on, few chunks have such keys.
    if tl.max(is_in.to(tl.int32), 0) > 0:
        if IS_COUNT:
            weight = is_in.to(tl.int32)
        else:
            highest = _highest(maxima, NUM_CHUNKS, BLOCK_C)
            weight = tl.where(is_in, _weight(logit, highest), 0)
        for least in range(NUM_DIGITS):
            mass = tl.sum(tl.where(digit >= least, weight, 0), 0)
            tl.store(masses + least, mass.to(tl.int64))
    else:
        digits = tl.arange(0, NUM_DIGITS)
        tl.store(masses + digits, tl.zeros([NUM_DIGITS], tl.int64))


@triton.jit
def _filter_kernel(
    logits: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    maxima: tl.tensor,
    floors: tl.tensor,
    states: tl.tensor,
    masses: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(logits + row * stride + ids, mask=ids < size, other=float("-inf"))
    key = _key(logit)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    is_kept = key >= tl.load(floors + row).to(tl.uint32)
    if p < 1:
        of_row = masses + row * NUM_CHUNKS * NUM_DIGITS
        low, above, _, wanted, of_chunks = _next_digit(
            states + row * 3, of_row, 0, k, p, NUM_CHUNKS, BLOCK_C, False
        )
        is_least = key == low.to(tl.uint32)
        highest = _highest(maxima + row * NUM_CHUNKS, NUM_CHUNKS, BLOCK_C)
        # Of equals at the edge, as many stay as their mass needs. All have this weight.
        weight = tl.max(tl.where(is_least, _weight(logit, highest), 1), 0)
        mass_before = tl.sum(tl.where(tl.arange(0, BLOCK_C) < chunk, of_chunks, 0), 0)
        mass_left = wanted - above - mass_before
        rank = tl.cumsum(is_least.to(tl.int32), 0)
        is_needed = (rank - 1) * weight < mass_left
        is_kept = (key > low.to(tl.uint32)) | (is_least & is_needed)
    tl.store(out + row * size + ids, tl.where(is_kept, logit, float("-inf")), mask=ids < size)


def filter_top_k_top_p(
    logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Do what `filters.filter_top_k_top_p` does; V is below 2^19."""
    num_rows, size = logits.shape
    # One pass of a search that nobody wants remains: it finds the maxima, or writes the floors.
    passes = [
        (is_count, shift)
        for is_count, wanted in ((True, top_k), (False, top_p))
        for shift in (SHIFTS[:1] if wanted is None else SHIFTS)
    ]
    top_k = logits.new_zeros(num_rows, dtype=torch.int64) if top_k is None else top_k
    top_p = logits.new_ones(num_rows) if top_p is None else top_p
    num_chunks = triton.cdiv(size, CHUNK)
    out = logits.new_empty(logits.shape)
    maxima = logits.new_empty(num_rows, num_chunks)
    floors = top_k.new_empty(num_rows)
    # A pass reads what the pass before wrote, and writes what the one behind reads.
    searches = [
        (top_k.new_empty(num_rows, 3), top_k.new_empty(num_rows, num_chunks, NUM_DIGITS.value))
        for _ in range(2)
    ]
    block = triton.next_power_of_2(num_chunks)
    options = {"CHUNK": CHUNK, "NUM_CHUNKS": num_chunks, "BLOCK_C": block}
    rows = (logits, top_k, top_p, maxima, floors)
    grid = (num_rows, num_chunks)
    old, new = searches
    for is_count, shift in passes:
        _search_kernel[grid](
            *rows,
            *old,
            *new,
            size,
            logits.stride(0),
            shift,
            **options,
            IS_COUNT=is_count,
            IS_FIRST=shift == SHIFTS[0],
            num_warps=NUM_WARPS,
        )
        old, new = new, old
    _filter_kernel[grid](*rows, *old, out, size, logits.stride(0), **options, num_warps=NUM_WARPS)
    return out


draw = functools.partial(drawing.draw, filter_logits=filter_top_k_top_p)
