"""Random checkpoints of many shapes, and transformers as their oracle."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from model import families

TIE_GAP = 1e-4
"""Two logits closer than this may change places with another order of summation."""
MAX_TIES = 1 / 500
"""Ties per compared token; more would hide something."""
FP8_KV_TIE_GAP, FP8_KV_MAX_TIES = 2e-2, 1 / 100
"""Where KV is FP8: what another order of summation changes in the last bit may tip a key over to
the next number, a sixteenth further."""
INPUTS_TIE_GAP, INPUTS_MAX_TIES = 1e-1, 1 / 50
"""Where inputs of linear layers are FP8 or FP4: every layer rounds some, FP4 to a number up to a
third further. Inputs that are not rounded at all miss by 0.4 and more."""


def shape(sizes: tuple[int, int, int], **fields: Any) -> dict[str, Any]:
    """Return fields of a config.json; `sizes` are heads, KV heads and the hidden size."""
    names = ("num_attention_heads", "num_key_value_heads", "hidden_size")
    return {**dict(zip(names, sizes, strict=True)), **fields}


def rope(rope_type: str, **fields: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, **fields}


def latent(
    heads: tuple[int, int, int], num_experts: int, top_k: int, **fields: Any
) -> dict[str, Any]:
    """Return fields of a DeepSeek model; `heads` are their number, the size of a latent and the
    hidden size."""
    num_heads, rank, hidden = heads
    return shape(
        (num_heads, num_heads, hidden),
        kv_lora_rank=rank,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        v_head_dim=14,
        n_routed_experts=num_experts,
        num_experts_per_tok=top_k,
        **fields,
    )


def uneven_yarn(mscale: float, mscale_all_dim: float) -> dict[str, Any]:
    factors = {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
    return rope(
        "yarn", rope_theta=300.0, factor=8.0, original_max_position_embeddings=16, **factors
    )


# Shapes that round numbers would hide mistakes in.
LLAMA_SHAPES = {
    "one kv head": shape((4, 1, 64)),
    "six heads": shape((6, 3, 96)),
    "wide heads": shape((4, 2, 48), head_dim=32),
    "tied": shape((4, 4, 64), tie_word_embeddings=True),
    "odd vocabulary": shape((4, 2, 64), vocab_size=509),
    "biases": shape(
        (5, 5, 40),
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=rope("default", rope_theta=500.0),
    ),
    "llama3 rope": shape(
        (4, 2, 64),
        rope_parameters=rope(
            "llama3",
            rope_theta=5000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=24,
        ),
    ),
    # Of two ranks, too.
    "whole blocks of 16": shape((4, 2, 64), intermediate_size=96),
    "linear rope": shape(
        (2, 2, 48), max_position_embeddings=40, rope_parameters=rope("linear", factor=3.5)
    ),
}
SHAPES = LLAMA_SHAPES | {  # the first word of the others is their family
    "mistral window 7": shape((4, 1, 64), sliding_window=7),
    "mistral window 13 wide heads": shape((6, 2, 60), head_dim=24, sliding_window=13),
    "mistral window 1": shape((2, 2, 40), sliding_window=1),
    "mistral without window": shape((6, 3, 48), vocab_size=263, sliding_window=None),
    "mistral tied yarn rope": shape(
        (3, 3, 54),
        sliding_window=50,
        tie_word_embeddings=True,
        rope_parameters=rope(
            "yarn", rope_theta=700.0, factor=4.0, original_max_position_embeddings=32
        ),
    ),
    "mistral long window": shape(
        (5, 5, 50), sliding_window=100, rope_parameters=rope("default", rope_theta=90.0)
    ),
    "mistral window 11 two kv heads": shape((4, 2, 48), sliding_window=11),
    "mistral window 20 tied": shape(
        (8, 4, 64), sliding_window=20, tie_word_embeddings=True, vocab_size=259
    ),
    "mistral wide heads linear rope": shape(
        (2, 2, 42), head_dim=26, sliding_window=None, rope_parameters=rope("linear", factor=2.5)
    ),
    "mistral window 16": shape((4, 4, 56), sliding_window=16),
    "qwen2 one kv head": shape((7, 1, 56), rms_norm_eps=1e-05),
    "qwen2 tied": shape((4, 2, 48), tie_word_embeddings=True, vocab_size=251),
    "qwen2 wide heads": shape((2, 2, 36), head_dim=30),
    "qwen2 window in the last layers": shape(
        (4, 4, 40), use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen2 window in all layers": shape(
        (6, 2, 60), use_sliding_window=True, sliding_window=10, max_window_layers=0
    ),
    "qwen2 eight heads": shape((8, 2, 80), vocab_size=261),
    "qwen2 yarn rope with mscale": shape(
        (4, 2, 64),
        max_position_embeddings=32,
        rope_parameters=rope(
            "yarn",
            factor=6.0,
            original_max_position_embeddings=32,
            mscale=1.2,
            mscale_all_dim=0.7,
            beta_fast=8,
            beta_slow=0.5,
        ),
    ),
    "qwen3 narrow heads": shape((6, 3, 96), head_dim=10),
    "qwen3 wide heads": shape((4, 1, 28), head_dim=36, tie_word_embeddings=True),
    "qwen3 biases": shape((3, 3, 50), head_dim=16, attention_bias=True, vocab_size=257),
    "qwen3 window in every other layer": shape(
        (4, 2, 64),
        head_dim=18,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        num_hidden_layers=3,
    ),
    "qwen3 eight heads": shape((8, 4, 76), head_dim=14),
    "qwen3 tied linear rope": shape(
        (2, 2, 32),
        head_dim=20,
        tie_word_embeddings=True,
        rope_parameters=rope("linear", factor=1.5),
    ),
    "qwen3 odd vocabulary": shape((6, 2, 42), head_dim=22, vocab_size=253),
    "qwen3 dynamic rope": shape(
        (4, 2, 44),
        head_dim=24,
        max_position_embeddings=90,  # no prompt is longer; most are with their output
        rope_parameters=rope("dynamic", factor=2.5, rope_theta=300.0),
    ),
    "qwen3 yarn rope without truncation": shape(
        (2, 1, 30),
        head_dim=32,
        rope_parameters=rope(
            "yarn",
            factor=3.0,
            original_max_position_embeddings=20,
            truncate=False,
            attention_factor=1.3,
        ),
    ),
    "mixtral window 11 wide heads": shape(
        (2, 2, 40),
        head_dim=26,
        sliding_window=11,
        num_local_experts=6,
        num_experts_per_tok=4,
        intermediate_size=31,
    ),
    "mixtral tied eight experts": shape(
        (6, 2, 60),
        vocab_size=263,
        num_local_experts=8,
        num_experts_per_tok=3,
        tie_word_embeddings=True,
    ),
    "qwen3moe every other layer": shape(
        (4, 2, 44),
        head_dim=18,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=29,
        decoder_sparse_step=2,
        num_hidden_layers=4,
        norm_topk_prob=True,
    ),
    "qwen3moe many experts": shape(
        (4, 1, 36),
        head_dim=20,
        num_experts=18,
        num_experts_per_tok=5,
        moe_intermediate_size=14,
        vocab_size=251,
    ),
    "deepseek2 whole queries": latent(
        (4, 20, 44),
        6,
        2,
        q_lora_rank=None,
        moe_intermediate_size=22,
        n_shared_experts=3,
        first_k_dense_replace=1,
        routed_scaling_factor=0.6,
        rope_parameters=uneven_yarn(0.7, 1.2),
    ),
    "deepseek2 tied groups": latent(
        (2, 28, 40),
        12,
        4,
        q_lora_rank=18,
        moe_intermediate_size=16,
        n_shared_experts=2,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters=uneven_yarn(1.1, 0.4),
    ),
    "deepseek3 groups": latent(
        (4, 24, 52),
        12,
        3,
        q_lora_rank=26,
        moe_intermediate_size=20,
        n_shared_experts=2,
        first_k_dense_replace=1,
        n_group=3,
        topk_group=2,
        vocab_size=263,
        rope_parameters=uneven_yarn(0.8, 1.3),
    ),
    # The last layer is the one behind the model's, which drafts.
    "deepseek3 mtp": latent(
        (4, 24, 52),
        8,
        3,
        num_hidden_layers=3,
        q_lora_rank=26,
        moe_intermediate_size=20,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        vocab_size=263,
        rope_parameters=uneven_yarn(0.8, 1.3),
    ),
    "deepseek3 tied one group": latent(
        (6, 16, 36),
        10,
        4,
        q_lora_rank=None,
        moe_intermediate_size=12,
        n_shared_experts=1,
        first_k_dense_replace=2,
        num_hidden_layers=3,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        routed_scaling_factor=1.3,
        rope_interleave=False,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters=rope("default", rope_theta=200.0, mscale_all_dim=1.4),
    ),
}
SLOW_SHAPES = {
    "whole blocks of 16",
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
    "deepseek2 tied groups",
    "deepseek3 mtp",
    "deepseek3 tied one group",
}
"""Left out by default: what is special about each, another one has too."""
FAMILIES = {
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3moe": "Qwen3Moe",
    "deepseek2": "DeepseekV2",
    "deepseek3": "DeepseekV3",
}
NORMS = tuple(f"{name}.weight" for name in ("q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm"))
SPARSE = tuple(
    name
    for name, family in FAMILIES.items()
    if families.FAMILIES[f"{family}ForCausalLM"].expert_names is not None
)


def features_of(name: str) -> list[str]:
    """Return the rows of the feature table that a shape's tests show."""
    family = name.split()[0]
    words = {" rope": "S05", "window ": "S06"}
    row = "S03" if family in SPARSE else "S02" if family.startswith("qwen") else "S01"
    row = "S04" if family.startswith("deepseek") else row
    return [row] + [feature for word, feature in words.items() if word in name]


@dataclass
class Oracle:
    """A checkpoint on disk and transformers' float32 model of it."""

    name: str
    path: Path
    model: Any
    num_compared: int = 0
    num_ties: int = 0
    has_fp8_kv: bool = False
    """Whether it answers as if its cache were FP8."""
    has_rounded_inputs: bool = False
    """Whether it rounds what linear layers multiply."""
    adapters: list[Path] = field(default_factory=list)
    merged: list[Any] = field(default_factory=list)
    """The model with each of its adapters added to its weights."""
    mtp: Any = None
    """What the layer behind the model says, if there is one."""

    @property
    def tie_gap(self) -> float:
        if self.has_rounded_inputs:
            return INPUTS_TIE_GAP
        return FP8_KV_TIE_GAP if self.has_fp8_kv else TIE_GAP

    @property
    def max_ties(self) -> float:
        if self.has_rounded_inputs:
            return INPUTS_MAX_TIES
        return FP8_KV_MAX_TIES if self.has_fp8_kv else MAX_TIES

    def write_adapters(self) -> None:
        from adapters import two_adapters

        if not self.adapters:
            self.adapters, self.merged = two_adapters(self.path, self.model)

    def with_integers(self, held: str, ranks: int) -> Oracle:
        """Return one of the weights that so many ranks hold as integers, adapters added to them;
        with FP4, of a checkpoint that has these numbers."""
        from integers import rounded_model
        from quantizer import KINDS, write

        path = self.path
        if held == "nvfp4":
            directory = self.path.with_name(f"{self.path.name} in FP4")
            path = directory / "quantized"
            if not path.exists():
                write(self.path, KINDS[held], directory)
        model, merged = rounded_model(self.model, held, ranks), copy.deepcopy(self.merged)
        with torch.no_grad():
            for each in merged:
                for weight, plain, found in zip(*parameters(each, self.model, model), strict=True):
                    weight += found - plain
        is_rounded = held in ("fp8", "nvfp4", "w8a8")
        return replace(self, path=path, model=model, merged=merged, has_rounded_inputs=is_rounded)

    @torch.inference_mode()
    def check_greedy(self, prompt: list[int], output: list[int], lora: int = 0) -> None:
        """Compare greedy tokens, teacher-forced after a tie.

        One forward over prompt and output tells for every position what transformers would have
        chosen after the same tokens; where all agree, that is its greedy generation.
        """
        logits = self.logits(prompt, output, lora)
        best, choice = logits.max(dim=-1)
        for position, token in enumerate(output):
            self.num_compared += 1
            if choice[position] == token:
                continue
            gap = float(best[position] - logits[position, token])
            assert gap < self.tie_gap, (
                f"output {position}: wanted token {int(choice[position])}, found {token}, "
                f"whose logit is {gap:.2e} below"
            )
            self.num_ties += 1

    @torch.inference_mode()
    def logits(self, prompt: list[int], output: list[int], lora: int = 0) -> torch.Tensor:
        """Return what each output token was chosen from: [len(output), vocabulary]."""
        from fp8_cache import Fp8Cache
        from transformers import DynamicCache

        if self.model.config.rope_parameters["rope_type"] != "dynamic":
            cache = Fp8Cache() if self.has_fp8_kv else None
            model = self.merged[lora - 1] if lora else self.model
            logits = model(torch.tensor([prompt + output[:-1]]), None, None, cache).logits
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
        assert self.num_ties <= max(1, self.num_compared * self.max_ties)


def parameters(*models: Any) -> Iterator[Iterator[Any]]:
    return (model.parameters() for model in models)


def new_oracle(path: Path, name: str) -> Oracle:
    """Write the checkpoint of a named shape to `path`."""
    import transformers

    fields, family = SHAPES[name], "Llama"
    if name not in LLAMA_SHAPES:
        family = FAMILIES[name.split()[0]]
    make_config = getattr(transformers, f"{family}Config")
    make_model = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(sum(map(ord, str(fields))))
    common: dict[str, Any] = {
        "vocab_size": 256,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    model = make_model(make_config(**{**common, **fields})).eval()
    if family in map(FAMILIES.get, SPARSE):
        # What it chooses by itself takes multiples of 16 bytes alone.
        model.set_experts_implementation("eager")
    with torch.no_grad():
        # A router's correction is no parameter, and part of the state.
        for parameter_name, parameter in model.state_dict().items():
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif parameter_name.endswith(NORMS):
                parameter.normal_(mean=1.0, std=0.3)
    if not name.endswith("mtp"):
        model.save_pretrained(path)
        return Oracle(name, path, model)
    from mtp import save_with_mtp

    reference = save_with_mtp(path, model, noise=0.05, volume=0.1)
    return Oracle(name, path, model, mtp=reference)
