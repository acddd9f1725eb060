"""Prompts that share prefixes, over four prefill replicas: what each way of choosing makes of them.

    python examples/bench/prefix_routing.py [--requests 3000] [--rate 40] [--blocks 4096] [--seed 0]

Directory, chooser, the board's part, scheduler, blocks and step statistics are those that serve;
time is simulated, and a step takes `STEP_S` and `TOKEN_S` a token. Replicas report four times a
second, and the ingress reads the board as often, so what it knows is up to half a second old.

1. *Shared prefixes*: each prompt begins with one of `GROUPS` prefixes of 1,000 to 3,000 tokens, the
   k-th most wanted as often as 1/k, and ends with 30 to 200 tokens of its own. All prefixes
   together are larger than one replica's cache and smaller than that of four. *One replica* has the
   speed of all four and the blocks of each, or of all: nothing has to be chosen. Hits are relative
   to the latter's.
2. *One hot prefix*: all prompts begin with the same 2,000 tokens, and come faster than all replicas
   compute them. The figure is the most requests that one replica has at once, relative to the mean
   of all four, once that is `MEAN_QUEUE`; and how many of the prompt's tokens were found.

`hits` is the share of prompt tokens that were found in a cache, TTFT the time from a request's
arrival to its first token.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, count
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from cluster.actors.reports import (  # noqa: E402
    CachedPrefixes,
    GroupReport,
    ReplicaReport,
    leaders_of,
)
from cluster.config import Role, SchedulerConfig  # noqa: E402
from cluster.engine.blocks import BlockManager, prompt_prefixes  # noqa: E402
from cluster.engine.prefix_index import PrefixFeed  # noqa: E402
from cluster.engine.request_limits import RequestLimits  # noqa: E402
from cluster.engine.scheduler import Scheduler  # noqa: E402
from cluster.engine.sequence import SampledTokens  # noqa: E402
from cluster.engine.step_stats import StepStats  # noqa: E402
from cluster.group.context import RankPlace, RankStats  # noqa: E402
from cluster.wire.credentials import Hashes  # noqa: E402
from cluster.wire.messages import (  # noqa: E402
    GenerateRequest,
    Inbound,
    Sampling,
    Submit,
    decode,
)
from serve.event_loop import StreamBatcher  # noqa: E402
from serve.pools.chooser import Routing  # noqa: E402
from serve.pools.directory import ConnectedLeader, Directory  # noqa: E402
from serve.pools.leader_load import Stage  # noqa: E402
from serve.pools.mailbox import Mailbox  # noqa: E402

NUM_REPLICAS = 4
GROUPS = 64
BLOCK_SIZE = 16
MAX_BATCHED_TOKENS = 2048
STEP_S, TOKEN_S = 0.005, 0.0001
REPORT_S = 0.25
MEAN_QUEUE = 20
HOT_PREFIX, HOT_TAIL = 2000, 100
ONE_TOKEN = Sampling(0.0, 0, 1.0, 0.0, 0, 1, (), -1, -1, None, None)


@dataclass(frozen=True)
class Arrival:
    at: float
    prompt: list[int]


@dataclass
class Figures:
    hits: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    queue_ratio: float = 0.0


def shared_prefixes(rng: random.Random, num_requests: int, rate: float) -> list[Arrival]:
    prefixes = [
        [rng.randrange(50_000) for _ in range(rng.randint(1000, 3000))] for _ in range(GROUPS)
    ]
    weights = [*accumulate(1 / (k + 1) for k in range(GROUPS))]
    arrivals, at = list[Arrival](), 0.0
    for _ in range(num_requests):
        at += rng.expovariate(rate)
        [prefix] = rng.choices(prefixes, cum_weights=weights)
        tail = [rng.randrange(50_000) for _ in range(rng.randint(30, 200))]
        arrivals.append(Arrival(at, prefix + tail))
    return arrivals


def one_hot_prefix(rng: random.Random, num_requests: int) -> list[Arrival]:
    prefix = [rng.randrange(50_000) for _ in range(HOT_PREFIX)]
    capacity = NUM_REPLICAS / ((HOT_TAIL + BLOCK_SIZE) * TOKEN_S)
    arrivals, at = list[Arrival](), 0.0
    for _ in range(num_requests):
        at += rng.expovariate(1.5 * capacity)
        arrivals.append(Arrival(at, prefix + [rng.randrange(50_000) for _ in range(HOT_TAIL)]))
    return arrivals


class World:
    """What happens when, in simulated time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), action))

    def run_until(self, at: float) -> None:
        while self._due and self._due[0][0] <= at:
            self.now, _, action = heapq.heappop(self._due)
            action()
        self.now = max(self.now, at)


class Replica:
    """A prefill replica of one leader, and the connection to it."""

    def __init__(self, world: World, name: str, num_blocks: int, speed: float) -> None:
        self.name = name
        self.leader: ConnectedLeader | None = None
        self.first_token_at: dict[str, float] = {}
        self.known = 0
        self.num_unfinished = 0
        self._world, self._speed = world, speed
        self._feed = PrefixFeed()
        self._stats = StepStats(lambda: world.now)
        # As a rank that times its largest step before it is ready.
        self._stats.learn(MAX_BATCHED_TOKENS, self._step_s(MAX_BATCHED_TOKENS))
        blocks = BlockManager(num_blocks, BLOCK_SIZE, True, changes=self._feed.changes)
        limits = RequestLimits(blocks, 8192, Role.PREFILL)
        config = SchedulerConfig(256, MAX_BATCHED_TOKENS)
        self.scheduler = Scheduler(config, limits, epoch=0, clock=lambda: world.now)
        self._is_busy = False

    def _step_s(self, num_tokens: int) -> float:
        return (STEP_S + TOKEN_S * num_tokens) / self._speed

    def send(self, body: bytes) -> None:
        message = decode(body, Inbound)
        if isinstance(message, Submit):
            self.num_unfinished += 1
            self.scheduler.add(message)
            if not self._is_busy:
                self._step()

    def close(self) -> None:
        """Nothing is held."""

    def _step(self) -> None:
        plan = self.scheduler.schedule()
        self._is_busy = bool(plan.num_tokens)
        if not self._is_busy:
            return
        self._stats.build(plan.step, plan.num_tokens)

        def end() -> None:
            self._stats.end_step(plan.step)
            drawn = sum(index >= 0 for index in plan.output_index)
            for output in self.scheduler.update(plan, SampledTokens([1] * drawn, [], [], [])):
                self.first_token_at[output.request_id] = self._world.now
                self.num_unfinished -= 1
                assert self.leader is not None and not output.error, output.error
                self.leader.deliver(output)
            self._step()

        self._world.after(self._step_s(plan.num_tokens), end)

    def report(self) -> ReplicaReport:
        rank = RankStats(
            RankPlace(),
            1,
            "",
            "ready",
            scheduler=self.scheduler.stats(),
            token_s=self._stats.token_s(),
            prefixes=self._feed.since(self.known),
        )
        group = GroupReport([rank], [])
        return ReplicaReport(
            "prefill", self.name, "ready", group, inboxes=(self.name,), hashes=Hashes("bench")
        )


class Pool:
    """Replicas, the board, and an ingress that has read it."""

    def __init__(
        self, world: World, routing: Routing, num_replicas: int, num_blocks: int, speed: float
    ) -> None:
        self._world = world
        self.replicas = {
            name: Replica(world, name, num_blocks, speed) for name in map(str, range(num_replicas))
        }
        self._board, self._reports = CachedPrefixes(), dict[str, ReplicaReport]()
        self.directory = Directory(
            {"prefill": routing}, self._connect, numerics_hash="bench", max_wait_s=1.0
        )
        for replica in self.replicas.values():
            self._push(replica)
        self._poll()
        for replica in self.replicas.values():
            assert replica.leader is not None
            replica.leader.on_welcome()

    def _connect(self, inbox: str, leader: ConnectedLeader) -> Replica:
        self.replicas[inbox].leader = leader
        return self.replicas[inbox]

    def _push(self, replica: Replica) -> None:
        self._reports[replica.name], numbers = self._board.take(replica.report())
        replica.known = numbers[0]
        self._world.after(REPORT_S, partial(self._push, replica))

    def _poll(self) -> None:
        known = self.directory.known_prefixes
        leaders = [leader for report in self._reports.values() for leader in leaders_of(report)]
        self.directory.see(self._board.add_to(leader, known) for leader in leaders)
        self._world.after(REPORT_S, self._poll)


async def simulate(
    arrivals: list[Arrival],
    routing: Routing,
    *,
    num_blocks: int,
    num_replicas: int = NUM_REPLICAS,
    speed: int = 1,
) -> Figures:
    """Send all requests; return their figures once all have a token."""
    world, figures = World(), Figures()
    pool = Pool(world, routing, num_replicas, num_blocks, speed)
    replicas, tick = [*pool.replicas.values()], StreamBatcher()
    for number, arrival in enumerate(arrivals):
        world.run_until(arrival.at)
        request = GenerateRequest(str(number), arrival.prompt, [], ONE_TOKEN, b"")
        prefixes = prompt_prefixes(request, BLOCK_SIZE) if pool.directory.knows_prefixes else []
        stage = Stage(request, None, BLOCK_SIZE, prefixes)
        leader = (await pool.directory.choose("prefill", stage)).leader
        leader.submit(stage, Mailbox(request.request_id, tick))
        queues = [replica.num_unfinished for replica in replicas]
        if (mean := statistics.mean(queues)) >= MEAN_QUEUE:
            figures.queue_ratio = max(figures.queue_ratio, max(queues) / mean)
    while any(replica.num_unfinished for replica in replicas):
        world.run_until(world.now + 1)
    for replica in replicas:
        figures.ttft_s += [
            at - arrivals[int(name)].at for name, at in replica.first_token_at.items()
        ]
    stats = [replica.scheduler.stats() for replica in replicas]
    figures.hits = sum(s.prefix_hits for s in stats) / sum(s.prefix_queries for s in stats)
    return figures


def line_of(name: str, figures: Figures, most: float) -> str:
    mean_ms = 1e3 * statistics.mean(figures.ttft_s)
    p99_ms = 1e3 * statistics.quantiles(figures.ttft_s, n=100)[-1]
    shares = f"{figures.hits:8.3f}{figures.hits / most:10.3f}"
    return f"{name:26}{shares}{mean_ms:12.0f}{p99_ms:10.0f}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--rate", type=float, default=40.0, help="requests a second")
    parser.add_argument("--blocks", type=int, default=4096, help="of each of the four replicas")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    arrivals = shared_prefixes(random.Random(options.seed), options.requests, options.rate)
    single = {"num_replicas": 1, "speed": NUM_REPLICAS}
    large, small = [
        await simulate(arrivals, Routing.COST, num_blocks=times * options.blocks, **single)
        for times in (NUM_REPLICAS, 1)
    ]
    print(f"{'shared prefixes':26}{'hits':>8}{'relative':>10}{'TTFT ms':>12}{'p99':>10}")
    print(line_of("one replica, all blocks", large, large.hits))
    print(line_of("one replica, its blocks", small, large.hits))
    for routing in (Routing.COST, Routing.ROUND_ROBIN, Routing.LEAST_REQUESTS):
        figures = await simulate(arrivals, routing, num_blocks=options.blocks)
        print(line_of(routing.value, figures, large.hits))
    hot = one_hot_prefix(random.Random(options.seed), options.requests)
    print(f"\n{'one hot prefix':26}{'hits':>8}{'largest queue':>16}")
    for routing in (Routing.COST, Routing.ROUND_ROBIN, Routing.LEAST_REQUESTS):
        figures = await simulate(hot, routing, num_blocks=options.blocks)
        print(f"{routing.value:26}{figures.hits:8.3f}{figures.queue_ratio:16.2f}")


if __name__ == "__main__":
    asyncio.run(main())
