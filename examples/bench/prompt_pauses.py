"""How long streams stand still while others' prompts are computed, by `max_step_ms`, in turns.

    python examples/bench/prompt_pauses.py [--limits 0 50 20] [--streams 8] [--prompt 512]
        [--prompts 12] [--repeats 3] [key=value ...]

Engines of the same arguments in this process, one for each limit (0: none). So many streams decode;
beside them one prompt after the other is computed, each of which ends with its first token. Printed
are, of each limit, medians of:

    p50, p99  milliseconds between two tokens of a stream
    max       the longest
    ttft      milliseconds from a prompt to its first token, mean
    tokens/s  tokens of prompts and streams together

Arguments of `deploy` come last; they are those of all engines.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import astuple, dataclass

from cluster.wire.messages import GenerateRequest, Sampling, Submit
from serve.llm import LLM

NUM_TOKENS = 500
"""Of the vocabulary, from which prompts are drawn."""
WARM_UP_TOKENS = 16
"""Of each stream before the first prompt comes."""
UNLIMITED_MS = 1e9
"""Longer than any step: without a limit of its own an engine has its device's."""


@dataclass(frozen=True)
class Found:
    p50_ms: float
    p99_ms: float
    max_ms: float
    ttft_ms: float
    tokens_per_s: float


def main() -> None:
    """Print a line for each limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limits", type=float, nargs="+", default=[0.0, 50.0, 20.0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("arguments", nargs="*", help="arguments of deploy")
    options = parser.parse_args()
    arguments = dict(argument.split("=", 1) for argument in options.arguments)
    engines = {
        limit: LLM(**arguments, max_step_ms=limit or UNLIMITED_MS, enable_prefix_caching=False)
        for limit in options.limits
    }
    found: dict[float, list[Found]] = {limit: [] for limit in options.limits}
    for repeat in range(options.repeats + 1):
        for limit, llm in engines.items():
            measured = measure(llm, options, random.Random(repeat))
            if repeat:  # the first one warms up, and teaches how long steps take
                found[limit].append(measured)
    print(f"{'limit':>6}{'p50':>9}{'p99':>9}{'max':>9}{'ttft':>9}{'tokens/s':>10}")
    for limit, all_found in found.items():
        columns = zip(*map(astuple, all_found), strict=True)
        values = "".join(f"{statistics.median(column):9.1f}" for column in columns)
        print(f"{limit or 'none':>6}{values}")


def measure(llm: LLM, options: argparse.Namespace, rng: random.Random) -> Found:
    """Run streams and, once all of them have tokens, prompts; return what was found of both."""
    engine = llm.engine
    last: dict[str, float] = {}
    num_tokens: dict[str, int] = {}
    gaps: list[float] = []
    waits: list[float] = []

    def submit(name: str, length: int, max_tokens: int) -> None:
        sampling = Sampling(0.0, 0, 1.0, 0.0, 0, max_tokens, (), -1, -1, None, None)
        prompt = [rng.randrange(NUM_TOKENS) for _ in range(length)]
        engine.submit(Submit(GenerateRequest(name, prompt, [], sampling, b""), None))

    def step() -> set[str]:
        """Do one step; return which requests it ended."""
        ended: set[str] = set()
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            name = output.request_id
            if output.token_ids:
                if name in last:
                    gaps.append(now - last[name])
                last[name] = now
                num_tokens[name] = num_tokens.get(name, 0) + len(output.token_ids)
            if output.finish_reason:
                ended.add(name)
        return ended

    streams = [f"stream {i}" for i in range(options.streams)]
    for name in streams:
        submit(name, 16, 1 << 20)
    while min((num_tokens.get(name, 0) for name in streams), default=0) < WARM_UP_TOKENS:
        step()
    gaps.clear()
    before, began = sum(num_tokens.values()), time.perf_counter()
    for i in range(options.prompts):
        name, asked = f"prompt {i}", time.perf_counter()
        submit(name, options.prompt, 1)
        while name not in step():
            pass
        waits.append(time.perf_counter() - asked)
    took_s = time.perf_counter() - began
    said = sum(num_tokens.values()) - before + options.prompts * options.prompt
    engine.abort(streams)
    while engine.has_unfinished:
        engine.step()
    ordered = sorted(gaps)
    return Found(
        p50_ms=1e3 * statistics.median(ordered),
        p99_ms=1e3 * ordered[int(0.99 * (len(ordered) - 1))],
        max_ms=1e3 * ordered[-1],
        ttft_ms=1e3 * statistics.mean(waits),
        tokens_per_s=said / took_s,
    )


if __name__ == "__main__":
    main()
