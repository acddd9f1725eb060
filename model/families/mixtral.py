"""The Mixtral family (Jiang et al., 2024): Mistral's attention, and experts in place of each MLP.

What is particular: every layer has experts, and the weights of those that a token is routed to
are scaled to the sum 1.
"""

from __future__ import annotations

import torch

from model.config import ModelConfig
from model.layers.decoder import CausalLM, DecoderLayer
from model.layers.grouped_query import GroupedQueryAttention
from model.layers.moe import ExpertNames, SparseMLP
from model.parallel import Shard

NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")


class MixtralForCausalLM(CausalLM):
    """One rank's shard of a Mixtral model."""

    def __init__(
        self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device
    ) -> None:
        experts = config.experts
        assert experts is not None

        def make_layer(i: int) -> DecoderLayer:
            attention = GroupedQueryAttention(config, i, shard=shard, dtype=dtype, device=device)
            mlp = SparseMLP(
                config.hidden_size, experts, NAMES, shard=shard, dtype=dtype, device=device
            )
            return DecoderLayer(config, attention, mlp, dtype=dtype, device=device)

        super().__init__(config, make_layer, shard=shard, dtype=dtype, device=device)
