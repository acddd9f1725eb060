"""The Mistral family (Jiang et al., 2023): Llama's layers with a sliding window.

What is particular: every layer attends to the last `sliding_window` tokens only, where the
configuration names a window, and no projection has a bias.
"""

from __future__ import annotations

import torch

from model.config import ModelConfig
from model.layers.decoder import CausalLM, DecoderLayer
from model.layers.grouped_query import GroupedQueryAttention
from model.layers.mlp import GatedMLP
from model.parallel import Shard


class MistralForCausalLM(CausalLM):
    """One rank's shard of a Mistral model."""

    def __init__(
        self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device
    ) -> None:
        def make_layer(i: int) -> DecoderLayer:
            attention = GroupedQueryAttention(
                config,
                i,
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
