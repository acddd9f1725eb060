"""The Qwen2 family (Yang et al., 2024): Llama's layers with biases on queries, keys and values.

What is particular: those biases, and that layers may slide from `max_window_layers` on, or as
`layer_types` says.
"""

from __future__ import annotations

import torch

from model.config import ModelConfig
from model.layers.decoder import CausalLM, DecoderLayer
from model.layers.grouped_query import GroupedQueryAttention
from model.layers.mlp import GatedMLP
from model.parallel import Shard


class Qwen2ForCausalLM(CausalLM):
    """One rank's shard of a Qwen2 model."""

    def __init__(
        self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device
    ) -> None:
        def make_layer(i: int) -> DecoderLayer:
            attention = GroupedQueryAttention(
                config,
                i,
                qkv_bias=True,
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
