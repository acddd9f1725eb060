"""The engine in this process, alone and beside a Ray Serve cluster that serves nobody, in turns.

    python examples/bench/in_process.py [--batches 1 8 32] [--input 128] [--output 64]
        [--repeats 3] [key=value ...]

What a server could reach at most, and what Ray's processes take from that on a machine whose cores
the engine's threads fill. Printed are, of each number of sequences, medians of:

    tokens/s  output tokens a second, prompts included; prompts are new each time
    step      milliseconds of a step in which the whole batch decodes

and of the cluster that idles, with the bundled model: its processes' share of one core, and how
often a second one of their threads gives up its core and comes back for it.

Arguments of `deploy` come last; they are those of the engine in this process.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from default_app import DefaultApp

from serve.llm import LLM, SamplingParams

IDLE_S = 8.0
SETTLE_S = 3.0


def main() -> None:
    """Print a line for each number of sequences, and one for the cluster."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("arguments", nargs="*", help="arguments of deploy")
    options = parser.parse_args()
    llm = LLM(**dict(argument.split("=", 1) for argument in options.arguments))
    alone: dict[int, list[tuple[float, float]]] = {batch: [] for batch in options.batches}
    beside: dict[int, list[tuple[float, float]]] = {batch: [] for batch in options.batches}
    rng = random.Random(0)

    def measure(found: dict[int, list[tuple[float, float]]]) -> None:
        for _ in range(options.repeats):
            for batch in options.batches:
                found[batch].append(generate(llm, batch, options.input, options.output, rng))

    measure({batch: [] for batch in options.batches})  # warms up
    measure(alone)
    with DefaultApp(("pools=mixed", "O=0")):
        time.sleep(SETTLE_S)
        share, wakeups = idle_cost()
        measure(beside)
    time.sleep(SETTLE_S)
    measure(alone)
    print(f"an idle cluster: {share:.2f} of a core, {wakeups:.0f} switches a second")
    print(f"{'batch':>5}{'tokens/s':>12}{'beside':>16}{'step':>10}{'beside':>16}")
    for batch in options.batches:
        rate, step_ms = medians(alone[batch])
        other_rate, other_ms = medians(beside[batch])
        rates = f"{other_rate:9.1f} ({other_rate / rate:.2f})"
        steps = f"{other_ms:9.2f} ({other_ms / step_ms:.2f})"
        print(f"{batch:5}{rate:12.1f}{rates:>16}{step_ms:10.2f}{steps:>16}")


def generate(
    llm: LLM, batch: int, num_input: int, num_output: int, rng: random.Random
) -> tuple[float, float]:
    """Return tokens a second, and the median milliseconds of a step."""
    prompts = [[rng.randrange(500) for _ in range(num_input)] for _ in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
    seconds: list[float] = []
    step = llm.engine.step

    def timed() -> Any:
        began = time.perf_counter()
        outputs = step()
        seconds.append(time.perf_counter() - began)
        return outputs

    llm.engine.step = timed  # type: ignore[method-assign]
    try:
        began = time.perf_counter()
        llm.generate(prompts, params)
        took = time.perf_counter() - began
    finally:
        llm.engine.step = step  # type: ignore[method-assign]
    return batch * num_output / took, 1e3 * statistics.median(seconds)


def medians(found: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the median of each of the two."""
    rates, steps = zip(*found, strict=True)
    return statistics.median(rates), statistics.median(steps)


def idle_cost() -> tuple[float, float]:
    """Return what all children of this process take of a core, and their voluntary switches."""
    began, before = time.monotonic(), taken()
    time.sleep(IDLE_S)
    took, after = time.monotonic() - began, taken()
    cpu_s = sum(after[p][0] - before[p][0] for p in after if p in before)
    switches = sum(after[p][1] - before[p][1] for p in after if p in before)
    return cpu_s / took, switches / took


def taken() -> dict[int, tuple[float, int]]:
    """Return seconds of a core and voluntary switches of each child, by pid."""
    found: dict[int, tuple[float, int]] = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, OSError):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system, switches_of(process.pid)
    return found


def switches_of(pid: int) -> int:
    """Return how often a process's threads have waited for something."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            lines = (task / "status").read_text().splitlines()
            total += sum(int(x.split()[1]) for x in lines if x.startswith("voluntary_ctxt"))
    return total


if __name__ == "__main__":
    main()
