"""Random checkpoints of many shapes, and transformers as their oracle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TIE_GAP = 1e-4
"""Two logits closer than this may change places with another order of summation."""
MAX_TIES = 1 / 500
"""Ties per compared token; more would hide something."""

# Shapes that round numbers would hide mistakes in, written as config.json fields. The name's first
# word is the family, where it is one; the others are Llama's.
SHAPES: dict[str, dict[str, Any]] = {
    "one kv head": {"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 64},
    "six heads": {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
    "wide heads": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 48,
        "head_dim": 32,
    },
    "tied": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_size": 64,
        "tie_word_embeddings": True,
    },
    "odd vocabulary": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "vocab_size": 509,
    },
    "biases": {
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "hidden_size": 40,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "llama3 rope": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 24,
        },
    },
    "linear rope": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_size": 48,
        "max_position_embeddings": 40,
        "rope_parameters": {"rope_type": "linear", "factor": 3.5},
    },
    "mistral window 7": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "hidden_size": 64,
        "sliding_window": 7,
    },
    "mistral window 13 wide heads": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_size": 60,
        "head_dim": 24,
        "sliding_window": 13,
    },
    "mistral window 1": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_size": 40,
        "sliding_window": 1,
        "num_hidden_layers": 2,
    },
    "mistral without window": {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "hidden_size": 48,
        "vocab_size": 263,
        "sliding_window": None,
    },
    "mistral tied yarn rope": {
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "hidden_size": 54,
        "sliding_window": 50,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 700.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral long window": {
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "hidden_size": 50,
        "sliding_window": 100,
        "rope_parameters": {"rope_type": "default", "rope_theta": 90.0},
    },
    "mistral window 11 two kv heads": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 48,
        "sliding_window": 11,
    },
    "mistral window 20 tied": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 64,
        "sliding_window": 20,
        "tie_word_embeddings": True,
        "vocab_size": 259,
    },
    "mistral wide heads linear rope": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_size": 42,
        "head_dim": 26,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "linear", "factor": 2.5},
    },
    "mistral window 16": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_size": 56,
        "sliding_window": 16,
    },
    "qwen2 one kv head": {
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "hidden_size": 56,
        "rms_norm_eps": 1e-5,
    },
    "qwen2 tied": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 48,
        "tie_word_embeddings": True,
        "vocab_size": 251,
    },
    "qwen2 wide heads": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_size": 36,
        "head_dim": 30,
    },
    "qwen2 window in the last layers": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_size": 40,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "qwen2 window in all layers": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_size": 60,
        "use_sliding_window": True,
        "sliding_window": 10,
        "max_window_layers": 0,
    },
    "qwen2 eight heads": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 80,
        "vocab_size": 261,
    },
    "qwen2 yarn rope with mscale": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 6.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.2,
            "mscale_all_dim": 0.7,
            "beta_fast": 8,
            "beta_slow": 0.5,
        },
    },
    "qwen3 narrow heads": {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "hidden_size": 96,
        "head_dim": 10,
    },
    "qwen3 wide heads": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "hidden_size": 28,
        "head_dim": 36,
        "tie_word_embeddings": True,
    },
    "qwen3 biases": {
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "hidden_size": 50,
        "head_dim": 16,
        "attention_bias": True,
        "vocab_size": 257,
    },
    "qwen3 window in every other layer": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "head_dim": 18,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3 eight heads": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 76,
        "head_dim": 14,
    },
    "qwen3 tied linear rope": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "head_dim": 20,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "factor": 1.5},
    },
    "qwen3 odd vocabulary": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_size": 42,
        "head_dim": 22,
        "vocab_size": 253,
    },
    "qwen3 dynamic rope": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 44,
        "head_dim": 24,
        # No prompt is longer, every output is.
        "max_position_embeddings": 90,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.5, "rope_theta": 300.0},
    },
    "qwen3 yarn rope without truncation": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 30,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 3.0,
            "original_max_position_embeddings": 20,
            "truncate": False,
            "attention_factor": 1.3,
        },
    },
    "mixtral window 11 wide heads": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_size": 40,
        "head_dim": 26,
        "sliding_window": 11,
        "num_local_experts": 6,
        "num_experts_per_tok": 4,
        "intermediate_size": 31,
    },
    "mixtral tied eight experts": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_size": 60,
        "vocab_size": 263,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": True,
    },
    "qwen3moe every other layer": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 44,
        "head_dim": 18,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 29,
        "decoder_sparse_step": 2,
        "num_hidden_layers": 4,
        "norm_topk_prob": True,
    },
    "qwen3moe many experts": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "hidden_size": 36,
        "head_dim": 20,
        "num_experts": 18,
        "num_experts_per_tok": 5,
        "moe_intermediate_size": 14,
        "vocab_size": 251,
    },
}
SLOW_SHAPES = {
    "mistral window 13 wide heads",
    "mistral without window",
    "mistral window 11 two kv heads",
    "mistral window 20 tied",
    "mistral wide heads linear rope",
    "mistral window 16",
    "qwen2 wide heads",
    "qwen2 window in all layers",
    "qwen2 eight heads",
    "qwen3 biases",
    "qwen3 eight heads",
    "qwen3 tied linear rope",
    "qwen3 odd vocabulary",
    "qwen3 yarn rope without truncation",
}
"""Left out by default: what is special about each, another one has too."""
FAMILIES = {
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3moe": "Qwen3Moe",
}
SPARSE = ("mixtral", "qwen3moe")


def features_of(name: str) -> list[str]:
    """Return the rows of the feature table that a shape's tests show."""
    family = name.split()[0]
    words = {" rope": "S05", "window ": "S06"}
    row = "S03" if family in SPARSE else "S02" if family.startswith("qwen") else "S01"
    return [row] + [feature for word, feature in words.items() if word in name]


def is_dynamic(config: Any) -> bool:
    return bool(config.rope_parameters["rope_type"] == "dynamic")


@dataclass
class Oracle:
    """A checkpoint on disk and transformers' float32 model of it."""

    name: str
    path: Path
    model: Any
    num_compared: int = 0
    num_ties: int = 0

    @torch.inference_mode()
    def check_greedy(self, prompt: list[int], output: list[int]) -> None:
        """Compare greedy tokens, teacher-forced after a tie.

        One forward over prompt and output tells for every position what transformers would have
        chosen after the same tokens; where all agree, that is its greedy generation.
        """
        logits = self.logits(prompt, output)
        best, choice = logits.max(dim=-1)
        for position, token in enumerate(output):
            self.num_compared += 1
            if choice[position] == token:
                continue
            gap = float(best[position] - logits[position, token])
            assert gap < TIE_GAP, (
                f"output {position}: wanted token {int(choice[position])}, found {token}, "
                f"whose logit is {gap:.2e} below"
            )
            self.num_ties += 1

    @torch.inference_mode()
    def logits(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """Return what each output token was chosen from: [len(output), vocabulary]."""
        from transformers import DynamicCache

        if not is_dynamic(self.model.config):
            logits = self.model(torch.tensor([prompt + output[:-1]])).logits
            return logits[0, len(prompt) - 1 :]
        # The angles of a cached key are those of the length at which it was computed, so only a
        # generation token by token tells; and the model remembers the longest it has seen.
        inner = self.model.model
        inner.rotary_emb = type(inner.rotary_emb)(self.model.config)
        cache = DynamicCache(config=self.model.config)
        rows = []
        for new in (prompt, *([token] for token in output[:-1])):
            # By position: the argument is named `cache` since transformers 5.24, and was
            # `past_key_values` before.
            out = self.model(torch.tensor([new]), None, None, cache)
            rows.append(out.logits[0, -1])
        return torch.stack(rows)

    def report_ties(self) -> None:
        print(f"{self.num_compared} tokens compared, {self.num_ties} ties")
        assert self.num_ties <= max(1, self.num_compared * MAX_TIES)


def new_oracle(path: Path, name: str) -> Oracle:
    """Write the checkpoint of a named shape to `path`."""
    import transformers

    shape = SHAPES[name]
    family = FAMILIES.get(name.split()[0], "Llama")
    make_config = getattr(transformers, f"{family}Config")
    make_model = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(sum(map(ord, str(shape))))
    fields: dict[str, Any] = {
        "vocab_size": 256,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    model = make_model(make_config(**{**fields, **shape})).eval()
    if family in map(FAMILIES.get, SPARSE):
        # What it chooses by itself takes multiples of 16 bytes alone.
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif parameter_name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.normal_(mean=1.0, std=0.3)
    model.save_pretrained(path)
    return Oracle(name, path, model)
