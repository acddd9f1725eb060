"""The Qwen3 family (Yang et al., 2025): Qwen2's layers with normalised queries and keys.

What is particular: each head of queries and keys is normalised before it is turned, the head dim
does not follow from the hidden size, and biases are the configuration's choice. Layers may slide
as in Qwen2.
"""

from __future__ import annotations

import torch

from model.config import ModelConfig
from model.layers.decoder import CausalLM, DecoderLayer
from model.layers.grouped_query import GroupedQueryAttention
from model.layers.mlp import GatedMLP
from model.parallel import Shard


class Qwen3ForCausalLM(CausalLM):
    """One rank's shard of a Qwen3 model."""

    def __init__(
        self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device
    ) -> None:
        def make_layer(i: int) -> DecoderLayer:
            attention = GroupedQueryAttention(
                config,
                i,
                qkv_bias=config.attention_bias,
                output_bias=config.attention_bias,
                normalises_heads=True,
                shard=shard,
                dtype=dtype,
                device=device,
            )
            mlp = GatedMLP(
                config.hidden_size,
                config.intermediate_size,
                bias=False,
                shard=shard,
                dtype=dtype,
                device=device,
            )
            return DecoderLayer(config, attention, mlp, dtype=dtype, device=device)

        super().__init__(config, make_layer, shard=shard, dtype=dtype, device=device)
