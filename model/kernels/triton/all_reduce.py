"""A sum over the ranks of one node, a residual's addition and the RMSNorm behind it, as one kernel
over memory that the ranks' GPUs all have mapped (a one-shot all-reduce). It has run in Triton's
interpreter and was compiled for two architectures; it has never run on a GPU.

Each program has some of the rows, the same ones on all ranks:

1. It copies them into this rank's slot, and sets its flag in every rank's memory.
2. It waits until each rank has set that flag here: their slots now hold the program's rows.
3. It adds those up in float32 and in the ranks' order, so all ranks get the same bits, and rounds
   where torch would: after the sum, after the residual and before the weight.

There is no second wait, because a rank has two slots, which take turns. What is filled in call n
is filled again in call n + 2. By then this rank has ended call n + 1, where every other rank had
set a flag, and its kernels run one after the other: it had ended call n. So all calls of a group
must be on one stream, or ordered as if they were.

A flag holds the number of its call, which never falls. Each program keeps that number in memory of
its device: a replayed graph counts on, and also a program that has no row in a call counts it. With
64 bits, no number comes twice.

Nobody is missed here: a program waits for a rank that died until its own process is killed.

Shapes: T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from model.kernels.triton.elementwise import norm_warps, write_norm

NUM_PROGRAMS = 64
"""All of them must be on the device at once, or they wait for ever. GPUs with NVLink have more
multiprocessors than that."""
MAX_RANKS = 16
FLAGS_BYTES = tl.constexpr(NUM_PROGRAMS * MAX_RANKS * 8)
"""A rank's memory begins with a flag of 8 bytes for each program and rank."""
SLOT_BYTES = tl.constexpr(256 << 10)
"""The most that is summed here. Each rank reads all of every other's: above that, NCCL, by which
each reads twice its own, is expected to win. Nobody has measured it."""
MEMORY_BYTES = FLAGS_BYTES.value + 2 * SLOT_BYTES.value
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _meet(
    memories: tl.tensor,
    rank: tl.tensor,
    count: tl.tensor,
    NUM_RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """Tell all ranks that this program's rows of call `count` are there, and wait for theirs."""
    ranks, at = tl.arange(0, BLOCK_R), tl.program_id(0) * NUM_RANKS
    is_rank = ranks < NUM_RANKS
    theirs = tl.load(memories + ranks, mask=is_rank, other=0).to(tl.pointer_type(tl.int64))
    own = tl.load(memories + rank).to(tl.pointer_type(tl.int64)) + at + ranks
    # One thread speaks for what all of them have written.
    tl.debug_barrier()
    tl.atomic_xchg(theirs + at + rank, count, mask=is_rank, sem="release", scope="sys")
    least = count - 1
    while least < count:
        flags = tl.atomic_add(own, 0, mask=is_rank, sem="acquire", scope="sys")
        least = tl.min(tl.where(is_rank, flags, count), 0)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["rank", "num_rows"])
def _all_reduce_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    summed: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    memories: tl.tensor,
    counts: tl.tensor,
    eps: tl.tensor,
    rank: tl.tensor,
    num_rows: tl.tensor,
    stride_x: tl.tensor,
    stride_residual: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    program, step = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    dtype = x.dtype.element_ty
    count = tl.load(counts + program) + 1
    slot = FLAGS_BYTES + count % 2 * SLOT_BYTES
    if program < num_rows:
        own = tl.multiple_of((tl.load(memories + rank) + slot).to(tl.pointer_type(dtype)), 16)
        for row in range(program, num_rows, step):
            values = tl.load(x + row * stride_x + columns, mask=is_column, other=0.0)
            tl.store(own + row * SIZE + columns, values, mask=is_column)
        _meet(memories, rank, count, NUM_RANKS, BLOCK_R)
        for row in range(program, num_rows, step):
            total = tl.zeros([BLOCK], tl.float32)
            for other in tl.static_range(NUM_RANKS):
                address = tl.load(memories + other) + slot
                rows = tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
                rows += row * SIZE + columns
                total += tl.load(rows, mask=is_column, other=0.0).to(tl.float32)
            residuals = residual + row * stride_residual + columns
            total = total.to(dtype).to(tl.float32)
            total += tl.load(residuals, mask=is_column, other=0.0).to(tl.float32)
            rounded = total.to(dtype)
            tl.store(summed + row * SIZE + columns, rounded, mask=is_column)
            write_norm(rounded.to(tl.float32), weight, out + row * SIZE, eps, SIZE, BLOCK)
    tl.store(counts + program, count)


class PeerMemory:
    """One rank's end of memory that all ranks' GPUs have mapped. Invariant: all ranks call it in
    the same order, with tensors of equal shapes, dtypes and layouts."""

    def __init__(
        self, memory: torch.Tensor, addresses: Sequence[int], rank: int, mapping: object = None
    ) -> None:
        """memory: this rank's, `MEMORY_BYTES` of zeros; addresses: where this process finds each
        rank's; mapping: what ends when nobody holds it, and the addresses with it. All must be
        zeros before any rank makes its first call."""
        if len(addresses) > MAX_RANKS:
            raise ValueError(f"addresses: wanted at most {MAX_RANKS}, found {len(addresses)}")
        self._memory, self._mapping = memory, mapping
        self._rank, self._size = rank, len(addresses)
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
        self._counts = torch.zeros(NUM_PROGRAMS, dtype=torch.int64, device=memory.device)

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the norm of residual plus the ranks' sum of x, and that sum, contiguous; None, on
        all ranks and with nothing done: it does not serve such tensors. x, residual: [T, E];
        weight: [E]."""
        num_rows, size = x.shape
        is_dense = x.stride(1) == 1 and residual.stride(1) == 1
        if not is_dense or x.dtype not in DTYPES or x.numel() * x.itemsize > SLOT_BYTES.value:
            return None
        out, summed = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
        if not x.numel():
            return out, summed
        block = triton.next_power_of_2(size)
        _all_reduce_norm_kernel[(NUM_PROGRAMS,)](
            x,
            residual,
            summed,
            weight,
            out,
            self._addresses,
            self._counts,
            eps,
            self._rank,
            num_rows,
            x.stride(0),
            residual.stride(0),
            SIZE=size,
            BLOCK=block,
            NUM_RANKS=self._size,
            BLOCK_R=triton.next_power_of_2(self._size),
            num_warps=norm_warps(block),
            # Left alone, the assembler spills for more programs at once than there are.
            maxnreg=128,
        )
        return out, summed
