"""Count the native builds that compiling and loading start: C++ and Triton.

An artifact may hold source that a compiler turns into machine code while it is *loaded*, so a start
that compiles nothing can still build for a minute. Each run of a C++ compiler and each Triton
kernel that is not found in a cache counts.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from compile.counters import counter
from compile.graphs.capture import note_late_compile

CPP_BUILDER = ("torch._inductor.cpp_builder", "run_compile_cmd")
"""Through which Inductor runs the C++ compiler, in torch 2.11 to 2.13."""
TRITON_ORDER = ("torch._inductor.async_compile", "AsyncCompile", "triton")
"""Through which Inductor asks for each Triton kernel, in torch 2.11 to 2.13."""

logger = logging.getLogger(__name__)
_lock = threading.Lock()


class _InInductor(threading.local):
    depth = 0


_in_inductor = _InInductor()


def install() -> None:
    """Count from now on. Idempotent; needs Inductor, and counts Triton once that is imported."""
    _count_cpp_builds()
    _count_ordered_kernels()
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
def _count_cpp_builds() -> None:
    module_name, name = CPP_BUILDER
    module = importlib.import_module(module_name)
    run: Callable[..., Any] | None = getattr(module, name, None)
    if run is None:
        logger.warning("C++ builds are not counted: wanted %s.%s, found none", module_name, name)
        return

    @functools.wraps(run)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _add("num_cpp_builds", 1)
        return run(*args, **kwargs)

    setattr(module, name, counted)


@functools.cache
def _count_triton_builds() -> None:
    knobs = getattr(sys.modules["triton"], "knobs", None)
    compilation: Any = getattr(knobs, "compilation", None)
    if not hasattr(compilation, "listener"):
        logger.warning("Triton builds are not counted: wanted knobs.compilation, found none")
        return
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


@functools.cache
def _count_ordered_kernels() -> None:
    module_name, owner_name, name = TRITON_ORDER
    owner: Any = getattr(importlib.import_module(module_name), owner_name, None)
    order: Callable[..., Any] | None = getattr(owner, name, None)
    if order is None:
        wanted = ".".join(TRITON_ORDER)
        logger.warning("Inductor's Triton builds are not counted: wanted %s, found none", wanted)
        return

    @functools.wraps(order)
    def counted(*args: Any, **kwargs: Any) -> Any:
        before = _missing_kernels()
        try:
            return order(*args, **kwargs)
        finally:
            if _in_inductor.depth:
                _add("num_triton_builds", _missing_kernels() - before)

    setattr(owner, name, counted)


@contextmanager
def inductor_builds() -> Iterator[None]:
    """Count the Triton kernels that Inductor orders inside: other processes may build them."""
    install()
    _in_inductor.depth += 1
    try:
        yield
    finally:
        _in_inductor.depth -= 1


def _missing_kernels() -> int:
    """Return how many kernels Inductor asked for and did not find in its artifact.

    Only a difference across one order counts builds: loading an artifact adds to these numbers what
    they grew by when it was compiled.
    """
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    return int(found["async_compile_cache_miss"] - found["async_compile_cache_hit"])
