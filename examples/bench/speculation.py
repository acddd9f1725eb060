"""Steps that check drafts against steps of one token, in turns, in this process.

    python examples/bench/speculation.py [--drafts 4] [--streams 1 8 32] [--input 64]
        [--output 192] [--repeats 3] [key=value ...]

Two engines of the same arguments, one with `speculative_config` (`ngram`), generate from the same
random prompts. A random model that is greedy soon repeats itself (`repeats`); drawn at temperature
1 it says nothing twice (`new`), and drafts are few. Printed are, of each number of streams, medians
of:

    tokens/s  output tokens a second without drafts, prompts included
    drafting  the same with drafts, as a multiple
    right     share of draft tokens that were what was drawn
    a step    output tokens of a sequence in a step that checked a draft of it

and how many tokens both said alike: all but near-ties, which rounding decides in another order.
Arguments of `deploy` come last; they are those of both engines.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from serve.llm import LLM, RequestOutput, SamplingParams

NUM_TOKENS = 500
"""Of the vocabulary, from which prompts are drawn."""


@dataclass
class Found:
    rates: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    """Tokens a second, with drafts or without."""
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_alike: int = 0
    num_tokens: int = 0


def main() -> None:
    """Print a line for each kind of text and number of streams."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafts", type=int, default=4, help="tokens of a draft, at most")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=192, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("arguments", nargs="*", help="arguments of deploy")
    options = parser.parse_args()
    arguments = dict(argument.split("=", 1) for argument in options.arguments)
    ngram = {"method": "ngram", "num_speculative_tokens": options.drafts}
    engines = {False: LLM(**arguments), True: LLM(**arguments, speculative_config=ngram)}
    print(f"{'text':<8}{'streams':>8}{'tokens/s':>10}{'drafting':>10}{'right':>8}{'a step':>8}")
    for text, temperature in (("repeats", 0.0), ("new", 1.0)):
        for num_streams in options.streams:
            found = Found()
            for seed in range(options.repeats + 1):
                measure(engines, found, num_streams, seed, temperature, options)
            print("".join(row(text, num_streams, found)))


def measure(
    engines: dict[bool, LLM],
    found: Found,
    num_streams: int,
    seed: int,
    temperature: float,
    options: argparse.Namespace,
) -> None:
    """Have both engines answer the same prompts; the first seed only warms them up."""
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(NUM_TOKENS) for _ in range(options.input)] for _ in range(num_streams)
    ]
    params = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=options.output, ignore_eos=True
    )
    said: dict[bool, list[RequestOutput]] = {}
    for drafts, llm in engines.items():
        before = llm.engine.scheduler.stats()
        began = time.perf_counter()
        said[drafts] = llm.generate(prompts, params)
        took_s = time.perf_counter() - began
        if not seed:
            continue
        stats = llm.engine.scheduler.stats()
        found.rates[drafts].append(num_streams * options.output / took_s)
        found.num_drafts += stats.num_drafts - before.num_drafts
        found.num_draft_tokens += stats.num_draft_tokens - before.num_draft_tokens
        found.num_accepted += stats.num_accepted_tokens - before.num_accepted_tokens
    if seed:
        for plain, drafted in zip(said[False], said[True], strict=True):
            pairs = zip(plain.outputs[0].token_ids, drafted.outputs[0].token_ids, strict=True)
            alike = [one == other for one, other in pairs]
            found.num_tokens += len(alike)
            found.num_alike += alike.index(False) if False in alike else len(alike)


def row(text: str, num_streams: int, found: Found) -> Iterator[str]:
    plain, drafting = (statistics.median(found.rates[drafts]) for drafts in (False, True))
    yield f"{text:<8}{num_streams:>8}{plain:>10.1f}{drafting / plain:>10.2f}"
    yield f"{found.num_accepted / max(found.num_draft_tokens, 1):>8.2f}"
    yield f"{1 + found.num_accepted / max(found.num_drafts, 1):>8.2f}"
    yield f"  {found.num_alike} of {found.num_tokens} tokens alike"


if __name__ == "__main__":
    main()
