"""`JobGroup`: the rank group of an `LLM` that has several ranks, in a Ray job or on one machine.

It is one replica of a pool and one ingress in a process, without Serve: the replica's core starts
the ranks as actors and rebuilds them if one dies, its reports go straight into the directory, and
the router has each request go on until it has ended.

An event loop on a thread of its own has all of that. The other methods are the caller's, of one
thread; they are those of an engine in process (`submit`, `step`, `abort`).
"""

from __future__ import annotations

import asyncio
import atexit
import queue
import secrets
import threading
from collections.abc import Coroutine, Iterable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import ray

from cluster.actors.rank_group import RankGroup
from cluster.actors.ray_ranks import create_group
from cluster.actors.reports import CachedPrefixes, PushAnswer, ReplicaReport, leaders_of
from cluster.config import PLACEMENT_TIMEOUT_S
from cluster.wire.credentials import SECRET_BYTES, Credentials, Hashes
from cluster.wire.messages import EngineOutput, FinishReason, GenerateRequest, Submit
from serve.config import PoolConfig
from serve.event_loop import StreamBatcher
from serve.pools.directory import Directory, NoLeader
from serve.pools.links import LeaderLinks
from serve.pools.pool_core import PoolCore
from serve.pools.router import Router

T = TypeVar("T")

REPLICA_ID = "job"
CHECK_PERIOD_S = 1.0
"""How often it is looked whether the group has failed for good, while nothing comes."""
MAX_WAIT_S = 86400.0
"""How long a request waits for a group that is rebuilt: one that cannot be ends the wait."""
AHEAD = 2
"""Requests that engines have, in multiples of those that run at once: more wait here."""
STOP_TIMEOUT_S = 15.0
"""How long the ranks may take to end, and then the event loop."""


class NotPlaced(RuntimeError):
    """Ray has no room for the ranks; the message says what was asked for and what is free."""


class JobGroup:
    has_unfinished = False
    """What has ended is in no step any more."""

    def __init__(self, pool: PoolConfig) -> None:
        """Start the ranks and return when they are ready; `NotPlaced`, or `RankDied`."""
        if not ray.is_initialized():
            ray.init()
        self._pool = pool
        self._outputs: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._credentials = Credentials(REPLICA_ID, secrets.token_bytes(SECRET_BYTES))
        self._placement_group = self._place()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="job group", daemon=True)
        self._core: PoolCore | None = None
        self._thread.start()
        atexit.register(self.close)  # before Ray's own, which was registered earlier
        try:
            self._call(self._start())
        except BaseException:
            self.close()
            raise

    def submit(self, submit: Submit) -> None:
        request = submit.request
        self._loop.call_soon_threadsafe(self._generate, request)

    def step(self) -> list[EngineOutput]:
        """Wait for outputs and return them; `RankDied` if the group cannot be rebuilt."""
        while True:
            with suppress(queue.Empty):
                outputs = [self._outputs.get(timeout=CHECK_PERIOD_S)]
                while not self._outputs.empty():
                    outputs.append(self._outputs.get())
                return outputs
            assert self._core is not None, "it was started"
            self._core.check_health()

    def abort(self, request_ids: Iterable[str]) -> None:
        self._call(self._cancel([*request_ids]))

    def close(self) -> None:
        """End the ranks, unless Ray has ended."""
        atexit.unregister(self.close)
        if not self._loop.is_running() or not ray.is_initialized():
            return
        with suppress(TimeoutError):
            self._call(self._stop(), STOP_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        ray.util.remove_placement_group(self._placement_group)

    def _place(self) -> Any:
        placement = self._pool.placement
        bundles = placement.bundles(self._pool.engine.parallel)
        labels = [placement.label_selector] * len(bundles) if placement.label_selector else None
        group = ray.util.placement_group(bundles, placement.strategy, bundle_label_selector=labels)
        if not group.wait(PLACEMENT_TIMEOUT_S):
            ray.util.remove_placement_group(group)
            wanted = f"{bundles} by {placement.strategy} in {PLACEMENT_TIMEOUT_S:g} s"
            raise NotPlaced(f"ranks: wanted {wanted}, found free {ray.available_resources()}")
        return group

    def _call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    # On the event loop.

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _start(self) -> None:
        tick, engine = StreamBatcher(), self._pool.engine
        self._links = LeaderLinks(self._credentials)
        self._directory = Directory(
            {self._pool.name: self._pool.routing},
            self._links.connect,
            numerics_hash=REPLICA_ID,
            max_wait_s=MAX_WAIT_S,
        )
        self._prefixes = CachedPrefixes()
        self._router = Router(self._directory, self._pool.name, tick, cache=engine.cache)
        num_engines = engine.parallel.data_parallel_size
        self._places = asyncio.Semaphore(AHEAD * engine.scheduler.max_num_seqs * num_engines)
        self._core = PoolCore(self._pool.name, REPLICA_ID, Hashes(REPLICA_ID), self)
        self._core.spawn(self._core.report())
        await self._core.start()

    def _generate(self, request: GenerateRequest) -> None:
        task = self._loop.create_task(self._run(request))
        self._tasks[request.request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request.request_id, None))

    async def _run(self, request: GenerateRequest) -> None:
        try:
            async with self._places, aclosing(self._router.generate(request)) as outputs:
                async for output in outputs:
                    self._outputs.put(output)
        except NoLeader as error:
            ended = EngineOutput.ended(request.request_id, FinishReason.ERROR, str(error))
            self._outputs.put(ended)

    async def _cancel(self, request_ids: list[str]) -> None:
        tasks = [self._tasks[each] for each in request_ids if each in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _stop(self) -> None:
        if self._core is not None:
            await self._core.stop()
        self._directory.close()
        self._links.shutdown()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # What the core calls (`PoolShell`).

    def new_group(self, epoch: int) -> RankGroup:
        return create_group(
            self._pool.engine,
            self._placement_group,
            first_bundle=0,
            engine_id=f"{self._pool.name}/{REPLICA_ID}",
            credentials=self._credentials,
            epoch=epoch,
            clients_node=ray.get_runtime_context().get_node_id(),
        )

    async def push(self, report: ReplicaReport, group: RankGroup) -> PushAnswer:
        report, numbers = self._prefixes.take(report)
        known = self._directory.known_prefixes
        self._directory.see(self._prefixes.add_to(each, known) for each in leaders_of(report))
        return PushAnswer(numbers)

    async def final_failure(self) -> str:
        return ""  # there was no replica before this one

    async def note_failure(self, reason: str, is_final: bool) -> None:
        pass  # `start` and `check_health` raise it

    async def note_recovery(self) -> None:
        pass
