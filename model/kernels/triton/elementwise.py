"""RMS normalisation and the gate of SwiGLU on a GPU; the references are in `elementwise`.

What torch rounds to the model's dtype on the way is rounded here too. Last dimensions are
contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def write_norm(
    values: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write a row's norm. values: [BLOCK], float32, zeros from SIZE on."""
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    dtype = out.dtype.element_ty
    normed = (values * scale).to(dtype).to(tl.float32)
    weights = tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + columns, (weights * normed).to(dtype), mask=is_column)


@triton.jit
def _norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    summed: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    inner_rows: tl.tensor,
    stride_x_outer: tl.tensor,
    stride_x_inner: tl.tensor,
    stride_residual: tl.tensor,
    stride_summed: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    x += row // inner_rows * stride_x_outer + row % inner_rows * stride_x_inner
    values = tl.load(x + columns, mask=is_column, other=0.0).to(tl.float32)
    if residual is not None:
        residual += row * stride_residual + columns
        values += tl.load(residual, mask=is_column, other=0.0).to(tl.float32)
        rounded = values.to(summed.dtype.element_ty)
        tl.store(summed + row * stride_summed + columns, rounded, mask=is_column)
        values = rounded.to(tl.float32)
    write_norm(values, weight, out + row * SIZE, eps, SIZE, BLOCK)


def norm_warps(block: int) -> int:
    """Return how many warps share a row that fits into `block`: 16 values per thread."""
    return min(max(block // 512, 1), 16)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return rows of unit mean square, scaled by `weight` [n], contiguous. x: [..., n]."""
    rows = x if x.ndim == 3 else x.reshape(-1, 1, x.shape[-1])
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(rows, None, None, weight, out, eps)
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of the sum, and the sum, contiguous. x, residual: [T, n]; weight: [n]."""
    out, summed = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    _launch(x.unsqueeze(1), residual, summed, weight, out, eps)
    return out, summed


def _launch(
    rows: torch.Tensor,
    residual: torch.Tensor | None,
    summed: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> None:
    """rows: [T, R, n]; residual, and summed for its sum with them: [T, n] with R = 1, or None."""
    outer, inner, size = rows.shape
    if not outer * inner:
        return
    block = triton.next_power_of_2(size)
    _norm_kernel[(outer * inner,)](
        rows,
        residual,
        summed,
        weight,
        out,
        eps,
        inner,
        *rows.stride()[:2],
        0 if residual is None else residual.stride(0),
        0 if summed is None else summed.stride(0),
        SIZE=size,
        BLOCK=block,
        num_warps=norm_warps(block),
    )


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
