"""The private names of Inductor that Lockstep depends on, each with its reason. No other file names
them, but for what loads and saves a compiled piece (inductor.py) and traces a forward."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

CODECACHE = "torch._inductor.codecache"
HEURISTICS = "torch._inductor.runtime.triton_heuristics"
UNHASHED_OPTIONS = ("cpp.vec_isa_ok",)
"""Says how vector instructions are probed for, not which are found."""


class Private(NamedTuple):
    """A function of Inductor, or a method of a class in it, that Lockstep replaces."""

    module: str
    path: str
    """Below the module."""

    def find(self) -> tuple[Any, str, Any]:
        """Return what has the name, the name, and what is bound to it."""
        owner_name, _, name = self.path.rpartition(".")
        owner: Any = importlib.import_module(self.module)
        owner = getattr(owner, owner_name) if owner_name else owner
        return owner, name, vars(owner)[name]


PRECOMPILE_HEADER = Private(CODECACHE, "_precompile_header")
"""A header only helps to build code, and all code of an artifact is there."""
LOAD_LIBRARY = Private(CODECACHE, "CppCodeCache._load_library")
LOAD_MODULE = Private(CODECACHE, "PyCodeCache.load_by_key_path")
"""Through these two go the files that a piece loads, which its artifact is to hold."""
CHECK_BUILD = Private("torch._inductor.cpu_vec_isa", "VecISA.check_build")
"""Finds out what vector instructions can be used, by a C++ build."""
RECHECK_TUNING = Private(HEURISTICS, "CachingAutotuner.recheck_autotune_cache")
"""A kernel looks for its tuned configuration in the directory in which it was compiled."""
RUN_COMPILER = Private("torch._inductor.cpp_builder", "run_compile_cmd")
"""C++ builds are counted there."""
ORDER_KERNEL = Private("torch._inductor.async_compile", "AsyncCompile.triton")
"""Inductor's Triton builds are counted there."""
CALL_GRAPH = Private("torch._inductor.output_code", "CompiledFxGraph.__call__")
"""Passes the inputs of a piece to the generated code, which nothing else leads to."""


def replace(name: Private, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Bind a name to what `make` returns for what it is bound to; return what undoes it."""
    owner, attribute, original = name.find()
    setattr(owner, attribute, make(original))
    return lambda: setattr(owner, attribute, original)


@contextmanager
def replaced(name: Private, make: Callable[[Any], Any]) -> Iterator[None]:
    """Bind a name to what `make` returns, as long as this lasts."""
    undo = replace(name, make)
    try:
        yield
    finally:
        undo()


def private(module_name: str, name: str) -> Any:
    return getattr(importlib.import_module(module_name), name)


def compiler_facts() -> list[str]:
    """Return what generated code depends on, as Inductor hashes it for its own cache."""
    facts = [private(CODECACHE, "torch_key")().hex()]
    if torch.cuda.is_available():
        facts.append(private(CODECACHE, "CacheBase").get_system()["hash"])
    for module in ("torch._inductor.config", "torch._functorch.config"):
        options = private(module, "save_config_portable")()
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
def caching() -> Iterator[None]:
    """Let Inductor keep what it compiles inside, and only that, even if its caches are off."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    with (
        private("torch.compiler._cache", "CacheArtifactManager").with_fresh_cache(),
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
    clear = private("torch._inductor.utils", "clear_caches")
    clear()
    try:
        yield
    finally:
        clear()


@contextmanager
def feedback(take: Callable[..., None]) -> Iterator[None]:
    """Call `take` for each op that is autotuned inside, with the milliseconds of each
    candidate, the op's name, its inputs as Inductor's nodes, and more that torch adds to."""
    savers = private("torch._inductor.select_algorithm", "get_algorithm_selector_cache")()
    savers.add_feedback_saver(take)
    try:
        yield
    finally:
        savers.feedback_saver_fns.remove(take)


def missing_kernels() -> int:
    """Return how many kernels Inductor did not find in its artifact. Only a difference across one
    order counts builds: loading an artifact adds what they grew by when it was compiled."""
    found = private("torch._dynamo.utils", "counters")["inductor"]
    return int(found["async_compile_cache_miss"] - found["async_compile_cache_hit"])
