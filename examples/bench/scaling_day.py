"""A simulated day of a prefill and a decode pool that are scaled, beside pools of fixed size.

    python examples/bench/scaling_day.py [--seed 1] [--rate 4] [--hours 24]

Requests come by a daily curve (a quarter of the peak at night) with bursts of two to six minutes
at one and a half times the rate. `Meter` and `decide` of `serve/pools/scaling.py` run unaltered,
once a second; around them is a model of engines and of Ray Serve:

- A prompt goes to the prefill replica with the least to do, which computes one after the other.
- A sequence goes to the decode replica with the fewest; a step takes a base time and some for each
  row.
- A replica serves `START_S` after it was asked for. The newest goes first; its sequences go on
  elsewhere at once, and its prompts end where they are.

Per pool: replica-seconds (from being asked for to the end), requests within the target, steps up
and down, and turns, which are changes of direction. The best fixed size is the smallest that keeps
`GOAL` of the requests within the target. Exit code 1 if scaling costs more than 1.15 times that, or
keeps fewer.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from serve.pools.scaling import Memory, Meter, decide

TICK_S = 0.5
BURST_PERIOD_S = 8640.0
START_S = 30.0
MOST = 12
GOAL = 0.99
MAX_COST = 1.15

TTFT_S, TPOT_S = 2.0, 0.06
PROMPT_TOKENS, MAX_PROMPT, OUTPUT_TOKENS = 800, 2400, 500
TOKEN_S = 0.0005
"""Of a prompt, in one replica."""
STEP_S, ROW_S = 0.015, 0.001
"""Of a decode step, and of each row in it."""
NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS = 4096, 16, 64


@dataclass(frozen=True)
class Request:
    at: float
    num_prompt: int
    num_output: int


def requests_of_a_day(seed: int, peak_rate: float, day_s: float) -> list[Request]:
    rng = random.Random(seed)
    begins = [rng.uniform(0, day_s) for _ in range(round(day_s / BURST_PERIOD_S))]
    bursts = [(begin, begin + rng.uniform(120, 360)) for begin in begins]
    found, now = [], 0.0
    while (now := now + rng.expovariate(1.5 * peak_rate)) < day_s:
        share = 0.25 + 0.75 * math.sin(math.pi * now / day_s) ** 2
        share *= 1.5 if any(begin <= now < end for begin, end in bursts) else 1.0
        if rng.random() < share / 1.5:
            num_prompt = max(1, min(round(rng.expovariate(1 / PROMPT_TOKENS)), MAX_PROMPT))
            found.append(
                Request(now, num_prompt, max(2, round(rng.expovariate(1 / OUTPUT_TOKENS))))
            )
    return found


@dataclass(eq=False)
class Prefill:
    """A replica that computes prompts one after the other."""

    serves_at: float
    free_at: float = 0.0
    given_s: float = 0.0
    """The time of all prompts that it was given."""
    starts: deque[float] = field(default_factory=deque)
    """Of prompts that wait."""
    ends: deque[float] = field(default_factory=deque)
    num_done: int = 0

    def give(self, request: Request, now: float, within: list[bool]) -> None:
        begin = max(self.free_at, now)
        self.free_at = begin + request.num_prompt * TOKEN_S
        self.given_s += self.free_at - begin
        self.starts.append(begin)
        self.ends.append(self.free_at)
        within.append(self.free_at - request.at <= TTFT_S)

    def advance(self, now: float, within: list[bool]) -> None:
        while self.starts and self.starts[0] <= now:
            self.starts.popleft()
        while self.ends and self.ends[0] <= now:
            self.ends.popleft()
            self.num_done += 1

    def to_do(self, now: float) -> float:
        return max(self.free_at, now)

    def leave(self, others: list[Prefill], now: float) -> float:
        """Return when it has ended."""
        self.num_done += len(self.ends)
        return self.to_do(now)

    def load(self) -> dict[str, int]:
        num_running = len(self.ends) - len(self.starts)
        return {"num_running": num_running, "num_waiting": len(self.starts)}

    def counts(self, now: float) -> dict[str, float]:
        busy_s = self.given_s - max(0.0, self.free_at - now)
        return {"prompt_steps": self.num_done, "prompt_step_seconds": busy_s}


@dataclass(eq=False)
class Decode:
    """A replica whose rows all advance by a token a step."""

    serves_at: float
    num_steps: float = 0.0
    busy_s: float = 0.0
    tokens: float = 0.0
    num_done: int = 0
    rows: list[tuple[float, float, int]] = field(default_factory=list)
    """At which step each ends, when it came, and its tokens; the first to end is first."""
    waiting: deque[tuple[float, int]] = field(default_factory=deque)
    seen: float = 0.0

    def give(self, request: Request, now: float, within: list[bool]) -> None:
        self.waiting.append((self.seen, request.num_output))
        self._admit()

    def _admit(self) -> None:
        while self.waiting and len(self.rows) < MAX_NUM_SEQS:
            came_at, num_tokens = self.waiting.popleft()
            heapq.heappush(self.rows, (self.num_steps + num_tokens, came_at, num_tokens))

    def advance(self, now: float, within: list[bool]) -> None:
        left_s, self.seen = now - max(self.seen, self.serves_at), now
        while self.rows and left_s > 0:
            step_s = STEP_S + ROW_S * len(self.rows)
            steps = min(left_s / step_s, self.rows[0][0] - self.num_steps)
            self.num_steps += steps
            self.busy_s += steps * step_s
            self.tokens += steps * len(self.rows)
            left_s -= steps * step_s
            while self.rows and self.rows[0][0] <= self.num_steps + 1e-9:
                _, came_at, num_tokens = heapq.heappop(self.rows)
                within.append((now - left_s - came_at) / num_tokens <= TPOT_S)
            self._admit()

    def to_do(self, now: float) -> float:
        return len(self.rows) + len(self.waiting)

    def leave(self, others: list[Decode], now: float) -> float:
        """Have its sequences go on elsewhere; return when it has ended."""
        for ends_at, came_at, num_tokens in self.rows:
            to = min(others, key=lambda each: each.to_do(now))
            entry = (to.num_steps + ends_at - self.num_steps, came_at, num_tokens)
            heapq.heappush(to.rows, entry)
        for entry in self.waiting:
            min(others, key=lambda each: each.to_do(now)).waiting.append(entry)
        self.rows, self.waiting = [], deque()
        return now + 1.0

    def load(self) -> dict[str, int]:
        # On average half of the output is there.
        row_blocks = (PROMPT_TOKENS + OUTPUT_TOKENS / 2) / BLOCK_SIZE
        num_free = max(0, NUM_BLOCKS - round(row_blocks * len(self.rows)))
        load = {"num_running": len(self.rows), "num_waiting": len(self.waiting)}
        return {**load, "num_blocks": NUM_BLOCKS, "num_free_blocks": num_free}

    def counts(self, now: float) -> dict[str, float]:
        steps = {"decode_steps": self.num_steps, "decode_step_seconds": self.busy_s}
        return {**steps, "tokens": self.tokens}


class Replica(Protocol):
    serves_at: float
    num_done: int

    def give(self, request: Request, now: float, within: list[bool]) -> None: ...
    def advance(self, now: float, within: list[bool]) -> None: ...
    def to_do(self, now: float) -> float: ...
    def leave(self, others: list[Any], now: float) -> float: ...
    def load(self) -> dict[str, int]: ...
    def counts(self, now: float) -> dict[str, float]: ...


NOTHING = {"num_running": 0, "num_waiting": 0, "num_blocks": 0, "num_free_blocks": 0}
COUNTED = ("tokens", "prompt_tokens", "prompt_steps", "prompt_step_seconds")
COUNTED += ("decode_steps", "decode_step_seconds")
NO_COUNTS = dict.fromkeys(COUNTED, 0.0)
TARGETS = {"ttft_target_s": TTFT_S, "tpot_target_s": TPOT_S}
TARGETS |= {"max_num_seqs": MAX_NUM_SEQS, "data_parallel_size": 1}


@dataclass
class Day:
    """What became of a pool."""

    replica_s: float
    within: float
    sizes: list[int]

    @property
    def turns(self) -> int:
        ups = [after > before for before, after in pairwise(self.sizes)]
        return sum(one != two for one, two in pairwise(ups))


def run(kind: type[Any], requests: list[Request], day_s: float, size: int | None = None) -> Day:
    """Run a pool for a day; `size`: of one that is not scaled."""
    replicas: list[Any] = [kind(0.0) for _ in range(size or 1)]
    leaving: dict[str, float] = {}
    meter, memory = Meter(), Memory()
    within: list[bool] = []
    sizes, replica_s, gone, coming = [len(replicas)], 0.0, 0, deque(requests)
    number = 0
    names = {id(each): str(number := number + 1) for each in replicas}
    for tick in range(int(day_s / TICK_S)):
        now = tick * TICK_S
        ready = [each for each in replicas if each.serves_at <= now]
        for each in ready:
            each.advance(now, within)
        while coming and coming[0].at <= now:
            request = coming.popleft()
            min(ready, key=lambda each: each.to_do(now)).give(request, request.at, within)
        leaving = {key: until for key, until in leaving.items() if until > now}
        replica_s += TICK_S * (len(replicas) + len(leaving))
        if size is not None or tick % 2:
            continue
        states = {names[id(e)]: "ready" if e.serves_at <= now else "loading" for e in replicas}
        told = {
            "pool": kind.__name__.lower(),
            "targets": TARGETS,
            "replicas": states | {key: "draining" for key in leaving},
            "engines": {
                names[id(each)]: {
                    "load": NOTHING | each.load(),
                    "counts": NO_COUNTS | each.counts(now),
                }
                for each in ready
            },
            "first_tokens": gone + sum(each.num_done for each in replicas),
        }
        signals = meter.see(told, now)
        decision, memory = decide(signals, len(replicas), now, least=1, most=MOST, memory=memory)
        if decision.wanted != len(replicas):
            sizes.append(decision.wanted)
        for _ in range(decision.wanted - len(replicas)):
            replicas.append(kind(now + START_S))
            names[id(replicas[-1])] = str(number := number + 1)
        for _ in range(len(replicas) - decision.wanted):
            victim = max(replicas, key=lambda each: each.serves_at)
            replicas.remove(victim)
            others = [each for each in replicas if each.serves_at <= now]
            leaving[names.pop(id(victim))] = victim.leave(others, now)
            gone += victim.num_done
    return Day(replica_s, sum(within) / len(within), sizes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second at the peak")
    parser.add_argument("--hours", type=float, default=24.0)
    options = parser.parse_args()
    began, day_s = time.perf_counter(), 3600 * options.hours
    requests = requests_of_a_day(options.seed, options.rate, day_s)
    print(f"{len(requests)} requests, at most {options.rate:g} a second but for bursts")
    print(f"targets: TTFT {TTFT_S:g} s, TPOT {TPOT_S:g} s; a replica loads for {START_S:g} s")
    is_kept = True
    for kind in (Prefill, Decode):
        print(f"\n{kind.__name__.lower()} pool")
        best = None
        for size in range(1, MOST + 1):
            fixed = run(kind, requests, day_s, size)
            print(f"  fixed {size:2d}: {fixed.replica_s:9.0f} replica-s, {fixed.within:.4f} within")
            if fixed.within >= GOAL:
                best = fixed
                break
        found = run(kind, requests, day_s)
        print(f"  scaled  : {found.replica_s:9.0f} replica-s, {found.within:.4f} within")
        least, most, steps = min(found.sizes), max(found.sizes), len(found.sizes) - 1
        print(f"  {least} to {most} replicas, {steps} steps, {found.turns} turns")
        if best is not None:
            cost = found.replica_s / best.replica_s
            print(
                f"  {cost:.2f} times the best fixed size, {found.within - best.within:+.4f} within"
            )
        is_kept &= best is not None and cost <= MAX_COST and found.within >= best.within
    print(f"\n{time.perf_counter() - began:.0f} s")
    return 0 if is_kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
