"""The graph part of gpu_check.py: every level and mode against eager, at every captured size."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from gpu_check_models import BLOCK_SIZE, save_random_checkpoint
from gpu_check_rows import Row, Setting, error_of

from cluster.config import CacheConfig, EngineConfig, SchedulerConfig
from cluster.messages import Admission, NewBlocks, StepPlan
from cluster.rank.lockstep import Lockstep
from cluster.rank.runner import ModelRunner
from compile.config import CompilationConfig

SIZES = (1, 2, 4, 8)
PROMPT = 37
COLUMNS = -(-(PROMPT + 8) // BLOCK_SIZE)
VARIANTS = (
    (0, "FULL_DECODE_ONLY", "shared"),
    (2, "NONE", "shared"),
    (2, "FULL_DECODE_ONLY", "shared"),
    (3, "NONE", "shared"),
    (3, "PIECEWISE", "shared"),
    (3, "FULL_DECODE_ONLY", "shared"),
    (3, "FULL_AND_PIECEWISE", "shared"),
    (3, "FULL_AND_PIECEWISE", "per_bucket"),
)


def part_graphs(at: Setting) -> Iterator[Row]:
    """Hidden states of a prefill and of padded decode steps against eager, then their times."""
    with tempfile.TemporaryDirectory() as name:
        save_random_checkpoint(at, Path(name))
        eager = make_runner(at, name, 0, "NONE", "shared")
        wanted = {size: run(eager, size) for size in range(1, SIZES[-1] + 1)}
        yield timed(at, eager, "level 0 NONE")
        for level, mode, policy in VARIANTS:
            runner = make_runner(at, name, level, mode, policy)
            title = f"level {level} {mode} {policy}"
            errors = [
                error_of(found, right)
                for size, both in wanted.items()
                for found, right in zip(run(runner, size), both, strict=True)
            ]
            report = runner.forward.report
            graphs = 0 if report is None else len(report.captured)
            pools = 0 if report is None else report.num_bytes
            note = f"{graphs} graphs, {pools} bytes in pools"
            yield Row(f"hidden states, {title}", error=max(errors), limit=1e-3, note=note)
            yield timed(at, runner, title)


def make_runner(at: Setting, path: str, level: int, mode: str, policy: str) -> ModelRunner:
    """Return a runner in float32 that captures `SIZES`."""
    most = SIZES[-1]
    tokens = {"capture_num_tokens": (8, 64, most * PROMPT)} if "PIECEWISE" in mode else {}
    sizes = {} if mode == "NONE" else {"cudagraph_capture_sizes": SIZES}
    return ModelRunner(
        EngineConfig(
            model_path=path,
            max_model_len=COLUMNS * BLOCK_SIZE,
            device=at.device.type,
            cache=CacheConfig(BLOCK_SIZE, num_kv_blocks=most * COLUMNS),
            scheduler=SchedulerConfig(most, most * PROMPT),
            compilation=CompilationConfig(
                level=level, cudagraph_mode=mode, graph_pool=policy, **sizes, **tokens
            ),
        )
    )


def make_plan(size: int, computed: int, new: int) -> StepPlan:
    """Return a step of `size` sequences, each `new` tokens further than `computed`."""
    rows = list(range(size))
    first = computed == 0
    return StepPlan(
        epoch=0,
        step=computed,
        admitted=[Admission(row, 0.0, 0, 1.0, 0.0, 0, -1, None) for row in rows if first],
        new_blocks=[
            NewBlocks(row, 0, list(range(1 + row * COLUMNS, 1 + (row + 1) * COLUMNS)))
            for row in rows
            if first
        ],
        rows=rows,
        num_computed=[computed] * size,
        num_new=[new] * size,
        output_index=[computed] * size,
        token_ids=[(7 * row + i + computed) % 512 for row in rows for i in range(new)],
        num_decodes=size if new == 1 else 0,
        prompt_targets=[],
    )


@torch.inference_mode()
def run(runner: ModelRunner, size: int) -> list[torch.Tensor]:
    """Return the hidden states of a prefill and of two decode steps, without padding."""
    found = []
    for computed, new in ((0, PROMPT), (PROMPT, 1), (PROMPT + 1, 1)):
        plan = make_plan(size, computed, new)
        mode = runner.forward.mode_of(Lockstep.alone().agree(plan.vote()))
        batch = runner.inputs.build(plan, mode.num_tokens, mode.num_seqs)
        hidden = runner.forward.run(batch, mode, plan.num_seqs)
        found.append(hidden[: plan.num_tokens].clone())
    return found


def timed(at: Setting, runner: ModelRunner, title: str) -> Row:
    """Return a row with the time of a whole decode step of one sequence."""
    run(runner, 1)
    plan = make_plan(1, PROMPT, 1)
    agreed = Lockstep.alone().agree(plan.vote())
    weights = sum(parameter.nbytes for parameter in runner.model.parameters())
    row = Row(f"decode step, {title}", num_bytes=weights)
    row.seconds = at.time(partial(runner.execute, plan, agreed))
    return row
