"""What `quantization` saves: memory, loading and decode steps of each kind, beside bfloat16.

    python examples/bench/quantized_weights.py [--layers 24] [--batches 1 8 32] [--prompt 512]
        [--rounds 15] [--turn 5] [--threads 1] [--context 128] [--dtype bfloat16]
        [--kinds int8 w8a8 int4 fp8]

A random model of the shape of Qwen2.5-0.5B is loaded as each kind. All are in one process and take
turns in every round, at compilation level 0, so a neighbour on the machine slows all of them.
Embeddings and head, which are tied, hold numbers of `dtype` in each kind. Printed are:

    MB        of what a rank holds: packed weights, and parameters that are not packed
    load      median seconds of three loads
    tokens/s  of decode steps with so many sequences, by the median step, and of steps that compute
              a prompt; in brackets as a multiple of what `none` reaches
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from decode_bandwidth import (  # noqa: E402
    BLOCK_SIZE,
    SHAPE,
    alternate,
    decode_plan,
    our_steps,
)
from msgspec.structs import replace  # noqa: E402

from cluster.config import CacheConfig, EngineConfig, SchedulerConfig  # noqa: E402
from cluster.engine.lockstep import AloneLockstep  # noqa: E402
from cluster.group.context import RankContext  # noqa: E402
from cluster.rank.runner import ModelRunner  # noqa: E402
from compile.config import CompilationConfig  # noqa: E402
from model.kernels.cpu import packed_linear  # noqa: E402
from model.quantization import WeightFormat  # noqa: E402
from model.weights import load_model  # noqa: E402

KINDS: tuple[WeightFormat, ...] = ("int8", "w8a8", "int4", "fp8")


def main() -> None:
    """Print a line for each kind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt's step")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turn", type=int, default=5, help="steps of a kind in a row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=128, help="tokens in the cache")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="beside none")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        write_checkpoint(path, options.layers)
        kinds: list[WeightFormat] = ["none", *options.kinds]
        loads = load_seconds(path, options.dtype, kinds)
        runners, held = {}, {}
        for kind in kinds:
            before = packed_bytes()
            runners[kind] = runner_of(path, kind, options)
            held[kind] = packed_bytes() - before + plain_bytes(runners[kind].model)
    rates: dict[WeightFormat, list[float]] = {kind: [] for kind in kinds}
    for count in options.batches:
        decodes = {k: our_steps(r, count, options.context) for k, r in runners.items()}
        for kind, took in alternate(decodes, options.rounds, options.turn).items():
            rates[kind].append(count / took)
    prompts = {kind: prompt_step(runner, options.prompt) for kind, runner in runners.items()}
    for kind, took in alternate(prompts, 3).items():
        rates[kind].append(options.prompt / took)
    columns = [*(f"{n} streams" for n in options.batches), f"prompt of {options.prompt}"]
    print(f"{'':>6}{'MB':>8}{'load':>8}" + "".join(f"{column:>18}" for column in columns))
    for kind in kinds:
        line = f"{kind:>6}{held[kind] / 1e6:8.0f}{loads[kind]:8.2f}"
        for rate, base in zip(rates[kind], rates["none"], strict=True):
            line += f"{f'{rate:.1f} ({rate / base:.2f})':>18}"
        print(line, flush=True)


def write_checkpoint(path: Path, layers: int) -> None:
    """Write a random checkpoint in bfloat16."""
    import transformers

    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(**SHAPE, num_hidden_layers=layers)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(path)


def load_seconds(path: Path, dtype: str, kinds: list[WeightFormat]) -> dict[WeightFormat, float]:
    """Return the median time of loads of each kind, which take turns; a first turn warms up."""
    seconds: dict[WeightFormat, list[float]] = {kind: [] for kind in kinds}
    for turn in range(4):
        for kind, found in seconds.items():
            began = time.perf_counter()
            load_model(path, dtype=getattr(torch, dtype), device="cpu", quantization=kind)
            if turn:
                found.append(time.perf_counter() - began)
    return {kind: statistics.median(found) for kind, found in seconds.items()}


def runner_of(path: Path, kind: WeightFormat, options: argparse.Namespace) -> ModelRunner:
    """Return a runner with room for the largest batch."""
    seqs = max(options.batches)
    blocks = -(-(options.context + (options.rounds + 2) * options.turn + 8) // BLOCK_SIZE)
    blocks = max(blocks, -(-options.prompt // BLOCK_SIZE) + 1)
    config = EngineConfig(
        model_path=str(path),
        max_model_len=blocks * BLOCK_SIZE,
        dtype=options.dtype,
        quantization=kind,
        cache=CacheConfig(block_size=BLOCK_SIZE, num_kv_blocks=seqs * blocks),
        scheduler=SchedulerConfig(seqs, max(seqs, options.prompt)),
        compilation=CompilationConfig(level=0),
        threads=options.threads,
    )
    return ModelRunner(RankContext(config))


def prompt_step(runner: ModelRunner, num_tokens: int) -> Callable[[], None]:
    """Return a function that computes a prompt, each time from its first token on."""
    plan = replace(
        decode_plan(1, 0, runner.config.max_blocks_per_seq),
        num_tokens=num_tokens,
        num_new=[num_tokens],
        token_ids=[i % 512 for i in range(num_tokens)],
        num_decodes=0,
    )
    return lambda: runner.execute(plan, AloneLockstep().agree(plan.vote()))


def packed_bytes() -> int:
    """Return what all packed weights of this process take."""
    return sum(map(_bytes_of, packed_linear._table.values()))


def _bytes_of(entry: packed_linear._Entry) -> int:
    if entry.scaled is not None:
        return entry.scaled.nbytes
    if entry.tiles is not None:
        return entry.tiles.nbytes
    return int(torch.ops.mkldnn._nbytes(entry.packed))


def plain_bytes(model: torch.nn.Module) -> int:
    """Return what the parameters take that are not packed."""
    return sum(p.nbytes for p in model.parameters() if not p.is_meta)


if __name__ == "__main__":
    main()
