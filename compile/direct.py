"""Calls of a compiled piece without the layers that torch puts around it.

The one thing to know: an artifact's call passes five Python functions before it reaches the code
that Inductor generated, as long as a small piece computes. For a piece of an inference graph they
pass everything through: inputs as they came, outputs as they are. Whether they do is not assumed
but watched in the first call; a piece for which anything differs keeps its layers.

What they decide, they decide when a piece is compiled (aliases, mutations, subclasses), so one call
tells for all. Two things can change: a step outside of inference mode takes the layers, and so does
one under the profiler, which shows pieces by them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Generated = Callable[[list[Any]], Sequence[Any]]


@dataclass
class _Call:
    """A call of generated code."""

    code: Generated
    inputs: list[Any]
    outputs: Sequence[Any]


class DirectCall:
    """A compiled piece that is called directly from its second call on, if that is the same.

    Invariant: equal arguments give what `compiled` gives, whichever way is taken.
    """

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled
        self._code: Generated | None = None
        self._is_watched = False

    @property
    def is_direct(self) -> bool:
        """Whether the layers are passed by."""
        return self._code is not None

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
    """Tell whether generated code got what the piece got, and returned what the piece returned."""
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


_lock = threading.Lock()
_watching: dict[int, list[_Call]] = {}
"""Calls by the thread that watches. Ranks of one process may be threads, which meet in
collectives inside of pieces: nobody may hold the lock there."""


@contextmanager
def _watched() -> Iterator[list[_Call]]:
    """Collect the calls of generated code that this thread makes inside."""
    thread, calls = threading.get_ident(), list[_Call]()
    with _lock:
        _watching[thread] = calls
        _install()
    try:
        yield calls
    finally:
        with _lock:
            del _watching[thread]
            if not _watching:
                _uninstall()


_original: Callable[..., Any] | None = None


def _install() -> None:
    global _original
    if _original is not None:
        return
    from torch._inductor.output_code import CompiledFxGraph

    original = _original = CompiledFxGraph.__call__

    def watch(self: Any, inputs: Sequence[Any]) -> Any:
        calls = _watching.get(threading.get_ident())
        if calls is None:
            return original(self, inputs)
        before = list(inputs)  # generated code empties the list
        outputs = original(self, inputs)
        calls.append(_Call(self.current_callable, before, outputs))
        return outputs

    CompiledFxGraph.__call__ = watch  # type: ignore[method-assign]


def _uninstall() -> None:
    global _original
    from torch._inductor.output_code import CompiledFxGraph

    CompiledFxGraph.__call__ = _original  # type: ignore[method-assign,assignment]
    _original = None
