"""`RankGroup`: the ranks that step together, and their owner's view of them.

1. One actor per (dp_rank, tp_rank) is created in its bundle of the placement group.
2. Leaders open where followers and other leaders will find them; the addresses go through here.
3. All load together; then all run. The reference of `run()` is a rank's sentinel.
4. When a sentinel returns, the rank is gone, and with it the group: the group is the failure unit.
   It also ends if a rank gives no heartbeat or does not advance (`cluster/engine/watchdog.py`).

When a rank dies, its peers' collectives fail within milliseconds. The error names the rank whose
process died, if any.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.actors.artifact_board import create_artifact_board
from cluster.actors.load_progress import LoadProgress
from cluster.actors.placement import bundles_by_node, is_on_one_node
from cluster.actors.rank_actor import RemoteRank
from cluster.config import EngineConfig
from cluster.engine.compile_handover import CannotCompile
from cluster.engine.divergence import StepDivergence
from cluster.engine.watchdog import SILENT_AFTER_S, Watchdog
from cluster.group.context import RankPlace
from cluster.group.rendezvous import Rendezvous, introduce
from cluster.observe.counts import Counts
from cluster.rank.status import RankStats
from cluster.wire.credentials import Credentials

log = logging.getLogger("lockstep.group")

STATS_TIMEOUT_S = 1.0
"""How long ranks may take to answer for a report of their figures."""
HEARTBEAT_PERIOD_S = 1.0
"""How often every rank is asked what it does."""
BLAME_S = 0.5
"""How long after a rank's error another rank's death may still be found to have caused it."""
LOADING_TIMES = 3
"""While loading, a rank may be silent this many times longer: reading a large weight keeps Python
busy."""
FIRST_WORD_S = 120.0
"""How long a rank that loads may take to answer first: its process starts, and imports torch."""


class RankDied(RuntimeError):
    """A rank of the group ended; the message names it and the cause."""

    def __init__(self, message: str, verdict: str = "") -> None:
        super().__init__(message)
        self.verdict = verdict
        """Why every other start would end in the same way; empty if another might not."""


@dataclass(frozen=True)
class GroupReport:
    """All ranks' figures, and the progress of those that are not ready or compile."""

    ranks: list[RankStats]
    loading: list[LoadProgress]
    counts: list[Counts] = field(default_factory=list)
    """What each rank has counted since it was started, in the order of `ranks`."""

    def aged(self, seconds: float) -> GroupReport:
        """Return it with the times of what loads as they are so long after."""
        return replace(self, loading=[progress.aged(seconds) for progress in self.loading])


class RankGroup:
    """The actors of one group under one epoch.

    Invariant: `inboxes[d]` is the endpoint of data-parallel rank d's leader.
    """

    def __init__(
        self,
        config: EngineConfig,
        placement_group: PlacementGroup,
        *,
        first_bundle: int,
        engine_id: str,
        credentials: Credentials,
        epoch: int = 0,
    ) -> None:
        """Create the actors.

        Args:
            first_bundle: the bundle of rank 0; those before it belong to the owner.
        """
        self.epoch = epoch
        self._parallel = config.parallel
        self._watchdog_s = config.watchdog_s
        self._is_stopping = False
        self.is_named_by_watchdog = False
        """Whether the watchdog ended the group: a rank did not answer, or not advance."""
        self.verdict = ""
        """Once the group has ended: as that of `RankDied`."""
        self.inboxes: list[str] = []
        self.places = [
            RankPlace(dp_rank, tp_rank, epoch)
            for dp_rank in range(config.parallel.data_parallel_size)
            for tp_rank in range(config.parallel.tensor_parallel_size)
        ]
        self._board = create_artifact_board() if len(self.places) > 1 else None
        bundles = bundles_by_node(placement_group, first_bundle, len(self.places))
        is_near = is_on_one_node(placement_group, bundles)
        self._actors: list[Any] = [
            RemoteRank.options(
                num_cpus=placement_group.bundle_specs[bundle].get("CPU", 0),
                num_gpus=placement_group.bundle_specs[bundle].get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group, placement_group_bundle_index=bundle
                ),
            ).remote(
                config,
                place,
                f"{engine_id}/{place.dp_rank}",
                credentials,
                self._board,
                is_near,
            )
            for bundle, place in zip(bundles, self.places, strict=True)
        ]
        self._sentinels: list[Any] = []

    async def start(self) -> None:
        """Load every rank and set it running.

        Raises:
            RankDied: a rank ended while loading, or fell silent; names it.
        """
        rendezvous = await self._meet()
        loads = [
            actor.load.options(concurrency_group="step").remote(rendezvous[place.dp_rank])
            for actor, place in zip(self._actors, self.places, strict=True)
        ]
        tasks = [asyncio.ensure_future(_end_of(load)) for load in loads]
        blamed = _first_to_blame(tasks, is_end=lambda end: bool(end.cause))
        first, silent = await _first_of(blamed, self._watch_loading())
        if first is not None or silent is not None:
            self.kill()
        if silent is not None:
            raise RankDied(f"{silent} while loading")
        if first is not None:
            name, end = self.places[first].name, tasks[first].result()
            reason = f"{name} ended while loading: {end.cause}"
            raise RankDied(reason, end.verdict) from end.error
        self.inboxes = [
            task.result().value
            for task, place in zip(tasks, self.places, strict=True)
            if place.tp_rank == 0
        ]
        self._sentinels = [
            actor.run.options(concurrency_group="step").remote() for actor in self._actors
        ]

    async def _meet(self) -> list[Rendezvous | None]:
        """Return by data-parallel rank what its ranks must be told; None for one that is alone."""
        parallel = self._parallel
        if parallel.tensor_parallel_size * parallel.lockstep_size == 1:
            return [None] * len(self.places)
        meets = {
            place: actor.meet.options(concurrency_group="step").remote()
            for place, actor in zip(self.places, self._actors, strict=True)
            if place.tp_rank == 0
        }
        leaders, tasks = list(meets), [asyncio.ensure_future(_end_of(m)) for m in meets.values()]
        blamed = _first_to_blame(tasks, is_end=lambda end: bool(end.cause))
        bound_s = FIRST_WORD_S + self._loading_silent_s
        try:
            first = await asyncio.wait_for(blamed, bound_s)
        except TimeoutError:
            self.kill()
            [late, *_] = [leaders[i].name for i, task in enumerate(tasks) if not task.done()]
            raise RankDied(f"{late}: no word of it for {bound_s:g} s before loading") from None
        if first is not None:
            self.kill()
            end = tasks[first].result()
            name = leaders[first].name
            raise RankDied(f"{name} ended before loading: {end.cause}") from end.error
        offers = [task.result().value for task in tasks]
        # Without lockstep each data-parallel rank is a group of its own, with its own store.
        return [*introduce(offers)] if parallel.lockstep_size > 1 else offers

    async def wait_for_end(self) -> str:
        """Wait until the first rank ends and return which it was and why.

        Unless the group was told to stop, all other ranks are killed: they are of no use any more.
        """
        tasks = [asyncio.ensure_future(_end_of(ref)) for ref in self._sentinels]
        blamed = _first_to_blame(tasks, is_end=lambda end: True)
        first, named = await _first_of(blamed, self._watch())
        for task in tasks:
            task.cancel()
        if not self._is_stopping:
            self.kill()
        if named is not None:
            self.is_named_by_watchdog = True
            return named
        assert first is not None
        end = tasks[first].result()
        self.verdict = end.verdict
        return f"{self.places[first].name} ended: {end.cause or 'stopped'}"

    async def _watch(self) -> str:
        """Return which rank keeps the group from stepping, and why."""
        now = asyncio.get_running_loop().time()
        return await self._listen(max(SILENT_AFTER_S, self._watchdog_s), since=now)

    async def _watch_loading(self) -> str:
        """Return which rank fell silent while it loaded."""
        since = asyncio.get_running_loop().time() + FIRST_WORD_S
        return await self._listen(self._loading_silent_s, since=since, starting_s=FIRST_WORD_S)

    @property
    def _loading_silent_s(self) -> float:
        return LOADING_TIMES * max(SILENT_AFTER_S, self._watchdog_s)

    async def _listen(self, silent_s: float, *, since: float, starting_s: float = 0.0) -> str:
        """Ask every rank for its heartbeat once a second, until the watchdog names one.

        An owner that was itself held up judges no rank before it has listened again.

        Args:
            starting_s: how much longer a rank may be silent that has no heartbeat yet. It lives as
                long as it answers that: on a slow disk it may import torch for minutes.
        """
        clock = asyncio.get_running_loop().time
        # Without lockstep the engines of a group wait for their own followers only.
        size = self._parallel.tensor_parallel_size * self._parallel.lockstep_size
        watchdogs = [
            Watchdog(
                [place.name for place in places],
                watchdog_s=self._watchdog_s,
                now=since,
                # Long: a process whose memory was swapped out answers late, and is not dead.
                silent_s=silent_s,
                leaders=[i - place.tp_rank for i, place in enumerate(places)],
            )
            for places in (self.places[i : i + size] for i in range(0, len(self.places), size))
        ]
        asked: dict[int, asyncio.Task[_End]] = {}
        while True:
            for i, actor in enumerate(self._actors):
                if i not in asked:
                    beat = actor.heartbeat.options(concurrency_group="ctl").remote()
                    asked[i] = asyncio.ensure_future(_end_of(beat))
            began = clock()
            await asyncio.sleep(HEARTBEAT_PERIOD_S)
            now = clock()
            for i in [i for i, task in asked.items() if task.done()]:
                answer, watchdog = asked.pop(i).result(), watchdogs[i // size]
                if answer.value is not None:
                    watchdog.on_heartbeat(i % size, answer.value, now)
                elif answer.error is None and starting_s:
                    watchdog.on_answer(i % size, now + starting_s)
            if now - began > 2 * HEARTBEAT_PERIOD_S or self._is_stopping:
                continue
            for watchdog in watchdogs:
                if (named := watchdog.on_tick(now)) is not None:
                    return named

    async def report(self) -> GroupReport:
        """Return every rank's figures.

        Raises:
            TimeoutError: a rank did not answer for `STATS_TIMEOUT_S`.
            ray.exceptions.RayError: a rank is gone.
        """
        refs = [actor.stats.options(concurrency_group="ctl").remote() for actor in self._actors]
        answers = await asyncio.wait_for(asyncio.gather(*refs), STATS_TIMEOUT_S)
        ranks = [stats for stats, _, _ in answers]
        loading = [progress for _, progress, _ in answers if progress is not None]
        if any(rank.compile_error for rank in ranks):
            # Ranks go over together, or none does.
            ranks, loading = [replace(rank, compiling=False) for rank in ranks], []
        return GroupReport(ranks, loading, [counts for _, _, counts in answers])

    @property
    def actors(self) -> list[Any]:
        """Handles of the ranks, in the order of `places`."""
        return list(self._actors)

    async def stop(self) -> None:
        """End every rank at its next step's border and wait for it, then kill what is left.

        Only leaders are told: they agree on the step, and tell their followers behind it.
        """
        self._is_stopping = True
        for actor, place in zip(self._actors, self.places, strict=True):
            if place.tp_rank == 0:
                actor.stop.options(concurrency_group="ctl").remote()
        if self._sentinels:
            tasks = [asyncio.ensure_future(_end_of(ref)) for ref in self._sentinels]
            await asyncio.wait(tasks, timeout=5)
        self.kill()

    def kill(self) -> None:
        """Kill every rank at once, even one inside a collective."""
        for actor in self._actors:
            ray.kill(actor)


@dataclass(frozen=True)
class _End:
    """How a call to a rank ended: with a value, or by an error of the rank or its death."""

    value: Any
    error: BaseException | None

    @property
    def cause(self) -> str:
        """What went wrong, in a line; empty if nothing did."""
        return _cause(self.error) if self.error else ""

    @property
    def is_death(self) -> bool:
        return isinstance(self.error, ray.exceptions.RayActorError)

    @property
    def verdict(self) -> str:
        """Why no other rank could do better; usually empty."""
        cause = getattr(self.error, "cause", None)
        return str(cause) if isinstance(cause, CannotCompile) else ""

    @property
    def accused(self) -> str:
        """The rank that this one's error says diverged; usually empty."""
        cause = getattr(self.error, "cause", None)
        return cause.parts[0] if isinstance(cause, StepDivergence) else ""


async def _end_of(ref: Any) -> _End:
    try:
        return _End(await ref, None)
    except ray.exceptions.RayError as error:
        return _End(None, error)


async def _first_of(
    blamed: Coroutine[Any, Any, int | None], watched: Coroutine[Any, Any, str]
) -> tuple[int | None, str | None]:
    """Wait for the first of them; return its result, and None for the other."""
    first, second = asyncio.ensure_future(blamed), asyncio.ensure_future(watched)
    try:
        await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        is_first = first.done()
    finally:
        first.cancel()
        second.cancel()
    return (first.result(), None) if is_first else (None, second.result())


async def _first_to_blame(
    tasks: list[asyncio.Task[_End]], is_end: Callable[[_End], bool]
) -> int | None:
    """Wait for the first task that `is_end`; return its index, or None if there is none.

    After an error, a process that dies within `BLAME_S` is to blame instead. Leaders that diverge
    all raise; one is returned whose error accuses the rank that most of them accuse.
    """
    pending, ended = set(tasks), list[int]()
    while pending and not ended:
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        ended = [i for i, task in enumerate(tasks) if task.done() and is_end(task.result())]
    if not ended:
        return None
    first = tasks[ended[0]].result()
    if pending and first.error is not None and not first.is_death:
        await asyncio.wait(pending, timeout=BLAME_S)
    ends = {i: task.result() for i, task in enumerate(tasks) if task.done()}
    for i, end in ends.items():
        if end.is_death:
            return i
    accused = {i: name for i, end in ends.items() if (name := end.accused)}
    if accused:
        num_accusers = Counter(accused.values())
        return max(accused, key=lambda i: num_accusers[accused[i]])
    return ended[0]


def _cause(error: BaseException) -> str:
    """Return the last line that says something: Ray puts the whole remote traceback before it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def place_in_group(reason: str) -> str:
    """Return the rank that the end of a group was blamed on, as `dp=0 tp=1`, or `unknown`."""
    found = re.match(r"rank (dp=\d+ tp=\d+) epoch=", reason)
    return found[1] if found else "unknown"
