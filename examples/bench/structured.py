"""What structured output costs a step: 32 constrained sequences against the same 32 free ones.

python examples/bench/structured.py [--model DIR] [--rows N] [--steps N] [--rounds N] [--level O]
                                    [--threads N] [--fail-above RATIO]

Both kinds draw at temperature 1 from a prompt of the same length, none ends before the last step,
and the sequences of each round run together, so that steps have the same size. Rounds take turns;
printed is the median step of each kind, and what the step thread waited for masks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from cluster.grammar.masks import GrammarMasks
from serve.llm import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
            "kind": {"enum": ["red", "green", "blue"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        },
        "required": ["name", "count", "kind"],
        "additionalProperties": False,
    },
}


def main() -> int:
    """Print one line for each kind of sequence, and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--level", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--fail-above", type=float)
    args = parser.parse_args()
    options: dict[str, Any] = {
        "max_num_seqs": args.rows,
        "compilation_config": {"level": args.level},
    }
    if args.threads:
        options["threads_per_rank"] = args.threads
    llm = LLM(args.model, **options)
    kinds = {
        "free": SamplingParams(n=args.rows, max_tokens=args.steps, seed=1, ignore_eos=True),
        "constrained": SamplingParams(
            n=args.rows,
            max_tokens=args.steps,
            seed=1,
            structured_outputs=StructuredOutputsParams(json=SCHEMA),
        ),
    }
    steps: dict[str, list[float]] = {kind: [] for kind in kinds}
    waits: list[float] = []
    _time_waits(waits)
    for number in range(args.rounds + 1):
        for kind, params in kinds.items():
            taken = _round(llm, params)
            if number:  # the first one compiles the grammar, and fills caches
                steps[kind] += taken
            else:
                waits.clear()
    medians = {kind: statistics.median(taken) for kind, taken in steps.items()}
    for kind, taken in steps.items():
        print(
            f"{kind}: {len(taken)} steps of {args.rows} rows, median {medians[kind] * 1e3:.3f} ms"
        )
    if waits:
        print(f"waited for masks: median {statistics.median(waits) * 1e3:.3f} ms a step")
    ratio = medians["constrained"] / medians["free"]
    print(f"constrained / free: {ratio:.3f}")
    return int(args.fail_above is not None and ratio > args.fail_above)


def _round(llm: LLM, params: SamplingParams) -> list[float]:
    """Generate, and return the seconds of each step in which all rows decode."""
    taken: list[float] = []
    step = llm.engine.step

    def timed() -> Any:
        began = time.perf_counter()
        outputs = step()
        if len(outputs) == params.n:
            taken.append(time.perf_counter() - began)
        return outputs

    llm.engine.step = timed  # type: ignore[method-assign]
    try:
        [output] = llm.generate("Write a list: ", params)
    finally:
        llm.engine.step = step  # type: ignore[method-assign]
    lengths = {len(choice.token_ids) for choice in output.outputs}
    if lengths != {params.max_tokens}:
        raise RuntimeError(f"wanted answers of {params.max_tokens} tokens, found {lengths}")
    return taken[2:]


def _time_waits(waits: list[float]) -> None:
    take = GrammarMasks.take

    def timed(self: GrammarMasks, *args: Any) -> Any:
        began = time.perf_counter()
        masks = take(self, *args)
        waits.append(time.perf_counter() - began)
        return masks

    GrammarMasks.take = timed  # type: ignore[method-assign]


if __name__ == "__main__":
    raise SystemExit(main())
