"""Tensors that are filled from the host without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy.typing as npt
import torch


class StaticBuffer:
    """One tensor on the device with a host array that fills it.

    On CPU both are the same memory and `upload` copies nothing.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._staging = torch.zeros(shape, dtype=dtype, pin_memory=pinned)
        self.host = self._staging.numpy()
        self.device = torch.zeros(shape, dtype=dtype, device=device) if pinned else self._staging
        self._view = self.device

    def upload(self, n: int) -> torch.Tensor:
        """Return the first `n` entries on the device."""
        if self.device is not self._staging:
            self.device[:n].copy_(self._staging[:n], non_blocking=True)
        # Most steps have the size of the step before.
        if self._view.shape[0] != n:
            self._view = self.device[:n]
        return self._view


def upload_once(values: Iterable[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a new tensor on the device, for values too rare to keep a buffer for."""
    # PyTorch reuses pinned memory only when the copy from it is done.
    staging = torch.tensor(list(values), dtype=dtype, pin_memory=device.type == "cuda")
    return staging.to(device, non_blocking=True)


def upload_array(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array that nothing else writes to on the device; see `upload_once`."""
    staging = torch.from_numpy(values)
    if device.type == "cuda":
        staging = staging.pin_memory()
    return staging.to(device, non_blocking=True)
