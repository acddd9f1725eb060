"""Attention over the paged cache, behind one opaque op.

The op's arguments are tensors and its layer's name. Cache and metadata come from the forward
context, so a traced graph does not depend on the batch. The batch is ordered: sequences with a
single query token first.

Shapes: T tokens, S sequences, H query heads, Hkv KV heads, D head dim, M columns of a block table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from compile.context import get_forward_context
from compile.custom_op import direct_register_custom_op
from model.kernels import dispatch
from model.kernels.elementwise import rotate


@dataclass(frozen=True)
class AttentionMetadata:
    """Where a step's tokens belong.

    Invariant: the first `num_decodes` sequences have exactly one query token each, so that their
    tokens are the first `num_decodes` of the batch. A padding token's slot lies in block 0; a
    padding sequence has length 0.
    """

    num_decodes: int
    cu_seqlens_q: torch.Tensor
    """int32 [S + 1]: where each sequence's tokens start in the batch."""
    seq_lens: torch.Tensor
    """int32 [S]: tokens in the cache after this step's were written."""
    block_table: torch.Tensor
    """int32 [S, M]: each sequence's blocks in order. Entries behind its length mean nothing, nor
    those wholly before the window of a model whose layers all slide."""
    slot_mapping: torch.Tensor
    """int64 [T]: where each token's key and value go, block * block_size + offset."""


class Attention(nn.Module):
    """One layer's attention on this rank's heads; holds no weights.

    Invariant: `layer_name` is the layer's key in the forward context.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        layer_name: str,
        sliding_window: int | None = None,
    ) -> None:
        """Describe a layer; with a window a token attends to so many, itself the last."""
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.layer_name = layer_name
        self.sliding_window = sliding_window
        self.scale = head_dim**-0.5

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor | None = None,
        sin: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend; with cosines and sines, turn q and k to their positions first.

        q: [T, H, D]; k, v: [T, Hkv, D]; cos, sin: [T, 1, D / 2]. Returns [T, H, D].
        """
        if cos is not None and sin is not None and not dispatch.uses_ops(q):
            # Traced here, turning fuses with its neighbours; an op does it while it writes KV.
            q, k, cos, sin = rotate(q, cos, sin), rotate(k, cos, sin), None, None
        output = torch.empty_like(q, memory_format=torch.contiguous_format)
        unified_attention_with_output(q, k, v, output, self.layer_name, cos, sin)
        return output

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """Write the attended values into `output`; the cache already holds k and v."""
        n = metadata.num_decodes
        table, lengths = metadata.block_table, metadata.seq_lens
        if n == lengths.shape[0] == q.shape[0]:
            # A step of decodes alone, as the next lines would compute it, without eight slices.
            arguments = (table, lengths, self.scale, output, self.sliding_window)
            dispatch.paged_decode(q, k_cache, v_cache, *arguments)
            return
        if n:
            decodes = (table[:n], lengths[:n], self.scale, output[:n])
            dispatch.paged_decode(q[:n], k_cache, v_cache, *decodes, self.sliding_window)
        if n < lengths.shape[0]:
            chunks = (table[n:], metadata.cu_seqlens_q[n:], lengths[n:], self.scale, output)
            dispatch.paged_prefill(q, k, v, k_cache, v_cache, *chunks, self.sliding_window)
        elif n < q.shape[0]:
            # Tokens behind the last sequence are padding: nothing wrote their rows.
            output[n:].zero_()


def _unified_attention_with_output(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
) -> None:
    """Attend in the layer called `layer_name`, with this step's metadata and cache."""
    context = get_forward_context()
    layer: Attention = context.no_compile_layers[layer_name]
    cache = context.kv_cache_data[layer_name]
    metadata: AttentionMetadata = context.attn_metadata
    caches = (cache.k_cache, cache.v_cache)
    if cos is not None and sin is not None:
        q, k = dispatch.rope_and_write_kv(q, k, v, cos, sin, *caches, metadata.slot_mapping)
    else:
        dispatch.write_kv(k, v, *caches, metadata.slot_mapping)
    layer.attend(q, k, v, output, *caches, metadata)


unified_attention_with_output = direct_register_custom_op(
    "unified_attention_with_output",
    _unified_attention_with_output,
    mutates_args=["output"],
)
