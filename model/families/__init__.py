"""The one registry of model families, by Hugging Face architecture name.

A family's file holds what is particular to it; its configuration defaults stand in `model.config`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from model.config import ModelConfig
from model.families.llama import LlamaForCausalLM
from model.families.mistral import MistralForCausalLM
from model.families.mixtral import MixtralForCausalLM
from model.families.qwen2 import Qwen2ForCausalLM
from model.families.qwen3 import Qwen3ForCausalLM
from model.families.qwen3_moe import Qwen3MoeForCausalLM
from model.layers.decoder import CausalLM
from model.parallel import Shard


class Family(Protocol):
    """Builds one rank's shard of a model, its weights still to be read."""

    def __call__(
        self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device
    ) -> CausalLM: ...


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}
