"""Count the native builds that compiling and loading start: runs of a C++ compiler, and Triton
kernels that are not found in a cache."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from compile.cache.inductor_private import ORDER_KERNEL, RUN_COMPILER, missing_kernels, replace
from compile.counters import counter
from compile.graphs.capture import note_late_compile

_lock = threading.Lock()


class _InInductor(threading.local):
    depth = 0


_in_inductor = _InInductor()


def install() -> None:
    """Count from now on. Idempotent; needs Inductor, and counts Triton once that is imported."""
    _count_inductor_builds()
    if "triton" in sys.modules:
        _count_triton_builds()


def install_for_kernels() -> None:
    """Count, and name after the seal, the Triton kernels that layers launch themselves."""
    importlib.import_module("triton")
    _count_triton_builds()


def _add(name: str, number: int) -> None:
    """Inductor builds in several threads at once."""
    with _lock:
        setattr(counter, name, getattr(counter, name) + number)


@functools.cache
def _count_inductor_builds() -> None:
    def compiling(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def counted(*args: Any, **kwargs: Any) -> Any:
            _add("num_cpp_builds", 1)
            return run(*args, **kwargs)

        return counted

    def ordering(order: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(order)
        def counted(*args: Any, **kwargs: Any) -> Any:
            before = missing_kernels()
            try:
                return order(*args, **kwargs)
            finally:
                if _in_inductor.depth:
                    _add("num_triton_builds", missing_kernels() - before)

        return counted

    replace(RUN_COMPILER, compiling)
    replace(ORDER_KERNEL, ordering)


@functools.cache
def _count_triton_builds() -> None:
    compilation: Any = sys.modules["triton"].knobs.compilation
    before = compilation.listener

    def listener(**facts: Any) -> None:
        # Inductor's own kernels are counted where they are ordered; see `inductor_builds`.
        is_built = not facts.get("cache_hit") and not _in_inductor.depth
        if is_built:
            _add("num_triton_builds", 1)
        if before is not None:
            before(**facts)
        if is_built:
            note_late_compile(f"Triton kernel {getattr(facts.get('src'), 'name', '')}")

    compilation.listener = listener


@contextmanager
def inductor_builds() -> Iterator[None]:
    """Count the Triton kernels that Inductor orders inside: other processes may build them."""
    install()
    _in_inductor.depth += 1
    try:
        yield
    finally:
        _in_inductor.depth -= 1
