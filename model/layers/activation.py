"""Activations of gated MLPs."""

from __future__ import annotations

import torch

from model.kernels import dispatch, elementwise


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up (SwiGLU; Shazeer, 2020).

    gate_up: [..., 2 * n], gate first. Returns [..., n].
    """
    if dispatch.uses_triton(gate_up):
        gated: torch.Tensor = dispatch.silu_and_mul(gate_up)
        return gated
    return elementwise.silu_and_mul(gate_up)
