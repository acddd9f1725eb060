"""The one table of model families, by Hugging Face architecture name. All are pre-norm decoders
with grouped-query or latent attention, rotary positions and gated MLPs or experts. A row holds what
is particular to one. A test compares the values with the transformers library's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ExpertNames:
    """What the checkpoints of a family call an expert's tensors."""

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Family:
    defaults: Mapping[str, Any]
    """Values of fields that `config.json` leaves out; those of other families are ignored."""
    has_qkv_bias: bool = False
    """Queries, keys and values have biases whatever `attention_bias` says."""
    has_head_norms: bool = False
    """Each head of queries and keys is normalised before it is rotated."""
    expert_names: ExpertNames | None = None
    grouped_scores: Literal["softmax", "sigmoid"] | None = None
    """Experts are chosen from the best groups of them, by scores of this kind; None: from all."""
    has_latent_attention: bool = False
    """Keys and values of all heads are made of one latent vector for each token."""


_SHARED: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MISTRAL = _SHARED | {
    "vocab_size": 32000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN = _SHARED | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_QWEN_LAYERS = {"max_window_layers": 28, "layer_types": None}
_NAMED_BY_PROJECTION = ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj")
_DEEPSEEK = _SHARED | {
    "attention_bias": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "scoring_func": None,
    "moe_layer_freq": None,
}

FAMILIES: dict[str, Family] = {
    # Touvron et al., 2023. Biases are the configuration's choice.
    "LlamaForCausalLM": Family(
        _SHARED
        | {
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
    ),
    # Jiang et al., 2023. Every layer has the sliding window, where there is one.
    "MistralForCausalLM": Family(_MISTRAL),
    # Jiang et al., 2024. Every layer has experts; a token's weights are scaled to the sum 1.
    "MixtralForCausalLM": Family(
        _MISTRAL
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "num_experts": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        expert_names=ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
    # Yang et al., 2024. Layers slide from `max_window_layers` on, or as `layer_types` says.
    "Qwen2ForCausalLM": Family(_QWEN | _QWEN_LAYERS, has_qkv_bias=True),
    # Yang et al., 2025. The head dim does not follow from the hidden size.
    "Qwen3ForCausalLM": Family(
        _QWEN | _QWEN_LAYERS | {"head_dim": 128, "attention_bias": False}, has_head_norms=True
    ),
    # Yang et al., 2025. The configuration says which layers have experts.
    "Qwen3MoeForCausalLM": Family(
        _QWEN
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        has_head_norms=True,
        expert_names=_NAMED_BY_PROJECTION,
    ),
    # DeepSeek-AI, 2024. Latent attention, and experts of which each token shares some.
    "DeepseekV2ForCausalLM": Family(
        _DEEPSEEK
        | {
            "vocab_size": 102400,
            "intermediate_size": 11008,
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "mlp_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": None,
            "n_group": None,
            "topk_group": None,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": False,
        },
        expert_names=_NAMED_BY_PROJECTION,
        grouped_scores="softmax",
        has_latent_attention=True,
    ),
    # DeepSeek-AI, 2024. A bias for each expert has a say in the choice and none in the weights.
    "DeepseekV3ForCausalLM": Family(
        _DEEPSEEK
        | {
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "max_position_embeddings": 4096,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "rope_interleave": True,
            "first_k_dense_replace": 3,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "topk_method": None,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
        },
        expert_names=_NAMED_BY_PROJECTION,
        grouped_scores="sigmoid",
        has_latent_attention=True,
    ),
}
