"""Which kernel computes what: those of `kernels.triton` on a GPU, of `kernels.cpu` elsewhere.

On a GPU nothing here waits for the device. Grids follow from tensor shapes and from host integers,
never from what a tensor holds. Triton is imported by the first tensor that needs it; a machine
without a GPU may be without it.

Functions of attention and of experts run inside an op and are plain; so are those of sampling,
which comes behind the graph. Those of other layers are traced, so on a GPU they are opaque ops.
On a CPU torch functions are traced, because Inductor fuses them with their neighbours, and cannot
look into an op; where nothing is traced the ops run there too, each of them one pass in C++.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from compile.custom_op import direct_register_custom_op
from compile.passes.fuse_add_rms_norm import OP_NAME as FUSED_ADD_RMS_NORM
from model.kernels import cpu
from model.kernels.cpu.native import native_library


def uses_triton(x: torch.Tensor) -> bool:
    """Return whether Triton kernels compute on this tensor's device."""
    return x.is_cuda


def uses_ops(x: torch.Tensor) -> bool:
    """Return whether layers call the ops of this module on this tensor, not torch functions."""
    return uses_triton(x) or (not torch.compiler.is_compiling() and native_library() is not None)


def kernels_for(x: torch.Tensor) -> ModuleType:
    """Return the kernels of this tensor's device."""
    if not uses_triton(x):
        return cpu
    from model.kernels import triton

    return triton


def _by_device(name: str) -> Callable[..., Any]:
    """Return a function that calls the kernel of this name for its first argument's device."""

    def call(x: torch.Tensor, *args: Any) -> Any:
        return getattr(kernels_for(x), name)(x, *args)

    return call


# Of attention.
write_kv = _by_device("write_kv")
rope_and_write_kv = _by_device("rope_and_write_kv")
paged_decode = _by_device("paged_decode")
paged_prefill = _by_device("paged_prefill")
# Of experts.
route = _by_device("route")
expert_mlp = _by_device("expert_mlp")
# Of sampling.
filter_top_k_top_p = _by_device("filter_top_k_top_p")


# --- ops of other layers --------------------------------------------------------------------


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    normed: torch.Tensor = kernels_for(x).rms_norm(x, weight, eps)
    return normed


def _rms_norm_fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    normed: torch.Tensor = kernels_for(x).add_rms_norm(x, residual, weight, eps)
    return normed


def _add_rms_norm_fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gated: torch.Tensor = kernels_for(gate_up).silu_and_mul(gate_up)
    return gated


def _silu_and_mul_fake(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _fused_add_rms_norm_cuda(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from model.kernels import triton

    return triton.fused_add_rms_norm(x, residual, weight, eps)


rms_norm = direct_register_custom_op("rms_norm", _rms_norm, fake_impl=_rms_norm_fake)
add_rms_norm = direct_register_custom_op(
    "add_rms_norm", _add_rms_norm, mutates_args=["residual"], fake_impl=_add_rms_norm_fake
)
silu_and_mul = direct_register_custom_op(
    "silu_and_mul", _silu_and_mul, fake_impl=_silu_and_mul_fake
)
# The op of a graph pass, which knows torch alone.
direct_register_custom_op(FUSED_ADD_RMS_NORM, cpu.fused_add_rms_norm, dispatch_key="CPU")
direct_register_custom_op(FUSED_ADD_RMS_NORM, _fused_add_rms_norm_cuda, dispatch_key="CUDA")
