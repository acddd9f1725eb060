"""`DirectCall`: a compiled piece that is called without torch's layers around it.

An artifact's call passes five Python functions of torch before it reaches the code that Inductor
generated: 12 us a piece on a CPU, 7 % of a decode step of the bundled model. They are left out if
the first call shows that they pass everything through.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from compile.cache.inductor_private import CALL_GRAPH, replace

Generated = Callable[[list[Any]], Sequence[Any]]


@dataclass
class _Call:
    """A call of generated code."""

    code: Generated
    inputs: list[Any]
    outputs: Sequence[Any]


class DirectCall:
    """A compiled piece. Invariant: equal arguments give what `compiled` gives, whichever way is
    taken."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled
        self._code: Generated | None = None
        self._is_watched = False

    def __call__(self, *args: Any) -> Any:
        """Run the piece; return its outputs, a tuple or a list."""
        if (
            self._code is not None
            and torch.is_inference_mode_enabled()
            and not torch.autograd.profiler._is_profiler_enabled
        ):
            return self._code(list(args))
        if self._is_watched or not torch.is_inference_mode_enabled():
            return self.compiled(*args)
        self._is_watched = True
        with _watched() as calls:
            outputs = self.compiled(*args)
        if len(calls) == 1 and _is_same(args, outputs, calls[0]):
            self._code = calls[0].code
        return outputs


def _is_same(args: tuple[Any, ...], outputs: Any, call: _Call) -> bool:
    """Return whether generated code got what the piece got, and returned what it returned."""
    return (
        isinstance(outputs, tuple | list)
        and len(args) == len(call.inputs)
        and len(outputs) == len(call.outputs)
        and all(map(_is_one, args, call.inputs))
        and all(map(_is_one, outputs, call.outputs))
    )


def _is_one(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value is other
    return type(value) is type(other) and bool(value == other)


class _PerThread(threading.local):
    """Ranks of one process may be threads: each watches its own calls."""

    calls: list[_Call] | None = None


_watching = _PerThread()
_lock = threading.Lock()


@contextmanager
def _watched() -> Iterator[list[_Call]]:
    """Collect the calls of generated code that this thread makes inside."""
    with _lock:
        _install()
    _watching.calls = calls = list[_Call]()
    try:
        yield calls
    finally:
        _watching.calls = None


@functools.cache
def _install() -> None:
    replace(CALL_GRAPH, _watch)


def _watch(original: Callable[..., Any]) -> Callable[..., Any]:
    def watch(self: Any, inputs: Sequence[Any]) -> Any:
        calls = _watching.calls
        if calls is None:
            return original(self, inputs)
        before = list(inputs)  # generated code empties the list
        outputs = original(self, inputs)
        calls.append(_Call(self.current_callable, before, outputs))
        return outputs

    return watch
