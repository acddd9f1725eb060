"""Decoder-only models: norm, attention, gated MLP, the pre-norm layer, their stack, and the head.

A configuration and the row of its family (`model.families`) say how they are built.

Shapes: T tokens, N rows to score, E hidden size, V vocabulary, D head dim, of which positions turn
all or, in latent attention, a part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

from compile.context import get_forward_context, static_forward_context
from compile.pieces.decorator import support_torch_compile
from model import user_buffers  # noqa: F401  (registers ops that passes write into graphs)
from model.config import ModelConfig
from model.families import FAMILIES
from model.kernels import dispatch
from model.kernels.elementwise import rotate_pairs
from model.layers.attention import Attention, scale_of
from model.layers.latent_attention import LatentAttention
from model.layers.linear import (
    Linear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from model.layers.moe import SparseMLP
from model.layers.rotary import RotaryEmbedding
from model.layers.slices import WeightedLayer, WeightSlice, whole
from model.parallel import Placement

LATENT_NORM_EPS = 1e-6
"""Of the norms of latents, whatever `rms_norm_eps` says of the others."""
_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")
"""What a checkpoint has twice: in a layer that predicts further tokens, too."""


class RMSNorm(WeightedLayer):
    """Scale rows to unit mean square in float32, then by a weight in the model's dtype."""

    def __init__(self, hidden_size: int, eps: float, place: Placement) -> None:
        super().__init__(place)
        self.eps = eps
        self.weight = self.declare(hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., hidden_size]"""
        normed: torch.Tensor = dispatch.rms_norm(x, self.weight, self.eps)
        return normed

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of the sum, and the sum. x, residual: [T, hidden_size]"""
        normed, summed = dispatch.fused_add_rms_norm(x, residual, self.weight, self.eps)
        return normed, summed

    def weight_slices(self, name: str, held: Collection[str]) -> Iterator[WeightSlice]:
        yield whole(f"{name}.weight", self, "weight")


class GroupedQueryAttention(nn.Module):
    """One rank's heads of a layer (Ainslie et al., 2023), with their projections."""

    def __init__(self, config: ModelConfig, layer: int, place: Placement) -> None:
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


class MultiHeadLatentAttention(nn.Module):
    """One rank's heads of a layer whose keys and values are made of a latent (DeepSeek-V2;
    DeepSeek-AI, 2024), with its projections."""

    def __init__(self, config: ModelConfig, layer: int, place: Placement) -> None:
        super().__init__()
        assert config.latent is not None
        self._latent = latent = config.latent
        hidden, bias = config.hidden_size, config.attention_bias
        self.attn = LatentAttention(
            config.num_heads,
            latent,
            layer_name=f"model.layers.{layer}.self_attn.attn",
            place=place,
        )
        # What every rank needs all of is one product.
        self._sizes = {"kv_a_proj_with_mqa": latent.kv_rank + latent.rope_dim}
        self.q_a_layernorm, q_name, q_inputs = None, "q_proj", hidden
        if latent.q_rank is not None:
            self._sizes["q_a_proj"] = latent.q_rank
            self.q_a_layernorm = RMSNorm(latent.q_rank, LATENT_NORM_EPS, place)
            q_name, q_inputs = "q_b_proj", latent.q_rank
        self.a_proj = ReplicatedLinear(hidden, self._sizes, place, bias=bias)
        q_size = config.num_heads * (latent.nope_dim + latent.rope_dim)
        self.q_proj = MergedColumnParallelLinear(q_inputs, q_size, [q_name], place, bias=False)
        self.kv_a_layernorm = RMSNorm(latent.kv_rank, LATENT_NORM_EPS, place)
        self.o_proj = RowParallelLinear(config.num_heads * latent.v_dim, hidden, place, bias=bias)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [T, E]; cos, sin: [T, 1, D / 2] of what is rotated"""
        latent = self._latent
        kv_low, *q_low = self.a_proj(x).split(list(self._sizes.values()), dim=-1)
        q = self.q_proj(x if self.q_a_layernorm is None else self.q_a_layernorm(*q_low))
        q_heads = q.view(q.shape[0], -1, latent.nope_dim + latent.rope_dim)
        q_nope, q_pe = q_heads.split([latent.nope_dim, latent.rope_dim], dim=-1)
        c, k_pe = kv_low.split([latent.kv_rank, latent.rope_dim], dim=-1)
        q_pe = rotate_pairs(q_pe, cos, sin, latent.is_interleaved)
        k_pe = rotate_pairs(k_pe.unsqueeze(1), cos, sin, latent.is_interleaved).squeeze(1)
        attended = self.attn(q_nope, q_pe, self.kv_a_layernorm(c), k_pe)
        out: torch.Tensor = self.o_proj(attended.flatten(1))
        return out


class GatedMLP(nn.Module):
    def __init__(self, config: ModelConfig, size: int, place: Placement) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.mlp_bias
        names = ("gate_proj", "up_proj")
        self.gate_up_proj = MergedColumnParallelLinear(hidden, size, names, place, bias=bias)
        self.down_proj = RowParallelLinear(size, hidden, place, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, E]"""
        out: torch.Tensor = self.down_proj(self._gated(x))
        return out

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum that `forward` returns, without its bias."""
        return self.down_proj.product(self._gated(x), None)

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = dispatch.silu_and_mul(self.gate_up_proj(x))
        return gated


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, place: Placement) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, place)
        attention = GroupedQueryAttention if config.latent is None else MultiHeadLatentAttention
        self.self_attn = attention(config, layer, place)
        self.post_attention_layernorm = RMSNorm(hidden, eps, place)
        self.mlp = _mlp(config, layer, place)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [T, E]; cos, sin: [T, 1, D / 2]"""
        attended = self.self_attn(self.input_layernorm(x), cos, sin)
        normed, x = self.post_attention_layernorm.add(attended, x)
        out: torch.Tensor = x + self.mlp(normed)
        return out


def _mlp(config: ModelConfig, layer: int, place: Placement) -> GatedMLP | SparseMLP:
    # A layer behind the model's is like its last one.
    if config.experts is None or not config.experts.is_sparse[min(layer, config.num_layers - 1)]:
        return GatedMLP(config, config.intermediate_size, place)
    names, size = FAMILIES[config.architecture].expert_names, config.experts.shared_size
    assert names is not None
    shared = GatedMLP(config, size, place) if size else None
    return SparseMLP(config.hidden_size, config.experts, names, place, shared)


class _Projection(Linear):
    """A product that every rank has all of, and that checkpoints store plainly."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, I]. Returns [T, O]."""
        return self.product(x, None)

    def weight_slices(self, name: str, held: Collection[str]) -> Iterator[WeightSlice]:
        yield whole(f"{name}.weight", self, "weight")


class MTPLayer(DecoderLayer):
    """A layer behind the model's that predicts one token more (multi-token prediction; DeepSeek-V3,
    DeepSeek-AI, 2024). Of each position it takes the hidden state and the token behind it."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__(config, config.num_layers, place)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(hidden, eps, place)
        self.hnorm = RMSNorm(hidden, eps, place)
        self.eh_proj = _Projection(2 * hidden, hidden, place, bias=False)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(hidden, eps, place)})

    def joined(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's inputs. embedded, hidden: [T, E], of the tokens behind, and of the
        positions."""
        out: torch.Tensor = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        return out


@support_torch_compile
class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, place, scores=config.tie_word_embeddings
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, place) for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.rotary_emb = RotaryEmbedding(config.rope, config.head_dim, device=place.device)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """input_ids, positions: [T]. Returns [T, E]."""
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: torch.Tensor = self.norm(x)
        return out


class CausalLM(nn.Module):
    """One rank's shard of a decoder with a head; named as the checkpoint's tensors are."""

    def __init__(self, config: ModelConfig, place: Placement, *, has_mtp: bool = False) -> None:
        """`has_mtp`: with the one layer that predicts a token more, which runs by itself."""
        super().__init__()
        self.config = config
        self.model = Decoder(config, place)
        self.mtp = MTPLayer(config, place) if has_mtp else None
        self.lm_head = (
            self.model.embed_tokens
            if config.tie_word_embeddings
            else VocabParallelEmbedding(
                config.vocab_size, config.hidden_size, place, looks_up=False, scores=True
            )
        )

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute hidden states [T, E], equal on all ranks. input_ids, positions: int64 [T]."""
        hidden: torch.Tensor = self.model(input_ids, positions)
        return hidden

    def tokens_behind(self, input_ids: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        """Return the token behind each of the step's, int64 [T]: one of those that were drawn, or
        of those that the forward context knows. input_ids: int64 [T]; drawn: int64 [N]"""
        metadata = get_forward_context().spec_decode_metadata
        return input_ids if metadata is None else metadata.token_ids_behind(input_ids, drawn)

    def predict_ahead(
        self, token_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Run the MTP layer, which caches its own KV at the step's slots; return [T, E], of which
        `compute_logits` scores the second token behind each position.

        token_ids: int64 [T], behind `positions`, int64 [T]; hidden: [T, E], what `forward` returned
        """
        assert self.mtp is not None, "`has_mtp`"
        embedded = self.model.embed_tokens(token_ids)
        # As vLLM does, and models are trained: the second token of a sequence is not looked at.
        embedded = embedded.masked_fill((positions == 0).unsqueeze(-1), 0)
        cos, sin = self.model.rotary_emb(positions, hidden.dtype)
        out: torch.Tensor = self.mtp(self.mtp.joined(embedded, hidden), cos, sin)
        normed: torch.Tensor = self.mtp.shared_head["norm"](out)
        return normed

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Score the vocabulary: a collective, which every rank calls equally often. hidden: [N, E].

        Returns float32 [N, V] on rank 0, which samples, and None on the others.
        """
        return self.lm_head.logits(hidden)

    def attention_layers(self) -> dict[str, Attention | LatentAttention]:
        """Return the attention layers by their names in the forward context, in order."""
        kinds = Attention | LatentAttention
        found = (module for module in self.modules() if isinstance(module, kinds))
        return static_forward_context((layer.layer_name, layer) for layer in found)

    def weight_slices(self, held: Collection[str] = ()) -> Iterator[WeightSlice]:
        for name, module in self.named_modules():
            if isinstance(module, WeightedLayer):
                yield from module.weight_slices(self._published(name), held)

    def _published(self, name: str) -> str:
        """Return what checkpoints call a module."""
        is_mtp = name.startswith("mtp.")
        return f"model.layers.{self.config.num_layers}{name[3:]}" if is_mtp else name

    def is_ignored(self, tensor_name: str) -> bool:
        """Return whether a checkpoint may hold this tensor although no parameter wants it."""
        if tensor_name == "lm_head.weight":
            return self.config.tie_word_embeddings
        if self.is_extra(tensor_name) and self.mtp is None:
            return True
        # The layer's copies of the model's own embeddings and head.
        if self.is_extra(tensor_name) and tensor_name.endswith(_COPIES):
            return True
        # Read apart from weights, where the KV cache is FP8.
        if scale_of(tensor_name) is not None:
            return True
        # Older conversions stored the rotary frequencies, which follow from the configuration.
        return tensor_name.endswith(".rotary_emb.inv_freq")

    def is_extra(self, tensor_name: str) -> bool:
        """Return whether a tensor belongs to a layer that predicts further tokens."""
        first, count = self.config.num_layers, self.config.num_nextn_predict_layers
        prefixes = (f"model.layers.{layer}." for layer in range(first, first + count))
        return tensor_name.startswith(tuple(prefixes))
