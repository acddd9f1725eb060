"""How a recorder sees a step: the ops that are dispatched, and reads for which none is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from compile.errors import CaptureError


class Modes:
    """Both modes, which opaque code must not see.

    Invariant: `_entered` are those on torch's stacks now. Torch takes a mode off its stack while
    the mode handles a call, but leaves the other kind on.
    """

    def __init__(self, handle: Callable[..., Any]) -> None:
        """Hand each op to `handle`, as function, arguments and keyword arguments."""
        self._dispatch = _Dispatch(handle, self)
        self._reads = _Reads(self)
        self._entered: list[_Dispatch | _Reads] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        with self._on(self._reads), self._on(self._dispatch):
            yield

    @contextmanager
    def off(self) -> Iterator[None]:
        """Leave those that are entered, and enter them again."""
        with ExitStack() as stack:
            for mode in list(self._entered):
                stack.enter_context(self._off(mode))
            yield

    @contextmanager
    def dispatching(self) -> Iterator[None]:
        """Record the ops that an op calls while it is handled."""
        with self._on(self._dispatch):
            yield

    @contextmanager
    def handling(self, mode: _Dispatch | _Reads) -> Iterator[None]:
        """Note that torch took a mode off its stack."""
        self._entered.remove(mode)
        try:
            yield
        finally:
            self._entered.append(mode)

    @contextmanager
    def _on(self, mode: _Dispatch | _Reads) -> Iterator[None]:
        with mode:
            self._entered.append(mode)
            try:
                yield
            finally:
                self._entered.remove(mode)

    @contextmanager
    def _off(self, mode: _Dispatch | _Reads) -> Iterator[None]:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            with self.handling(mode):
                yield
        finally:
            mode.__enter__()  # type: ignore[no-untyped-call]


class _Dispatch(TorchDispatchMode):
    """Hands every op on."""

    def __init__(self, handle: Callable[..., Any], stack: Modes) -> None:
        TorchDispatchMode.__init__(self)
        self._handle = handle
        self._stack = stack

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with self._stack.handling(self):
            return self._handle(func, args, kwargs or {})


class _Reads(TorchFunctionMode):
    """Refuses the reads that no op is dispatched for, addresses for native code included."""

    refused = (
        torch.Tensor.data_ptr,
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
    )

    def __init__(self, stack: Modes) -> None:
        TorchFunctionMode.__init__(self)
        self._stack = stack

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self.refused:
            raise value_read(func.__name__)
        with self._stack.handling(self):
            return func(*args, **(kwargs or {}))


def value_read(name: str) -> CaptureError:
    """Return the error of a step that reads a value by `name`."""
    return CaptureError(f"{name} at {where()}", "tensors that stay tensors", "a value read")


def where() -> str:
    """Return file and line of the step's code that runs now."""
    hidden = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__))
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*hidden, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"
