"""Kernels for a CPU: C++ where it is built and serves the tensors, the torch reference elsewhere
(other dtypes, head dims above 256, rows that are not contiguous).

Each takes its reference's arguments and has its effect, but for the order of sums and the last bit
of an exponential. `model.kernels.triton` has the same names.
"""

from __future__ import annotations

from typing import Any

import torch

from compile.graphs.boundary import boundary
from compile.passes.fuse_add_rms_norm import add_rms_norm
from model.kernels import elementwise, latent_attention, paged_attention, sparse_mlp
from model.kernels.adapters import add_adapters as add_adapters
from model.kernels.cpu import native
from model.kernels.cpu.drawing import draw as draw
from model.kernels.cpu.drawing import penalise as penalise
from model.kernels.cpu.packed_linear import packed_products
from model.kernels.sparse_mlp import route as route


def paged_decode(*args: Any) -> None:
    """Attend, reading each byte of KV once."""
    if not _attends("paged_decode", args[:5], *args[5:]):
        boundary(paged_attention.paged_decode)(*args)


def paged_prefill(*args: Any) -> None:
    """Attend; rows behind the last sequence become zero."""
    if not _attends("paged_prefill", args[:6], *args[6:]):
        _paged_prefill(*args)


def _attends(
    name: str,
    tensors: tuple[torch.Tensor, ...],
    scale: float,
    out: torch.Tensor,
    window: int | None = None,
    kv_scales: torch.Tensor | None = None,
) -> bool:
    tensors = (*tensors, out) if kv_scales is None else (*tensors, out, kv_scales)
    return native.run(name, *tensors, scalar=scale, window=window or 0)


@boundary
def _paged_prefill(*args: Any) -> None:
    paged_attention.paged_prefill(*args)
    cu_seqlens_q, out = args[4], args[7]
    out[int(cu_seqlens_q[-1]) :].zero_()


def rope_and_write_kv(q: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    """Rotate and write in one pass over the tokens."""
    rotated = q.new_empty(q.shape)
    given = [tensor for tensor in others if tensor is not None]  # all but the scales always are
    if native.run("rope_and_write_kv", q, rotated, *given):
        return rotated
    in_torch: torch.Tensor = boundary(paged_attention.rope_and_write_kv)(q, *others)
    return in_torch


def write_latents(*args: torch.Tensor) -> None:
    boundary(latent_attention.write_latents)(*args)


def latent_decode(*args: Any) -> None:
    """Attend to latents as they are cached, reading each once for all heads."""
    latent_attention.latent_decode(*(*args, _attend_to_latents))


def _attend_to_latents(*args: Any) -> None:
    q, cache, _, table, lengths, scale, out = args
    if not native.run("latent_decode", q, cache, table, lengths, out, scalar=scale):
        boundary(paged_attention.paged_decode)(*args)


def latent_prefill(*args: Any) -> None:
    """Attend; rows behind the last sequence become zero."""
    q_nope, q_pe, cache, matrices, table, cu_seqlens_q, seq_lens, scale, out = args
    num_tokens = q_nope.shape[0]
    if num_tokens >= latent_attention.MIN_CHUNK * seq_lens.shape[0]:
        _latent_prefill(*args)
        return
    of_token, seen = latent_attention.as_decodes(cu_seqlens_q, seq_lens, num_tokens)
    latent_decode(q_nope, q_pe, cache, matrices, table[of_token], seen, scale, out)


@boundary
def _latent_prefill(*args: Any) -> None:
    latent_attention.latent_prefill(*args)
    *_, cu_seqlens_q, _, _, out = args
    out[int(cu_seqlens_q[-1] - cu_seqlens_q[0]) :].zero_()


def expert_mlp(*args: Any) -> torch.Tensor:
    """Multiply with plain experts, or with packed ones, whose handles are int64 [Xr]."""
    x, experts, weights, gate_up, down, first_expert = args
    kind = sparse_mlp.plain_products if gate_up.ndim > 1 else packed_products
    return sparse_mlp.expert_mlp(x, experts, weights, gate_up, down, first_expert, kind)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm of rows, contiguous. x: [T, E] or [T, H, D]; weight: [E] or [D]."""
    normed = x.new_empty(x.shape)
    if native.run("rms_norm", x, weight, normed, scalar=eps):
        return normed
    return elementwise.rms_norm(x, weight, eps).contiguous()


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of the sum, and the sum. x, residual: [T, E]; weight: [E]."""
    normed, summed = x.new_empty(x.shape), x.new_empty(x.shape)
    if native.run("fused_add_rms_norm", x, residual, weight, normed, summed, scalar=eps):
        return normed, summed
    return add_rms_norm(x, residual, weight, eps)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, contiguous. gate_up: [T, 2 * n], gate first."""
    out = gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
    if native.run("silu_and_mul", gate_up, out):
        return out
    return elementwise.silu_and_mul(gate_up).contiguous()
