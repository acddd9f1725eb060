"""One engine, or two: the real scheduler over a rank whose cache holds tokens, checked each step.

Around it a reader, a router and the weather, without processes or links: what the tests of the
engine room drive (`tests/cluster/engine`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import sim_model
from hypothesis import strategies as st
from sim_check import check_scheduler
from sim_model import PagedModel, SimDrafter

from cluster.config import Role, SchedulerConfig
from cluster.engine.adapters import AdapterSlots
from cluster.engine.blocks import SCRATCH, BlockManager
from cluster.engine.kv_handover import KVHandover
from cluster.engine.request_limits import RequestLimits
from cluster.engine.scheduler import Scheduler
from cluster.engine.sequence import SampledTokens, Sequence
from cluster.kv.handoff import HandoffMetadata, KVHolder
from cluster.wire.group_messages import ReadEnded
from cluster.wire.messages import (
    PENDING,
    EngineOutput,
    GenerateRequest,
    KVHandoff,
    KVSource,
    RankProcess,
    Sampling,
    StepPlan,
    Submit,
)

VOCAB = 11
STOP = 0
MAX_MODEL_LEN = 40


def continuation(request: GenerateRequest) -> list[int]:
    return sim_model.continuation(request, VOCAB, MAX_MODEL_LEN)


def drafter(most: int) -> SimDrafter:
    return SimDrafter(most, VOCAB, MAX_MODEL_LEN)


def make_request(
    request_id: str,
    prompt: list[int],
    *,
    max_tokens: int = 8,
    output: list[int] | None = None,
    seed: int = 0,
    stop: tuple[int, ...] = (),
    cache_salt: bytes = b"",
) -> GenerateRequest:
    sampling = Sampling(0.0, 0, 1.0, 0.0, seed, max_tokens, stop, -1, -1, None, None)
    return GenerateRequest(request_id, list(prompt), list(output or []), sampling, cache_salt)


@dataclass(frozen=True)
class Shape:
    num_blocks: int = 16
    block_size: int = 4
    max_num_seqs: int = 4
    budget: int = 16
    caching: bool = True
    window: int | None = None
    """Above 1: the fake model reads its context from the token before."""


class FakeEngine:
    """A scheduler and its rank, checked at every step.

    If overlapped, a step runs when it is waited for: after the next one is planned, and after
    whatever came in between.
    """

    def __init__(
        self,
        shape: Shape,
        role: Role = Role.MIXED,
        is_overlapped: bool = False,
        *,
        holder: KVHolder | None = None,
        metadata: HandoffMetadata | None = None,
        reader: FakeReader | None = None,
        grammars: Any = None,
        drafter: Any = None,
        max_step_s: float | None = None,
        tokens_within: Callable[[float], int] | None = None,
    ) -> None:
        self.shape = shape
        self.is_overlapped = is_overlapped
        self.in_flight: tuple[StepPlan, Callable[[], list[int]]] | None = None
        self.role = role
        self.model = PagedModel(
            shape.num_blocks, shape.block_size, shape.max_num_seqs, VOCAB, shape.window
        )
        self.blocks = BlockManager(shape.num_blocks, shape.block_size, shape.caching, shape.window)
        self.scheduler = Scheduler(
            SchedulerConfig(shape.max_num_seqs, shape.budget, max_step_s),
            RequestLimits(self.blocks, MAX_MODEL_LEN, role, adapters=AdapterSlots(num_static=1)),
            epoch=1,
            handover=KVHandover(self.blocks, metadata, holder=holder, reader=reader)
            if metadata is not None
            else None,
            grammars=grammars,
            drafter=drafter,
            tokens_within=tokens_within,
        )
        self.num_steps = 0
        self.prompt_tokens_computed = 0
        self.submitted: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.plans: list[StepPlan] = []

    def submit(self, request: GenerateRequest, handoff: KVHandoff | None = None) -> None:
        self.submitted[request.request_id] += 1
        self.scheduler.add(Submit(request, handoff))

    def step(self) -> list[EngineOutput]:
        """Run one step, checked; if overlapped, return the outputs of the one before."""
        outputs = self._step()
        check_scheduler(self.scheduler)
        self._check_outputs(outputs)
        num_computed = self.scheduler.stats().prompt_tokens_computed
        if self.in_flight is None:
            assert num_computed == self.prompt_tokens_computed
        return outputs

    def _step(self) -> list[EngineOutput]:
        num_preemptions = self.scheduler.stats().num_preemptions
        plan = self.scheduler.schedule_ahead() if self.is_overlapped else self.scheduler.schedule()
        if plan is None:
            return self._retire()
        self.num_steps += 1
        if self.role is not Role.DECODE and plan.admitted:
            assert self.scheduler.stats().num_preemptions == num_preemptions
        self.plans.append(plan)
        check_scheduler(self.scheduler)
        if not plan.rows and self.num_steps % 2 == 0:
            return self._retire()  # nobody has work: the plan reaches no rank
        launched = plan, self.model.launch(plan)
        self._check_plan(plan)
        if not self.is_overlapped:
            self.in_flight = launched
            return self._retire()
        outputs = self._retire()
        self.in_flight = launched
        return outputs

    def _retire(self) -> list[EngineOutput]:
        if self.in_flight is None:
            return self.scheduler.take_outputs()
        (plan, run), self.in_flight = self.in_flight, None
        return self.scheduler.update(plan, SampledTokens(run(), [], [], []))

    def run(self, max_steps: int = 200) -> dict[str, list[EngineOutput]]:
        outputs: dict[str, list[EngineOutput]] = {}
        while self.scheduler.has_unfinished:
            assert self.num_steps < max_steps, f"unfinished after {max_steps} steps"
            for output in self.step():
                outputs.setdefault(output.request_id, []).append(output)
        return outputs

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.step == self.num_steps
        assert len(set(plan.rows)) == len(plan.rows) <= self.shape.max_num_seqs
        assert {admission.row for admission in plan.admitted} <= set(plan.rows)
        assert {new.row for new in plan.new_blocks} <= set(plan.rows)
        assert min(plan.num_new, default=1) >= 1, "logits come from a computed token"
        assert sum(plan.num_new) == len(plan.token_ids) <= self.shape.budget
        singles = [num_new == 1 for num_new in plan.num_new]
        assert singles == sorted(singles, reverse=True)
        assert sum(singles) == plan.num_decodes
        num_decoding = plan.num_decodes + plan.num_drafting
        assert all(index >= 0 for index in plan.output_index[plan.num_decodes : num_decoding])
        by_row = {seq.row: seq for seq in self.scheduler.running}
        assert len(by_row) == len(self.scheduler.running)
        start = 0
        for i, row in enumerate(plan.rows):
            end = start + plan.num_new[i]
            self._check_row(by_row[row], plan, i, plan.token_ids[start:end])
            start = end

    def _check_row(self, seq: Sequence, plan: StepPlan, i: int, tokens: list[int]) -> None:
        computed, end = plan.num_computed[i], plan.num_computed[i] + plan.num_new[i]
        assert end == seq.num_computed_tokens
        # Of what this step and the one before it draw, the last token is this step's.
        num_known = seq.num_tokens + seq.num_pending_tokens - (plan.output_index[i] >= 0)
        is_drafting = plan.num_decodes <= i < plan.num_decodes + plan.num_drafting
        wanted = seq.token_ids[computed:end] or [PENDING]
        found = tokens[:1] if is_drafting else tokens
        assert found == wanted, "the plan's tokens are not the sequence's"
        table = self.model.tables[plan.rows[i]][: len(seq.block_table)]
        assert len(table) == len(seq.block_table) == -(-end // self.shape.block_size)
        # Ranks are not told of blocks that a window has passed: they read none of them.
        pairs = zip(table, seq.block_table, strict=True)
        assert all(theirs == ours for theirs, ours in pairs if ours), "a rank's row went astray"
        is_complete = is_drafting or end == num_known
        assert plan.output_index[i] == (num_known - seq.num_prompt_tokens if is_complete else -1)
        assert end < seq.max_total_len, "a token is computed that no other will follow"
        self.prompt_tokens_computed += max(0, min(end, seq.num_prompt_tokens) - computed)

    def _check_outputs(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            assert (output.handoff is not None) == (output.finish_reason == "handoff")
            if output.finish_reason:
                self.finished[output.request_id] += 1
                assert self.finished[output.request_id] <= self.submitted[output.request_id]


@dataclass
class Weather:
    """How badly the world treats KV transfer; it clears up at tick `until`."""

    rng: random.Random
    until: int = 0
    p_fail: float = 0.0
    p_no_renew: float = 0.0
    max_delay: int = 0

    def happens(self, probability: float, now: float) -> bool:
        return now < self.until and self.rng.random() < probability

    def delay(self) -> int:
        return self.rng.randint(0, self.max_delay)


@dataclass
class _Read:
    handoff: KVHandoff
    copies: list[tuple[int, int]] = field(default_factory=list)
    wait: int = 0
    num_read: int = 0
    is_started: bool = False
    is_cancelled: bool = False


class FakeReader:
    """A KVReader that copies a block per tick at most, out of one rank's cache into another's.

    A cancelled read goes on to write garbage until it reports: whoever reuses its blocks earlier
    will read that garbage.
    """

    def __init__(self, holder: KVHolder, weather: Weather) -> None:
        self.holder = holder
        self.weather = weather
        self.reads: dict[str, _Read] = {}
        self.results: list[ReadEnded] = []
        self.num_cancelled = 0

    def connect(self, source: FakeEngine, target: FakeEngine) -> None:
        self.source, self.target = source, target

    def expect(self, request_id: str, handoff: KVHandoff) -> None:
        assert request_id not in self.reads
        self.reads[request_id] = _Read(handoff)

    def start(
        self, request_id: str, handoff: KVHandoff, source_indices: list[int], dst_blocks: list[int]
    ) -> None:
        read = self.reads[request_id]
        assert read.handoff is handoff and not read.is_started
        read.is_started = True
        read.copies = list(zip(source_indices, dst_blocks, strict=True))
        read.wait = self.weather.delay()

    def cancel(self, request_id: str) -> None:
        read = self.reads.get(request_id)
        self.num_cancelled += 1
        if read is None:
            assert any(result.request_id == request_id for result in self.results)
        elif read.is_started:
            read.is_cancelled = True
            read.wait += self.weather.delay()
        else:
            self.holder.release(read.handoff.handoff_id, 0)
            del self.reads[request_id]

    def take_finished(self) -> list[ReadEnded]:
        results, self.results = self.results, []
        return results

    def tick(self, now: float) -> None:
        for request_id, read in list(self.reads.items()):
            if not self.weather.happens(self.weather.p_no_renew, now):
                self.holder.renew(read.handoff.handoff_id)
            if not read.is_started:
                continue
            if read.wait > 0:
                read.wait -= 1
                self._write_garbage(read)
            elif read.copies and not read.is_cancelled:
                self._copy(read)
            else:
                self._release(request_id, read, now)

    def _copy(self, read: _Read) -> None:
        index, dst = read.copies.pop(0)
        block, handoff = read.handoff.block_ids[index], read.handoff
        assert block != SCRATCH, "a block outside of the window was read"
        if self.holder.is_alive(handoff.handoff_id):
            found = self.source.blocks.generations[block]
            assert found == handoff.generations[index], "a held block was handed out again"
            assert self.holder.covers(handoff.handoff_id, [block], [found])
        self.target.model.blocks[dst] = list(self.source.model.blocks[block])
        read.num_read += 1

    def _write_garbage(self, read: _Read) -> None:
        for _, dst in read.copies:
            self.target.model.blocks[dst] = [(-1, -1)] * self.target.shape.block_size

    def _release(self, request_id: str, read: _Read, now: float) -> None:
        failed = read.is_cancelled or self.weather.happens(self.weather.p_fail, now)
        alive = self.holder.release(read.handoff.handoff_id, 0 if failed else read.num_read)
        del self.reads[request_id]
        ok = alive and not failed
        self.results.append(ReadEnded(request_id, "" if ok else "handoff: lost"))


@dataclass
class Arrival:
    """A request of a trace: when it comes, and when its client goes away."""

    request: GenerateRequest
    at: int
    abort_at: int | None


class Pair:
    """A prefill and a decode engine with a holder and a reader between them, on one clock."""

    def __init__(
        self,
        prefill: Shape,
        decode: Shape,
        weather: Weather,
        lease_s: float,
        is_overlapped: bool = False,
        drafter: Any = None,
    ) -> None:
        self.now = 0.0
        self.weather = weather
        self.holder = KVHolder(lease_s, lambda: self.now)
        self.reader = FakeReader(self.holder, weather)
        block_bytes = 64
        source = KVSource(0, "boot", 1, -1, "tcp://p", RankProcess(1, ""))
        metadata = HandoffMetadata([source], block_bytes, "kv", lease_s)
        self.prefill = FakeEngine(
            prefill, Role.PREFILL, is_overlapped, holder=self.holder, metadata=metadata
        )
        self.decode = FakeEngine(
            decode,
            Role.DECODE,
            is_overlapped,
            reader=self.reader,
            metadata=metadata,
            drafter=drafter,
        )
        self.reader.connect(self.prefill, self.decode)

    @property
    def has_unfinished(self) -> bool:
        return self.prefill.scheduler.has_unfinished or self.decode.scheduler.has_unfinished

    def run(self, max_ticks: int = 300) -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        for _ in range(max_ticks):
            if not self.has_unfinished:
                return outputs
            outputs += self.tick()
        raise AssertionError(f"unfinished after {max_ticks} ticks")

    def tick(self) -> list[EngineOutput]:
        outputs = self.prefill.step() + self.decode.step()
        self.reader.tick(self.now)
        self.now += 1
        self.holder.tick()
        return outputs


class Router:
    """Takes each request through a pair of engines, and again where its KV was lost."""

    def __init__(self, pair: Pair, arrivals: list[Arrival]) -> None:
        self.pair = pair
        self.arrivals = arrivals
        self.requests = {a.request.request_id: a.request for a in arrivals}
        self.texts = {a.request.request_id: list(a.request.output_token_ids) for a in arrivals}
        self.ends: dict[str, str] = {}
        self.num_lost = 0
        self._due: list[tuple[float, Callable[[], None]]] = []
        for arrival in arrivals:
            request = arrival.request
            self._later(arrival.at, partial(pair.prefill.submit, request))
            if arrival.abort_at is not None:
                for engine in (pair.prefill, pair.decode):
                    abort = partial(engine.scheduler.abort, [request.request_id])
                    self._later(arrival.abort_at, abort)

    def run(self, max_ticks: int) -> None:
        while self._due or self.pair.has_unfinished:
            assert self.pair.now < max_ticks, f"unfinished after {max_ticks} ticks"
            now, due = self.pair.now, self._due
            self._due = [item for item in due if item[0] > now]
            for at, action in due:
                if at <= now:
                    action()
            for output in self.pair.tick():
                self._on_output(output)

    def _later(self, at: float, action: Callable[[], None]) -> None:
        self._due.append((at + self.pair.weather.delay(), action))

    def _on_output(self, output: EngineOutput) -> None:
        request_id, reason = output.request_id, output.finish_reason
        self.texts[request_id] += output.token_ids
        resumed = msgspec.structs.replace(
            self.requests[request_id], output_token_ids=list(self.texts[request_id])
        )
        if reason == "handoff":
            resume = partial(self.pair.decode.submit, resumed, output.handoff)
            self._later(self.pair.now, resume)
        elif reason == "kv_lost":
            self.num_lost += 1
            self._later(self.pair.now, partial(self.pair.prefill.submit, resumed))
        elif reason:
            assert request_id not in self.ends
            self.ends[request_id] = reason


def check_end(request: GenerateRequest, text: list[int], reason: str) -> None:
    """Compare a finished text with the oracle's."""
    whole = continuation(request)
    if reason == "abort":
        assert text == whole[: len(text)]
        return
    assert text == whole
    is_stop = whole[-1] in request.sampling.stop_token_ids
    assert reason == ("stop" if is_stop else "length")


# --- random traces ------------------------------------------------------------------------------

STREAMS = [[hash((family, i)) % VOCAB for i in range(MAX_MODEL_LEN)] for family in range(3)]
"""Prompts begin with one of these, so that traces share prefixes of every length."""


@st.composite
def arrivals(draw_: st.DrawFn) -> list[Arrival]:
    trace = []
    for i in range(draw_(st.integers(1, 8))):
        stream = STREAMS[draw_(st.integers(0, 2))]
        prompt = stream[: draw_(st.integers(0, 20))]
        prompt = prompt + draw_(st.lists(st.integers(0, VOCAB - 1), max_size=4))
        request = make_request(
            f"r{i}",
            prompt or [1],
            max_tokens=draw_(st.sampled_from([1, 2, 5, 12, 30])),
            stop=draw_(st.sampled_from([(), (STOP,)])),
            seed=draw_(st.integers(0, 3)),
        )
        num_delivered = draw_(st.sampled_from([0, 0, 0, 1, 3]))
        whole = continuation(request)
        if num_delivered < len(whole):
            request.output_token_ids.extend(whole[:num_delivered])
        abort_at = draw_(st.none() | st.integers(0, 40))
        trace.append(Arrival(request, draw_(st.integers(0, 15)), abort_at))
    return trace


@st.composite
def shapes(draw_: st.DrawFn, trace: list[Arrival], window: int | None = None) -> Shape:
    block_size = draw_(st.integers(1, 4))
    longest = max(longest_len(arrival.request) for arrival in trace)
    max_num_seqs = draw_(st.integers(1, 4))
    needed = -(-longest // block_size)
    if window is not None:
        # The blocks that `window` tokens can lie in: longer sequences go through a smaller pool.
        needed = min(needed, 1 + -(-(window - 1) // block_size))
    return Shape(
        num_blocks=needed + draw_(st.sampled_from([0, 0, 1, 2, 5, 20])),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        budget=max_num_seqs + draw_(st.integers(0, 12)),
        caching=draw_(st.sampled_from([True, True, True, False])),
        window=window,
    )


WINDOWS = [None, None, 2, 3, 4, 5, 8, 13, 39]


def longest_len(request: GenerateRequest) -> int:
    return min(MAX_MODEL_LEN, len(request.prompt_token_ids) + request.sampling.max_tokens)
