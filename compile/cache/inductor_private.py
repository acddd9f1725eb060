"""The private names of Inductor that Lockstep depends on, each with its reason.

No other file names them, but for what loads and saves a compiled piece (inductor.py) and traces a
forward. A name that is replaced is a `Private`: with a torch that lacks it, only what it was for is
lost, and a line in the log says so. The others decide what is right, so a torch without them is an
error.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

CODECACHE = "torch._inductor.codecache"
HEURISTICS = "torch._inductor.runtime.triton_heuristics"
BUILT_AGAIN = "loading may build C++ code again"
UNHASHED_OPTIONS = ("cpp.vec_isa_ok",)
"""Says how vector instructions are probed for, not which are found."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Private:
    """A function of Inductor, or a method of a class in it, that Lockstep replaces."""

    module: str
    path: str
    """Below the module."""
    lost: str
    """What does not work in a torch without it."""

    def find(self) -> tuple[Any, str, Any]:
        """Return what has the name, the name, and what is bound to it; None if there is none."""
        owner_name, _, name = self.path.rpartition(".")
        owner: Any = importlib.import_module(self.module)
        if owner_name:
            owner = getattr(owner, owner_name, None)
        return owner, name, None if owner is None else vars(owner).get(name)


PRECOMPILE_HEADER = Private(CODECACHE, "_precompile_header", BUILT_AGAIN)
"""A header only helps to build code, and all code of an artifact is there."""
LOAD_LIBRARY = Private(CODECACHE, "CppCodeCache._load_library", BUILT_AGAIN)
LOAD_MODULE = Private(CODECACHE, "PyCodeCache.load_by_key_path", BUILT_AGAIN)
"""Through these two go the files that a piece loads, which its artifact is to hold."""
CHECK_BUILD = Private("torch._inductor.cpu_vec_isa", "VecISA.check_build", BUILT_AGAIN)
"""Finds out what vector instructions can be used, by a C++ build."""
RECHECK_TUNING = Private(
    HEURISTICS,
    "CachingAutotuner.recheck_autotune_cache",
    "each start tunes the GPU's kernels again",
)
"""A kernel looks for its tuned configuration in the directory in which it was compiled."""
RUN_COMPILER = Private(
    "torch._inductor.cpp_builder", "run_compile_cmd", "C++ builds are not counted"
)
ORDER_KERNEL = Private(
    "torch._inductor.async_compile",
    "AsyncCompile.triton",
    "Inductor's Triton builds are not counted",
)
CALL_GRAPH = Private(
    "torch._inductor.output_code",
    "CompiledFxGraph.__call__",
    "pieces are called through torch's layers",
)
"""Passes the inputs of a piece to the generated code, which nothing else leads to."""


def replace(private: Private, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Bind a name to what `make` returns for what it is bound to; return what undoes it."""
    owner, name, original = private.find()
    if original is None:
        _warn_once(private)
        return lambda: None
    setattr(owner, name, make(original))
    return lambda: setattr(owner, name, original)


@contextmanager
def replaced(private: Private, make: Callable[[Any], Any]) -> Iterator[None]:
    """Bind a name to what `make` returns, as long as this lasts."""
    undo = replace(private, make)
    try:
        yield
    finally:
        undo()


@cache
def _warn_once(private: Private) -> None:
    name = f"{private.module}.{private.path}"
    logger.warning("%s: wanted in this torch, found none; %s", name, private.lost)


def required(module_name: str, name: str) -> Any:
    """Return what a name is bound to; raises RuntimeError where this torch has none."""
    found = getattr(importlib.import_module(module_name), name, None)
    if found is None:
        wanted = f"{module_name}.{name}"
        raise RuntimeError(f"torch {torch.__version__}: wanted {wanted}, found none")
    return found


def compiler_facts() -> list[str]:
    """Return what generated code depends on: the compiler's sources, the device, all options.

    Inductor hashes the same for its own cache.
    """
    facts = [required(CODECACHE, "torch_key")().hex()]
    if torch.cuda.is_available():
        facts.append(required(CODECACHE, "CacheBase").get_system()["hash"])
    for module in ("torch._inductor.config", "torch._functorch.config"):
        options = required(module, "save_config_portable")()
        facts += [f"{k}={options[k]!r}" for k in sorted(options) if k not in UNHASHED_OPTIONS]
    return [*facts, repr(_global_switches())]


def _global_switches() -> tuple[Any, ...]:
    """Return torch's own switches that generated code depends on."""
    matmul = torch.backends.cuda.matmul
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        matmul.fp32_precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )


@contextmanager
def fresh_tracing(inputs: Sequence[Any]) -> Iterator[None]:
    """Compile outside of the tracing that is going on, with the symbols of its inputs."""
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = detect_fake_mode(inputs) or FakeTensorMode(shape_env=ShapeEnv())
    with tracing(TracingContext(mode)):
        yield


@contextmanager
def caching() -> Iterator[None]:
    """Let Inductor keep what it compiles inside, and only that, even if its caches are off."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    with (
        required("torch.compiler._cache", "CacheArtifactManager").with_fresh_cache(),
        inductor.patch(force_disable_caches=False, fx_graph_cache=True),
        functorch.patch(enable_autograd_cache=True),
    ):
        yield


@contextmanager
def no_caches() -> Iterator[None]:
    """Compile inside as if nothing had been compiled before, and keep nothing."""
    from torch._inductor import config as inductor

    with inductor.patch(force_disable_caches=True):
        yield


@contextmanager
def cleared_caches() -> Iterator[None]:
    """Make Inductor forget what it loaded from another directory, so that it writes it here too."""
    clear = required("torch._inductor.utils", "clear_caches")
    clear()
    try:
        yield
    finally:
        clear()


def missing_kernels() -> int:
    """Return how many kernels Inductor looked for and did not find in its artifact.

    Only a difference across one order counts builds: loading an artifact adds to these numbers what
    they grew by when it was compiled.
    """
    found = required("torch._dynamo.utils", "counters")["inductor"]
    return int(found["async_compile_cache_miss"] - found["async_compile_cache_hit"])
