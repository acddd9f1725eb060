"""The Qwen3-MoE family (Yang et al., 2025): Qwen3's attention, and experts in most layers.

What is particular: which layers have experts is the configuration's choice, as is whether a
token's weights are scaled to the sum 1. The other layers have a dense MLP of another size.
"""

from __future__ import annotations

import torch

from model.config import ModelConfig
from model.layers.decoder import CausalLM, DecoderLayer
from model.layers.grouped_query import GroupedQueryAttention
from model.layers.mlp import GatedMLP
from model.layers.moe import ExpertNames, SparseMLP
from model.parallel import Shard

NAMES = ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj")


class Qwen3MoeForCausalLM(CausalLM):
    """One rank's shard of a Qwen3-MoE model."""

    def __init__(
        self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device
    ) -> None:
        def make_mlp(i: int) -> GatedMLP | SparseMLP:
            hidden_size, experts = config.hidden_size, config.experts
            if experts is not None and experts.is_sparse[i]:
                return SparseMLP(
                    hidden_size, experts, NAMES, shard=shard, dtype=dtype, device=device
                )
            return GatedMLP(
                hidden_size,
                config.intermediate_size,
                bias=False,
                shard=shard,
                dtype=dtype,
                device=device,
            )

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
            return DecoderLayer(config, attention, make_mlp(i), dtype=dtype, device=device)

        super().__init__(config, make_layer, shard=shard, dtype=dtype, device=device)
