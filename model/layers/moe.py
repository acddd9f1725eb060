"""Sparse MLPs: a router chooses a few of many experts for each token, behind one opaque op.

1. The router scores the experts (a small product, traced like any other).
2. The op `lockstep::routed_experts` brings the tokens of all data-parallel ranks here, a chunk at
   a time, chooses each token's experts, computes this rank's, and sums over the ranks
   (`ExpertShard`).

The op's arguments are tensors and the names of groups, the same in every layer and on every rank. A
traced graph does not depend on which experts a rank holds or how many.

Shapes: T tokens, E hidden size, X experts, Xr experts of this rank, K experts of a token,
I intermediate size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

from compile.context import DPMetadata, get_forward_context
from compile.custom_op import direct_register_custom_op
from model.config import Experts
from model.families import ExpertNames
from model.kernels.cpu.packed_linear import PackedWeight, can_pack
from model.kernels.dispatch import kernels_for
from model.layers.linear import ReplicatedLinear
from model.layers.slices import WeightedLayer, WeightSlice
from model.parallel import ExpertShard, Placement, Shard

CHUNK_TOKENS = 4096
"""Of each data-parallel rank at once: what all ranks' tokens take here is bounded, however long
their steps are."""


FUSED = "mlp.experts"
"""Where transformers 5 writes all experts of a layer as one tensor, if it is told to."""


class ExpertWeights(WeightedLayer):
    """One projection of this rank's experts, one matrix for each.

    Invariant: once packed, `weight` keeps its shape and dtype alone, and `handles` stand for it.
    """

    handles: torch.Tensor | None

    def __init__(
        self,
        num_experts: int,
        parts: int,
        out_features: int,
        in_features: int,
        place: Placement,
    ) -> None:
        """Describe matrices that join `parts` tensors of `out_features` outputs each."""
        super().__init__(place)
        shard = ExpertShard.of(place.shard)
        num_local = shard.divide(num_experts)
        self.weight = self.declare(num_local, parts * out_features, in_features)
        self.register_buffer("handles", None, persistent=False)
        self.is_fused = False
        self._packed: list[PackedWeight] = []
        self._own = range(shard.rank * num_local, (shard.rank + 1) * num_local)
        self._num_experts, self._out_features = num_experts, out_features

    @property
    def operand(self) -> torch.Tensor:
        """What an op computes with: the matrices [Xr, O, I], or their handles [Xr]."""
        return self.weight if self.handles is None else self.handles

    def read_names(self, names: Collection[str]) -> None:
        self.is_fused = any(name.endswith(f".{FUSED}.gate_up_proj") for name in names)

    def loaded(self, name: str) -> None:
        if can_pack(self.dtype, self.device):
            self._packed = [PackedWeight(matrix) for matrix in self.weight]
            self.handles = torch.stack([packed.handle for packed in self._packed])
            self.weight = self.declare(*self.weight.shape)

    def forget_values(self) -> None:
        self._packed = []

    def fused_slice(self, name: str) -> WeightSlice:
        """Describe one tensor of all experts."""
        shape = (self._num_experts, *self.weight.shape[1:])
        own = (self._own.start, self._own.stop)
        return WeightSlice(name, shape, self, "weight", slice(None), 0, *own)

    def expert_slice(self, name: str, expert: int, part: int) -> WeightSlice:
        """Describe a tensor of one expert; nothing of it is read on a rank without that expert."""
        size, is_own = self._out_features, expert in self._own
        shape = (size, self.weight.shape[2])
        row = (expert - self._own.start, slice(part * size, (part + 1) * size))
        rows, stop = (row, size) if is_own else ((0, slice(0)), 0)
        return WeightSlice(name, shape, self, "weight", rows, 0, 0, stop)


class SparseMLP(nn.Module):
    """A router and its experts, in place of a layer's gated MLP."""

    def __init__(
        self, hidden_size: int, experts: Experts, names: ExpertNames, place: Placement
    ) -> None:
        super().__init__()
        self._experts, self._names = experts, names
        grid = ExpertShard.of(place.shard)
        self._groups = (grid.tensor.group_name, grid.data.group_name)
        count, size = experts.num_experts, experts.intermediate_size
        self.gate = ReplicatedLinear(hidden_size, count, place)
        self.gate_up_proj = ExpertWeights(count, 2, size, hidden_size, place)
        self.down_proj = ExpertWeights(count, 1, hidden_size, size, place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, E], equal on the ranks of a tensor-parallel group. Returns [T, E], equal too."""
        out: torch.Tensor = routed_experts(
            x,
            self.gate(x),
            self.gate_up_proj.operand,
            self.down_proj.operand,
            self._experts.num_experts_per_tok,
            self._experts.norm_topk_prob,
            *self._groups,
        )
        return out

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        """Describe the checkpoint's tensors; a family may call the block otherwise than `name`."""
        layer, _, _ = name.rpartition(".")
        if self.gate_up_proj.is_fused:
            yield from self.gate.weight_slices(f"{layer}.mlp.gate")
            yield self.gate_up_proj.fused_slice(f"{layer}.{FUSED}.gate_up_proj")
            yield self.down_proj.fused_slice(f"{layer}.{FUSED}.down_proj")
            return
        names, block = self._names, f"{layer}.{self._names.block}"
        yield from self.gate.weight_slices(f"{block}.gate")
        for i in range(self._experts.num_experts):
            expert = f"{block}.experts.{i}"
            yield self.gate_up_proj.expert_slice(f"{expert}.{names.gate}.weight", i, 0)
            yield self.gate_up_proj.expert_slice(f"{expert}.{names.up}.weight", i, 1)
            yield self.down_proj.expert_slice(f"{expert}.{names.down}.weight", i, 0)


# --- the op -------------------------------------------------------------------------------------


def _routed_experts(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    norm_topk_prob: bool,
    group: str,
    data_group: str,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, over all ranks that hold some.

    Args:
        x: [T, E]; router_logits: [T, X]
        gate_up, down: [Xr, 2 * I, E] and [Xr, E, I], or handles of packed ones, int64 [Xr]
        group, data_group: names of this rank's tensor-parallel and data-parallel group; "" for one
            rank alone
    """
    shard = ExpertShard(Shard.named(group), Shard.named(data_group))
    num_tokens, num_columns = x.shape
    kernels, first = kernels_for(x), shard.rank * gate_up.shape[0]

    def compute(x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        experts, weights = kernels.route(router_logits, top_k, norm_topk_prob)
        out: torch.Tensor = kernels.expert_mlp(x, experts, weights, gate_up, down, first)
        return out

    if shard.data.size == 1:
        return shard.tensor.all_reduce(compute(x, router_logits)) if num_tokens else x.clone()
    metadata = _metadata_for(num_tokens, shard.data)
    # One collective instead of two: what travels is short where it happens most often.
    rows, done = torch.cat((x, router_logits), 1), []
    for index in range(-(-metadata.max_tokens_across_dp // CHUNK_TOKENS)):
        sizes = metadata.chunked_sizes(CHUNK_TOKENS, index)
        chunk = rows[CHUNK_TOKENS * index :][:CHUNK_TOKENS]
        # A rank without a token left takes part with one of padding.
        sent = chunk if len(chunk) else rows.new_zeros(1, rows.shape[1])
        everyones = shard.dispatch(sent, sizes)
        outputs = compute(everyones[:, :num_columns], everyones[:, num_columns:])
        done.append(shard.combine(outputs, sizes)[: len(chunk)])
    return done[0] if len(done) == 1 else torch.cat([x[:0], *done])


def _routed_experts_fake(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)


def _metadata_for(num_tokens: int, data: Shard) -> DPMetadata:
    """Return how many tokens each data-parallel rank computes in this step, padding included.

    Raises:
        ValueError: the step's metadata does not say so, or says otherwise of this rank.
    """
    metadata = get_forward_context().dp_metadata
    found = () if metadata is None else metadata.num_tokens_across_dp
    if metadata is None or len(found) != data.size or found[data.rank] != num_tokens:
        wanted = f"{data.size} counts with {num_tokens} at rank {data.rank}"
        raise ValueError(f"dp_metadata: wanted {wanted}, found {metadata}")
    return metadata


routed_experts = direct_register_custom_op(
    "routed_experts", _routed_experts, fake_impl=_routed_experts_fake
)
