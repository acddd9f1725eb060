"""Grouped-query attention (Ainslie et al., 2023) with its projections and rotary positions.

Families differ in their biases, in windows, and in whether heads are normalised before they
are rotated.

Shapes: T tokens, E hidden size, D head dim.
"""

from __future__ import annotations

import torch
from torch import nn

from model.config import ModelConfig
from model.families import FAMILIES
from model.layers.attention import Attention
from model.layers.linear import QKVParallelLinear, RowParallelLinear
from model.layers.norm import RMSNorm
from model.parallel import Placement


class GroupedQueryAttention(nn.Module):
    """The attention of one layer. Its window, if it has one, is the configuration's for it."""

    def __init__(self, config: ModelConfig, layer: int, place: Placement) -> None:
        """Build one rank's heads of layer `layer`."""
        super().__init__()
        family, head_dim = FAMILIES[config.architecture], config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            head_dim,
            place,
            bias=family.has_qkv_bias or config.attention_bias,
        )
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            head_dim,
            layer_name=f"model.layers.{layer}.self_attn.attn",
            sliding_window=config.layer_windows[layer],
        )
        self.q_norm = self.k_norm = None
        if family.has_head_norms:
            # Every head has the same norm, so every rank holds all of it.
            self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, place)
            self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, place)
        self.o_proj = RowParallelLinear(
            config.num_heads * head_dim, config.hidden_size, place, bias=config.attention_bias
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [T, E]; cos, sin: [T, 1, D / 2]"""
        q, k, v = self.qkv_proj.split(self.qkv_proj(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        attended = self.attn(q, k, v, cos, sin)
        out: torch.Tensor = self.o_proj(attended.flatten(1))
        return out
