"""Which kernel computes what: Triton on a GPU, `cpu_*` and torch functions elsewhere.

On a GPU nothing here waits for the device. Grids follow from tensor shapes and from host integers,
never from what a tensor holds. Triton is imported by the first tensor that needs it; a machine
without a GPU may be without it.

Functions of attention and of experts run inside an op and are plain; so are those of sampling,
which comes behind the graph. Those of other layers are traced, so on a GPU they are opaque ops.
On a CPU torch functions are traced, because Inductor fuses them with their neighbours, and cannot
look into an op; where nothing is traced the ops run there too, each of them one pass in C++.

Shapes: T tokens, S sequences, H query heads, Hkv KV heads, D head dim, N blocks in the pool,
B tokens per block, M columns of the block table.
"""

from __future__ import annotations

import torch

from compile.custom_op import direct_register_custom_op
from compile.passes.fuse_add_rms_norm import OP_NAME as FUSED_ADD_RMS_NORM
from model.kernels import filters, sparse_mlp
from model.kernels.cpu import attention as cpu_attention
from model.kernels.cpu import elementwise as cpu_elementwise
from model.kernels.cpu.native import native_library


def uses_triton(x: torch.Tensor) -> bool:
    """Return whether Triton kernels compute on this tensor's device."""
    return x.is_cuda


def uses_ops(x: torch.Tensor) -> bool:
    """Return whether layers call the ops of this module on this tensor, not torch functions."""
    return uses_triton(x) or (not torch.compiler.is_compiling() and native_library() is not None)


# --- attention ------------------------------------------------------------------------------


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write tokens into their slots; see `paged_attention.write_kv`."""
    if uses_triton(k):
        from model.kernels.triton import rope as triton_rope

        triton_rope.write_kv(k, v, k_cache, v_cache, slot_mapping)
    else:
        cpu_attention.write_kv(k, v, k_cache, v_cache, slot_mapping)


def rope_and_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write turned keys and values into their slots; return queries and keys for attention.

    Both are turned, but for keys on a GPU, where attention reads them in the cache alone.

    Args:
        q: [T, H, D]; k, v: [T, Hkv, D]; cos, sin: [T, 1, D / 2]
        k_cache, v_cache: [N, B, Hkv, D], any strides but the last
        slot_mapping: int64 [T], block * B + offset
    """
    if uses_triton(q):
        from model.kernels.triton import rope as triton_rope

        args = (cos, sin, k_cache, v_cache, slot_mapping)
        return triton_rope.rope_and_write_kv(q, k, v, *args), k
    q, k = cpu_elementwise.rotate(q, k, cos, sin)
    cpu_attention.write_kv(k, v, k_cache, v_cache, slot_mapping)
    return q, k


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    sliding_window: int | None = None,
) -> None:
    """Attend from one token per sequence; see `paged_attention.paged_decode`."""
    args = (q, k_cache, v_cache, block_table, seq_lens, scale, out, sliding_window)
    if uses_triton(q):
        from model.kernels.triton import decode as triton_decode

        triton_decode.paged_decode(*args)
    else:
        cpu_attention.paged_decode(*args)


def paged_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    sliding_window: int | None = None,
) -> None:
    """Attend from chunks of prompts; see `paged_attention.paged_prefill`.

    What lies behind the last sequence is padding; its output is zero.
    """
    where = (k_cache, v_cache, block_table, cu_seqlens_q, seq_lens)
    if uses_triton(q):
        from model.kernels.triton import prefill as triton_prefill

        triton_prefill.paged_prefill(q, *where, scale, out, sliding_window)
    else:
        cpu_attention.paged_prefill(q, k, v, *where, scale, out, sliding_window)


# --- experts --------------------------------------------------------------------------------


def route(
    router_logits: torch.Tensor, top_k: int, norm_topk_prob: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts; see `sparse_mlp.route`."""
    if uses_triton(router_logits):
        from model.kernels.triton import routing as triton_routing

        return triton_routing.route(router_logits, top_k, norm_topk_prob)
    return sparse_mlp.route(router_logits, top_k, norm_topk_prob)


def expert_mlp(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    intermediate_size: int,
    first_expert: int,
) -> torch.Tensor:
    """Run a rank's experts on their tokens; see `sparse_mlp.expert_mlp`.

    gate_up, down: the weights, or handles of packed ones
    """
    if gate_up.ndim == 1:
        operands = (gate_up, down, intermediate_size, first_expert)
        return sparse_mlp.packed_expert_mlp(x, experts, weights, *operands)
    if uses_triton(x):
        from model.kernels.triton import experts as triton_experts

        return triton_experts.expert_mlp(x, experts, weights, gate_up, down, first_expert)
    return sparse_mlp.expert_mlp(x, experts, weights, gate_up, down, first_expert)


# --- sampling -------------------------------------------------------------------------------


def filter_top_k_top_p(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Set tokens outside of top-k and top-p to -inf; see `filters.filter_top_k_top_p`."""
    if uses_triton(logits):
        from model.kernels.triton import filters as triton_filters

        return triton_filters.filter_top_k_top_p(logits, top_k, top_p)
    return filters.filter_top_k_top_p(logits, top_k, top_p)


# --- ops of other layers --------------------------------------------------------------------


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if not uses_triton(x):
        return cpu_elementwise.rms_norm(x, weight, eps)
    from model.kernels.triton import elementwise as triton_elementwise

    return triton_elementwise.rms_norm(x, weight, eps)


def _rms_norm_fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    if not uses_triton(x):
        return cpu_elementwise.add_rms_norm(x, residual, weight, eps)
    from model.kernels.triton import elementwise as triton_elementwise

    return triton_elementwise.add_rms_norm(x, residual, weight, eps)


def _add_rms_norm_fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    if not uses_triton(gate_up):
        return cpu_elementwise.silu_and_mul(gate_up)
    from model.kernels.triton import elementwise as triton_elementwise

    return triton_elementwise.silu_and_mul(gate_up)


def _silu_and_mul_fake(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _fused_add_rms_norm_cuda(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from model.kernels.triton import elementwise as triton_elementwise

    return triton_elementwise.fused_add_rms_norm(x, residual, weight, eps)


rms_norm = direct_register_custom_op("rms_norm", _rms_norm, fake_impl=_rms_norm_fake)
add_rms_norm = direct_register_custom_op(
    "add_rms_norm", _add_rms_norm, mutates_args=["residual"], fake_impl=_add_rms_norm_fake
)
silu_and_mul = direct_register_custom_op(
    "silu_and_mul", _silu_and_mul, fake_impl=_silu_and_mul_fake
)
# The op of a graph pass, which knows torch alone.
direct_register_custom_op(
    FUSED_ADD_RMS_NORM, cpu_elementwise.fused_add_rms_norm, dispatch_key="CPU"
)
direct_register_custom_op(FUSED_ADD_RMS_NORM, _fused_add_rms_norm_cuda, dispatch_key="CUDA")
