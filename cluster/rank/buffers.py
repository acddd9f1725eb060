"""Tensors that are filled from the host without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy.typing as npt
import torch


class Staging:
    """Which of their host arrays the buffers of one rank fill.

    A copy to a CUDA device reads its host array after the call has returned. With two arrays a step
    fills those that the step before the last one did: that one has ended.
    """

    def __init__(self, device: torch.device, num_steps: int = 1) -> None:
        """Fill arrays on behalf of `device`, with up to `num_steps` steps in flight."""
        self.device = device
        # On a CPU the host array is the tensor that the step reads: it has been read.
        self.num_arrays = num_steps if device.type == "cuda" else 1
        self.turn = 0

    def next_step(self) -> None:
        """Fill the arrays of the next step from now on."""
        self.turn = (self.turn + 1) % self.num_arrays


class StaticBuffer:
    """One tensor on the device with host arrays that fill it in turn.

    On CPU there is one, in the same memory, and `upload` copies nothing.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, staging: Staging) -> None:
        pinned = staging.device.type == "cuda"
        self._turns = staging
        self._staging = [
            torch.zeros(shape, dtype=dtype, pin_memory=pinned) for _ in range(staging.num_arrays)
        ]
        self._hosts = [tensor.numpy() for tensor in self._staging]
        first = self._staging[0]
        self.device = torch.zeros_like(first, device=staging.device) if pinned else first
        self._view = self.device

    @property
    def host(self) -> npt.NDArray[Any]:
        """The array to fill in this step. What it holds of earlier steps is undefined."""
        return self._hosts[self._turns.turn]

    def upload(self, n: int) -> torch.Tensor:
        """Return the first `n` entries on the device."""
        staging = self._staging[self._turns.turn]
        if self.device is not staging:
            self.device[:n].copy_(staging[:n], non_blocking=True)
        # Most steps have the size of the step before.
        if self._view.shape[0] != n:
            self._view = self.device[:n]
        return self._view


class StaticTable:
    """A table on the device of which each step fills the first rows and columns.

    The table keeps its width, which graphs rely on. On a GPU what is filled is packed on the host
    for one short copy and spread on the device, because torch copies what is not contiguous by way
    of memory that is not pinned, and waits. On a CPU the table itself is filled.

    Invariant: what no step has filled is 0; what the last one left out is undefined.
    """

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, staging: Staging) -> None:
        self._rows, self._num_columns = rows, columns
        self._flat = StaticBuffer((rows * columns,), dtype, staging)
        self._is_packed = staging.device.type == "cuda"
        table = self._flat.device.view(rows, columns)
        self.device = torch.zeros_like(table) if self._is_packed else table
        self._view = self.device

    def first_columns(self, columns: int) -> npt.NDArray[Any]:
        """Return the array to fill in this step, [rows, columns], for `upload` to take."""
        self._num_columns = columns
        if self._is_packed:
            return self._flat.host[: self._rows * columns].reshape(self._rows, columns)
        return self._flat.host.reshape(self._rows, -1)[:, :columns]

    def upload(self, n: int) -> torch.Tensor:
        """Return the first `n` rows on the device, in their full width."""
        if self._is_packed:
            columns = self._num_columns
            packed = self._flat.upload(n * columns).view(n, columns)
            self.device[:n, :columns].copy_(packed)
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
