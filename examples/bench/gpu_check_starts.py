"""The parts of gpu_check.py that start a runner twice, each time in a process of its own."""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_check_graphs import PROMPT, SIZES, compilation, make_config, make_plan
from gpu_check_models import save_random_checkpoint
from gpu_check_rows import Row, Setting

from cluster.config import EngineConfig
from cluster.engine.lockstep import AloneLockstep
from cluster.group.context import RankContext
from cluster.rank.runner import ModelRunner
from compile.counters import counter

START_S = 150.0
"""A start that takes longer prints its stacks."""


@dataclass(frozen=True)
class Start:
    """What one process did from an empty runner to its second step."""

    seconds: float
    num_compilations: int
    num_builds: int
    """Of C++ and Triton kernels."""
    num_tunings: int
    """Measurements by which Inductor chose among kernels."""
    num_loaded: int
    token_ids: list[list[int]]


def part_restart(at: Setting, kind: str = "") -> Iterator[Row]:
    """A second start with the first one's cache: nothing is compiled, built or tuned again.

    kind: "sizes" for pieces that are tuned for a few sizes.
    """
    with tempfile.TemporaryDirectory() as name:
        save_random_checkpoint(at, Path(name))
        fields = compilation(
            3, "FULL_AND_PIECEWISE", "shared", SIZES[1:3] if kind == "sizes" else None
        )
        fields = replace(fields, cache_dir=f"{name}/cache")
        config = make_config(at, name, fields, "bfloat16")
        first, second = (start_alone(config, f"{name}/triton") for _ in range(2))
    title = f"second start{', sizes' if kind == 'sizes' else ''}"
    for label, each in ((title.replace("second", "first"), first), (title, second)):
        note = f"{each.num_compilations} compiled, {each.num_loaded} loaded"
        note += f", {each.num_builds} built, {each.num_tunings} measured to tune"
        yield Row(f"seconds, {label}", value=each.seconds, unit="s", note=note)
    # A first start that had nothing to do would prove nothing about the second one.
    is_proof = first.num_compilations and first.num_builds and second.num_loaded
    again = float(second.num_compilations + second.num_builds) if is_proof else math.inf
    yield Row(f"compilations and builds, {title}", error=again, limit=0.0)
    # On a CPU Inductor has nothing to choose from.
    is_tuned = first.num_tunings or kind != "sizes" or at.device.type == "cpu"
    tuned = float(second.num_tunings) if is_tuned else math.inf
    yield Row(f"tunings, {title}", error=tuned, limit=0.0)
    differ = float(first.token_ids != second.token_ids)
    yield Row(f"tokens, {title} against first", error=differ, limit=0.0)


def start_alone(config: EngineConfig, triton_directory: str) -> Start:
    """Start a runner in a new process; return what it did there.

    Raises:
        Exception: what the start raised.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(start, config, triton_directory).result()


def start(config: EngineConfig, triton_directory: str) -> Start:
    """Load, compile, capture, and run a prefill and a decode step in this process."""
    faulthandler.dump_traceback_later(START_S)
    # Kernels of layers are kept here: those that another part left would not count as built.
    os.environ["TRITON_CACHE_DIR"] = triton_directory
    num_tunings = count_tunings()
    began = time.perf_counter()
    runner = ModelRunner(RankContext(config))
    tokens = []
    for computed, new in ((0, PROMPT), (PROMPT, 1)):
        plan = make_plan(SIZES[-1], computed, new)
        agreed = AloneLockstep(runner.switch).agree(plan.vote())
        tokens.append(list(runner.execute(plan, agreed).token_ids))
    seconds = time.perf_counter() - began
    faulthandler.cancel_dump_traceback_later()
    return Start(
        seconds,
        counter.num_backend_compilations,
        counter.num_cpp_builds + counter.num_triton_builds,
        num_tunings(),
        counter.num_compiled_artifacts_loaded,
        tokens,
    )


def count_tunings() -> Callable[[], int]:
    """Count Inductor's measurements of kernels from now on; return what tells their number.

    Inductor's own counters do not do: a graph that is loaded adds what its compilation counted.
    """
    from torch._inductor.runtime.benchmarking import benchmarker

    num_calls = 0

    def counted(measure: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            return measure(*args, **kwargs)

        return call

    for name in ("benchmark", "benchmark_cpu", "benchmark_gpu"):
        setattr(benchmarker, name, counted(getattr(benchmarker, name)))
    return lambda: num_calls
