"""The graph parts of gpu_check.py: a level and mode against eager, at every captured size.

And the part that leaves the size of the KV cache to the runner.
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
from gpu_check_models import BLOCK_SIZE, save_random_checkpoint, save_random_moe
from gpu_check_rows import Row, Setting, error_of

from cluster.config import CacheConfig, EngineConfig, SchedulerConfig
from cluster.engine.lockstep import AloneLockstep
from cluster.group.context import RankContext
from cluster.rank.runner import ModelRunner
from cluster.wire.messages import NewBlocks, RowAdmission, StepPlan
from compile.config import CompilationConfig
from compile.counters import counter

SIZES = (1, 2, 4, 8)
PROMPT = 37
COLUMNS = -(-(PROMPT + 8) // BLOCK_SIZE)


def part_graphs(
    at: Setting, number: str, mode: str, policy: str, kind: str = "float32"
) -> Iterator[Row]:
    """Hidden states of a prefill and of padded decode steps against eager, then a step's time.

    kind: "bfloat16"; "sizes" for pieces that are tuned for a few sizes, "streams" for pieces that
    run as traced, on two streams where there are any, both in float32.
    """
    level, title = int(number), f"level {number} {mode} {policy}"
    title += "" if kind == "float32" else f" {kind}"
    dtype = "bfloat16" if kind == "bfloat16" else "float32"
    sizes = SIZES[1 : at.pick(3, 2)] if kind == "sizes" else None
    with tempfile.TemporaryDirectory() as name:
        save_random_checkpoint(at, Path(name))
        wanted = run_sizes(make_runner(at, name, CompilationConfig(level=0), dtype))
        config = replace(compilation(level, mode, policy, sizes), use_inductor=at.has_inductor)
        if kind == "streams":
            num_streams = 2 if at.device.type == "cuda" else 1
            config = replace(config, use_inductor=False, max_num_streams=num_streams)
        runner = make_runner(at, name, config, dtype)
        # A compiled piece does not round between its operations, as eager does.
        yield compared(runner, wanted, mode, title, 3e-2 if dtype == "bfloat16" else 1e-3)
        if (report := runner.forward.report) is not None:
            yield Row(f"graph pools, {title}", value=float(report.num_bytes), unit="bytes")
        yield timed(at, runner, title)


def part_sizing(at: Setting, kind: str = "dense") -> Iterator[Row]:
    """The share of memory that is taken after start and the largest step, by default settings.

    kind: "moe" for a model whose layers have experts.
    """
    most, limit = at.pick(8192, 256), at.pick(4096, 512)
    cache = (
        CacheConfig(BLOCK_SIZE)
        if at.device.type == "cuda"
        else CacheConfig(BLOCK_SIZE, kv_memory_bytes=1 << 24)
    )
    with tempfile.TemporaryDirectory() as name:
        save = save_random_moe if kind == "moe" else save_random_checkpoint
        save(at, Path(name))
        gc.collect()
        if at.device.type == "cuda":
            torch.cuda.empty_cache()
        runner = ModelRunner(
            RankContext(
                EngineConfig(
                    model_path=name,
                    max_model_len=limit,
                    device=at.device.type,
                    dtype="bfloat16",
                    cache=cache,
                    scheduler=SchedulerConfig(at.pick(1024, 64), most),
                )
            )
        )
    columns = limit // BLOCK_SIZE
    plan = make_plan(most // limit or 1, 0, min(limit, most), columns)
    runner.execute(plan, AloneLockstep(runner.switch).agree(plan.vote()))
    note = f"{runner.num_blocks} blocks of {runner.kv_spec.block_bytes} bytes"
    if at.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(at.device)
        wanted, taken = cache.gpu_memory_utilization, 1 - free / total
        yield Row(f"share of memory, {kind}", error=abs(taken - wanted), limit=0.05, note=note)
    else:
        taken = (runner.num_blocks + 1) * runner.kv_spec.block_bytes
        error = abs(taken / cache.kv_memory_bytes - 1)
        limit_ = runner.kv_spec.block_bytes / cache.kv_memory_bytes
        yield Row(f"share of KV memory, {kind}", error=error, limit=limit_, note=note)


def run_sizes(runner: ModelRunner) -> list[torch.Tensor]:
    """Return hidden states and logits of every number of sequences, captured or padded."""
    return [each for size in range(1, SIZES[-1] + 1) for each in run(runner, size)]


def compared(
    runner: ModelRunner, wanted: list[torch.Tensor], mode: str, title: str, limit: float
) -> Row:
    """Return a row with the largest error of all sizes; one that replays nothing is wrong."""
    replayed = counter.num_cudagraph_replayed
    errors = [error_of(*pair) for pair in zip(run_sizes(runner), wanted, strict=True)]
    replayed = counter.num_cudagraph_replayed - replayed
    report = runner.forward.report
    note = f"{replayed} replays"
    if report is not None:
        note += f", {len(report.captured)} graphs, {report.num_bytes} bytes in pools"
        note += f", {len(report.skipped)} without room" if report.skipped else ""
    is_replayed = mode == "NONE" or (replayed and report is not None and not report.skipped)
    error = max(errors) if is_replayed else math.inf
    return Row(f"hidden states and logits, {title}", error=error, limit=limit, note=note)


def compilation(
    level: int, mode: str, policy: str, compile_sizes: tuple[int, ...] | None
) -> CompilationConfig:
    """Return a configuration that captures `SIZES`."""
    tokens = {"capture_num_tokens": (8, 64, SIZES[-1] * PROMPT)} if "PIECEWISE" in mode else {}
    sizes = {} if mode == "NONE" else {"cudagraph_capture_sizes": SIZES}
    return CompilationConfig(
        level=level,
        cudagraph_mode=mode,
        graph_pool=policy,
        compile_sizes=compile_sizes,
        **sizes,
        **tokens,
    )


def make_runner(at: Setting, path: str, compilation: CompilationConfig, dtype: str) -> ModelRunner:
    """Return a runner for as many sequences as the largest of `SIZES`."""
    return ModelRunner(RankContext(make_config(at, path, compilation, dtype)))


def make_config(at: Setting, path: str, compilation: CompilationConfig, dtype: str) -> EngineConfig:
    """Return a configuration for as many sequences as the largest of `SIZES`."""
    most = SIZES[-1]
    return EngineConfig(
        model_path=path,
        max_model_len=COLUMNS * BLOCK_SIZE,
        device=at.device.type,
        dtype=dtype,
        cache=CacheConfig(BLOCK_SIZE, num_kv_blocks=most * COLUMNS),
        scheduler=SchedulerConfig(most, most * PROMPT),
        compilation=compilation,
    )


def make_plan(size: int, computed: int, new: int, columns: int = COLUMNS) -> StepPlan:
    """Return a step of `size` sequences, each `new` tokens further than `computed`."""
    rows = list(range(size))
    first = computed == 0
    return StepPlan(
        epoch=0,
        step=computed,
        num_seqs=size,
        num_tokens=size * new,
        admitted=[RowAdmission(row, 0.0, 0, 1.0, 0.0, 0, -1, None, 0) for row in rows if first],
        new_blocks=[
            NewBlocks(row, 0, list(range(1 + row * columns, 1 + (row + 1) * columns)))
            for row in rows
            if first
        ],
        rows=rows,
        num_computed=[computed] * size,
        num_new=[new] * size,
        output_index=[computed] * size,
        token_ids=[(7 * row + i + computed) % 512 for row in rows for i in range(new)],
        num_decodes=size if new == 1 else 0,
        num_drafting=0,
        prompt_targets=[],
        known_token_ids=[],
    )


@torch.inference_mode()
def run(runner: ModelRunner, size: int) -> list[torch.Tensor]:
    """Return hidden states and logits of a prefill and of two decode steps, without padding."""
    found = []
    for computed, new in ((0, PROMPT), (PROMPT, 1), (PROMPT + 1, 1)):
        plan = make_plan(size, computed, new)
        agreed = AloneLockstep(runner.switch).agree(plan.vote())
        batch = runner.build(plan, agreed)
        output = runner.forward.run(batch, agreed, plan.num_seqs)
        hidden, scored = output.hidden, output.scored
        found.append(hidden[: plan.num_tokens].clone())
        logits = runner.model.compute_logits(hidden) if scored is None else scored.logits
        assert logits is not None
        found.append(logits[: plan.num_tokens].clone())
        if hidden.is_cuda:
            # The next step writes the host arrays that this one's copies read.
            torch.cuda.synchronize()
    return found


def timed(at: Setting, runner: ModelRunner, title: str) -> Row:
    """Return a row with the time of a whole decode step of one sequence."""
    run(runner, 1)
    plan = make_plan(1, PROMPT, 1)
    agreed = AloneLockstep(runner.switch).agree(plan.vote())
    weights = sum(parameter.nbytes for parameter in runner.model.parameters())
    # One row of the embedding is read.
    weights -= runner.model.model.embed_tokens.weight.nbytes
    row = Row(f"decode step, {title}", num_bytes=weights)
    row.seconds = at.time_whole(partial(runner.execute, plan, agreed))
    return row
