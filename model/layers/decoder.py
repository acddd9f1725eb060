"""What decoder-only families share: the pre-norm layer, the stack of them, and the head.

A family hands in its attention and MLP modules; nothing here asks which family it is.

Shapes: T tokens, N rows to score, E hidden size, V vocabulary, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Protocol

import torch
from torch import nn

from compile.context import static_forward_context
from compile.pieces.decorator import support_torch_compile
from model.config import ModelConfig
from model.layers.attention import Attention
from model.layers.linear import VocabParallelEmbedding
from model.layers.norm import RMSNorm
from model.layers.rotary import RotaryEmbedding
from model.layers.slices import WeightedLayer, WeightSlice
from model.parallel import Shard


class SelfAttention(Protocol):
    """A family's attention: projections and rotary positions around a layer's `Attention`."""

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [T, E]; cos, sin: [T, 1, D / 2]"""

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        """Describe the checkpoint's tensors."""


class FeedForward(Protocol):
    """A family's part of a layer that works on each token alone."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, E]"""

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        """Describe the checkpoint's tensors."""


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(
        self,
        config: ModelConfig,
        self_attn: SelfAttention,
        mlp: FeedForward,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.mlp = mlp

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: [T, E]; cos, sin: [T, 1, D / 2]"""
        attended = self.self_attn(self.input_layernorm(x), cos, sin)
        normed, x = self.post_attention_layernorm.add(attended, x)
        return x + self.mlp(normed)

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        """Describe the checkpoint's tensors."""
        yield from self.input_layernorm.weight_slices(f"{name}.input_layernorm")
        yield from self.self_attn.weight_slices(f"{name}.self_attn")
        yield from self.post_attention_layernorm.weight_slices(f"{name}.post_attention_layernorm")
        yield from self.mlp.weight_slices(f"{name}.mlp")


@support_torch_compile
class Decoder(nn.Module):
    """Tokens and positions to hidden states."""

    def __init__(
        self,
        config: ModelConfig,
        layers: list[DecoderLayer],
        *,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            shard=shard,
            dtype=dtype,
            device=device,
            scores=config.tie_word_embeddings,
        )
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.rotary_emb = RotaryEmbedding(config.rope, config.head_dim, device=device)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """input_ids, positions: [T]. Returns [T, E]."""
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: torch.Tensor = self.norm(x)
        return out

    def weight_slices(self, name: str) -> Iterator[WeightSlice]:
        """Describe the checkpoint's tensors."""
        yield from self.embed_tokens.weight_slices(f"{name}.embed_tokens")
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from layer.weight_slices(f"{name}.layers.{i}")
        yield from self.norm.weight_slices(f"{name}.norm")


class CausalLM(nn.Module):
    """One rank's shard of a decoder with a head over the vocabulary.

    Invariant: modules and layer names follow the checkpoint's tensor names.
    """

    def __init__(
        self,
        config: ModelConfig,
        make_layer: Callable[[int], DecoderLayer],
        *,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Build the model; `make_layer` returns the layer of an index."""
        super().__init__()
        self.config = config
        layers = [make_layer(i) for i in range(config.num_layers)]
        self.model = Decoder(config, layers, shard=shard, dtype=dtype, device=device)
        self.lm_head = (
            self.model.embed_tokens
            if config.tie_word_embeddings
            else VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                shard=shard,
                dtype=dtype,
                device=device,
                looks_up=False,
                scores=True,
            )
        )

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute hidden states inside a forward context.

        input_ids, positions: int64 [T]. Returns [T, E], equal on all ranks.
        """
        hidden: torch.Tensor = self.model(input_ids, positions)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Score the vocabulary. hidden: [N, E].

        A collective: every rank calls it equally often. Returns float32 [N, V] on rank 0, which
        samples, and None on the others, which have sent it theirs.
        """
        return self.lm_head.logits(hidden)

    def attention_layers(self) -> dict[str, Attention]:
        """Return the attention layers by their names in the forward context, in order."""
        found = (module for module in self.modules() if isinstance(module, Attention))
        return static_forward_context((layer.layer_name, layer) for layer in found)

    def weight_slices(self, names: Collection[str] = ()) -> Iterator[WeightSlice]:
        """Describe every tensor that the checkpoint must hold.

        Args:
            names: of the tensors that it does hold; they choose where there are two spellings.
        """
        for module in self.modules():
            if isinstance(module, WeightedLayer):
                module.read_names(names)
        yield from self.model.weight_slices("model")
        if not self.config.tie_word_embeddings:
            yield from self.lm_head.weight_slices("lm_head")

    def is_ignored(self, tensor_name: str) -> bool:
        """Return whether a checkpoint may hold this tensor although no parameter wants it."""
        if tensor_name == "lm_head.weight":
            return self.config.tie_word_embeddings
        # Older conversions stored the rotary frequencies, which follow from the configuration.
        return tensor_name.endswith(".rotary_emb.inv_freq")
