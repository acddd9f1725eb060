"""Decode steps of two ranks that sum what each has computed, with that sum fused into the norm
behind it and without.

    python examples/bench/fused_all_reduce.py [--batches 1 8 32] [--output 64] [--repeats 7]
        [key=value ...]

Two tensor-parallel ranks on one node, each on a core of its own: a `LLM` of the bundled model for
each variant, all loaded, which take turns. A step lasts what `--output` more tokens take, divided
by their number, with the way between this process and the ranks. Medians of all repetitions, in
milliseconds, and the ratio to the same compiler without passes:

    as traced   pieces run op by op, as they do where Inductor is off
                in place: products are written where the other rank reads them
    inductor    Inductor's code, which fuses a norm with what is computed around it by itself

Arguments of `deploy` come last.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from compile.resolve import DEFAULT_PASSES
from serve.llm import LLM, SamplingParams

NUM_PROMPT_TOKENS = 8
VARIANTS: dict[tuple[str, str], dict[str, Any]] = {
    ("as traced", "unfused"): {"use_inductor": False, "passes": []},
    ("as traced", "fused"): {"use_inductor": False, "passes": DEFAULT_PASSES},
    ("as traced", "in place"): {
        "use_inductor": False,
        "passes": DEFAULT_PASSES,
        "enable_userbuffers": True,
    },
    ("inductor", "unfused"): {"passes": []},
    ("inductor", "fused"): {"passes": DEFAULT_PASSES},
}


def main() -> None:
    """Print a row for each variant and number of sequences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("arguments", nargs="*", help="arguments of deploy")
    options = parser.parse_args()
    given = dict(argument.split("=", 1) for argument in options.arguments)
    compilation = {"level": 3, "cudagraph_mode": "NONE", "serve_while_compiling": "off"}
    llms = {
        variant: LLM(
            tensor_parallel_size=2,
            compilation_config={**compilation, **fields},
            max_num_seqs=max(options.batches),
            **given,
        )
        for variant, fields in VARIANTS.items()
    }
    found: dict[tuple[tuple[str, str], int], list[float]] = {}
    for repeat in range(options.repeats + 1):
        for batch in options.batches:
            for variant, llm in llms.items():
                step_ms = step_ms_of(llm, batch, options.output)
                if repeat:  # the first one warms up
                    found.setdefault((variant, batch), []).append(step_ms)
    print(f"{'compiler':<12}{'norms':<10}{'batch':>5}{'step':>10}{'ratio':>8}")
    for (variant, batch), steps in sorted(found.items(), key=lambda each: each[0][1]):
        step_ms = statistics.median(steps)
        ratio = step_ms / statistics.median(found[(variant[0], "unfused"), batch])
        print(f"{variant[0]:<12}{variant[1]:<10}{batch:5}{step_ms:10.3f}{ratio:8.2f}")


def step_ms_of(llm: LLM, batch: int, num_outputs: int) -> float:
    """Return the milliseconds of a step in which so many sequences decode."""
    prompts = [[1 + i % 90] * NUM_PROMPT_TOKENS for i in range(batch)]
    took: list[float] = []
    for max_tokens in (1, 1 + num_outputs):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        began = time.perf_counter()
        llm.generate(prompts, params)
        took.append(time.perf_counter() - began)
    return 1e3 * (took[1] - took[0]) / num_outputs


if __name__ == "__main__":
    main()
