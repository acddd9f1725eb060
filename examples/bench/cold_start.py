"""A group's cold start: compiled once for all ranks, against ranks that compile for themselves.

    python examples/bench/cold_start.py [--dp 2] [--tp 2] [--repeat 1]

Starts the bundled model at level 3 in a group of rank actors, each time with an empty cache and on
a Ray cluster of its own: with one cache for the group, and with the cache switched off, where each
rank compiles all pieces. Prints seconds until the group is ready, and what all ranks compiled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def main() -> None:
    """Run each kind in a process of its own, in turns; print one line each, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(asyncio.run(start(options.dp, options.tp))))
        return
    seconds: dict[str, list[float]] = {"together": [], "each for itself": []}
    for _ in range(options.repeat):
        for kind in seconds:
            found = run(kind, options)
            seconds[kind].append(found["ready_s"])
            print(f"{kind:16} " + "  ".join(f"{k} {v}" for k, v in found.items()), flush=True)
    together, alone = (sorted(each)[len(each) // 2] for each in seconds.values())
    print(f"together over each for itself: {together / alone:.2f}")


def run(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start once in a process of its own; return what it found."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "LOCKSTEP_CACHE_ROOT": cache,
            "LOCKSTEP_DISABLE_COMPILE_CACHE": str(int(kind != "together")),
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        command = [sys.executable, __file__, "--once", f"--dp={options.dp}", f"--tp={options.tp}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{kind}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


async def start(dp: int, tp: int) -> dict[str, Any]:
    """Start a group and stop it."""
    import ray

    from cluster.actors.ray_ranks import create_group
    from cluster.config import (
        PLACEMENT_TIMEOUT_S,
        CacheConfig,
        EngineConfig,
        ParallelConfig,
        Placement,
        SchedulerConfig,
    )
    from cluster.wire.credentials import SECRET_BYTES, Credentials
    from compile.config import CompilationConfig

    ray.init(num_cpus=dp * tp, include_dashboard=False, log_to_driver=False)
    engine = EngineConfig(
        model_path=str(ROOT / "examples" / "tiny"),
        max_model_len=256,
        cache=CacheConfig(num_kv_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        parallel=ParallelConfig(tp, dp),
        compilation=CompilationConfig(level=3),
    )
    bundles = Placement().bundles(engine.parallel)
    placement = ray.util.placement_group(bundles, strategy=Placement.strategy)
    assert placement.wait(PLACEMENT_TIMEOUT_S), "not placed"
    began = time.monotonic()
    credentials = Credentials("bench", secrets.token_bytes(SECRET_BYTES))
    group = create_group(
        engine, placement, first_bundle=0, engine_id="bench", credentials=credentials
    )
    await group.start()
    ready_s = time.monotonic() - began
    told = await asyncio.gather(*(rank.actor.debug.remote() for rank in group.handles))
    names = ("compilations", "loaded", "cpp_builds", "captures")
    found = {name: [rank[name] for rank in told] for name in names}
    ended = asyncio.create_task(group.wait_for_end())
    await group.stop()
    await ended
    ray.shutdown()
    return {"ready_s": round(ready_s, 1), **found}


if __name__ == "__main__":
    main()
