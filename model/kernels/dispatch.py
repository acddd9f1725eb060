"""Which kernels compute: those of `kernels.triton` on a GPU, of `kernels.cpu` elsewhere.

On a GPU nothing here waits for the device: grids follow from tensor shapes and host integers.
Kernels of attention and experts run inside an op, and those of sampling behind the graph: they are
called as they are. Those of other layers are traced, so on a GPU they are opaque ops. On a CPU
torch functions are traced, because Inductor fuses them with their neighbours and cannot look into
an op; where nothing is traced the ops run there too, each of them one pass in C++.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from compile.custom_op import direct_register_custom_op
from compile.passes.quantizers import quantize_blocks, quantize_groups, quantize_rows
from model.kernels import cpu, elementwise
from model.kernels.cpu.packed_linear import short_numbers
from model.kernels.scaled_linear import (
    BlockScaledWeight,
    IntegerWeight,
    ScaledWeight,
    multiplies_on_gpu,
)
from model.kernels.scaled_linear import scaled_linear as scaled_product


def kernels_for(x: torch.Tensor) -> ModuleType:
    return _triton() if x.is_cuda else cpu


def uses_ops(x: torch.Tensor) -> bool:
    """Return whether the functions below call their ops on this tensor, not torch functions."""
    return x.is_cuda or not torch.compiler.is_compiling()


@functools.cache
def _triton() -> ModuleType:
    from model.kernels import triton

    return triton


def _on_gpu(op_name: str, like: Callable[..., Any], name: str) -> Any:
    """Register a Triton kernel as an op's on a GPU; return the op. like: takes what it takes"""

    @functools.wraps(like)
    def on_gpu(*args: Any) -> Any:
        return getattr(_triton(), name)(*args)

    return direct_register_custom_op(op_name, on_gpu, dispatch_key="CUDA")


def _op(name: str, fake_impl: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Register both devices' kernels as one op; return what calls it or the torch function."""
    on_cpu, reference = getattr(cpu, name), getattr(elementwise, name)
    direct_register_custom_op(
        name, on_cpu, fake_impl=fake_impl, dispatch_key="CPU", is_composite=True
    )
    op = _on_gpu(name, on_cpu, name)
    return lambda x, *others: (op if uses_ops(x) else reference)(x, *others)


rms_norm = _op(
    "rms_norm", lambda x, weight, eps: torch.empty_like(x, memory_format=torch.contiguous_format)
)
silu_and_mul = _op(
    "silu_and_mul", lambda gate_up: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
)
# `compile.passes` defines it, because its pass writes it into graphs.
fused_add_rms_norm = _op("fused_add_rms_norm")


def integer_linear(
    x: torch.Tensor, handle: torch.Tensor, bias: torch.Tensor | None, out_features: int
) -> torch.Tensor:
    """Multiply x [T, I] with the weight of `handle`, on a GPU always one of integers."""
    product: torch.Tensor = _triton().integer_linear(x, short_numbers(handle), bias, out_features)
    return product


def scaled_linear(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    handle: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply with the FP8 or FP4 weight of `handle`: by a kernel of ours where torch does not."""
    weight = short_numbers(handle)
    assert not isinstance(weight, IntegerWeight)
    multiply = scaled_product
    if isinstance(weight, BlockScaledWeight) and weight.blocks.ndim > 1:
        multiply = _triton().fp4_linear
    elif isinstance(weight, ScaledWeight) and not multiplies_on_gpu(weight, dtype):
        multiply = _triton().fp8_linear
    return multiply(numbers, scales, weight, bias, dtype)


direct_register_custom_op("scaled_linear", scaled_linear, dispatch_key="CUDA")
# What rounds inputs is defined where passes find it.
_on_gpu("quantize_fp8_per_token", quantize_rows, "quantize_rows")
_on_gpu("quantize_fp8_per_token_group", quantize_groups, "quantize_groups")
_on_gpu("quantize_nvfp4", quantize_blocks, "quantize_blocks")
packed_linear = direct_register_custom_op("packed_linear", integer_linear, dispatch_key="CUDA")
