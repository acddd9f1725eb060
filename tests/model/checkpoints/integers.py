"""What weights mean that a rank holds as integers or FP8, and models that have such weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from adapters import LATENT, LINEAR
from torch.overrides import TorchFunctionMode

ROW_PARALLEL = ("o_proj", "down_proj")
EXPERTS = ("gate_up_proj", "down_proj")


def group_of(held: str, num_inputs: int) -> int:
    """Return how many inputs of an output share a scale."""
    if held == "int8" or num_inputs <= 128:
        return num_inputs
    return max(size for size in range(8, 129, 8) if num_inputs % size == 0)


def rounded(weight: torch.Tensor, held: str, ranks: int = 1) -> torch.Tensor:
    """Return what [..., O, I] becomes where each of so many ranks has a part of the inputs."""
    if held == "fp8":
        return rounded_fp8(weight, ranks)
    steps, lowest, highest = (127.0, -128, 127) if held == "int8" else (7.5, -8, 7)
    parts = []
    for part in weight.float().chunk(ranks, -1):
        size = group_of(held, part.shape[-1])
        groups = part.reshape(*part.shape[:-1], -1, size)
        scales = groups.abs().amax(-1, keepdim=True) / steps
        numbers = (groups / scales.masked_fill(scales == 0, 1)).round().clamp(lowest, highest)
        parts.append((numbers * scales).reshape(part.shape))
    return torch.cat(parts, -1)


def rounded_fp8(rows: torch.Tensor, ranks: int = 1) -> torch.Tensor:
    """Return what [..., I] becomes where the largest of a row, or of its part on a rank, is 448."""
    parts = []
    for part in rows.float().chunk(ranks, -1):
        scales = part.abs().amax(-1, keepdim=True) / 448
        numbers = (part / scales.masked_fill(scales == 0, 1)).to(torch.float8_e4m3fn)
        parts.append(numbers.float() * scales)
    return torch.cat(parts, -1)


class RoundedInputs(TorchFunctionMode):
    """Rounds the inputs of products with some weights, each token of each rank's part by its
    largest number."""

    def __init__(self, ranks_of: Mapping[int, int]) -> None:
        """Take how many ranks split a weight's inputs, by the address of its memory."""
        super().__init__()
        self.num_rounded = 0
        self._ranks_of = ranks_of

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            ranks = self._ranks_of.get(args[1].untyped_storage().data_ptr())
            if ranks is not None:
                self.num_rounded += 1
                args = (rounded_fp8(args[0], ranks), *args[1:])
        return func(*args, **(kwargs or {}))


def round_inputs(model: Any, ranks: int) -> None:
    """Let a model of transformers round what its FP8 weights are multiplied with."""
    ranks_of = {}
    for name, weight in model.named_parameters():
        *_, module, last = name.split(".")
        if last in EXPERTS or (last == "weight" and module in LINEAR + LATENT):
            is_split = last == "weight" and module in ROW_PARALLEL
            ranks_of[weight.untyped_storage().data_ptr()] = ranks if is_split else 1
    # Each expert's product is one of its own.
    model.set_experts_implementation("eager")
    forward = model.forward

    def rounding(*args: Any, **kwargs: Any) -> Any:
        with RoundedInputs(ranks_of) as mode:
            out = forward(*args, **kwargs)
        assert mode.num_rounded
        return out

    model.forward = rounding


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
    if held == "fp8":
        round_inputs(model, ranks)
    return model
