"""An engine in this process under a fixed number of streams, with the arguments of a server.

    python examples/bench/offline_throughput.py [--requests 64] [--streams 16] [--input 128]
        [--output 64] [--out FILE] [config=FILE key=value ...]

The last ones are arguments of `deploy`, and the YAML file is what `serve run` takes, so that what
is measured is what is served. Prompts are random token ids; decoding is greedy and ignores the end
token. So many streams run at a time; the next request comes when one ends. Printed are, after as
many requests again that are not counted:

    ttft      milliseconds from a request to its first token: mean, median, 99th percentile
    tpot      milliseconds from there, per token
    tokens/s  output tokens a second, from the first request to the last token
    padding   share of padding in all tokens that steps computed

and what each captured size padded (`python -m compile.waste`). With several ranks, which are
processes of their own, the last two are not known.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cluster.wire.messages import EngineOutput, Submit
from compile.waste import table, traffic_of
from serve.llm import LLM, OfflineEngine, SamplingParams

NUM_TOKENS = 500
"""Of the vocabulary, from which prompts are drawn."""
PERCENTILE = 0.99


class Streams:
    """An engine that runs so many requests at a time, and notes when their tokens come."""

    def __init__(self, engine: OfflineEngine, num_streams: int) -> None:
        self._engine = engine
        self._num_streams = num_streams
        self._waiting: deque[Submit] = deque()
        self._running: set[str] = set()
        self.began: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.num_tokens: dict[str, int] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting) or self._engine.has_unfinished

    def submit(self, submit: Submit) -> None:
        """Take a request, whose time begins when a stream is free for it."""
        self._waiting.append(submit)

    def step(self) -> list[EngineOutput]:
        """Submit what streams are free for, and do one step."""
        while self._waiting and len(self._running) < self._num_streams:
            submit = self._waiting.popleft()
            request_id = submit.request.request_id
            self._running.add(request_id)
            self.began[request_id] = time.perf_counter()
            self._engine.submit(submit)
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            if output.token_ids:
                self.first.setdefault(output.request_id, now)
                self.last[output.request_id] = now
                known = self.num_tokens.get(output.request_id, 0)
                self.num_tokens[output.request_id] = known + len(output.token_ids)
            if output.finish_reason:
                self._running.discard(output.request_id)
        return outputs

    def abort(self, request_ids: Iterable[str]) -> None:
        self._engine.abort(request_ids)


def main() -> None:
    """Print what was measured, and write it to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--streams", type=int, default=16, help="requests that run at a time")
    parser.add_argument("--input", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--out", type=Path, help="write all of it there, as JSON")
    parser.add_argument("arguments", nargs="*", help="arguments of deploy")
    options = parser.parse_args()
    llm = LLM(**dict(argument.split("=", 1) for argument in options.arguments))
    engine, rng = llm.engine, random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=options.output, ignore_eos=True)

    def run() -> Streams:
        streams = Streams(engine, options.streams)
        llm.engine = streams
        prompts = [
            [rng.randrange(NUM_TOKENS) for _ in range(options.input)]
            for _ in range(options.requests)
        ]
        llm.generate(prompts, params)
        return streams

    run()  # warms up
    before = counts_of(llm)
    streams = run()
    found = figures(streams) | padding(before, counts_of(llm))
    print(f"{options.requests} requests, {options.streams} at a time")
    for name in ("ttft", "tpot"):
        mean, median, high = (found[f"{name}_ms"][key] for key in ("mean", "p50", "p99"))
        print(f"{name:<10}{mean:9.2f} mean{median:9.2f} p50{high:9.2f} p99")
    print(f"{'tokens/s':<10}{found['tokens_per_s']:9.1f}")
    if "padding_share" in found:
        print(f"{'padding':<10}{found['padding_share']:9.1%}")
    for traffic in traffic_of(told_of(llm)):
        print("\n" + "\n".join(table(traffic)))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1))


def figures(streams: Streams) -> dict[str, Any]:
    """Return times in milliseconds, and tokens a second."""
    num_tokens = streams.num_tokens
    ttft = [1e3 * (streams.first[each] - streams.began[each]) for each in num_tokens]
    tpot = [
        1e3 * (streams.last[each] - streams.first[each]) / (number - 1)
        for each, number in num_tokens.items()
        if number > 1
    ]
    took_s = max(streams.last.values()) - min(streams.began.values())
    return {
        "requests": len(num_tokens),
        "output_tokens": sum(num_tokens.values()),
        "ttft_ms": spread(ttft),
        "tpot_ms": spread(tpot),
        "tokens_per_s": sum(num_tokens.values()) / took_s,
        "seconds": took_s,
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return the mean, the median and the 99th percentile; zeros of nothing."""
    ordered = sorted(values) or [0.0]
    high = ordered[min(len(ordered) - 1, int(PERCENTILE * len(ordered)))]
    return {"mean": statistics.fmean(ordered), "p50": statistics.median(ordered), "p99": high}


def counts_of(llm: LLM) -> dict[str, float]:
    """Return the tokens that steps have computed, and those of padding; nothing of other ranks."""
    runner = getattr(llm, "runner", None)
    counts = {} if runner is None else runner.step_stats.counts()
    names = ("scheduled_tokens_total", "padding_tokens_total")
    return {name: counts[name,] for name in names if (name,) in counts}


def padding(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return what was computed in between."""
    grown = {name: number - before[name] for name, number in after.items()}
    if not grown:
        return {}
    scheduled, padded = grown["scheduled_tokens_total"], grown["padding_tokens_total"]
    share = padded / (scheduled + padded)
    return {"scheduled_tokens": scheduled, "padding_tokens": padded, "padding_share": share}


def told_of(llm: LLM) -> dict[str, Any]:
    """Return what `/debug/ranks` would answer."""
    runner = getattr(llm, "runner", None)
    ranks = [] if runner is None else [runner.debug()]
    return {"pools": {"mixed": {"replicas": [{"id": "offline", "ranks": ranks}]}}}


if __name__ == "__main__":
    main()
