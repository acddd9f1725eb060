"""Sparse MLPs: a router chooses a few of many experts for each token, behind one opaque op.

1. The router scores the experts (a small product, traced like any other).
2. The op `lockstep::routed_experts` brings the tokens of all data-parallel ranks here, a chunk at
   a time: an all-gather. Ranks of one tensor-parallel group have the same tokens already.
3. It chooses each token's experts, and computes what this rank's own add.
4. It sums over the data-parallel ranks and keeps this one's tokens, a reduce-scatter, so that what
   is left to sum over the tensor-parallel ranks is short.

Every rank makes the same collectives, whatever tokens it has. The op's arguments are the same in
every layer and on every rank: a traced graph does not depend on which experts a rank holds.

Shapes: T tokens, E hidden size, X experts, Xr experts of this rank, K experts of a token, I
intermediate size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from compile.context import DPMetadata, get_forward_context
from compile.custom_op import direct_register_custom_op
from model.config import Experts
from model.families import ExpertNames
from model.kernels.cpu.packed_linear import (
    PackedWeight,
    can_pack,
    is_on_gpu,
    short_numbers,
)
from model.kernels.dispatch import kernels_for
from model.layers.linear import Linear
from model.layers.slices import WeightedLayer, WeightSlice, whole
from model.parallel import Placement, Shard
from model.quantization import form_for

CHUNK_TOKENS = 4096
"""Of each data-parallel rank at once: what all ranks' tokens take here is bounded."""


class Router(Linear):
    """Scores the experts. All of it is on every rank."""

    def __init__(
        self, hidden_size: int, experts: Experts, names: ExpertNames, place: Placement
    ) -> None:
        if experts.has_float32_router:
            place = replace(place, dtype=torch.float32)
        super().__init__(hidden_size, experts.num_experts, place, bias=False)
        self._block = names.block
        self.e_score_correction_bias = None
        if experts.has_sigmoid_scores:
            self.e_score_correction_bias = self.declare(experts.num_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, E]. Returns [T, X]."""
        return self.product(x.to(self.dtype), None)

    def weight_slices(self, name: str, held: Collection[str]) -> Iterator[WeightSlice]:
        layer, mlp, gate = name.rsplit(".", 2)
        block = mlp if _is_fused(layer, held) else self._block
        yield whole(f"{layer}.{block}.{gate}.weight", self, "weight")
        if self.e_score_correction_bias is not None:
            bias = "e_score_correction_bias"
            yield whole(f"{layer}.{block}.{gate}.{bias}", self, bias)


def _is_fused(layer: str, held: Collection[str]) -> bool:
    """Return whether all experts of a layer are one tensor, as transformers 5 may write them."""
    return f"{layer}.mlp.experts.gate_up_proj" in held


class ExpertWeights(WeightedLayer):
    """One matrix for each of this rank's experts; once packed, `handles` stand for `weight`."""

    is_quantizable = True
    handles: torch.Tensor | None

    def __init__(
        self,
        num_experts: int,
        out_features: int,
        in_features: int,
        block: str,
        parts: Sequence[str],
        place: Placement,
    ) -> None:
        """Describe matrices that join tensors, `parts` by name, of `out_features` outputs each."""
        super().__init__(place)
        self._own = place.shard.own_experts(num_experts)
        self.form = form_for(place.quantization, in_features)
        self.weight = self.declare(len(self._own), len(parts) * out_features, in_features)
        self.register_buffer("handles", None, persistent=False)
        self._packed: list[PackedWeight] = []
        self._num_experts, self._out_features = num_experts, out_features
        self._block, self._parts = block, parts

    @property
    def operand(self) -> torch.Tensor:
        """What an op computes with: the matrices [Xr, O, I], or their handles [Xr]."""
        return self.weight if self.handles is None else self.handles

    def loaded(self, name: str) -> None:
        kept = self.take_kept()
        if self.form and is_on_gpu(self.weight if kept is None else kept.numbers):
            self._packed = [PackedWeight(self.weight if kept is None else kept, self.form)]
            self.handles = self._packed[0].handle
            self.weight = self.declare(*self.weight.shape)
        elif self.form or can_pack(self.dtype, self.device):
            matrix_of = self.weight.__getitem__ if kept is None else kept.of_expert
            matrices = (matrix_of(number) for number in range(len(self._own)))
            self._packed = [PackedWeight(matrix, self.form) for matrix in matrices]
            self.handles = torch.stack([packed.handle for packed in self._packed])
            self.weight = self.declare(*self.weight.shape)

    def forget_values(self) -> None:
        self._packed = []

    def weight_slices(self, name: str, held: Collection[str]) -> Iterator[WeightSlice]:
        (layer, mlp, tensor), own = name.rsplit(".", 2), self._own
        if _is_fused(layer, held):
            shape = (self._num_experts, *self.weight.shape[1:])
            where = (slice(None), 0, own.start, own.stop)
            yield WeightSlice(f"{layer}.{mlp}.experts.{tensor}", shape, self, "weight", *where)
            return
        size = self._out_features
        for expert in range(self._num_experts):
            for i, part in enumerate(self._parts):
                published = f"{layer}.{self._block}.experts.{expert}.{part}.weight"
                row = (expert - own.start, slice(i * size, (i + 1) * size))
                # Nothing is read on a rank without this expert.
                rows, stop = (row, size) if expert in own else ((0, slice(0)), 0)
                shape = (size, self.weight.shape[2])
                yield WeightSlice(published, shape, self, "weight", rows, 0, 0, stop)


class SharedMLP(Protocol):
    """What every token goes through beside its experts, a tensor-parallel MLP."""

    @property
    def down_proj(self) -> Linear: ...

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is summed over the tensor-parallel ranks, without a bias."""


class SparseMLP(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        experts: Experts,
        names: ExpertNames,
        place: Placement,
        shared_experts: SharedMLP | None = None,
    ) -> None:
        super().__init__()
        self._experts = experts
        self.shared_experts = shared_experts
        data = place.shard.data or Shard()
        self._shard = place.shard
        self._groups = (place.shard.group_name, data.group_name)
        count, size = experts.num_experts, experts.intermediate_size
        up, back = (names.gate, names.up), (names.down,)
        self.gate = Router(hidden_size, experts, names, place)
        self.gate_up_proj = ExpertWeights(count, size, hidden_size, names.block, up, place)
        self.down_proj = ExpertWeights(count, hidden_size, size, names.block, back, place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, E], equal on the ranks of a tensor-parallel group. Returns [T, E], equal too."""
        experts, shared = self._experts, self.shared_experts
        out: torch.Tensor = routed_experts(
            x,
            self.gate(x),
            self.gate_up_proj.operand,
            self.down_proj.operand,
            experts.num_experts_per_tok,
            experts.norm_topk_prob,
            *self._groups,
            self.gate.e_score_correction_bias,
            experts.num_groups,
            experts.num_groups_per_tok,
            experts.scaling,
        )
        if shared is None:
            return self._shard.all_reduce(out)
        out = self._shard.all_reduce(out + shared.partial(x))
        return out if shared.down_proj.bias is None else out + shared.down_proj.bias


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
    correction_bias: torch.Tensor | None,
    num_groups: int,
    num_groups_per_tok: int,
    scaling: float,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, over this rank and those that compute other
    tokens; the sum over ranks that compute the same ones is left to the caller.

    x: [T, E]; router_logits: [T, X]; gate_up, down: [Xr, 2 * I, E] and [Xr, E, I], or handles of
    packed ones, int64 [Xr]; group, data_group: names, "" for one rank alone; the rest as
    `sparse_mlp.route` takes it
    """
    tensor, data = Shard.named(group), Shard.named(data_group)
    num_tokens, num_columns = x.shape
    kernels = kernels_for(x)
    first = (data.rank * tensor.size + tensor.rank) * gate_up.shape[0]
    matrices: Sequence[object] = (gate_up, down)
    if gate_up.ndim == 1 and is_on_gpu(gate_up):
        matrices = short_numbers(gate_up), short_numbers(down)

    def compute(x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        groups = (correction_bias, num_groups, num_groups_per_tok, scaling)
        experts, weights = kernels.route(router_logits, top_k, norm_topk_prob, *groups)
        out: torch.Tensor = kernels.expert_mlp(x, experts, weights, *matrices, first)
        return out

    if data.size == 1:
        return compute(x, router_logits) if num_tokens else x.clone()
    metadata = _metadata_for(num_tokens, data)
    # One collective instead of two: what travels is short where it happens most often. Scores that
    # are wider than tokens travel as the bits that they are.
    kind = router_logits.dtype
    rows, done = torch.cat((x, router_logits.view(x.dtype)), 1), []
    for index in range(-(-metadata.max_tokens_across_dp // CHUNK_TOKENS)):
        sizes = metadata.chunked_sizes(CHUNK_TOKENS, index)
        chunk = rows[CHUNK_TOKENS * index :][:CHUNK_TOKENS]
        # A rank without a token left takes part with one of padding.
        sent = chunk if len(chunk) else rows.new_zeros(1, rows.shape[1])
        everyones = data.all_gather(sent, 0, sizes)
        scores = everyones[:, num_columns:]
        if kind != x.dtype:
            scores = scores.contiguous().view(kind)
        outputs = compute(everyones[:, :num_columns], scores)
        done.append(data.reduce_scatter(outputs, sizes)[: len(chunk)])
    return done[0] if len(done) == 1 else torch.cat([x[:0], *done])


def _metadata_for(num_tokens: int, data: Shard) -> DPMetadata:
    metadata = get_forward_context().dp_metadata
    found = () if metadata is None else metadata.num_tokens_across_dp
    if metadata is None or len(found) != data.size or found[data.rank] != num_tokens:
        wanted = f"{data.size} counts with {num_tokens} at rank {data.rank}"
        raise ValueError(f"dp_metadata: wanted {wanted}, found {metadata}")
    return metadata


routed_experts = direct_register_custom_op(
    "routed_experts", _routed_experts, fake_impl=lambda x, *_: x.new_empty(x.shape)
)
