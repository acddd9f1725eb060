"""The Mistral family (Jiang et al., 2023): Llama's layers with a sliding window.

What is particular: every layer attends to the last `sliding_window` tokens only, where the
configuration names a window, and no projection has a bias.

Shapes: T tokens, E hidden size, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from model.config import ModelConfig
from model.layers.attention import Attention
from model.layers.decoder import CausalLM, DecoderLayer
from model.layers.linear import QKVParallelLinear, RowParallelLinear
from model.layers.mlp import GatedMLP
from model.layers.slices import WeightSlice
from model.parallel import Shard


class MistralAttention(nn.Module):
    """Projections and rotary positions around a layer's attention."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        layer: int,
    ) -> None:
        super().__init__()
        head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            head_dim,
            bias=False,
            shard=shard,
            dtype=dtype,
            device=device,
        )
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            head_dim,
            layer_name=f"model.layers.{layer}.self_attn.attn",
            sliding_window=config.layer_windows[layer],
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * head_dim,
            config.hidden_size,
            bias=False,
            shard=shard,
            dtype=dtype,
            device=device,
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [T, E]; cos, sin: [T, 1, D / 2]"""
        q, k, v = self.qkv_proj.split(self.qkv_proj(x))
        attended = self.attn(q, k, v, cos, sin)
        out: torch.Tensor = self.o_proj(attended.flatten(1))
        return out

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        yield from self.qkv_proj.weight_slices(f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        yield from self.o_proj.weight_slices(f"{name}.o_proj")


class MistralForCausalLM(CausalLM):
    """One rank's shard of a Mistral model."""

    def __init__(
        self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device
    ) -> None:
        def make_layer(i: int) -> DecoderLayer:
            attention = MistralAttention(config, shard, dtype, device, i)
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
