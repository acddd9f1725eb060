"""What weights mean that a rank holds as integers, and models that have such weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from adapters import LATENT, LINEAR

ROW_PARALLEL = ("o_proj", "down_proj")
EXPERTS = ("gate_up_proj", "down_proj")


def group_of(held: str, num_inputs: int) -> int:
    """Return how many inputs of an output share a scale."""
    if held == "int8" or num_inputs <= 128:
        return num_inputs
    return max(size for size in range(8, 129, 8) if num_inputs % size == 0)


def rounded(weight: torch.Tensor, held: str, ranks: int = 1) -> torch.Tensor:
    """Return what [..., O, I] becomes where each of so many ranks has a part of the inputs."""
    steps, lowest, highest = (127.0, -128, 127) if held == "int8" else (7.5, -8, 7)
    parts = []
    for part in weight.float().chunk(ranks, -1):
        size = group_of(held, part.shape[-1])
        groups = part.reshape(*part.shape[:-1], -1, size)
        scales = groups.abs().amax(-1, keepdim=True) / steps
        numbers = (groups / scales.masked_fill(scales == 0, 1)).round().clamp(lowest, highest)
        parts.append((numbers * scales).reshape(part.shape))
    return torch.cat(parts, -1)


@torch.no_grad()
def rounded_model(model: Any, held: str, ranks: int = 1) -> Any:
    """Return a copy of transformers' model with the weights that so many ranks hold."""
    model = copy.deepcopy(model)
    for name, weight in model.named_parameters():
        *_, module, last = name.split(".")
        if last in EXPERTS:  # all of a layer's in one, and whole on their rank
            weight.copy_(rounded(weight, held))
        elif last == "weight" and module in LINEAR + LATENT:
            weight.copy_(rounded(weight, held, ranks if module in ROW_PARALLEL else 1))
    return model
