"""Tensors that are filled from the host without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy.typing as npt
import torch

ALIGNMENT = 128
"""Bytes: a line of a GPU's cache. Kernels are compiled for addresses that are multiples of 16."""
MAX_GAP_BYTES = 64 * 1024
"""What a copy may carry between two buffers: about as long as launching another takes."""


class Staging:
    """Memory for buffers that are copied to the device together, once a step.

    A copy to a CUDA device reads its host array after the call has returned: with two arrays a step
    fills that of the step before the last one. On a CPU nothing is copied. Invariant: all buffers
    are reserved before `allocate`, and none is used before it.
    """

    def __init__(self, device: torch.device, num_steps: int = 1) -> None:
        self.device = device
        self.is_copied = device.type == "cuda"
        self._num_arrays = num_steps if self.is_copied else 1
        self._turn = 0
        self._num_bytes = 0
        self._buffers: list[StaticBuffer] = []
        self._arrays: list[torch.Tensor] = []
        self._on_device: torch.Tensor
        self._spans: list[tuple[int, int]] = []
        """What `upload` has to copy: first byte, and the one behind the last."""

    def reserve(self, buffer: StaticBuffer, num_bytes: int) -> int:
        self._buffers.append(buffer)
        start = self._num_bytes
        self._num_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return start

    def allocate(self) -> None:
        """Give all buffers their memory, which is zero."""
        with torch.inference_mode(False):
            self._arrays = [
                torch.zeros(self._num_bytes, dtype=torch.uint8, pin_memory=self.is_copied)
                for _ in range(self._num_arrays)
            ]
            self._on_device = self._arrays[0]
            if self.is_copied:
                self._on_device = torch.zeros(
                    self._num_bytes, dtype=torch.uint8, device=self.device
                )
            for buffer in self._buffers:
                buffer.place(self._arrays, self._on_device)

    def next_step(self) -> None:
        self._turn = (self._turn + 1) % self._num_arrays
        for buffer in self._buffers:
            buffer.host = buffer.hosts[self._turn]

    def stage(self, start: int, end: int) -> None:
        if start < end:
            self._spans.append((start, end))

    def upload(self) -> None:
        """Copy what was staged, with gaps in it: a buffer holds what this step staged alone."""
        array = self._arrays[self._turn]
        for start, end in joined(self._spans):
            self._on_device[start:end].copy_(array[start:end], non_blocking=True)
        self._spans = []


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans in order, those that lie within `MAX_GAP_BYTES` of each other as one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start - found[-1][1] <= MAX_GAP_BYTES:
            first, last = found[-1]
            found[-1] = (first, max(last, end))
        else:
            found.append((start, end))
    return found


class StaticBuffer:
    """One tensor on the device whose address never changes, and the host arrays that fill it. From
    the staging's `allocate` on, `host` is the array to fill in this step; what it holds of earlier
    steps is undefined."""

    host: npt.NDArray[Any]
    hosts: list[npt.NDArray[Any]]
    device: torch.Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, staging: Staging) -> None:
        self._shape, self._dtype, self._staging = shape, dtype, staging
        self._is_copied = staging.is_copied
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize
        self._num_bytes = shape[0] * self._row_bytes
        self._start = staging.reserve(self, self._num_bytes)
        self._view: torch.Tensor | None = None

    def place(self, arrays: list[torch.Tensor], on_device: torch.Tensor) -> None:
        self.hosts = [self._of(array).numpy() for array in arrays]
        self.host, self.device = self.hosts[0], self._of(on_device)

    def stage(self, n: int) -> torch.Tensor:
        """Return the first `n` entries on the device, as they are once the staging is uploaded."""
        if self._is_copied:
            self._staging.stage(self._start, self._start + n * self._row_bytes)
        # Most steps have the size of the step before.
        if self._view is None or self._view.shape[0] != n:
            self._view = self.device[:n]
        return self._view

    def _of(self, memory: torch.Tensor) -> torch.Tensor:
        own = memory[self._start : self._start + self._num_bytes]
        return own.view(self._dtype).view(self._shape)


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
