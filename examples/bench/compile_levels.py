"""Gains of compiling and replaying: decode steps by level and mode, and the time of a start.

    python examples/bench/compile_levels.py [--models tiny,qwen] [--batches 1,8,32] [--rounds 15]
        [--turn 10] [--layers 24] [--threads 1] [--no-starts] [--json PATH]

All variants of a model are loaded in one process and take turns in every round, so a neighbour on
the machine slows all of them; figures are medians of steps, in milliseconds and as a share of the
eager step. A turn is a few steps in a row, as a server runs them; the first one is left out, since
it finds another variant's weights in the processor's caches. `--turn 1` times that step instead.
`host_us` is the step of a model of equal depth and a width of 64, whose kernels have next to
nothing to do. A start is timed in a process of its own, from the moment torch is imported to the
end of the first step; the second one finds what the first one compiled, and a second rank has a
directory of its own in the same cache.

A replay on a CPU says nothing about CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402

VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {"level": 0, "cudagraph_mode": "NONE"},
    "level 0 PIECEWISE": {"level": 0, "cudagraph_mode": "PIECEWISE"},
    "level 2": {"level": 2, "cudagraph_mode": "NONE"},
    "level 3": {"level": 3, "cudagraph_mode": "NONE"},
    "level 3 FULL": {"level": 3, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "level 3 PIECEWISE": {"level": 3, "cudagraph_mode": "PIECEWISE"},
}
NARROW = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def main() -> None:
    """Print a table for each model, then the starts, then one JSON line."""
    options = parse()
    if options.start:
        print(json.dumps(time_start(Path(options.start), options)))
        return
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {"threads": options.threads, "steps": [], "starts": []}
    with tempfile.TemporaryDirectory() as name:
        os.environ.setdefault("LOCKSTEP_CACHE_ROOT", f"{name}/cache")
        for model in options.models.split(","):
            report["steps"] += steps_of(model, Path(name), options)
        if not options.no_starts:
            report["starts"] = starts(options)
    print(json.dumps(report))
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="tiny,qwen")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--turn", type=int, default=10, help="steps of a variant in a row")
    parser.add_argument("--layers", type=int, default=24, help="of the Qwen2.5-0.5B shape")
    parser.add_argument("--context", type=int, default=128, help="tokens in the cache")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-starts", action="store_true")
    parser.add_argument("--json", help="where to write the figures")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    parser.add_argument("--dp-rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--level", type=int, default=3, help=argparse.SUPPRESS)
    return parser.parse_args()


# --- steps ------------------------------------------------------------------------------------


def steps_of(model: str, directory: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every variant at every batch size, and print the table."""
    path, dtype, narrow = checkpoints(model, directory, options)
    wide = {name: runner(path, dtype, fields, options) for name, fields in VARIANTS.items()}
    thin = {name: runner(narrow, dtype, fields, options) for name, fields in VARIANTS.items()}
    found = []
    for batch in map(int, options.batches.split(",")):
        ms, host = medians(wide, batch, options), medians(thin, batch, options)
        for name in VARIANTS:
            row = {
                "model": model,
                "batch": batch,
                "variant": name,
                "step_ms": round(ms[name] * 1e3, 3),
                "of_eager": round(ms[name] / ms["eager"], 3),
                "host_us": round(host[name] * 1e6),
            }
            found.append(row)
            print("  ".join(f"{value!s:>17}" for value in row.values()), flush=True)
    return found


def checkpoints(model: str, directory: Path, options: argparse.Namespace) -> tuple[Path, str, Path]:
    """Return the model, its dtype, and a narrow one of equal depth."""
    from decode_bandwidth import SHAPE

    if model == "tiny":
        path, dtype, shape = ROOT / "examples" / "tiny", "float32", dict(SHAPE)
        layers = json.loads((path / "config.json").read_text())["num_hidden_layers"]
    else:
        path, dtype, shape = directory / "qwen", "bfloat16", dict(SHAPE)
        layers = options.layers
        write_checkpoint(path, shape, layers, dtype)
    narrow = directory / f"narrow-{model}"
    write_checkpoint(narrow, {**shape, **NARROW}, layers, dtype)
    return path, dtype, narrow


def write_checkpoint(path: Path, shape: dict[str, Any], layers: int, dtype: str) -> None:
    """Write a random checkpoint of a shape."""
    import transformers

    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(**shape, num_hidden_layers=layers)
    transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(path)


def runner(path: Path, dtype: str, compilation: dict[str, Any], options: argparse.Namespace) -> Any:
    """Return a runner with room for the largest batch."""
    from cluster.config import CacheConfig, EngineConfig, SchedulerConfig
    from cluster.group.context import RankContext, RankPlace
    from cluster.rank.runner import ModelRunner
    from compile.config import CompilationConfig

    batches = [int(batch) for batch in options.batches.split(",")]
    seqs = max(batches)
    blocks = -(-(options.context + (options.rounds + 2) * options.turn + 8) // 16)
    sizes = {} if compilation["level"] == 0 else {"cudagraph_capture_sizes": batches}
    return ModelRunner(
        RankContext(
            EngineConfig(
                model_path=str(path),
                max_model_len=blocks * 16,
                dtype=dtype,
                cache=CacheConfig(num_kv_blocks=seqs * blocks),
                scheduler=SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=max(seqs, 64)),
                compilation=CompilationConfig(**compilation, **sizes),
                threads=options.threads,
            ),
            RankPlace(options.dp_rank),
        )
    )


def medians(runners: dict[str, Any], batch: int, options: argparse.Namespace) -> dict[str, float]:
    """Return each variant's median seconds for a decode step."""
    from decode_bandwidth import alternate, our_steps

    functions = {name: our_steps(one, batch, options.context) for name, one in runners.items()}
    return alternate(functions, options.rounds, options.turn)


# --- starts -----------------------------------------------------------------------------------


STARTS = [
    ("cold", 0, 3),
    ("warm", 0, 3),
    ("second rank", 1, 3),
    ("warm again", 0, 3),
    ("as written", 0, 0),
    ("as written again", 0, 0),
]
"""Name, data-parallel rank and level."""


def starts(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time starts of the bundled model with piecewise graphs in processes of their own, at level 3
    and, with what was compiled for that of no use, as it is written; print them."""
    found = []
    with tempfile.TemporaryDirectory() as cache:
        for name, dp_rank, level in STARTS:
            command = [sys.executable, __file__, "--start", str(ROOT / "examples" / "tiny")]
            command += ["--dp-rank", str(dp_rank), "--batches", options.batches]
            command += ["--level", str(level)]
            environment = {**os.environ, "LOCKSTEP_CACHE_ROOT": cache, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True
            )
            row = {"start": name, **json.loads(done.stdout.splitlines()[-1])}
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            found.append(row)
    return found


def time_start(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Load, compile, capture, and run one step. Torch is imported already."""
    import time

    from decode_bandwidth import our_steps

    from compile.counters import counter

    began = time.perf_counter()
    fields = {"level": options.level, "cudagraph_mode": "PIECEWISE"}
    made = runner(path, "float32", fields, options)
    our_steps(made, 1, 1)()
    return {
        "seconds": round(time.perf_counter() - began, 2),
        "compilations": counter.num_backend_compilations,
        "loaded": counter.num_compiled_artifacts_loaded,
        "cpp_builds": counter.num_cpp_builds,
        "captures": counter.num_cudagraph_captured,
    }


if __name__ == "__main__":
    main()
