"""LoRA adapters as PEFT writes them, random ones, and models that have them merged."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "use_dora": False}


def matrices_of(
    model: Any, targets: tuple[str, ...], ranks: dict[str, int], default: int, seed: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return random A and B of the linear layers that end so, outside of experts; `ranks` has those
    of some modules."""
    rng = torch.Generator().manual_seed(seed)
    found = {}
    for name, module in model.named_modules():
        is_target = name.rpartition(".")[2] in targets and ".experts." not in name
        if is_target and isinstance(module, torch.nn.Linear):
            rank, (outputs, inputs) = ranks.get(name, default), module.weight.shape
            a, b = (
                torch.randn(rank, inputs, generator=rng),
                torch.randn(outputs, rank, generator=rng),
            )
            found[name] = (a * 0.3, b * 0.3)
    return found


def write_adapter(
    path: Path, matrices: dict[str, tuple[torch.Tensor, torch.Tensor]], **fields: Any
) -> None:
    path.mkdir()
    targets = sorted({name.rpartition(".")[2] for name in matrices})
    config = {**CONFIG, "target_modules": targets, **fields}
    (path / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for name, (a, b) in matrices.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.contiguous()
    save_file(tensors, path / "adapter_model.safetensors")


@torch.no_grad()
def merged(
    model: Any, matrices: dict[str, tuple[torch.Tensor, torch.Tensor]], scales: dict[str, float]
) -> Any:
    """Return a copy of a model whose weights have an adapter added, by the scale of each module."""
    model = copy.deepcopy(model)
    for name, (a, b) in matrices.items():
        model.get_submodule(name).weight += scales[name] * (b @ a)
    return model


def two_adapters(directory: Path, model: Any) -> tuple[list[Path], list[Any]]:
    """Write a plain adapter of all layers, and a rank-stabilized one of some, with patterns; return
    where they are, and the models that have them merged."""
    paths = [directory / name for name in ("plain", "stable")]
    first = matrices_of(model, LINEAR + LATENT, {}, 4, 1)
    write_adapter(paths[0], first, r=4, lora_alpha=6)
    models = [merged(model, first, dict.fromkeys(first, 6 / 4))]
    wide, loud = "model.layers.1.self_attn.o_proj", "model.layers.0.self_attn.o_proj"
    second = matrices_of(model, ("q_proj", "o_proj"), {wide: 9}, 3, 2)
    write_adapter(
        paths[1],
        second,
        r=3,
        lora_alpha=2.5,
        use_rslora=True,
        rank_pattern={"layers.1.self_attn.o_proj": 9},
        alpha_pattern={r"layers\.[0]\.self_attn\.o_proj": 4.5},
    )
    scales = dict.fromkeys(second, 2.5 / 3**0.5)
    scales |= {wide: 2.5 / 9**0.5, loud: 4.5 / 3**0.5}
    return paths, [*models, merged(model, second, scales)]
