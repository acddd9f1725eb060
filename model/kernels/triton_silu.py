"""The gate of SwiGLU on a GPU; the twin of `elementwise.silu_and_mul`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _silu_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    stride_row: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    gate_up += row * stride_row + columns
    gate = tl.load(gate_up, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up + SIZE, mask=is_column, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    # torch rounds the activation to the model's dtype before it multiplies.
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * SIZE + columns, (activated * up).to(dtype), mask=is_column)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up. gate_up: [..., 2 * n], gate first. Returns [..., n]."""
    size = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * size)
    out = gate_up.new_empty((*gate_up.shape[:-1], size))
    if out.numel():
        grid = (rows.shape[0], triton.cdiv(size, BLOCK))
        _silu_kernel[grid](rows, out, rows.stride(0), SIZE=size, BLOCK=BLOCK, num_warps=4)
    return out
