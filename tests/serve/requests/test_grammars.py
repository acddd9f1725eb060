"""Grammars of strangers: what ends its process is refused, what was ended from outside is not.

Whose grammar is compiled next, and what is remembered of one that was not compiled.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile.errors import FieldError
from serve.admission import Overloaded
from serve.clients import UNKNOWN, Client
from serve.config import bundled_model
from serve.requests import grammar_process, grammar_queue
from serve.requests.grammar_process import MAX_CPU_S, GrammarProcess, GrammarProcessLost, Tried
from serve.requests.grammar_queue import (
    MAX_GRAMMARS_WAITING,
    MAX_TIMES_LOST,
    QUICK_CPU_S,
    GrammarQueue,
    Job,
    Turns,
)
from serve.requests.structured import StructuredOutputsParams

pytestmark = pytest.mark.feature("R09")

ONE_IS_FINE = StructuredOutputsParams(regex="[a-c]{3}x")


@pytest.fixture(scope="module")
def process() -> Iterator[GrammarProcess]:
    """One that may wait for its processor as long as a busy machine makes it wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_process, "MAX_WAIT_S", 600.0)
        yield GrammarProcess(Path(bundled_model()))


def text_of(process: GrammarProcess, wanted: StructuredOutputsParams) -> str:
    """Return a grammar as engines take it, or raise why not."""
    tried = process.compile(wanted, max_cpu_s=15.0)  # what takes 2 s on a busy machine can take 4
    assert not tried.is_over_time
    if isinstance(tried.found, FieldError):
        raise tried.found
    return tried.found


def patterns(count: int) -> dict[str, Any]:
    """Return a schema of texts that match many patterns at once, each of many states."""
    each = [{"type": "string", "pattern": f"[ab]*a[ab]{{{n}}}"} for n in range(10, 10 + count)]
    return {"allOf": each}


CHAIN = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(3000))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"json": patterns(60)}, "structured_outputs.json: .*MiB"),
        ({"grammar": f'start: r0\n{CHAIN}\nr3000: "a"'}, "structured_outputs.grammar: .*too deep"),
    ],
)
def test_what_would_end_an_ingress_ends_its_process_and_is_refused_by_name(
    process: GrammarProcess, wanted: dict[str, Any], message: str
) -> None:
    with pytest.raises(FieldError, match=message):
        text_of(process, StructuredOutputsParams(**wanted))
    assert text_of(process, ONE_IS_FINE)


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "(a{1000}){1000}"},
        {"grammar": "start: " + " ".join(["x?"] * 9000) + '\nx: "a"'},
        {"json": {"type": "object", "properties": {f"k{i}": {} for i in range(2500)}}},
        {"grammar": 'start: a{1000}\na: b{1000}\nb: "x"'},
    ],
)  # fmt: skip
def test_what_spends_its_budget_in_its_first_steps_is_refused(
    process: GrammarProcess, wanted: dict[str, Any]
) -> None:
    [kind] = wanted
    with pytest.raises(FieldError, match=f"structured_outputs.{kind}: "):
        text_of(process, StructuredOutputsParams(**wanted))


def test_what_is_large_and_ordinary_is_taken(process: GrammarProcess) -> None:
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(30):
        nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
    schemas: list[dict[str, Any]] = [
        nested,
        {"enum": [f"value {i}" for i in range(3000)]},
        {"properties": {f"key_{i}": {"type": ["string", "integer"]} for i in range(200)}},
        {"anyOf": [{"properties": {"t": {"const": i}}, "required": ["t"]} for i in range(300)]},
        {"type": "array", "items": {"type": "number"}, "minItems": 10**6},
        {"type": "string", "minLength": 10**6},
    ]
    for schema in schemas:
        assert text_of(process, StructuredOutputsParams(json=schema))
    assert text_of(process, StructuredOutputsParams(choice=[f"choice {i}" for i in range(3000)]))


def children_of(process: GrammarProcess) -> list[psutil.Process]:
    return psutil.Process(process.start().pid).children()


def begin(process: GrammarProcess, wanted: StructuredOutputsParams) -> Future[Tried]:
    """Have a costly grammar compiled; return when a child does so."""
    process.start()
    future = ThreadPoolExecutor(1).submit(process.compile, wanted)
    while not children_of(process):
        assert not future.done()
    return future


COSTLY = StructuredOutputsParams(json=patterns(30))


def test_too_much_time_is_of_a_processor_and_ends_no_process(process: GrammarProcess) -> None:
    pid = process.start().pid
    for budget_s in (0.1, 0.3):
        tried = process.compile(COSTLY, budget_s)
        assert tried.is_over_time and not tried.text and tried.error is None
        assert tried.cpu_s == pytest.approx(budget_s, abs=0.1)
    assert process.compile(ONE_IS_FINE, 0.1).text
    assert process.start().pid == pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGPROF])
def test_a_child_that_is_ended_from_outside_says_nothing_of_its_grammar(
    process: GrammarProcess, number: signal.Signals
) -> None:
    future = begin(process, COSTLY)
    children_of(process)[0].send_signal(number)
    with pytest.raises(GrammarProcessLost, match=number.name):
        future.result()
    assert text_of(process, ONE_IS_FINE)


def test_a_process_that_is_killed_says_nothing_of_its_grammar(process: GrammarProcess) -> None:
    future = begin(process, COSTLY)
    [child] = children_of(process)
    process.start().kill()
    with pytest.raises(GrammarProcessLost, match="SIGKILL"):
        future.result()
    assert text_of(process, ONE_IS_FINE)
    child.wait(60)  # its time is limited though nobody waits for it


def test_a_process_that_is_not_run_says_nothing_of_its_grammar(
    process: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that gets no processor is as one that is stopped: all its time is by the clock."""
    monkeypatch.setattr(grammar_process, "MAX_WAIT_S", 0.5)
    stopped = process.start()
    stopped.send_signal(signal.SIGSTOP)
    with pytest.raises(GrammarProcessLost):
        process.compile(ONE_IS_FINE)
    assert stopped.wait(60) == -signal.SIGKILL
    monkeypatch.undo()
    assert text_of(process, ONE_IS_FINE)


def test_the_process_ends_with_its_caller() -> None:
    process = GrammarProcess(Path(bundled_model()))
    running = process.start()
    del process
    assert running.wait(60) == 0


def test_a_model_without_a_tokenizer_is_refused_by_name(tmp_path: Any) -> None:
    with pytest.raises(FieldError, match=r"structured_outputs.regex: .*tokenizer.json"):
        text_of(GrammarProcess(tmp_path), ONE_IS_FINE)


# --- turns ---

WANTED, OTHER = StructuredOutputsParams(regex="a"), StructuredOutputsParams(regex="b")
HONEST = Client("honest")
NOBODY: Any = None
"""In place of those who wait for a job."""


class Compiling:
    """Turns on processes that take what each job is said to take, by a clock of their own."""

    def __init__(self, num_processes: int) -> None:
        self.turns = Turns(num_processes)
        self.now = 0.0
        self.costs: dict[Job, float] = {}
        self.ended_at: dict[Job, float] = {}
        self.running: list[tuple[float, Job]] = []
        self.dropped: list[Job] = []
        self._num = 0

    def ask(self, client: Client, cost_s: float) -> Job:
        self._num += 1
        job = Job(WANTED, client, self._num, NOBODY)
        self.costs[job] = cost_s
        self._add(job)
        return job

    def _add(self, job: Job) -> None:
        dropped = self.turns.add(job)
        if dropped is not None:
            self.dropped.append(dropped)
        self._begin()

    def _begin(self) -> None:
        while (job := self.turns.take(self.now)) is not None:
            self.running.append((self.now + min(self.costs[job], job.budget_s), job))

    def end_one(self) -> Job | None:
        """Go on to the next end of a try; return the job if it is done."""
        ends_at, job = min(self.running, key=lambda each: each[0])
        self.running.remove((ends_at, job))
        self.now = ends_at
        budget_s = job.budget_s
        self.turns.end(job, min(self.costs[job], budget_s), self.now)
        if self.costs[job] > budget_s and not job.is_long:
            job.is_long = True
            self._add(job)
            return None
        self.ended_at[job] = self.now
        self._begin()
        return job


def ask_each(compiling: Compiling, clients: Iterable[Client], cost_s: float) -> list[Job]:
    return [compiling.ask(client, cost_s) for client in clients]


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("is_one_client", [False, True])
def test_a_new_schema_waits_for_one_costly_grammar_not_for_all(
    num: int, is_one_client: bool
) -> None:
    """Eight others have asked for costly grammars for a minute, and ask anew once one is done."""
    compiling = Compiling(num)
    others = [UNKNOWN] * 8 if is_one_client else [Client(str(i)) for i in range(8)]
    ask_each(compiling, others, cost_s=10.0)
    waits = []
    for turn in range(60):
        while compiling.now < turn + 1:
            if (job := compiling.end_one()) is not None:
                compiling.ask(job.client, 10.0)
        asked_at = compiling.now
        honest = compiling.ask(UNKNOWN if is_one_client else HONEST, 0.005)
        while honest not in compiling.ended_at:
            if (job := compiling.end_one()) is not None and job is not honest:
                compiling.ask(job.client, 10.0)
        waits.append(compiling.ended_at[honest] - asked_at)
    quick_s = 8 * QUICK_CPU_S * is_one_client + QUICK_CPU_S + 0.1
    assert max(waits) < quick_s + (MAX_CPU_S if num == 1 else 0.0)


def test_clients_with_costly_grammars_share_the_time() -> None:
    compiling = Compiling(1)
    many, one = Client("many"), Client("one")
    ask_each(compiling, [many] * 20, cost_s=10.0)
    ask_each(compiling, [one] * 5, cost_s=10.0)
    ended = []
    while len(ended) < 10:
        if (job := compiling.end_one()) is not None:
            ended.append(job.client)
    assert 4 <= ended.count(one) <= 5


def test_a_costly_grammar_is_compiled_though_quick_ones_of_others_keep_coming() -> None:
    compiling = Compiling(1)
    others = [Client(str(i)) for i in range(3)]
    ask_each(compiling, others, cost_s=0.09)
    costly = compiling.ask(HONEST, 1.5)
    while costly not in compiling.ended_at and compiling.now < 60:
        if (job := compiling.end_one()) is not None:
            compiling.ask(job.client, 0.09)
    assert compiling.ended_at[costly] < 30


@settings(deadline=None)
@given(
    st.integers(1, 2),
    st.lists(st.tuples(st.sampled_from("ABC"), st.sampled_from([0.01, 0.09, 1.0, 9.0]))),
)
def test_each_is_tried_at_most_twice_and_one_process_is_left_to_quick_ones(
    num: int, asked: list[tuple[str, float]]
) -> None:
    compiling = Compiling(num)
    jobs = [compiling.ask(Client(name), cost_s) for name, cost_s in asked]
    while compiling.running:
        assert len(compiling.running) <= num
        assert sum(job.is_long for _, job in compiling.running) <= max(1, num - 1)
        compiling.end_one()
    assert set(compiling.ended_at) == set(jobs) and not compiling.dropped
    tries_s = sum(
        cost_s if cost_s <= QUICK_CPU_S else QUICK_CPU_S + min(cost_s, MAX_CPU_S)
        for _, cost_s in asked
    )
    assert compiling.now <= tries_s + 1e-6


def test_where_too_many_wait_the_client_of_whom_most_wait_gives_one_up() -> None:
    compiling = Compiling(1)
    greedy = Client("greedy")
    jobs = ask_each(compiling, [greedy] * (MAX_GRAMMARS_WAITING + 1), cost_s=1.0)
    assert not compiling.dropped
    assert compiling.ask(greedy, 1.0) in compiling.dropped
    honest = compiling.ask(HONEST, 0.01)
    assert compiling.dropped[1:] == [jobs[-1]]
    while honest not in compiling.ended_at:
        compiling.end_one()
    assert len(compiling.ended_at) <= 2


def test_who_joins_a_grammar_of_a_client_that_waits_does_not_wait_for_its_sake() -> None:
    compiling = Compiling(1)
    greedy = Client("greedy")
    for _ in range(2):
        compiling.ask(greedy, 2.0)
        while compiling.running:
            compiling.end_one()
    running, behind = (compiling.ask(Client(name), 1.0) for name in ("running", "behind"))
    job = compiling.ask(greedy, 0.1)
    compiling.turns.join(job, HONEST, compiling.now)
    ended = []
    while compiling.running:
        ended.append(compiling.end_one())
    done = [each for each in ended if each is not None]
    assert job.client == HONEST and done.index(job) == 0 and {running, behind} < set(done)


# --- with tries of a script in place of the process -----------------------------------------------


class ScriptedProcess:
    """Does what it is told with each try; notes the processor time that each was given."""

    def __init__(self, do: Callable[[float], Tried], may_start: threading.Event | None = None):
        self._do = do
        self._may_start = may_start
        self.is_starting = threading.Event()
        self.budgets: list[float] = []

    def start(self) -> None:
        self.is_starting.set()
        if self._may_start is not None:
            assert self._may_start.wait(60)

    def compile(self, wanted: StructuredOutputsParams, max_cpu_s: float) -> Tried:
        self.budgets.append(max_cpu_s)
        return self._do(max_cpu_s)


def queue_of(
    do: Callable[[float], Tried], clock: Callable[[], float] = lambda: 0.0
) -> tuple[GrammarQueue, ScriptedProcess]:
    process: Any = ScriptedProcess(do)
    return GrammarQueue(Path(), 1, clock, lambda _: process), process


class Busy:
    """Tries that last until the test says so."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def __call__(self, _: float) -> Tried:
        assert self.may_end.wait(60)
        return Tried("text")


async def ask(queue: GrammarQueue, wanted: StructuredOutputsParams = WANTED) -> str:
    return await queue.text(wanted, HONEST)


def lost(_: float) -> Tried:
    raise GrammarProcessLost("it was killed")


async def test_a_lost_process_is_no_verdict_and_is_tried_again_ever_later() -> None:
    times = [0.0]
    does = [lost]
    queue, process = queue_of(lambda budget_s: does[0](budget_s), lambda: times[0])
    for _ in range(MAX_TIMES_LOST):
        with pytest.raises(GrammarProcessLost, match="it was killed"):
            await ask(queue)
    waits = []
    for _ in range(6):
        with pytest.raises(GrammarProcessLost, match="several times") as refused:
            await ask(queue)
        waits.append(refused.value.retry_after_s)
        times[0] += refused.value.retry_after_s
        with pytest.raises(GrammarProcessLost, match="it was killed"):
            await ask(queue)
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert len(process.budgets) == MAX_TIMES_LOST + 6
    times[0] += 60.0
    does[0] = lambda _: Tried("text")
    assert await ask(queue) == await ask(queue) == "text"
    assert len(process.budgets) == MAX_TIMES_LOST + 7


async def test_what_is_not_done_soon_is_tried_with_all_time_and_then_refused_for_good() -> None:
    queue, process = queue_of(lambda budget_s: Tried(is_over_time=True, cpu_s=budget_s))
    for _ in range(2):
        with pytest.raises(FieldError, match="longer than 2 s to compile"):
            await ask(queue)
    assert process.budgets == [QUICK_CPU_S, MAX_CPU_S]


async def test_what_fails_unforeseen_is_no_verdict() -> None:
    queue, process = queue_of(lambda _: Tried("text")[0])  # type: ignore[index]
    for _ in range(2):
        with pytest.raises(TypeError):
            await ask(queue)
    assert len(process.budgets) == 2


async def test_several_who_ask_for_one_grammar_wait_for_one_try() -> None:
    queue, process = queue_of(lambda _: Tried("text"))
    texts = await asyncio.gather(*(queue.text(WANTED, Client(str(i))) for i in range(5)))
    assert (texts, len(process.budgets)) == (["text"] * 5, 1)


async def test_what_nobody_waits_for_any_more_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_queue, "MAX_GRAMMAR_WAIT_S", 0.05)
    busy = Busy()
    queue, process = queue_of(busy)
    for wanted in (OTHER, WANTED):
        with pytest.raises(Overloaded, match="a grammar that is compiled in"):
            await ask(queue, wanted)
    busy.may_end.set()
    monkeypatch.setattr(grammar_queue, "MAX_GRAMMAR_WAIT_S", 60)
    assert await ask(queue, StructuredOutputsParams(regex="c")) == "text"
    assert len(process.budgets) == 2, "of the first and of the last"


async def test_no_grammar_waits_for_the_second_process_to_start() -> None:
    busy, may_start = Busy(), threading.Event()
    second = ScriptedProcess(lambda _: Tried("by the second"), may_start)
    processes: list[Any] = [ScriptedProcess(busy), second]
    queue = GrammarQueue(Path(), 2, new_process=lambda _: processes.pop(0))
    queue.start()
    wanted = [StructuredOutputsParams(regex=f"[a-c]{{{i}}}") for i in (1, 2, 3)]
    texts = asyncio.gather(*(ask(queue, each) for each in wanted))
    assert await asyncio.to_thread(second.is_starting.wait, 60)
    busy.may_end.set()
    assert await texts == ["text"] * 3
    busy.may_end.clear()
    held = asyncio.create_task(ask(queue))
    await asyncio.sleep(0.01)
    may_start.set()
    async with asyncio.timeout(60):
        assert await ask(queue, OTHER) == "by the second"
    busy.may_end.set()
    assert await held == "text"
