"""Whose grammar is compiled next.

Compiling is done by two processes, or by one where there is one core. What a grammar costs shows
only when it is compiled, so:

1. Each is tried for `QUICK_CPU_S` first. One that is not done by then waits again, as a long one,
   behind all quick ones of its client.
2. A client's turn comes by the processor time that its grammars took lately, the least first.
3. Of two processes one takes no long grammars.
4. If too many wait, the client of whom most wait gives one up.

`Turns` decides that; it has no thread, process or clock. `GrammarQueue` runs it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.admission import Overloaded
from serve.clients import Client
from serve.requests.grammar_process import (
    GRAMMAR_RETRY_S,
    MAX_CPU_S,
    GrammarProcess,
    GrammarProcessLost,
    Tried,
)
from serve.requests.structured import StructuredOutputsParams, Verdicts, key_of, refused

log = logging.getLogger("lockstep.grammars")

QUICK_CPU_S = 0.1
"""Of a processor, for which a grammar is tried at first. Ordinary ones take some milliseconds."""
MAX_GRAMMARS_WAITING = 256
"""Grammars that wait to be compiled; beyond that the client of whom most wait gets 429."""
MAX_GRAMMAR_WAIT_S = 30.0
"""How long a request waits for its grammar; then it gets 429."""
HALF_LIFE_S = 30.0
"""In which half of what a client's grammars took is forgotten."""
MAX_REMEMBERED = 4096
"""Clients whose processor time is remembered, and grammars whose process was lost."""
SECOND_CORES = 2
"""Cores with which a second process compiles. Both are nicer than all others, and the second one
is started when it is needed: it holds the vocabulary too."""
MAX_TIMES_LOST = 3
"""How often in a row a grammar is tried at once though its process was ended from outside."""
MAX_LOST_WAIT_S = 60.0
"""How long such a grammar waits after that for its next try: twice as long each time, at most
this."""


@dataclass(eq=False)
class Job:
    wanted: StructuredOutputsParams
    client: Client
    number: int
    """In the order of arrival."""
    text: asyncio.Future[str]
    num_waiting: int = 0
    """Requests that wait for it."""
    is_long: bool = False
    """It was tried for `QUICK_CPU_S`."""

    @property
    def budget_s(self) -> float:
        return MAX_CPU_S if self.is_long else QUICK_CPU_S


class Turns:
    """The grammars that wait, and what each client's took. Times are given to it."""

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        self._waiting: dict[Job, None] = {}
        self._running: dict[Job, float] = {}
        """With the processor time that its client was charged in advance."""
        self._spent: OrderedDict[Client, tuple[float, float]] = OrderedDict()
        """Seconds of a processor by client, and when that was so; the last charged last."""

    @property
    def are_waiting(self) -> bool:
        return bool(self._waiting)

    def spent_s(self, client: Client, now: float) -> float:
        """Return what a client's grammars took, less what is forgotten."""
        spent_s, at = self._spent.get(client, (0.0, now))
        return spent_s * float(0.5 ** ((now - at) / HALF_LIFE_S))

    def add(self, job: Job) -> Job | None:
        """Let a job wait. Return the one that gives way to it, if one must, which may be itself."""
        dropped = None
        if len(self._waiting) >= MAX_GRAMMARS_WAITING:
            counts = Counter(each.client for each in self._waiting)
            client, most = counts.most_common(1)[0]
            if most <= counts[job.client] + 1:
                return job
            dropped = next(each for each in reversed(self._waiting) if each.client == client)
            del self._waiting[dropped]
        self._waiting[job] = None
        return dropped

    def join(self, job: Job, client: Client, now: float) -> None:
        """A client asks for what another one has asked for: it waits no longer for that."""
        if job in self._waiting and self.spent_s(client, now) < self.spent_s(job.client, now):
            job.client = client

    def remove(self, job: Job) -> bool:
        """Nobody wants it any more. Return whether it waited, and waits no longer."""
        if job not in self._waiting:
            return False
        del self._waiting[job]
        return True

    def take(self, now: float) -> Job | None:
        """Return the next to be compiled, or None if no process is free for any."""
        if len(self._running) >= self.num_processes:
            return None
        max_long = max(1, self.num_processes - 1)
        may_be_long = sum(job.is_long for job in self._running) < max_long
        spent_s = {job.client: self.spent_s(job.client, now) for job in self._waiting}
        job = min(
            (job for job in self._waiting if may_be_long or not job.is_long),
            key=lambda job: (spent_s[job.client], job.is_long, job.number),
            default=None,
        )
        if job is not None:
            del self._waiting[job]
            self._running[job] = job.budget_s
            self._charge(job.client, job.budget_s, now)
        return job

    def end(self, job: Job, cpu_s: float, now: float) -> None:
        self._charge(job.client, cpu_s - self._running.pop(job), now)

    def _charge(self, client: Client, cpu_s: float, now: float) -> None:
        self._spent[client] = (max(0.0, self.spent_s(client, now) + cpu_s), now)
        self._spent.move_to_end(client)
        if len(self._spent) > MAX_REMEMBERED:
            self._spent.popitem(last=False)


class GrammarQueue:
    """Grammars of an ingress's requests: what was found of them, and those being compiled. Belongs
    to one event loop, but for `start` and `close`, which block."""

    def __init__(
        self,
        path: Path,
        num_processes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        new_process: Callable[[Path], GrammarProcess] = GrammarProcess,
    ) -> None:
        """Start nothing yet; the tokenizer.json lies in the directory `path`."""
        has_second = len(os.sched_getaffinity(0)) >= SECOND_CORES
        self._idle = [new_process(path)]
        """Processes that compile nothing now."""
        self._cold = [new_process(path) for _ in range((num_processes or 1 + has_second) - 1)]
        """Those that were not needed yet: no grammar waits for one to start."""
        self._clock = clock
        self._verdicts = Verdicts()
        self._turns = Turns(num_processes=1)
        self._jobs: dict[bytes, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_asked = 0
        self._lost: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        """How often in a row a grammar's process was lost, and when it may be tried again."""

    def start(self) -> None:
        """Start a process and wait until it is ready, so that the first request need not. One that
        does not start is started again for the first grammar."""
        try:
            self._idle[0].start()
        except GrammarProcessLost as error:
            log.warning("%s", error)

    def close(self) -> None:
        """End the processes that compile nothing at this moment."""
        for process in (*self._idle, *self._cold):
            process.close()

    async def text(self, wanted: StructuredOutputsParams, client: Client) -> str:
        """Return a grammar as engines take it, or raise FieldError, which says what is wrong.
        Overloaded if too many others wait, or it took `MAX_GRAMMAR_WAIT_S`; GrammarProcessLost if
        its process was ended from outside."""
        known = self._verdicts.known(wanted)
        if known is not None:
            return known
        job = self._job_of(wanted, client)
        job.num_waiting += 1
        try:
            async with asyncio.timeout(MAX_GRAMMAR_WAIT_S):
                return await asyncio.shield(job.text)
        except TimeoutError as error:
            limit = f"wanted a grammar that is compiled in {MAX_GRAMMAR_WAIT_S:g} s"
            message = f"{limit}, found others before it"
            raise Overloaded(GRAMMAR_RETRY_S, message) from error
        finally:
            job.num_waiting -= 1
            if not job.num_waiting and self._turns.remove(job):
                del self._jobs[key_of(wanted)]

    def _job_of(self, wanted: StructuredOutputsParams, client: Client) -> Job:
        """Return the job of a grammar, which others may wait for already."""
        key, now = key_of(wanted), self._clock()
        _, try_at = self._lost.get(key, (0, now))
        if now < try_at:
            raise GrammarProcessLost("its process ended several times", try_at - now)
        job = self._jobs.get(key)
        if job is not None:
            self._turns.join(job, client, now)
            return job
        self._num_asked += 1
        text = asyncio.get_running_loop().create_future()
        job = self._jobs[key] = Job(wanted, client, self._num_asked, text)
        self._add(job)
        self._go_on()
        return job

    def _add(self, job: Job) -> None:
        dropped = self._turns.add(job)
        if dropped is not None:
            del self._jobs[key_of(dropped.wanted)]
            limit = f"wanted at most {MAX_GRAMMARS_WAITING} grammars being compiled, found more"
            _answer(dropped, Overloaded(GRAMMAR_RETRY_S, limit))

    def _go_on(self) -> None:
        while (job := self._turns.take(self._clock())) is not None:
            self._spawn(self._try(job, self._idle.pop()))
        if self._turns.are_waiting and self._cold:
            self._spawn(self._start_another(self._cold.pop()))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_another(self, process: GrammarProcess) -> None:
        try:
            await asyncio.to_thread(process.start)
        except GrammarProcessLost as error:
            log.warning("%s; one process goes on", error)
            return
        self._idle.append(process)
        self._turns.num_processes += 1
        self._go_on()

    async def _try(self, job: Job, process: GrammarProcess) -> None:
        tried: Tried | Exception
        try:
            tried = await asyncio.to_thread(process.compile, job.wanted, job.budget_s)
        except Exception as error:
            tried = error
        self._idle.append(process)
        self._end(job, tried)
        self._go_on()

    def _end(self, job: Job, tried: Tried | Exception) -> None:
        now, key = self._clock(), key_of(job.wanted)
        self._turns.end(job, tried.cpu_s if isinstance(tried, Tried) else 0.0, now)
        is_over_time = isinstance(tried, Tried) and tried.is_over_time
        if is_over_time and not job.is_long and job.num_waiting:
            job.is_long = True
            self._add(job)
            return
        del self._jobs[key]
        if isinstance(tried, GrammarProcessLost):
            self._note_lost(key, now)
        else:
            self._lost.pop(key, None)
        of = f"a {job.wanted.kind} of {job.wanted.num_chars} characters"
        if isinstance(tried, Exception):
            log.warning("%s: %s", of, tried)
            _answer(job, tried)
            return
        found = tried.found
        if is_over_time:
            if not job.is_long:
                return  # it was tried for a moment alone, and nobody waits for more
            log.warning("%s takes longer than %g s to compile", of, MAX_CPU_S)
            found = refused(job.wanted, f"it takes longer than {MAX_CPU_S:g} s to compile")
        self._verdicts.keep(job.wanted, found)
        _answer(job, found)

    def _note_lost(self, key: bytes, now: float) -> None:
        num_times = self._lost.pop(key, (0, 0.0))[0] + 1
        num_late = max(0, num_times - MAX_TIMES_LOST)
        wait_s = min(GRAMMAR_RETRY_S * 2**num_late, MAX_LOST_WAIT_S)
        self._lost[key] = (num_times, now + (wait_s if num_times >= MAX_TIMES_LOST else 0.0))
        if len(self._lost) > MAX_REMEMBERED:
            self._lost.popitem(last=False)


def _answer(job: Job, found: str | Exception) -> None:
    if isinstance(found, str):
        job.text.set_result(found)
    else:
        job.text.set_exception(found)
        job.text.exception()  # asyncio complains of one that nobody looks at
