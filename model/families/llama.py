"""The Llama family (Touvron et al., 2023): pre-norm decoder, rotary positions, grouped KV heads.

What is particular: projections with or without biases, as the configuration says.
"""

from __future__ import annotations

import torch

from model.config import ModelConfig
from model.layers.decoder import CausalLM, DecoderLayer
from model.layers.grouped_query import GroupedQueryAttention
from model.layers.mlp import GatedMLP
from model.parallel import Shard


class LlamaForCausalLM(CausalLM):
    """One rank's shard of a Llama model."""

    def __init__(
        self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device
    ) -> None:
        def make_layer(i: int) -> DecoderLayer:
            attention = GroupedQueryAttention(
                config,
                i,
                qkv_bias=config.attention_bias,
                output_bias=config.attention_bias,
                shard=shard,
                dtype=dtype,
                device=device,
            )
            mlp = GatedMLP(
                config.hidden_size,
                config.intermediate_size,
                bias=config.mlp_bias,
                shard=shard,
                dtype=dtype,
                device=device,
            )
            return DecoderLayer(config, attention, mlp, dtype=dtype, device=device)

        super().__init__(config, make_layer, shard=shard, dtype=dtype, device=device)
