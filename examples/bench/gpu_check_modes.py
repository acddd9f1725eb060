"""The part of gpu_check.py that times one model's steps by graph mode.

The model has the shape of Qwen3-0.6B: so many small kernels that launching them is most of an
eager step.
"""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from gpu_check_graphs import PROMPT, make_plan
from gpu_check_models import BLOCK_SIZE, save_random_qwen3
from gpu_check_rows import Row, Setting

from cluster.config import CacheConfig, EngineConfig, SchedulerConfig
from cluster.engine.lockstep import AloneLockstep
from cluster.group.context import RankContext
from cluster.rank.runner import ModelRunner
from cluster.wire.messages import StepAgreement, StepPlan
from compile.config import CompilationConfig
from compile.counters import counter

MODES = (("FULL", 3, "FULL_DECODE_ONLY"), ("PIECEWISE", 3, "PIECEWISE"), ("eager", 0, "NONE"))
"""How rows name a mode, its level and the mode."""
CHUNK = 100
"""Tokens of a prompt that are padded to a captured number, the next one."""
NUM_TOKENS = (1, 8, 64, 128)
COLUMNS = NUM_TOKENS[-1] // BLOCK_SIZE


def part_modes(at: Setting) -> Iterator[Row]:
    """Decode steps of 1, 8 and 64 sequences and a padded prompt, by mode.

    A step that replays nothing in a mode that captures it is wrong.
    """
    batches = (1, at.pick(8, 2), at.pick(64, 4))
    with tempfile.TemporaryDirectory() as name:
        save_random_qwen3(at, Path(name))
        for title, level, mode in MODES:
            config = replace(compilation(level, mode, batches), use_inductor=at.has_inductor)
            runner = ModelRunner(RankContext(make_config(at, name, config, batches)))
            for batch in batches:
                runner.execute(*agreed(runner, make_plan(batch, 0, PROMPT, COLUMNS)))
                plan = make_plan(batch, PROMPT, 1, COLUMNS)
                yield timed(at, runner, plan, f"decode step, 0.6B {title}: {batch}", title)
            plan = make_plan(1, 0, CHUNK, COLUMNS)
            # A full graph is of decode steps alone.
            captures = "eager" if title == "FULL" else title
            yield timed(at, runner, plan, f"prompt step, 0.6B {title}: {CHUNK}", captures)
            del runner
            gc.collect()
            if at.device.type == "cuda":
                torch.cuda.empty_cache()


def compilation(level: int, mode: str, batches: tuple[int, ...]) -> CompilationConfig:
    """Return a configuration that captures these batches, and prompts where the mode does."""
    if mode == "NONE":
        return CompilationConfig(level=level, cudagraph_mode=mode)
    tokens = {"capture_num_tokens": NUM_TOKENS} if mode == "PIECEWISE" else {}
    return CompilationConfig(
        level=level, cudagraph_mode=mode, cudagraph_capture_sizes=batches, **tokens
    )


def make_config(
    at: Setting, path: str, compilation: CompilationConfig, batches: tuple[int, ...]
) -> EngineConfig:
    most = batches[-1]
    return EngineConfig(
        model_path=path,
        max_model_len=COLUMNS * BLOCK_SIZE,
        device=at.device.type,
        dtype="bfloat16",
        cache=CacheConfig(BLOCK_SIZE, num_kv_blocks=most * COLUMNS),
        scheduler=SchedulerConfig(most, max(most * PROMPT, CHUNK, NUM_TOKENS[-1])),
        compilation=compilation,
    )


def agreed(runner: ModelRunner, plan: StepPlan) -> tuple[StepPlan, StepAgreement]:
    """Return a plan and what a group of one agrees on for it."""
    return plan, AloneLockstep(runner.switch).agree(plan.vote())


def timed(at: Setting, runner: ModelRunner, plan: StepPlan, name: str, captures: str) -> Row:
    """Return a row with the time of a whole step; `captures` is the mode that it must replay."""
    weights = sum(parameter.nbytes for parameter in runner.model.parameters())
    step = partial(runner.execute, *agreed(runner, plan))
    step()
    replayed = counter.num_cudagraph_replayed
    step()
    replayed = counter.num_cudagraph_replayed - replayed
    is_right = bool(replayed) == (captures != "eager")
    row = Row(name, error=0.0 if is_right else math.inf, limit=0.0, num_bytes=weights)
    row.note = f"{replayed} replays"
    row.seconds = at.time_whole(step)
    return row
