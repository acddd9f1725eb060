"""Outputs of eager ops between captured pieces, delivered at one address.

The one thing to know: attention needs none of this, because it writes into a tensor that a piece
before it allocated. An op that returns a new tensor would hand the next piece another address in
every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from compile.capture import is_in_capture_window
from compile.config import CUDAGraphMode
from compile.context import BatchDescriptor, get_forward_context
from compile.nested import map_tensors, tensors_of


class StableOutputs:
    """Calls an op and copies what it returns into a slot of the step's key.

    Invariant: a key's slots are made while graphs are captured and live as long as this object.
    Outside of piecewise steps, and for keys that were not captured, outputs are passed on.
    """

    def __init__(self, runnable: Callable[..., Any]) -> None:
        self.runnable = runnable
        self._slots: dict[BatchDescriptor, list[torch.Tensor]] = {}

    def __call__(self, *args: Any) -> Any:
        """Call the op; return its outputs in their slots. What aliases an input stays there."""
        output = self.runnable(*args)
        context = get_forward_context()
        key = context.batch_descriptor
        if context.cudagraph_runtime_mode is not CUDAGraphMode.PIECEWISE or key is None:
            return output
        inputs = {t.untyped_storage().data_ptr() for t in tensors_of(args)}
        fresh = [t for t in tensors_of(output) if t.untyped_storage().data_ptr() not in inputs]
        if key not in self._slots and is_in_capture_window():
            self._slots[key] = [_like(t) for t in fresh]
        if key not in self._slots:
            return output
        slots = dict(zip(map(id, fresh), self._slots[key], strict=True))
        return map_tensors(lambda t: _delivered(t, slots.get(id(t))), output)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory with the same strides; `empty_like` would close gaps that readers expect."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _delivered(tensor: torch.Tensor, slot: torch.Tensor | None) -> torch.Tensor:
    return tensor if slot is None else slot.copy_(tensor)
