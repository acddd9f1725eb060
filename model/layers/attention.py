"""Attention over the paged cache, behind one opaque op.

The op's arguments are tensors and its layer's name. Cache and metadata come from the forward
context, so a traced graph does not depend on the batch. The batch is ordered: sequences with a
single query token first.

Shapes: T tokens, S sequences, H query heads, Hkv KV heads, D head dim, M columns of a block table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn

from compile.context import get_forward_context
from compile.custom_op import direct_register_custom_op
from model.kernels.dispatch import kernels_for

_SCALE = re.compile(
    r"(.+\.self_attn)\.(?:(?:attn\.|[qkv]_proj\.|qkv_proj\.)?([qkv])_scale"
    r"|([kv])_proj\.output_scale)"
)


def scale_of(tensor_name: str) -> tuple[str, str] | None:
    """Return which attention and what of it, q, k or v, a tensor of a checkpoint scales, in all
    spellings that vLLM takes; None for other tensors."""
    found = _SCALE.fullmatch(tensor_name)
    return None if found is None else (found[1], found[2] or found[3])


@dataclass(frozen=True)
class AttentionMetadata:
    """Where a step's tokens belong. Invariant: the first `num_decodes` sequences, and so tokens,
    have one query token each. A padding token's slot lies in block 0; a padding sequence has length
    0."""

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
    """One layer's attention on this rank's heads; holds no weights but the scales of its cache."""

    has_values = True

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        *,
        layer_name: str,
        sliding_window: int | None = None,
    ) -> None:
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.layer_name = layer_name
        self.sliding_window = sliding_window
        self.scale = head_dim**-0.5
        self.kv_scales: torch.Tensor | None = None
        """float32 [2, Hkv], of keys and of values, set with weights where the cache is e4m3; else
        None. The op reads them, so that layers stay alike in a traced graph."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """Rotate, write and attend. q: [T, H, D]; k, v: [T, Hkv, D]; cos, sin: [T, 1, D / 2]."""
        output = torch.empty_like(q, memory_format=torch.contiguous_format)
        unified_attention_with_output(q, k, v, cos, sin, output, self.layer_name)
        return output


def _unified_attention_with_output(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
) -> None:
    """Attend in the layer called `layer_name`, with this step's metadata and cache."""
    context = get_forward_context()
    layer: Attention = context.no_compile_layers[layer_name]
    cache = context.kv_cache_data[layer_name]
    caches = (cache.k_cache, cache.v_cache)
    metadata: AttentionMetadata = context.attn_metadata
    kernels = kernels_for(q)
    scales = layer.kv_scales
    q = kernels.rope_and_write_kv(q, k, v, cos, sin, *caches, metadata.slot_mapping, scales)
    n, table, lengths = metadata.num_decodes, metadata.block_table, metadata.seq_lens
    if n == lengths.shape[0] == q.shape[0]:
        # A step of decodes alone, as the next lines would compute it, without eight slices.
        decodes = (table, lengths, layer.scale, output)
        kernels.paged_decode(q, *caches, *decodes, layer.sliding_window, scales)
        return
    if n:
        decodes = (table[:n], lengths[:n], layer.scale, output[:n])
        kernels.paged_decode(q[:n], *caches, *decodes, layer.sliding_window, scales)
    if n < lengths.shape[0]:
        chunks = (table[n:], metadata.cu_seqlens_q[n:], lengths[n:], layer.scale, output)
        kernels.paged_prefill(q, *caches, *chunks, layer.sliding_window, scales)
    elif n < q.shape[0]:
        # Tokens behind the last sequence are padding: nothing wrote their rows.
        output[n:].zero_()


unified_attention_with_output = direct_register_custom_op(
    "unified_attention_with_output",
    _unified_attention_with_output,
    mutates_args=["output"],
    # Token ids and positions are two inputs: this tells a trace that their lengths are one.
    fake_impl=lambda q, k, v, cos, *_: torch._check(cos.shape[0] == q.shape[0]),
    is_composite=True,
)
