"""`StatusBoard`: the small named actor where pools and ingresses tell how they are.

The first ingress to come owns it, and all answer `/ready` from it; pool replicas push to it up to
four times a second from their first line on. If its owner dies, the next ingress to ask makes
another one. It also adds up what ranks and ingresses have counted, and holds which adapters all
are to have (`adapter_set.py`). Whatever it has told is kept before (`gcs_store.py`), so both go on
where they were if it is made anew.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

import ray
from ray.util.metrics import Gauge

from cluster.actors.adapter_set import AdapterSet, AdapterSets, LoadCall, UnloadCall
from cluster.actors.gcs_store import KeptAdapters, KeptTotals
from cluster.actors.reports import (
    BoardSilent,
    CachedPrefixes,
    IngressReport,
    PushAnswer,
    ReplicaReport,
    figures_body,
    leaders_of,
    ready_body,
    scaling_body,
)
from cluster.observe.counts import Counts, Ledger
from cluster.observe.metrics import (
    COMMON_LABELS,
    HISTOGRAM,
    INGRESS,
    Described,
    MetricsSnapshot,
    SchedulerStats,
    samples,
)
from compile.errors import FieldError

NAMESPACE = "lockstep"
UNORDERED_ACTOR = {"num_cpus": 0, "allow_out_of_order_execution": True}
"""Ray's options for actors that requests call. Ray cancels a request's calls with the request, and
an actor that keeps each caller's order waits for ever for one that was cancelled before it was
sent."""
BOARD_PREFIX = "status:"
"""Of the actor's name, before the application's."""
EXPORT_PERIOD_S = 5.0
"""How often figures go to Ray's metrics."""
SAVE_PERIOD_S = 5.0
"""How often totals are kept that nobody asks for."""
LOST_AFTER_S = 5.0
"""A replica that is silent this long is gone: one whose ranks do not answer still pushes. The same
holds for ingresses."""
ANSWER_S = 3.0
"""How long the board may take to answer an ingress."""
CHANGE_S = 30.0
"""How long it may take to load or unload an adapter, and as long again if it dies meanwhile: nobody
should be left to guess."""
AGAIN_S = 0.05
"""How often one that restarts is asked again."""
USUAL_STATES = ("loading", "ready", "draining")
"""Of a replica that nothing happens to."""
DEBUG_S = 3.0
"""How long ranks have to answer `/debug/ranks`."""


class RayMetrics:
    """One application's metrics once more, for those who scrape Ray's own endpoints. Ray's names
    take no colon: `lockstep:steps_total` is `lockstep_steps_total` there. All are set as gauges,
    because a Ray counter starts at zero with its process and a total does not."""

    def __init__(self, described: Described) -> None:
        self._described = described
        self._gauges: dict[str, Gauge] = {}

    def export(self, snapshot: MetricsSnapshot) -> None:
        """Set all gauges; some milliseconds."""
        for metric, found in samples(snapshot, self._described):
            labels = (*COMMON_LABELS, *metric.labels)
            for sample in found:
                tags = dict(zip(labels, sample.labels, strict=True))
                if metric.kind != HISTOGRAM:
                    self._set(metric.name, metric.meaning, sample.value, tags)
                    continue
                self._set(f"{metric.name}_sum", metric.meaning, sample.value, tags)
                self._set(f"{metric.name}_count", metric.meaning, sample.buckets[-1][1], tags)
                for bound, times in sample.buckets:
                    of_bucket = {**tags, "le": bound}
                    self._set(f"{metric.name}_bucket", metric.meaning, times, of_bucket)

    def _set(self, name: str, meaning: str, value: float, tags: dict[str, str]) -> None:
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = self._gauges[name] = Gauge(f"lockstep_{name}", meaning, tag_keys=tuple(tags))
        gauge.set(value, tags=tags)


class StatusBoard:
    """The last report of every pool replica, by pool and replica id, and the totals of all.
    Invariant: `metrics` returns no total that was not kept before."""

    def __init__(
        self,
        pools: list[str],
        kept: KeptTotals | None = None,
        ray_metrics: RayMetrics | None = None,
        kept_adapters: KeptAdapters | None = None,
    ) -> None:
        """Go on from what was kept; `ray_metrics` gets all figures at times."""
        self._kept = kept
        self._ray_metrics = ray_metrics
        self._adapters = (
            AdapterSets()
            if kept_adapters is None
            else AdapterSets(kept_adapters.load(), kept_adapters.save)
        )
        self._made_at = self._exported_at = time.monotonic()
        self._ledger = Ledger() if kept is None else kept.load()
        self._has_grown = False
        self._saved_at = time.monotonic()
        self._places: dict[str, dict[str, int]] = {}
        """By pool and replica id its number, the lowest that none had when it came."""
        self._reports: dict[str, dict[str, tuple[float, ReplicaReport]]] = {p: {} for p in pools}
        self._prefixes = CachedPrefixes()
        self._actors: dict[str, dict[str, list[Any]]] = {}
        self._ingresses: dict[str, tuple[float, IngressReport]] = {}
        self._scaling: dict[str, tuple[float, dict[str, Any]]] = {}
        """By pool what its policy decided last."""

    def push(self, report: ReplicaReport) -> PushAnswer | dict[int, int]:
        """Replace the replica's last report, and add what was counted since. The answer to one of a
        release before is its known prefixes alone."""
        report, known_prefixes = self._prefixes.take(report)
        self._reports.setdefault(report.pool, {})[report.replica_id] = (time.monotonic(), report)
        place, source = self._place(report.pool, report.replica_id), report.replica_id
        self._add(source, _engine(report.pool, place, 0), report.counts)
        for rank, counts in zip(report.group.ranks, report.group.counts, strict=False):
            at = rank.place
            of_rank = f"{source}/{at.dp_rank}/{at.tp_rank}/{at.epoch}/{rank.pid}"
            self._add(of_rank, _engine(report.pool, place, at.dp_rank), counts)
        now = time.monotonic()
        if now - self._saved_at > SAVE_PERIOD_S:
            self._save()
        if self._ray_metrics is not None and now - self._exported_at > EXPORT_PERIOD_S:
            self._ray_metrics.export(self._now())
            self._exported_at = time.monotonic()
        if not report.takes_answer:
            return known_prefixes
        self._sweep_adapters(now)
        return PushAnswer(known_prefixes, self._adapters.of(report.hashes.numerics).of_engines)

    def remove(self, pool: str, replica_id: str) -> None:
        self._prefixes.forget(pool, replica_id)
        self._reports.get(pool, {}).pop(replica_id, None)
        self._actors.get(pool, {}).pop(replica_id, None)
        self._places.get(pool, {}).pop(replica_id, None)

    def register(self, pool: str, replica_id: str, actors: list[Any]) -> None:
        self._actors.setdefault(pool, {})[replica_id] = actors

    def count(self, ingress_id: str, counts: Counts) -> None:
        self._add(f"ingress/{ingress_id}", INGRESS, counts)

    def poll(self, report: IngressReport) -> dict[str, Any]:
        """Take an ingress's report, and return the body of `/ready` as its deployment sees it, with
        all `leaders` as `LeaderReport`s, its `adapters` as an `AdapterSet`, and with the figures of
        the status page while somebody looks at one: each look may reach another ingress."""
        now = time.monotonic()
        self._ingresses[report.ingress_id] = (now, report)
        if report.counts is not None:
            self.count(report.ingress_id, report.counts)
        body = self.snapshot(report.numerics_hash)
        reports = [known for _, known in self._ingresses.values()]
        is_watched = any(known.is_watched for known in reports)
        leaders = [
            self._prefixes.add_to(leader, report.known_prefixes)
            for by_id in self._reports.values()
            for _, replica in by_id.values()
            for leader in leaders_of(replica)
        ]
        if report.adapters_revision is not None:
            self._sweep_adapters(now)
            body["adapters"] = self._adapters.of(report.numerics_hash)
        return {**body, "leaders": leaders, "figures": self.figures() if is_watched else None}

    def load_adapter(self, call: LoadCall) -> AdapterSet | FieldError:
        """Have all of these numerics load an adapter; returns the error of what is refused, since
        Ray would wrap it."""
        try:
            return self._adapters.add(call)
        except FieldError as error:
            return error

    def unload_adapter(self, call: UnloadCall) -> AdapterSet | None:
        """Have one leave once its last request has ended; None if none is loaded by that name."""
        return self._adapters.mark(call)

    def _sweep_adapters(self, now: float) -> None:
        self._forget_lost(now)
        # A board made anew has not heard of all ingresses before.
        if now - self._made_at > LOST_AFTER_S:
            self._adapters.sweep(report for _, report in self._ingresses.values())

    def scale(self, pool: str, decided: dict[str, Any] | None) -> dict[str, Any]:
        """Take what a pool's policy has decided, and return what it decides by next."""
        now = time.monotonic()
        if decided is not None:
            self._count_decision(pool, decided)
            self._scaling[pool] = now, decided
        self._forget_lost(now)
        reports = [report for _, report in self._reports.get(pool, {}).values()]
        return scaling_body(pool, reports, self._engines(pool), self._ledger.totals)

    def metrics(self, ingress_id: str, counts: Counts) -> MetricsSnapshot:
        self.count(ingress_id, counts)
        self._forget_lost(time.monotonic())
        self._save()
        return self._now()

    def _now(self) -> MetricsSnapshot:
        engines: dict[str, SchedulerStats] = {}
        for pool in self._reports:
            engines |= self._engines(pool)
        wanted = {pool: int(decided["wanted"]) for pool, (_, decided) in self._scaling.items()}
        return MetricsSnapshot(self._ledger.totals, engines, wanted, self._replicas())

    def _replicas(self) -> dict[str, dict[str, int]]:
        """Return how many replicas each pool has in each state, zeros of the usual ones included:
        a series that ends looks as if it stayed."""
        return {
            pool: {
                **dict.fromkeys(USUAL_STATES, 0),
                **Counter(report.state for _, report in by_id.values()),
            }
            for pool, by_id in self._reports.items()
        }

    def _count_decision(self, pool: str, decided: dict[str, Any]) -> None:
        _, before = self._scaling.get(pool, (0.0, decided))
        if decided["wanted"] != before["wanted"]:
            key, source = ("scale_decisions_total", decided["why"]), f"scaling/{pool}"
            counts = self._ledger.last.get(source, {})
            self._add(source, pool, {**counts, key: counts.get(key, 0.0) + 1})

    def _engines(self, pool: str) -> dict[str, SchedulerStats]:
        return {
            _engine(pool, self._place(pool, replica_id), rank.place.dp_rank): rank.scheduler
            for replica_id, (_, report) in self._reports.get(pool, {}).items()
            for rank in report.group.ranks
            if rank.place.tp_rank == 0 and rank.state == "ready"
        }

    def _add(self, source: str, engine: str, counts: Counts) -> None:
        self._has_grown |= self._ledger.add(source, engine, counts)

    def _save(self) -> None:
        if self._has_grown and self._kept is not None:
            self._kept.save(self._ledger)
        self._has_grown, self._saved_at = False, time.monotonic()

    def _place(self, pool: str, replica_id: str) -> int:
        places = self._places.setdefault(pool, {})
        if replica_id not in places:
            places[replica_id] = next(i for i in count() if i not in places.values())
        return places[replica_id]

    def actors(self) -> dict[str, dict[str, list[Any]]]:
        return self._actors

    def snapshot(self, numerics_hash: str | None = None) -> dict[str, Any]:
        self._forget_lost(time.monotonic())
        reports = {pool: [r for _, r in by_id.values()] for pool, by_id in self._reports.items()}
        ingresses = [report for _, report in self._ingresses.values()]
        scaling = {pool: decided for pool, (_, decided) in self._scaling.items()}
        return ready_body(reports, ingresses, numerics_hash, scaling)

    def figures(self) -> dict[str, Any]:
        """Return what the status page shows; it may fall when the board is made anew."""
        engines = {
            _engine(pool, place, dp_rank): (pool, replica_id, dp_rank)
            for pool, places in self._places.items()
            for replica_id, place in places.items()
            for dp_rank in self._dp_ranks(pool, replica_id)
        }
        return {"at": time.monotonic(), **figures_body(self._ledger.totals, engines)}

    def _dp_ranks(self, pool: str, replica_id: str) -> list[int]:
        """Return the data-parallel ranks of a replica; those of one that is rebuilt are unknown."""
        _, report = self._reports.get(pool, {}).get(replica_id, (0.0, None))
        return [] if report is None else sorted({rank.place.dp_rank for rank in report.group.ranks})

    def _forget_lost(self, now: float) -> None:
        for ingress_id, (polled_at, _) in list(self._ingresses.items()):
            if now - polled_at > LOST_AFTER_S:
                del self._ingresses[ingress_id]
        for pool, (decided_at, _) in list(self._scaling.items()):
            if now - decided_at > LOST_AFTER_S:
                del self._scaling[pool]
        for pool, by_id in self._reports.items():
            for replica_id, (pushed_at, _) in list(by_id.items()):
                if now - pushed_at > LOST_AFTER_S:
                    del by_id[replica_id]
                    self._prefixes.forget(pool, replica_id)
                    for places in self._places.values():
                        places.pop(replica_id, None)
                    for actors in self._actors.values():
                        actors.pop(replica_id, None)


def board_name(app_name: str) -> str:
    return BOARD_PREFIX + app_name


def _engine(pool: str, place: int, dp_rank: int) -> str:
    return f"{pool}-{place}-{dp_rank}"


class IngressBoard:
    """An ingress's way to the board, made where there is none; BoardSilent if nobody answers."""

    def __init__(self, app_name: str, pools: list[str], described: Described) -> None:
        self._app_name = app_name
        try:
            ray.get_actor(board_name(app_name), namespace=NAMESPACE)
            self.is_first = False
        except ValueError:
            self.is_first = True
            """There was no board, and so no other ingress."""
        kept = KeptTotals(app_name), RayMetrics(described), KeptAdapters(app_name)
        self._arguments = pools, *kept
        self._lost_at = -math.inf
        self._told: Counts = {}
        """What the board was told last; empty if it was made anew."""
        self._board = self._found()

    @property
    def is_new(self) -> bool:
        """Whether it was made in place of one that was lost, and may not have heard of all yet."""
        return time.monotonic() - self._lost_at < LOST_AFTER_S

    async def poll(self, report: IngressReport) -> dict[str, Any]:
        def call() -> Any:
            is_known = report.counts == self._told
            return self._board.poll.remote(replace(report, counts=None) if is_known else report)

        body: dict[str, Any] = await self._answer(call)
        self._told = report.counts or {}
        return body

    async def metrics(self, ingress_id: str, counts: Counts) -> MetricsSnapshot:
        snapshot: MetricsSnapshot = await self._answer(
            lambda: self._board.metrics.remote(ingress_id, counts)
        )
        return snapshot

    async def load_adapter(self, call: LoadCall) -> AdapterSet:
        """Have all load an adapter; FieldError if its name is taken or there is no room for it."""
        found: AdapterSet | FieldError = await self._answer(
            lambda: self._board.load_adapter.remote(call), CHANGE_S
        )
        if isinstance(found, FieldError):
            raise found
        return found

    async def unload_adapter(self, call: UnloadCall) -> AdapterSet | None:
        """Have one leave; None if none is loaded by that name."""
        found: AdapterSet | None = await self._answer(
            lambda: self._board.unload_adapter.remote(call), CHANGE_S
        )
        return found

    async def free_resources(self) -> dict[str, float]:
        """Return the CPUs and GPUs of the cluster that are not reserved."""
        try:
            found = await asyncio.to_thread(ray.available_resources)
        except ray.exceptions.RayError as error:
            raise BoardSilent(type(error).__name__) from error
        return {k: v for k, v in found.items() if k in ("CPU", "GPU")}

    async def debug_ranks(self) -> dict[str, Any]:
        """Return the body of `/debug/ranks`; a rank that does not answer has an `error`."""
        pools = {}
        for pool, replicas in (await self._answer(lambda: self._board.actors.remote())).items():
            asked = [(name, await _debug_of(actors)) for name, actors in replicas.items()]
            pools[pool] = {"replicas": [{"id": name, "ranks": ranks} for name, ranks in asked]}
        return {"pools": pools}

    async def _answer(self, call: Callable[[], Any], timeout_s: float = ANSWER_S) -> Any:
        """Make a call, and again if the board died, or its ingress did: what it does, it may have
        done already."""
        try:
            asked = self._board
            try:
                async with asyncio.timeout(timeout_s):
                    return await call()
            except ray.exceptions.RayActorError as error:
                self._lost_at, self._told = time.monotonic(), {}
                # A board ends with the handle that made it: one that restarts keeps it, and so does
                # one that another call has made meanwhile.
                is_dead = not isinstance(error, ray.exceptions.ActorUnavailableError)
                if is_dead and self._board is asked:
                    self._board = self._found()
                async with asyncio.timeout(timeout_s):
                    while True:
                        with suppress(ray.exceptions.ActorUnavailableError):
                            return await call()
                        await asyncio.sleep(AGAIN_S)
        # A board that dies while another is made raises ValueError, not a RayError.
        except (TimeoutError, ValueError, ray.exceptions.RayError) as error:
            raise BoardSilent(type(error).__name__) from error

    def _found(self) -> Any:
        remote = ray.remote(**UNORDERED_ACTOR, max_restarts=-1)(StatusBoard)
        return remote.options(
            name=board_name(self._app_name), namespace=NAMESPACE, get_if_exists=True
        ).remote(*self._arguments)


class ReplicaBoard:
    """A pool replica's way to the board, which may not exist yet or have been restarted."""

    def __init__(self, app_name: str) -> None:
        self._app_name = app_name
        self._board: Any = None
        self._registered: list[Any] = []
        self._heard_at = 0.0

    async def push(self, report: ReplicaReport, actors: list[Any]) -> PushAnswer:
        """Push a report, or nothing while there is no board; its actors when they are new there.
        Return what the board does, or an empty answer. Waits for it, because only that shows
        whether the board died with its ingress."""
        try:
            if self._board is None:
                self._board = ray.get_actor(board_name(self._app_name), namespace=NAMESPACE)
                self._registered = []
            if actors != self._registered:
                await self._board.register.remote(report.pool, report.replica_id, actors)
                self._registered = actors
            found = await self._board.push.remote(report)
            now = time.monotonic()
            if now - self._heard_at > LOST_AFTER_S / 2:
                self._registered = []  # the board may have forgotten them meanwhile
            self._heard_at = now
            # That of a release before knows of no adapters.
            return found if isinstance(found, PushAnswer) else PushAnswer(found)
        except (ValueError, ray.exceptions.RayError):
            self._board = None
            return PushAnswer()

    def remove(self, pool: str, replica_id: str) -> None:
        if self._board is not None:
            self._board.remove.remote(pool, replica_id)


async def _debug_of(actors: list[Any]) -> list[dict[str, Any]]:
    async def ask(actor: Any) -> dict[str, Any]:
        try:
            call = actor.debug.options(concurrency_group="ctl").remote()
            async with asyncio.timeout(DEBUG_S):
                return dict(await call)
        except TimeoutError:
            return {"error": f"wanted an answer in {DEBUG_S:g} s, found none"}
        except ray.exceptions.RayError as error:
            return {"error": str(error).splitlines()[0]}

    return list(await asyncio.gather(*map(ask, actors)))
