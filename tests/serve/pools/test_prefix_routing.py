"""Requests go where their prompts are cached, as long as nobody waits there too long.

Real are the router, the directory, the chooser, the board's part, and each leader's scheduler with
its blocks; a step takes no time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing

import pytest
from scripted import GREEDY, Connections, ScriptedConnection

from cluster.actors.reports import CachedPrefixes, GroupReport, ReplicaReport, leaders_of
from cluster.config import CacheConfig, Role, SchedulerConfig
from cluster.engine.blocks import BlockManager
from cluster.engine.prefix_index import PrefixFeed
from cluster.engine.request_limits import RequestLimits
from cluster.engine.scheduler import Scheduler
from cluster.engine.sequence import SampledTokens
from cluster.group.context import RankPlace, RankStats
from cluster.wire.credentials import Hashes
from cluster.wire.messages import GenerateRequest, Submit
from serve.event_loop import StreamBatcher
from serve.pools.chooser import MAX_QUEUE_TIMES, Routing
from serve.pools.router import Router

BLOCK = 16
PROMPT = 320


def prompt_of(group: int, number: int) -> list[int]:
    """Return a prompt, most of which those of its group share."""
    return [group] * (PROMPT - 20) + [1000 + number] * 20


class Replica:
    """One of a pool's leaders, which computes when it is told to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.feed = PrefixFeed()
        self.known = 0
        blocks = BlockManager(4096, BLOCK, True, changes=self.feed.changes)
        limits = RequestLimits(blocks, 1000, Role.MIXED)
        self.scheduler = Scheduler(SchedulerConfig(256, 2048), limits, epoch=0)

    def report(self) -> ReplicaReport:
        prefixes = self.feed.since(self.known)
        place, load = RankPlace(0, 0, 0), self.scheduler.stats()
        rank = RankStats(place, 1, "", "ready", 1, load, {12: 1e-4, 1: 1e-3}, prefixes)
        group, inboxes = GroupReport([rank], []), (self.name,)
        fields = {"epoch": 0, "inboxes": inboxes, "hashes": Hashes("ours")}
        return ReplicaReport("mixed", self.name, "ready", group, **fields)  # type: ignore[arg-type]

    def step(self, connection: ScriptedConnection) -> None:
        plan = self.scheduler.schedule()
        drawn = sum(index >= 0 for index in plan.output_index)
        for output in self.scheduler.update(plan, SampledTokens([5] * drawn, [], [], [])):
            connection.leader.deliver(output)


class Pool:
    def __init__(self, routing: Routing, *names: str) -> None:
        self.replicas = {name: Replica(name) for name in names}
        self.submitted: list[tuple[str, str]] = []
        """Requests, with the replica that each went to."""
        self.connections = Connections({"mixed": routing}, on_submit=self._on_submit)
        cache = CacheConfig(BLOCK)
        directory = self.connections.directory
        self.router = Router(directory, "mixed", StreamBatcher(), cache=cache)
        self._board = CachedPrefixes()
        self.report()

    def _on_submit(self, to: ScriptedConnection, submit: Submit) -> None:
        replica = to.leader.report.replica_id
        self.submitted.append((submit.request.request_id.split(".")[0], replica))
        self.replicas[replica].scheduler.add(submit)

    def report(self) -> None:
        """Let the replicas report to the board, and the ingress read it, as each does by itself."""
        for _ in range(2):
            leaders = []
            for replica in self.replicas.values():
                report, numbers = self._board.take(replica.report())
                replica.known = numbers[0]
                leaders += leaders_of(report)
            known = self.connections.directory.known_prefixes
            self.connections.see(*(self._board.add_to(leader, known) for leader in leaders))

    def step(self) -> None:
        for name, replica in self.replicas.items():
            replica.step(self.connections[f"mixed/{name}/0"])

    async def ask(self, name: str, prompt: list[int], salt: bytes = b"") -> int:
        """Return how many tokens of a prompt were cached where it went."""
        request = GenerateRequest(name, prompt, [], GREEDY, salt)
        cached = 0
        async with aclosing(self.router.generate(request)) as outputs:
            async for output in outputs:
                cached = max(cached, output.num_cached_tokens)
        return cached

    async def ask_all(self, prompts: dict[str, list[int]]) -> dict[str, int]:
        """Ask at once; step until all have ended."""
        asked = {name: asyncio.create_task(self.ask(name, each)) for name, each in prompts.items()}
        while not all(task.done() for task in asked.values()):
            for _ in range(3):
                await asyncio.sleep(0)
            self.step()
        return {name: task.result() for name, task in asked.items()}


@pytest.mark.feature("P08")
async def test_requests_go_to_the_leader_that_has_their_prefix_cached() -> None:
    pool = Pool(Routing.COST, "a", "b")
    holders: dict[int, str] = {}
    for group in range(8):
        await pool.ask_all({f"first{group}": prompt_of(group, 0)})
        holders[group] = pool.submitted[-1][1]
        pool.report()
    assert {*holders.values()} == {"a", "b"}, "of equal ones the request's id decides"
    for number in range(1, 4):
        for group in range(8):
            found = await pool.ask_all({"r": prompt_of(group, number)})
            assert pool.submitted[-1][1] == holders[group]
            assert found["r"] == (PROMPT - 20) // BLOCK * BLOCK
            pool.report()
    # Another salt finds nothing anywhere.
    went = Counter[str]()
    for i in range(24):
        task = asyncio.create_task(pool.ask(f"salted{i}", prompt_of(0, i), b"%d" % i))
        while not task.done():
            await asyncio.sleep(0)
            pool.step()
        assert await task == 0
        went[pool.submitted[-1][1]] += 1
    assert min(went["a"], went["b"]) > 3, went


@pytest.mark.feature("P08")
async def test_siblings_follow_the_first_one_before_anybody_reports() -> None:
    pool = Pool(Routing.COST, "a", "b", "c", "d")
    prompts = {f"{group}-{i}": prompt_of(group, i) for i in range(3) for group in range(4)}
    await pool.ask_all(prompts)
    went = dict(pool.submitted)
    for group in range(4):
        assert len({went[f"{group}-{i}"] for i in range(3)}) == 1, went


@pytest.mark.feature("P08")
async def test_a_hot_prefix_spreads_when_its_leader_has_enough_to_do() -> None:
    pool = Pool(Routing.COST, "a", "b", "c", "d")
    await pool.ask_all({"first": prompt_of(0, 0)})
    pool.report()
    hot = dict(pool.submitted)["first"]
    pool.submitted.clear()
    await pool.ask_all({f"r{i}": prompt_of(0, i) for i in range(200)})
    went = Counter(replica for _, replica in pool.submitted)
    assert set(went) == set(pool.replicas)
    # 20 tokens of each are new there, and a block's rest: a prompt more is 10 requests.
    assert went[hot] <= MAX_QUEUE_TIMES * 200 / 4 + 10, went


@pytest.mark.feature("P08")
async def test_what_others_have_queued_and_used_counts_as_reported() -> None:
    pool = Pool(Routing.COST, "a", "b")
    theirs = GenerateRequest("theirs", [9] * 900, [], GREEDY, b"")
    pool.replicas["a"].scheduler.add(Submit(theirs, None))
    pool.report()
    asked = [asyncio.create_task(pool.ask(f"r{i}", prompt_of(i, 0))) for i in range(2)]
    for _ in range(3):
        await asyncio.sleep(0)
    assert [replica for _, replica in pool.submitted] == ["b", "b"]
    for task in asked:
        task.cancel()
