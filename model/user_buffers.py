"""User buffers: sums over ranks of what a product has written where the other ranks read it.

`compile.passes.user_buffers` writes these ops into graphs. A rank has one buffer in a group, which
is free again behind the op that sums: that ends with an exchange in which every rank says that it
has read. Where ranks share no memory, products and sums are the usual ones.

Shapes: T tokens, I inputs, O outputs, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compile.custom_op import direct_register_custom_op
from model.kernels.cpu.packed_linear import packed_linear_into
from model.parallel import Shard, communicator_of


def _buffer_for(shape: Sequence[int], x: torch.Tensor, group_name: str) -> torch.Tensor:
    near = communicator_of(group_name)
    found = None if near is None else near.user_buffer(shape, x.dtype)
    return x.new_empty(shape) if found is None else found


def _copy(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return _buffer_for(x.shape, x, group_name).copy_(x)


def _mm(x: torch.Tensor, weight: torch.Tensor, group_name: str) -> torch.Tensor:
    """x: [T, I]; weight: [I, O]. Returns [T, O]."""
    return torch.mm(x, weight, out=_buffer_for((x.shape[0], weight.shape[1]), x, group_name))


def _packed_linear(
    x: torch.Tensor,
    handle: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    group_name: str,
) -> torch.Tensor:
    """x: [T, I]; handle: of a packed weight. Returns [T, O]."""
    buffer = _buffer_for((x.shape[0], out_features), x, group_name)
    return packed_linear_into(buffer, x, handle, bias)


def _all_reduce_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of residual plus the ranks' sum of x, and that sum with the residual, of
    which only this rank's rows are set; of the residual only they are read. x is overwritten where
    ranks share no memory. x, residual: [T, E]; weight: [E]."""
    near, rows = communicator_of(group_name), Shard.named(group_name).slice(len(x))
    own = x.new_empty(residual[rows].shape)
    if near is None or not near.reduce_scatter(x, own):
        normed, summed = torch.ops.lockstep.all_reduce_add_rms_norm(
            x, residual, weight, eps, group_name
        )
        return normed, summed
    normed, summed = torch.empty_like(residual), torch.empty_like(residual)
    if len(own):
        parts = torch.ops.lockstep.fused_add_rms_norm(own, residual[rows], weight, eps)
        normed[rows], summed[rows] = parts
    near.gather_rows(normed)
    return normed, summed


def _finalize(summed: torch.Tensor, group_name: str) -> None:
    """Set all rows of a sum of which each rank has its own. summed: [T, E]."""
    near = communicator_of(group_name)
    if near is not None:
        near.gather_rows(summed)


direct_register_custom_op(
    "copy_to_user_buffers",
    _copy,
    fake_impl=lambda x, _: x.new_empty(x.shape),
    is_composite=True,
)
direct_register_custom_op(
    "mm_to_user_buffers",
    _mm,
    fake_impl=lambda x, weight, _: x.new_empty(x.shape[0], weight.shape[1]),
    is_composite=True,
)
direct_register_custom_op(
    "packed_linear_to_user_buffers",
    _packed_linear,
    fake_impl=lambda x, handle, bias, n, _: x.new_empty(x.shape[0], n),
    is_composite=True,
)
direct_register_custom_op(
    "user_buffers_all_reduce_add_rms_norm",
    _all_reduce_add_rms_norm,
    mutates_args=["x"],
    fake_impl=lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)),
)
direct_register_custom_op("user_buffers_finalize", _finalize, mutates_args=["summed"])
