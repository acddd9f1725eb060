"""Step graphs on CPU: a step is run once, recorded, and replayed from fixed addresses.

A replay behaves like that of a CUDA graph, down to its mistakes. Arguments, host values and the
forward context are those of the capture. Nothing that changed since is followed, except the
contents of tensors. The speed of a replay says nothing about CUDA graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from compile.context import resumed_context
from compile.graphs.cpu.pool import CpuGraphPool
from compile.graphs.cpu.recorder import Recorder, Recording
from compile.graphs.errors import DeadTensorError, NestedCaptureError, ReplayError

T = TypeVar("T")


class _PerThread(threading.local):
    is_capturing = False


_state = _PerThread()


class CpuStepGraph:
    """One captured step.

    Invariant: it keeps its pool and the values of host scalars, and owns no tensor.
    """

    def __init__(self, pool: CpuGraphPool) -> None:
        self._pool = pool
        self._recording: Recording | None = None
        self._is_inference = False

    def capture(self, fn: Callable[[], T]) -> T:
        """Run `fn` and record it; return its result, whose fresh tensors lie in the pool.

        Raises:
            CaptureError: `fn` does what a replay cannot repeat.
            DeadTensorError: a tensor that `fn` made outside of the pool is gone already.
        """
        recorder = Recorder(self._pool)
        with _capturing(), torch.no_grad(), recorder.active():
            result = fn()
        self._recording = recorder.finish()
        self._is_inference = torch.is_inference_mode_enabled()
        _check_alive(self._recording)
        return result

    def replay(self) -> None:
        """Run the step again on what its tensors hold now.

        Raises:
            ReplayError: nothing was captured.
            DeadTensorError: a tensor from outside of the pool is gone.
            NestedCaptureError: this thread is capturing a step.
        """
        if _state.is_capturing:
            raise NestedCaptureError("replay", "no capture around it", "one on this thread")
        if self._recording is None:
            raise ReplayError("replay", "a captured step", "none")
        _check_alive(self._recording)
        with torch.inference_mode(self._is_inference), torch.no_grad():
            for context, calls in self._recording.groups:
                with resumed_context(context):
                    for call in calls:
                        call()


def _check_alive(recording: Recording) -> None:
    if recording.watch.dead:
        wanted = "tensors from outside of the pool to outlive the graph"
        raise DeadTensorError("replay", wanted, f"{recording.watch.dead[0]} is gone")


@contextmanager
def _capturing() -> Iterator[None]:
    if _state.is_capturing:
        raise NestedCaptureError("capture", "no capture around it", "one on this thread")
    _state.is_capturing = True
    try:
        yield
    finally:
        _state.is_capturing = False
