"""The op that adds what LoRA adapters make of a linear layer's inputs.

Its arguments are tensors that every layer of a kind has alike; which adapter a token belongs to
comes from the forward context, so a traced graph depends on neither.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compile.context import get_forward_context
from compile.custom_op import direct_register_custom_op
from model.kernels.dispatch import kernels_for


def _lora_add(
    out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, sizes: Sequence[int]
) -> None:
    """Add to each token's outputs what its adapter makes of its inputs; see
    `kernels.adapters.add_adapters`."""
    adapters = get_forward_context().adapters
    assert adapters is not None, "adapters: wanted each token's in the forward context, found none"
    kernels_for(x).add_adapters(out, x, a, b, sizes, adapters)


lora_add = direct_register_custom_op("lora_add", _lora_add, mutates_args=["out"])
