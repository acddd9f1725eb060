"""Multi-head latent attention over the paged cache, behind one opaque op, as `layers.attention` is.

The op absorbs the matrix that makes keys and values of latents (`kernels.latent_attention`), so a
layer holds that matrix, once. A latent serves all heads: every rank of a tensor-parallel group
caches all of it.

Shapes: T tokens, H query heads of this rank, n and p the head dim without and with positions, v of
values, r of a latent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from compile.context import get_forward_context
from compile.custom_op import direct_register_custom_op
from model.config import Latent
from model.kernels.dispatch import kernels_for
from model.layers.attention import AttentionMetadata
from model.layers.slices import WeightedLayer, WeightSlice
from model.parallel import Placement


class LatentAttention(WeightedLayer):
    """One layer's attention on this rank's heads. `weight` is [H * (n + v), r], each head's keys
    first, and stays plain, since it is multiplied from either side."""

    is_quantizable = True
    num_kv_heads, has_values = 1, False

    def __init__(
        self, num_heads: int, latent: Latent, *, layer_name: str, place: Placement
    ) -> None:
        super().__init__(place)
        self.layer_name = layer_name
        self.head_dim = latent.kv_rank + latent.rope_dim
        self.scale = latent.scale
        self._latent = latent
        self._num_heads = place.shard.divide("num_attention_heads", num_heads)
        self._rows = num_heads * (latent.nope_dim + latent.v_dim)
        self._first = place.shard.rank * self._rows // place.shard.size
        self.weight = self.declare(self._rows // place.shard.size, latent.kv_rank)

    @property
    def matrices(self) -> torch.Tensor:
        """[H, n + v, r]"""
        return self.weight.view(self._num_heads, -1, self._latent.kv_rank)

    def forward(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, c: torch.Tensor, k_pe: torch.Tensor
    ) -> torch.Tensor:
        """Write and attend. q_nope: [T, H, n]; q_pe: [T, H, p], rotated; c: [T, r], normed; k_pe:
        [T, p], rotated. Returns [T, H, v]."""
        output = q_nope.new_empty(q_nope.shape[0], self._num_heads, self._latent.v_dim)
        mla_attention(q_nope, q_pe, c, k_pe, output, self.layer_name)
        return output

    def weight_slices(self, name: str, held: Collection[str]) -> Iterator[WeightSlice]:
        tensor = f"{name.rpartition('.')[0]}.kv_b_proj.weight"
        shape = (self._rows, self.weight.shape[1])
        start, stop = self._first, self._first + self.weight.shape[0]
        yield WeightSlice(tensor, shape, self, "weight", slice(None), 0, start, stop)


def _mla_attention(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    c: torch.Tensor,
    k_pe: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
) -> None:
    """Attend in the layer called `layer_name`, with this step's metadata and cache."""
    context = get_forward_context()
    layer: LatentAttention = context.no_compile_layers[layer_name]
    cache = context.kv_cache_data[layer_name].k_cache
    metadata: AttentionMetadata = context.attn_metadata
    kernels = kernels_for(q_nope)
    kernels.write_latents(c, k_pe, cache, metadata.slot_mapping)
    held = (cache, layer.matrices)
    n, table, lengths = metadata.num_decodes, metadata.block_table, metadata.seq_lens
    if n:
        decodes = (table[:n], lengths[:n], layer.scale, output[:n])
        kernels.latent_decode(q_nope[:n], q_pe[:n], *held, *decodes)
    if n < lengths.shape[0]:
        chunks = (table[n:], metadata.cu_seqlens_q[n:], lengths[n:], layer.scale, output[n:])
        kernels.latent_prefill(q_nope[n:], q_pe[n:], *held, *chunks)
    elif n < q_nope.shape[0]:
        # Tokens behind the last sequence are padding: nothing wrote their rows.
        output[n:].zero_()


mla_attention = direct_register_custom_op(
    "mla_attention", _mla_attention, mutates_args=["output"], is_composite=True
)
