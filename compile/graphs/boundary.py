"""The boundary that a recording graph sees: calls of compiled pieces and of kernels, whose inside
is out of its reach, and the tensors they carry."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(Protocol):
    """Takes part in every call that crosses a boundary while it is active."""

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run `fn(*args)`, keep it for replay, and return its outputs at fixed addresses."""

    def bound(self, call: partial[Any], tensors: tuple[torch.Tensor | None, ...]) -> Any:
        """Make a call that knows the addresses of `tensors` and holds none of them; keep it for
        replay unless it returns False, with nothing done. Return what it returns."""


class _PerThread(threading.local):
    recorder: Recorder | None = None


active = _PerThread()


def boundary(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` as a call that an active recorder of this thread sees as one."""

    def call(*args: Any) -> Any:
        recorder = active.recorder
        return fn(*args) if recorder is None else recorder.call(fn, args)

    return call


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Make `recorder` this thread's active one; None pauses the one that is."""
    before = active.recorder
    active.recorder = recorder
    try:
        yield
    finally:
        active.recorder = before


class CaptureMode(TorchDispatchMode):
    """A mode under which a step is captured. Nothing is traced there, so Dynamo need not be kept
    out, for which torch would import it: a second of a start that compiles nothing."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def map_tensors(fn: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return `value` with `fn` applied to every tensor in it; all else stays."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, tuple | list):
        return rebuild(value, [map_tensors(fn, item) for item in value])
    if isinstance(value, dict):
        return {key: map_tensors(fn, item) for key, item in value.items()}
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for item in value for tensor in tensors_of(item)]


def rebuild(like: tuple[Any, ...] | list[Any], items: list[Any]) -> Any:
    """Return the items as a sequence of the type of `like`: a list, tuple or named tuple."""
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)
