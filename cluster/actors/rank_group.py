"""`RankGroup`: the ranks that step together, and their owner's view of them. It knows no Ray.

1. Leaders open where followers and other leaders will find them; the addresses go through here.
2. All load together; then all run. The end of `run()` is the end of a rank.
3. When a rank ends, the group does: it is the failure unit. It also ends if a rank gives no
   heartbeat or does not advance (`cluster/engine/watchdog.py`).

When a rank dies, its peers' collectives fail within milliseconds. The error names the rank whose
process died, if any.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cluster.actors.reports import GroupReport
from cluster.config import ParallelConfig
from cluster.engine.compile_switch import CannotCompile
from cluster.engine.divergence import StepDivergence
from cluster.engine.watchdog import SILENT_AFTER_S, Watchdog
from cluster.group.context import RankPlace
from cluster.group.rendezvous import Rendezvous, introduce
from cluster.wire.messages import LoraAdapter

STATS_TIMEOUT_S = 1.0
"""How long ranks may take to answer for a report of their figures."""
HEARTBEAT_PERIOD_S = 1.0
"""How often every rank is asked what it does."""
TICKS = 4
"""How often in that time answers are judged."""
BLAME_S = 0.5
"""How long after a rank's error another rank's death may still be found to have caused it."""
LOADING_TIMES = 3
"""While loading, a rank may be silent this many times longer: reading a large weight keeps Python
busy."""
FIRST_WORD_S = 120.0
"""How long a rank that loads may take to answer first: its process starts, and imports torch."""
STOP_S = 5.0
"""How long ranks may take to end when they are told to."""


class RankDied(RuntimeError):
    """A rank of the group ended; the message names it and the cause."""

    def __init__(self, message: str, verdict: str = "") -> None:
        super().__init__(message)
        self.verdict = verdict
        """Why every other start would end in the same way; empty if another might not."""


@dataclass(frozen=True)
class CallEnd:
    """How a call to a rank ended: with a value, or by an error of the rank or its death."""

    value: Any = None
    cause: str = ""
    error: BaseException | None = None
    is_death: bool = False

    @property
    def verdict(self) -> str:
        """Why no other rank could do better; usually empty."""
        return str(self.error) if isinstance(self.error, CannotCompile) else ""

    @property
    def accused(self) -> str:
        """The rank that this one's error says diverged; usually empty."""
        return self.error.parts[0] if isinstance(self.error, StepDivergence) else ""


class RankHandle(Protocol):
    """One rank, as its group's owner calls it. A call is made at once, and its end never raises.
    The values are those of `RankActor`. `run` ends with the rank. `stop` tells a leader to end the
    group between two steps; `kill` ends the process even inside a collective."""

    def meet(self) -> Awaitable[CallEnd]: ...
    def load(self, rendezvous: Rendezvous | None) -> Awaitable[CallEnd]: ...
    def run(self) -> Awaitable[CallEnd]: ...
    def heartbeat(self) -> Awaitable[CallEnd]: ...
    def stats(self, prefixes_since: int | None) -> Awaitable[CallEnd]: ...
    def set_adapters(self, adapters: Sequence[LoraAdapter]) -> Awaitable[CallEnd]: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...


Calls = dict[RankPlace, asyncio.Future[CallEnd]]


class RankGroup:
    """The ranks of one epoch. Invariant: `inboxes[d]` is that of data-parallel rank d's leader."""

    def __init__(
        self,
        parallel: ParallelConfig,
        handles: Sequence[RankHandle],
        *,
        watchdog_s: float,
        epoch: int = 0,
    ) -> None:
        self.epoch = epoch
        self.handles = list(handles)
        self.places = places_of(parallel, epoch)
        self.is_named_by_watchdog = False
        self.verdict = ""
        """Once the group has ended: as that of `RankDied`."""
        self.inboxes: list[str] = []
        self._parallel = parallel
        self._watchdog_s = watchdog_s
        self._is_stopping = False
        self.runs: list[asyncio.Future[CallEnd]] = []
        """The end of each rank, in the order of `places`."""

    async def start(self) -> None:
        """Load every rank and set it running; `RankDied` names one that ended or fell silent."""
        rendezvous = await self._meet()
        loads: Calls = {
            place: asyncio.ensure_future(handle.load(rendezvous[place.dp_rank]))
            for handle, place in zip(self.handles, self.places, strict=True)
        }
        since = asyncio.get_running_loop().time() + FIRST_WORD_S
        silent = self._listen(self._loading_silent_s, since=since, starting_s=FIRST_WORD_S)
        await self._succeed(loads, silent, "while loading")
        self.inboxes = [load.result().value for place, load in loads.items() if place.tp_rank == 0]
        self.runs = [asyncio.ensure_future(handle.run()) for handle in self.handles]

    async def _meet(self) -> list[Rendezvous | None]:
        """Return by data-parallel rank what its ranks must be told; None for one that is alone."""
        parallel = self._parallel
        if parallel.tensor_parallel_size * parallel.lockstep_size == 1:
            return [None] * len(self.places)
        meets: Calls = {
            place: asyncio.ensure_future(handle.meet())
            for handle, place in zip(self.handles, self.places, strict=True)
            if place.tp_rank == 0
        }

        async def late() -> str:
            bound_s = FIRST_WORD_S + self._loading_silent_s
            await asyncio.sleep(bound_s)
            first = next((place.name for place, meet in meets.items() if not meet.done()), "")
            return f"{first}: no word of it for {bound_s:g} s"

        await self._succeed(meets, late(), "before loading")
        offers = [meet.result().value for meet in meets.values()]
        # Without lockstep each data-parallel rank is a group of its own, with its own store.
        return [*introduce(offers)] if parallel.lockstep_size > 1 else offers

    async def _succeed(self, calls: Calls, watch: Coroutine[Any, Any, str], when: str) -> None:
        """Wait until all calls have ended well; else kill all, and `RankDied` names one."""
        found = await _first_to_end(calls, watch, is_end=lambda end: bool(end.cause))
        if found is None:
            return
        self.kill()
        name, end = found
        if end is None:
            raise RankDied(f"{name} {when}")
        raise RankDied(f"{name} ended {when}: {end.cause}", end.verdict) from end.error

    async def wait_for_end(self) -> str:
        """Wait until a rank ends and return which one is to blame and why. That is the first to
        end, unless another turns out to have died, or most ranks name another. Unless the group was
        told to stop, all other ranks are killed."""
        runs = dict(zip(self.places, self.runs, strict=True))
        found = await _first_to_end(runs, self.watch(), is_end=lambda end: True)
        if not self._is_stopping:
            self.kill()
        assert found is not None, "a run that has ended is an end"
        name, end = found
        if end is None:
            self.is_named_by_watchdog = True
            return name
        self.verdict = end.verdict
        return f"{name} ended: {end.cause or 'stopped'}"

    async def watch(self) -> str:
        now = asyncio.get_running_loop().time()
        return await self._listen(max(SILENT_AFTER_S, self._watchdog_s), since=now)

    @property
    def _loading_silent_s(self) -> float:
        return LOADING_TIMES * max(SILENT_AFTER_S, self._watchdog_s)

    async def _listen(self, silent_s: float, *, since: float, starting_s: float = 0.0) -> str:
        """Ask every rank for its heartbeat, a second after the last time or once it has answered,
        until the watchdog names one. An owner that was held up judges no rank before it has
        listened again. A rank that answers without a heartbeat may be silent for `starting_s`
        longer, since it may import torch."""
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
        asked: dict[int, asyncio.Future[CallEnd]] = {}
        now, tick_s = clock(), HEARTBEAT_PERIOD_S / TICKS
        ask_at = [now] * len(self.handles)
        while True:
            for i, handle in enumerate(self.handles):
                if i not in asked and now >= ask_at[i]:
                    asked[i] = asyncio.ensure_future(handle.heartbeat())
                    ask_at[i] = now + HEARTBEAT_PERIOD_S - tick_s / 2
            began = clock()
            await asyncio.sleep(tick_s)
            now = clock()
            for i in [i for i, beat in asked.items() if beat.done()]:
                answer, watchdog = asked.pop(i).result(), watchdogs[i // size]
                if answer.value is not None:
                    watchdog.on_heartbeat(i % size, answer.value, now)
                elif not answer.cause and starting_s:
                    watchdog.on_answer(i % size, now + starting_s)
            if now - began > 2 * HEARTBEAT_PERIOD_S or self._is_stopping:
                continue
            for watchdog in watchdogs:
                if (named := watchdog.on_tick(now)) is not None:
                    return named

    async def report(self, prefixes_since: Mapping[int, int] | None = None) -> GroupReport:
        """Return every rank's figures; a TimeoutError or `RankDied` if one does not answer.
        `prefixes_since`: by data-parallel rank which number its reader has of the changes in its
        leader's prefix cache."""
        known = prefixes_since or {}
        calls = asyncio.gather(
            *(
                handle.stats(None if place.tp_rank else known.get(place.dp_rank))
                for handle, place in zip(self.handles, self.places, strict=True)
            )
        )
        async with asyncio.timeout(STATS_TIMEOUT_S):
            ends = await calls
        for place, end in zip(self.places, ends, strict=True):
            if end.cause:
                raise RankDied(f"{place.name}: {end.cause}")
        answers = [end.value for end in ends]
        ranks = [stats for stats, _, _ in answers]
        loading = [progress for _, progress, _ in answers if progress is not None]
        if any(rank.compile_error for rank in ranks):
            # Ranks go over together, or none does.
            ranks, loading = [replace(rank, compiling=False) for rank in ranks], []
        return GroupReport(ranks, loading, [counts for _, _, counts in answers])

    async def set_adapters(self, adapters: Sequence[LoraAdapter]) -> None:
        """Tell every leader which adapters the application has now, beside those that it started
        with: it loads what is new and forgets what is not there any more. Reports say what it has.
        A TimeoutError or `RankDied` if one does not answer."""
        leaders = [place for place in self.places if place.tp_rank == 0]
        calls = asyncio.gather(
            *(self.handles[self.places.index(at)].set_adapters(adapters) for at in leaders)
        )
        async with asyncio.timeout(STATS_TIMEOUT_S):
            ends = await calls
        for place, end in zip(leaders, ends, strict=True):
            if end.cause:
                raise RankDied(f"{place.name}: {end.cause}")

    async def stop(self) -> None:
        """End the ranks between two steps, then kill what is left. Leaders tell followers."""
        self._is_stopping = True
        for handle, place in zip(self.handles, self.places, strict=True):
            if place.tp_rank == 0:
                handle.stop()
        if self.runs:
            await asyncio.wait(self.runs, timeout=STOP_S)
        self.kill()

    def kill(self) -> None:
        for handle in self.handles:
            handle.kill()


def places_of(parallel: ParallelConfig, epoch: int) -> list[RankPlace]:
    """Return the places of a group's ranks: those of one data-parallel rank in a row."""
    return [
        RankPlace(dp_rank, tp_rank, epoch)
        for dp_rank in range(parallel.data_parallel_size)
        for tp_rank in range(parallel.tensor_parallel_size)
    ]


async def _first_to_end(
    calls: Calls, watch: Coroutine[Any, Any, str], *, is_end: Callable[[CallEnd], bool]
) -> tuple[str, CallEnd | None] | None:
    """Wait for the first call that `is_end`, or for what `watch` names; return a rank's name and
    its end, what `watch` says and None, or None if no call is an end. After an error, a process
    that dies within `BLAME_S` is to blame instead. If ranks diverge, it is the one that most
    others accuse; the end is that of an accuser, which it names as well."""
    watched = asyncio.ensure_future(watch)
    pending: set[asyncio.Future[Any]] = {*calls.values(), watched}
    ended = list[RankPlace]()
    try:
        while not ended:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            ended = [at for at, call in calls.items() if call.done() and is_end(call.result())]
            if not ended and pending <= {watched}:
                return None
            if not ended and watched.done():
                return watched.result(), None
    finally:
        watched.cancel()
    named, first = ended[0], calls[ended[0]].result()
    if (left := pending - {watched}) and first.cause and not first.is_death:
        await asyncio.wait(left, timeout=BLAME_S)
    ends = {at: call.result() for at, call in calls.items() if call.done()}
    accused = {at: end.accused for at, end in ends.items() if end.accused}
    if dead := [at for at, end in ends.items() if end.is_death]:
        named = dead[0]
    elif accused:
        num_accusers = Counter(accused.values())
        accuser = max(accused, key=lambda at: num_accusers[accused[at]])
        name, end = accused[accuser], ends[accuser]
        if name != accuser.name:
            end = replace(end, cause=f"{accuser.name} found {end.cause}")
        return name, end
    return named.name, ends[named]


def place_in_group(reason: str) -> str:
    """Return the rank that the end of a group was blamed on, as `dp=0 tp=1`, or `unknown`."""
    found = re.match(r"rank (dp=\d+ tp=\d+) epoch=", reason)
    return found[1] if found else "unknown"
