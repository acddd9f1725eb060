"""A decode step against the memory that it must read, and against transformers' own step.

    python examples/bench/decode_bandwidth.py [--layers 24] [--rounds 15] [--threads 1]
        [--batches 1,8,32] [--context 128] [--dtype bfloat16] [--level 3] [--json PATH]

The model has the shape of Qwen2.5-0.5B with random weights. What is timed is the whole step of a
runner: a plan becomes inputs, a forward, logits and tokens on the host. Steps, a plain read of the
same number of bytes and a step of transformers alternate in every round, and each figure is a
median of rounds, so a neighbour on the machine slows all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cluster.config import CacheConfig, EngineConfig, SchedulerConfig
from cluster.engine.lockstep import AloneLockstep
from cluster.group.context import RankContext
from cluster.rank.runner import ModelRunner
from cluster.wire.messages import NewBlocks, RowAdmission, StepPlan
from compile.config import CompilationConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
BLOCK_SIZE = 16


def main() -> None:
    """Make the model, time all batch sizes, print a table and one JSON line."""
    options = parse()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        theirs = make_checkpoint(Path(name), options.layers, getattr(torch, options.dtype))
        runner = make_runner(Path(name), options)
    results = [measure(runner, theirs, batch, options) for batch in options.batches]
    columns = list(results[0])
    print(" ".join(f"{column:>16}" for column in columns))
    for result in results:
        print(" ".join(f"{value:>16}" for value in result.values()))
    report = {"threads": options.threads, "dtype": options.dtype, "results": results}
    print(json.dumps(report))
    if options.json:
        Path(options.json).write_text(json.dumps(report) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=sizes, default="1,8,32")
    parser.add_argument("--context", type=int, default=128, help="tokens in the cache")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--level", type=int, default=3, help="of compilation")
    parser.add_argument("--json", help="where to write the figures")
    return parser.parse_args()


def sizes(text: str) -> list[int]:
    """Return the numbers of a list with commas."""
    return [int(number) for number in text.split(",")]


# --- what is compared -------------------------------------------------------------------------


def make_checkpoint(path: Path, layers: int, dtype: torch.dtype) -> Any:
    """Write a random checkpoint and return transformers' model of it."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, num_hidden_layers=layers)
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    model.save_pretrained(path)
    return model


def make_runner(path: Path, options: argparse.Namespace) -> ModelRunner:
    """Return a runner with room for the largest batch."""
    seqs = max(options.batches)
    blocks = -(-(options.context + options.rounds + 8) // BLOCK_SIZE)
    return ModelRunner(
        RankContext(
            EngineConfig(
                model_path=str(path),
                max_model_len=blocks * BLOCK_SIZE,
                dtype=options.dtype,
                cache=CacheConfig(block_size=BLOCK_SIZE, num_kv_blocks=seqs * blocks),
                scheduler=SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=max(seqs, 64)),
                compilation=CompilationConfig(
                    level=options.level, cudagraph_capture_sizes=tuple(options.batches)
                ),
                threads=options.threads,
            )
        )
    )


def our_steps(runner: ModelRunner, batch: int, context: int) -> Callable[[], None]:
    """Return a function that decodes one token of each sequence, further with every call."""
    columns = runner.config.max_blocks_per_seq
    step = 0

    def execute() -> None:
        nonlocal step
        plan = decode_plan(batch, context + step, columns if step == 0 else 0)
        runner.execute(plan, AloneLockstep().agree(plan.vote()))
        step += 1

    return execute


def decode_plan(batch: int, computed: int, columns: int) -> StepPlan:
    """Return the plan of one decode step; with `columns`, rows are admitted with their blocks."""
    rows = list(range(batch)) if columns else []
    return StepPlan(
        epoch=0,
        step=computed,
        num_seqs=batch,
        num_tokens=batch,
        admitted=[RowAdmission(row, 0.0, 0, 1.0, 0.0, 0, -1, None, 0) for row in rows],
        new_blocks=[
            NewBlocks(row, 0, list(range(1 + row * columns, 1 + (row + 1) * columns)))
            for row in rows
        ],
        rows=list(range(batch)),
        num_computed=[computed] * batch,
        num_new=[1] * batch,
        output_index=[computed] * batch,
        token_ids=[(7 + computed + row) % 512 for row in range(batch)],
        num_decodes=batch,
        num_drafting=0,
        prompt_targets=[],
        known_token_ids=[],
    )


def their_steps(model: Any, batch: int, context: int) -> Callable[[], None]:
    """Return a function that decodes with transformers' cache, greedily and down to the host."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        # The cache by position: its name is another one since transformers 5.24.
        model(torch.randint(1000, (batch, context)), None, None, cache, logits_to_keep=1)
    token = torch.full((batch, 1), 7)

    @torch.inference_mode()
    def step() -> None:
        logits = model(token, None, None, cache).logits
        logits[:, -1].argmax(-1).tolist()

    return step


def plain_read(num_bytes: int) -> Callable[[], None]:
    """Return a function that reads as many bytes as a step, and does little else."""
    data = torch.ones(num_bytes // 4)
    return lambda: float(data.sum())


# --- timing -----------------------------------------------------------------------------------


def measure(runner: ModelRunner, theirs: Any, batch: int, options: argparse.Namespace) -> Any:
    """Time one batch size; milliseconds, and ratios of medians."""
    num_bytes = step_bytes(runner, batch, options.context)
    functions = {
        "ours": our_steps(runner, batch, options.context),
        "read": plain_read(num_bytes),
        "theirs": their_steps(theirs, batch, options.context),
    }
    seconds = alternate(functions, options.rounds)
    ours, read = seconds["ours"], seconds["read"]
    return {
        "batch": batch,
        "ours_ms": round(ours * 1e3, 2),
        "read_ms": round(read * 1e3, 2),
        "theirs_ms": round(seconds["theirs"] * 1e3, 2),
        "GB_per_s": round(num_bytes / ours / 1e9, 2),
        "of_plain_read": round(read / ours, 3),
        "over_theirs": round(seconds["theirs"] / ours, 2),
        "host_ms": round(host_seconds(runner, batch, options) * 1e3, 2),
    }


def step_bytes(runner: ModelRunner, batch: int, context: int) -> int:
    """Bytes that a decode step must read: all weights once, and the cache of its sequences."""
    weights = sum(parameter.nbytes for parameter in runner.model.parameters())
    return weights + batch * context * runner.kv_spec.block_bytes // BLOCK_SIZE


def alternate(
    functions: dict[str, Callable[[], None]], rounds: int, turn: int = 1
) -> dict[str, float]:
    """Return each function's median seconds over rounds in which all of them run in turn.

    Args:
        turn: calls in a row; of several the first one is not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for current in range(rounds + 2):
        for name, function in functions.items():
            for call in range(turn):
                began = time.perf_counter()
                function()
                if current >= 2 and (call or turn == 1):
                    seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def host_seconds(runner: ModelRunner, batch: int, options: argparse.Namespace) -> float:
    """Return the part of a step outside of torch's operations, as its profiler sees them.

    It includes the cost of the profiler, so it is an upper bound.
    """
    step = our_steps(runner, batch, options.context)
    step()
    rounds = 3
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        began = time.perf_counter()
        for _ in range(rounds):
            step()
        whole = time.perf_counter() - began
    inside = sum(event.self_cpu_time_total for event in profile.key_averages()) / 1e6
    return (whole - inside) / rounds


if __name__ == "__main__":
    main()
