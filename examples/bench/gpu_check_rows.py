"""A row of the table of gpu_check.py and the setting it was measured in, shared by its parts."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Row:
    """One line of the table. Errors are relative to the largest magnitude that was wanted."""

    name: str
    error: float | None = None
    limit: float | None = None
    seconds: float | None = None
    num_bytes: int = 0
    """What must be read and written at least."""
    copy: str = "copy"
    """The row whose rate is that of these bytes."""
    is_replayed: bool = False
    """The time has a graph's launch in it, which its floor has too."""
    num_flops: int = 0
    value: float | None = None
    """A figure that is no time of a call."""
    unit: str = ""
    note: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the error is within its limit; a NaN is not."""
        return self.error is None or self.limit is None or self.error <= self.limit


@dataclass(frozen=True)
class Setting:
    """Where and how large."""

    device: torch.device
    is_quick: bool

    @property
    def is_small(self) -> bool:
        return self.is_quick or self.device.type == "cpu"

    @property
    def has_inductor(self) -> bool:
        """Whether pieces that are compared or timed are compiled; else they run as traced.

        Building C++ would take most of a quick run on a CPU. The parts that start twice build it.
        """
        return self.device.type == "cuda" or not self.is_quick

    def pick(self, large: int, small: int) -> int:
        """Return the size that this machine can hold and finish."""
        return small if self.is_small else large

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=self.device)

    def time(self, function: Callable[[], object]) -> float:
        """Return the median seconds of a call's kernels; on a GPU with a cold L2.

        Launching counts where the device waits for it: take `time_replayed` for a few small kernels
        that steps replay from a graph, and `time_whole` for what waits itself.
        """
        if self.device.type == "cuda":
            from triton.testing import do_bench

            return float(do_bench(function, return_mode="median")) / 1e3
        return self.time_whole(function)

    def time_replayed(self, function: Callable[[], Any]) -> float:
        """Return what `time` does, on a GPU of a graph's replay. The call has run before."""
        return self.time(captured(function)[0].replay if self.device.type == "cuda" else function)

    def time_whole(self, function: Callable[[], object]) -> float:
        """Return the median seconds of a call that waits for its device; with a cold L2."""
        is_cuda = self.device.type == "cuda"
        flush = torch.empty(256 << 20 if is_cuda else 0, dtype=torch.uint8, device=self.device)
        seconds = []
        for _ in range(2 if self.is_quick else 30 if is_cuda else 7):
            if is_cuda:
                flush.zero_()
                torch.cuda.synchronize()
            began = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)


def attempts(function: Callable[..., Row], cases: Iterable[tuple[Any, ...]]) -> Iterator[Row]:
    """Yield each case's row; one that fails is a row that is wrong, and the others run.

    A case begins with its name.
    """
    for case in cases:
        try:
            yield function(*case)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:1000]
            yield Row(f"{function.__name__}, {case[0]}", error=math.nan, limit=0.0, note=text)


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a step that ran before; return the graph and its output."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    return graph, output


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest wanted magnitude."""
    wanted = wanted.float()
    return float((found.float() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-9))
