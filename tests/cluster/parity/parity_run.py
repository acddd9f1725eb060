"""Runs any row: one engine is stepped by hand, several leaders serve through a router.

All is real but Ray: ranks that follow or serve are processes of their own, with the sockets, steps
and KV transfer that serve.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from parity_process import (
    END,
    EPOCH,
    LOSE,
    REPORT,
    Report,
    context_of,
    draft_replays,
    num_late,
    record_drafts,
    report,
)
from parity_rows import Request, Row, Run
from routed import routing

from cluster.config import EngineConfig, Role
from cluster.group.rendezvous import LeaderEndpoints, Rendezvous, introduce
from cluster.rank.leader import Leader
from cluster.wire.messages import LoraAdapter, Submit
from compile.counters import counter
from serve.pools.chooser import Why
from serve.pools.directory import ChosenLeader, Directory
from serve.pools.leader_load import Stage
from serve.pools.router import Router

FOLDER = Path(__file__).resolve().parent
MAX_STEPS = 10_000
MAX_SERVE_S = 120.0
MAX_LOAD_S = 300.0
EMPTY_WITHIN_S = 5.0
"""Behind the last request, also where clients have left; a lease is longer."""
EAGER = ("num_graphs_seen", "num_backend_compilations", "num_cudagraph_captured")
"""Counters that stand still at a start that does not compile or capture."""
AFTER_READY = (*EAGER, "num_cpp_builds", "num_late_compilations", "num_late_captures")
"""Those that do while requests are run."""


class RankProcess:
    """A process that plays ranks (`parity_process.py`)."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(FOLDER.parents[2]), str(FOLDER)])
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from parity_process import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
        )

    def tell(self, what: Any) -> None:
        pickle.dump(what, self.process.stdin)
        self.process.stdin.flush()

    def hear(self) -> Any:
        return pickle.load(self.process.stdout)

    def ask(self, what: str) -> Report:
        """Return the report of a rank that was loaded, after it did what it is asked."""
        self.tell(what)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class RankProcesses:
    """Processes that are lent to one row after another."""

    def __init__(self) -> None:
        self._free: list[RankProcess] = []

    @contextmanager
    def lent(self, number: int) -> Iterator[list[RankProcess]]:
        """Lend so many processes; they end where their ranks did not come to their end."""
        lent = [self._free.pop() if self._free else RankProcess() for _ in range(number)]
        try:
            yield lent
        except BaseException:
            for process in lent:
                process.kill()
            raise
        self._free += lent

    def close(self) -> None:
        """End all; none of them holds anything that keeps it from ending."""
        for rank in self._free:
            rank.tell(None)
        for rank in self._free:
            try:
                assert rank.process.wait(timeout=60) == 0
            finally:
                rank.kill()


class Pool:
    """All ranks of a group, each a process."""

    def __init__(self, config: EngineConfig, ranks: list[RankProcess]) -> None:
        parallel = config.parallel
        size = parallel.tensor_parallel_size
        self.ranks, self.leaders = ranks, ranks[::size]
        for i, rank in enumerate(ranks):
            rank.tell((config, *divmod(i, size)))
        offers: list[Rendezvous] = [leader.hear() for leader in self.leaders]
        told = introduce(offers) if len(ranks) > 1 else offers
        for i, rank in enumerate(ranks):
            rank.tell(told[i // size])
        self.inboxes = [rank.hear() for rank in ranks][::size]

    def reports(self) -> list[Report]:
        return [rank.ask(REPORT) for rank in self.ranks]

    def is_empty(self) -> bool:
        stats = [report.stats.scheduler for report in self.reports()]
        blocks = all(rank.num_free_blocks == rank.num_blocks for rank in stats)
        return blocks and not any(rank.num_running + rank.num_handoffs for rank in stats)

    def end(self) -> list[Report]:
        """End all ranks at one step; return what they have done."""
        for leader in self.leaders:
            leader.tell(END)
            time.sleep(0.05)  # not at once: who is told first waits for the others
        for rank in self.ranks:
            if rank not in self.leaders:
                rank.tell(END)
        return [rank.hear() for rank in self.ranks]


class UnevenDirectory(Directory):
    """Chooses a random leader: most of eight in a row the one, then another. So neither the first
    rank nor the last is always the one that all others pad to."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._rng = random.Random(1)
        self._num_chosen: Counter[str] = Counter()

    async def choose(self, pool: str, stage: Stage) -> ChosenLeader:
        leaders = self._able(pool)
        favoured = self._num_chosen[pool] // 8 % 2 * (len(leaders) - 1)
        self._num_chosen[pool] += 1
        place = self._rng.randrange(len(leaders)) if self._rng.random() < 0.6 else favoured
        return ChosenLeader(leaders[place], Why.EQUAL, 0)


@contextmanager
def leading(
    config: EngineConfig, processes: RankProcesses, reports: list[Report]
) -> Iterator[Leader]:
    """Lead a group from this process; `reports` is filled in at its end."""
    num_late_before = num_late()
    context = context_of(config, 0, 0)
    endpoints = LeaderEndpoints(context)
    with processes.lent(config.parallel.tensor_parallel_size - 1) as followers:
        for i, follower in enumerate(followers):
            follower.tell((config, 0, i + 1))
            follower.tell(endpoints.rendezvous)
        leader = record_drafts(Leader(context, endpoints))
        for follower in followers:
            follower.hear()
        try:
            yield leader
        finally:
            leader.stop()
            leader.run()  # ends at once, and its followers with it
        for follower in followers:
            follower.tell(END)
        reports += [
            report(leader, [], num_late_before),
            *(follower.hear() for follower in followers),
        ]


def step_through(row: Row, oracle: Any, config: EngineConfig, processes: RankProcesses) -> Run:
    """Step one engine by hand, so that requests come at known steps."""
    requests = row.requests(oracle)
    run = Run(row, oracle, requests, config, [[] for _ in requests], {"mixed": []}, [])
    ready = counter.expect(**dict.fromkeys(EAGER if row.is_eager else (), 0))
    with ready, leading(config, processes, run.pools["mixed"]) as leader:
        # Where captures end at attention, a step is one graph.
        num_layers = leader.runner.model_config.num_layers
        run.num_pieces = 1 if config.compilation.has_breakable_graphs else num_layers + 1
        with counter.expect(**dict.fromkeys(AFTER_READY, 0)):
            for adapters in row.adapters_in_turn(oracle):
                step_until_loaded(leader, adapters)
            log = _step_all(leader, run)
    run.pools["mixed"][0] = replace(run.pools["mixed"][0], log=log)
    return run


def step_until_loaded(leader: Leader, adapters: list[LoraAdapter]) -> None:
    leader.set_adapters(adapters)
    wanted, deadline = {adapter.id for adapter in adapters}, time.monotonic() + MAX_LOAD_S
    while (found := leader.stats().adapters).ids != wanted:
        assert not found.errors and time.monotonic() < deadline, found
        leader.step()


def _step_all(leader: Leader, run: Run) -> list[dict[str, Any]]:
    """Run all requests; return the agreements of all steps, however many."""
    engine, log, replays = leader.engine, list[dict[str, Any]](), run.replays_by_step
    waiting = sorted(
        range(len(run.requests)), key=lambda i: (run.requests[i].at is None, run.requests[i].at, i)
    )
    step = 0
    while waiting or engine.has_unfinished:
        while waiting:
            at = run.requests[waiting[0]].at
            if engine.has_unfinished if at is None else at > step:
                break
            _submit(leader, run, waiting.pop(0))
        before, last = _num_replayed(leader), engine.agreed
        for output in engine.step():
            run.outputs[int(output.request_id)].append(output)
        # An overlapped loop may have waited for a step alone.
        is_new = engine.agreed is not last
        if is_new and engine.agreed is not None and engine.agreed.has_work:
            log.append(leader.runner.step_stats.as_dicts()[-1])
            assert log[-1]["step"] == engine.agreed.step
            replays.append(_num_replayed(leader) - before)
        step += 1
        assert step < MAX_STEPS
    return log


def _num_replayed(leader: Leader) -> int:
    """Return how many graphs were replayed, but for those of drafts behind the first ones."""
    _, further = draft_replays(leader.runner.forward.mtp)
    return counter.num_cudagraph_replayed - sum(further.values())


def _submit(leader: Leader, run: Run, i: int) -> None:
    request = run.requests[i]
    if request.is_second_turn:
        before = run.requests[i - 1].prompt + run.tokens[i - 1]
        run.requests[i] = request = replace(request, prompt=before + request.prompt)
    leader.engine.submit(Submit(request.message(i), None))


def serve(row: Row, oracle: Any, config: EngineConfig, processes: RankProcesses) -> Run:
    """Serve the row's requests through a router, over one pool or two."""
    roles = (Role.PREFILL, Role.DECODE) if row.kv else (Role.MIXED,)
    requests = row.requests(oracle)
    run = Run(row, oracle, requests, config, [[] for _ in requests], {})
    with ExitStack() as stack:
        ranks = [stack.enter_context(processes.lent(row.tp * row.dp)) for _ in roles]
        pools = {
            role.value: Pool(of_role(config, role), some)
            for role, some in zip(roles, ranks, strict=True)
        }
        if row.loses is not None:
            pools["prefill"].ranks[row.loses].ask(LOSE)
        asyncio.run(_serve_all(run, pools))
        run.pools = {name: pool.end() for name, pool in pools.items()}
    return run


def of_role(config: EngineConfig, role: Role) -> EngineConfig:
    """Return a pool's configuration, as `deploy` resolves it for a GPU: what fills prompts drafts
    nothing, and may be planned ahead where others draft."""
    if role is not Role.PREFILL or config.speculation is None:
        return replace(config, role=role)
    return replace(config, role=role, speculation=None, overlap=True)


async def _serve_all(run: Run, pools: dict[str, Pool]) -> None:
    inboxes = {name: pool.inboxes for name, pool in pools.items()}
    async with routing(inboxes, EPOCH, UnevenDirectory) as router:
        await _ask_all(run, pools, router)


async def _ask_all(run: Run, pools: dict[str, Pool], router: Router) -> None:
    rng = random.Random(2)

    async def ask(i: int, request: Request) -> None:
        num_tokens = 0
        async with aclosing(router.generate(request.message(i))) as outputs:
            async for output in outputs:
                run.outputs[i].append(output)
                num_tokens += len(output.token_ids)
                if request.leaves_after and num_tokens >= request.leaves_after:
                    return

    async def settle(asked: list[asyncio.Task[None]]) -> None:
        await asyncio.gather(*asked)
        await _until(lambda: all(pool.is_empty() for pool in pools.values()), EMPTY_WITHIN_S)

    asked: list[asyncio.Task[None]] = []
    async with asyncio.timeout(MAX_SERVE_S):
        for i, request in enumerate(run.requests):
            if request.at is None:
                await settle(asked)
                await asyncio.sleep(0.1)  # all leaders sleep, by agreement
            elif run.row.dp > 1:  # not all at once: the load of the ranks is uneven
                await asyncio.sleep(rng.choice((0, 0.005, 0.02)))
            asked.append(asyncio.create_task(ask(i, request)))
        await settle(asked)


async def _until(condition: Callable[[], bool], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


def run_row(row: Row, oracle: Any, processes: RankProcesses, cache_dir: str) -> Run:
    """Run a row's requests to their ends, and all of its ranks to theirs."""
    config = row.config(oracle, cache_dir)
    is_stepped = row.dp == 1 and not row.kv
    return (step_through if is_stepped else serve)(row, oracle, config, processes)
