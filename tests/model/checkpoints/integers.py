"""What weights mean that a rank holds as integers, FP8 or FP4, and models with such weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from adapters import LATENT, LINEAR
from quantizer import INPUT_SCALE, fp4_blocks, fp4_scale
from torch.overrides import TorchFunctionMode

ROW_PARALLEL = ("o_proj", "down_proj")
EXPERTS = ("gate_up_proj", "down_proj")


def group_of(held: str, num_inputs: int) -> int:
    """Return how many inputs of an output share a scale."""
    if held in ("int8", "w8a8") or num_inputs <= 128:
        return num_inputs
    return max(size for size in range(8, 129, 8) if num_inputs % size == 0)


def rounded(weight: torch.Tensor, held: str, ranks: int = 1) -> torch.Tensor:
    """Return what [..., O, I] becomes where each of so many ranks has a part of the inputs."""
    if held == "fp8":
        return rounded_fp8(weight, ranks)
    if held == "nvfp4":
        return fp4_blocks(weight, fp4_scale(weight))[2]
    steps, lowest, highest = (7.5, -8, 7) if held == "int4" else (127.0, -128, 127)
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


def rounded_fp8_groups(rows: torch.Tensor) -> torch.Tensor:
    """Return what [..., I] becomes where the largest of each 128 of a row is 448."""
    return torch.cat([rounded_fp8(part) for part in rows.split(128, -1)], -1)


def rounded_fp4(rows: torch.Tensor) -> torch.Tensor:
    return fp4_blocks(rows, INPUT_SCALE)[2]


class RoundedInputs(TorchFunctionMode):
    """Rounds the inputs of products with some weights."""

    def __init__(self, rounding: Mapping[int, Callable[[torch.Tensor], torch.Tensor]]) -> None:
        """Take what rounds a weight's inputs, by the address of its memory."""
        super().__init__()
        self.num_rounded = 0
        self._rounding = rounding

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            rounding = self._rounding.get(args[1].untyped_storage().data_ptr())
            if rounding is not None:
                self.num_rounded += 1
                args = (rounding(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def round_inputs(model: Any, held: str, ranks: int) -> None:
    """Let a model of transformers round what its weights are multiplied with: with FP8 and w8a8
    each token of each rank's part by its largest number, or each 128 inputs; with FP4 blocks, by
    their scale."""
    found: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
    for name, weight in model.named_parameters():
        *_, module, last = name.split(".")
        if last in EXPERTS or (last == "weight" and module in LINEAR + LATENT):
            is_split = last == "weight" and module in ROW_PARALLEL
            rounding = partial(rounded, held=held, ranks=ranks if is_split else 1)
            rounding = {"nvfp4": rounded_fp4, "fp8 groups": rounded_fp8_groups}.get(held, rounding)
            found[weight.untyped_storage().data_ptr()] = rounding
    # Each expert's product is one of its own.
    model.set_experts_implementation("eager")
    forward = model.forward

    def rounding(*args: Any, **kwargs: Any) -> Any:
        with RoundedInputs(found) as mode:
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
            halves = weight.chunk(2 if last == "gate_up_proj" else 1, 1)
            for matrix in (each for half in halves for each in half):
                matrix.copy_(rounded(matrix, held))
        elif last == "weight" and module in LINEAR + LATENT:
            weight.copy_(rounded(weight, held, ranks if module in ROW_PARALLEL else 1))
    if held in ("fp8", "nvfp4", "w8a8"):
        round_inputs(model, held, ranks)
    return model
