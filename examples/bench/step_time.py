"""What a decode step spends on the host, outside of the model: by part, for the bundled model.

    python examples/bench/step_time.py [--batches 1 8 32] [--steps 300] [--temperature 0]
        [key=value ...]

An engine in this process decodes a full batch. Of each step, microseconds, medians:

    schedule  the scheduler makes the plan
    agree     the step's agreement; alone, so without a peer to wait for
    build     the plan becomes tensors in the static buffers
    forward   the model, compiled and replayed as it serves; eager with `O=0`
    logits    rows gathered and multiplied with the head
    sample    the likeliest token of each row, or one drawn
    rest      everything else: outputs and sequences booked, tokens copied to the host
    host      schedule, agree, build and rest together: what no device makes faster

Arguments of `deploy` come last.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import cluster.rank.runner
from serve.llm import LLM, SamplingParams

PARTS = ("schedule", "agree", "build", "forward", "logits", "sample")
HOST = ("schedule", "agree", "build", "rest")
PROMPT = 16


def main() -> None:
    """Print a line for each batch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("arguments", nargs="*", help="arguments of deploy")
    options = parser.parse_args()
    llm = LLM(**dict(argument.split("=", 1) for argument in options.arguments))
    print(f"{'batch':>5}" + "".join(f"{name:>10}" for name in (*PARTS, "rest", "host", "step")))
    for batch in options.batches:
        steps = decode(llm, batch, options.steps, options.temperature)
        medians = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
        cells = (*PARTS, "rest", "host", "step")
        print(f"{batch:5}" + "".join(f"{1e6 * medians[name]:10.0f}" for name in cells))


def decode(llm: LLM, batch: int, num_steps: int, temperature: float) -> list[dict[str, float]]:
    """Return the seconds of each part of the steps in which the whole batch decodes."""
    engine, runner = llm.engine, llm.runner
    seconds: dict[str, float] = {}
    steps: list[dict[str, float]] = []

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            found = function(*args, **kwargs)
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began
            return found

        return run

    def step() -> Any:
        seconds.clear()
        began = time.perf_counter()
        outputs = whole()
        took = time.perf_counter() - began
        if len(outputs) == batch and engine.agreed and engine.agreed.batch.num_tokens <= 2 * batch:
            found = {name: seconds.get(name, 0.0) for name in PARTS}
            found |= {"rest": took - sum(found.values()), "step": took}
            steps.append(found | {"host": sum(found[name] for name in HOST)})
        return outputs

    whole = engine.step
    with ExitStack() as patches:
        for target, name, part in (
            (engine.scheduler, "schedule", "schedule"),
            (engine.lockstep, "agree", "agree"),
            (runner, "build", "build"),
            (runner.forward, "run", "forward"),
            (runner.model, "compute_logits", "logits"),
            (cluster.rank.runner, "sample", "sample"),
        ):
            patches.enter_context(patch.object(target, name, timed(part, getattr(target, name))))
        patches.enter_context(patch.object(engine, "step", step))
        params = SamplingParams(temperature=temperature, max_tokens=num_steps, ignore_eos=True)
        llm.generate([[7 + i] * PROMPT for i in range(batch)], params)
    return steps


if __name__ == "__main__":
    main()
