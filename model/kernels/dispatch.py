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
from model.kernels import cpu, elementwise
from model.kernels.cpu.packed_linear import short_numbers
from model.kernels.scaled_linear import BlockScaledWeight, IntegerWeight
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


def _op(name: str, fake_impl: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Register both devices' kernels as one op; return what calls it or the torch function."""
    on_cpu, reference = getattr(cpu, name), getattr(elementwise, name)

    @functools.wraps(on_cpu)
    def on_gpu(*args: Any) -> Any:
        return getattr(_triton(), name)(*args)

    direct_register_custom_op(
        name, on_cpu, fake_impl=fake_impl, dispatch_key="CPU", is_composite=True
    )
    op = direct_register_custom_op(name, on_gpu, dispatch_key="CUDA")
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


def quantize_fp8_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round inputs of a product with FP8, as `compile.passes` defines it."""
    rounded: tuple[torch.Tensor, torch.Tensor] = _triton().quantize_rows(x)
    return rounded


def quantize_nvfp4(
    x: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round inputs of a product with FP4, as `compile.passes` defines it."""
    rounded: tuple[torch.Tensor, torch.Tensor] = _triton().quantize_blocks(x, global_scale)
    return rounded


def scaled_linear(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    handle: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply with the FP8 or FP4 weight of `handle`; with FP4 that this GPU does not multiply by
    a kernel that makes it wide."""
    weight = short_numbers(handle)
    assert not isinstance(weight, IntegerWeight)
    multiply = scaled_product
    if isinstance(weight, BlockScaledWeight) and weight.blocks.ndim > 1:
        multiply = _triton().fp4_linear
    return multiply(numbers, scales, weight, bias, dtype)


direct_register_custom_op("scaled_linear", scaled_linear, dispatch_key="CUDA")
direct_register_custom_op("quantize_nvfp4", quantize_nvfp4, dispatch_key="CUDA")
direct_register_custom_op("quantize_fp8_per_token", quantize_fp8_per_token, dispatch_key="CUDA")
packed_linear = direct_register_custom_op("packed_linear", integer_linear, dispatch_key="CUDA")
