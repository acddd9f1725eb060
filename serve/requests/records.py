"""What is noted of a request while it is answered: numbers and names, nothing of a prompt or an
answer, and no key. The ingress's metrics, its log lines and traces are made of it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.observe.counts import Counts, Histogram
from cluster.observe.metrics import HISTOGRAM, METRICS
from serve.clients import UNKNOWN, Client
from serve.pools.chooser import Why

ABORTED, FAILED = "abort", "error"
"""How a sequence ends whose client left or whose time was up, and one that failed."""
MAX_ATTEMPTS = 16
"""Attempts of a sequence that are noted one by one: the first ones, and the last."""


class EngineChoice(NamedTuple):
    """An engine that a sequence was sent to."""

    engine: str
    """As `pool/replica/dp_rank`."""
    why: Why
    num_cached_tokens: int
    """That were known to be cached there."""

    def __str__(self) -> str:
        """Return why, in a word."""
        return f"{self.why}:{self.num_cached_tokens}" if self.why is Why.PREFIX else self.why


@dataclass(slots=True)
class Attempt:
    """One run of a sequence through the pools, until it ends or is lost."""

    number: int
    """From 0."""
    submitted_at: float
    first_at: float = 0.0
    """When the first output of its first engine came."""
    handed_over_at: float = 0.0
    """When its prefill engine had computed the prompt; 0 without one."""
    queued_s: float = 0.0
    """From its arrival at the first engine until it got a row."""
    resumed_at: float = 0.0
    """When the first output of its decode engine came."""
    kv_wait_s: float = 0.0
    """From its arrival at the decode engine until its KV was there and it got a row."""
    lost_at: float = 0.0
    lost: str = ""
    """How it was lost, if it was."""
    engine_choices: list[EngineChoice] = field(default_factory=list)
    """In their order."""
    num_moves: int = 0
    """How often it left an engine that drained."""

    @property
    def engines(self) -> list[str]:
        return [choice.engine for choice in self.engine_choices]


@dataclass(slots=True)
class SequenceRecord:
    """One sequence's way through the pools. Times are those of the monotonic clock; 0 is never."""

    is_first_choice: bool = True
    """Of its prompt, whose tokens count once."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    max_tokens: int = 0
    num_tokens: int = 0
    """That the client got, or will."""
    first_at: float = 0.0
    last_at: float = 0.0
    ended_at: float = 0.0
    num_attempts: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    finish_reason: str = ""

    @property
    def submitted_at(self) -> float:
        return self.attempts[0].submitted_at if self.attempts else 0.0

    @property
    def queued_s(self) -> float:
        return next((each.queued_s for each in self.attempts if each.queued_s), 0.0)

    @property
    def kv_wait_s(self) -> float:
        return next((each.kv_wait_s for each in self.attempts if each.kv_wait_s), 0.0)

    @property
    def prefill_s(self) -> float:
        """From its row until the client's first token, if there was one."""
        return max(0.0, self.first_at - self.submitted_at - self.queued_s)

    @property
    def decode_s(self) -> float:
        """From the client's first token to its last one."""
        return self.last_at - self.first_at

    @property
    def engine_choices(self) -> list[EngineChoice]:
        return [choice for each in self.attempts for choice in each.engine_choices]

    @property
    def num_moves(self) -> int:
        return sum(each.num_moves for each in self.attempts)

    def on_attempt(self) -> None:
        if len(self.attempts) == MAX_ATTEMPTS:
            self.attempts.pop()
        self.attempts.append(Attempt(self.num_attempts, time.monotonic()))
        self.num_attempts += 1

    def on_engine_output(self, queued_us: int) -> None:
        """An engine's first output has come, and says how long it waited there."""
        attempt, now = self.attempts[-1], time.monotonic()
        if attempt.handed_over_at:
            attempt.kv_wait_s, attempt.resumed_at = queued_us / 1e6, now
        else:
            attempt.queued_s, attempt.first_at = queued_us / 1e6, now

    def on_handover(self) -> None:
        self.attempts[-1].handed_over_at = time.monotonic()

    def on_choice(self, engine: str, why: Why, num_cached_tokens: int) -> None:
        self.attempts[-1].engine_choices.append(EngineChoice(engine, why, num_cached_tokens))

    def on_move(self) -> None:
        self.attempts[-1].num_moves += 1

    def on_lost(self, how: str) -> None:
        self.attempts[-1].lost_at, self.attempts[-1].lost = time.monotonic(), how


@dataclass(slots=True)
class RequestRecord:
    request_id: str
    """The client's X-Request-Id, or a new one."""
    path: str
    """The route; of a call by handle `handle`."""
    arrived_at: float = field(default_factory=time.monotonic)
    status: int = 0
    """Of the answer; 0 if none began."""
    is_generating: bool = False
    """Whether it asks for what a line is logged of."""
    id: str = ""
    """Of the answer, as in `chatcmpl-...`; empty until it is parsed."""
    model: str = ""
    is_stream: bool = False
    n: int = 0
    """Choices of each prompt; 0 until it is parsed."""
    max_tokens: int | None = None
    """Of each choice, if it is given."""
    temperature: float = 0.0
    top_p: float = 0.0
    traceparent: str = ""
    tracestate: str = ""
    """The client's trace, as in its headers; empty without one, and where nothing is traced."""
    client: Client = UNKNOWN
    """Who asks."""
    sequences: list[SequenceRecord] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        """A prompt counts once for all `n`."""
        return sum(each.num_prompt_tokens for each in self.sequences if each.is_first_choice)

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for each in self.sequences)


_ELSEWHERE = ("iteration_tokens_total", "time_per_output_token_seconds")
"""Histograms that engines count, or that are another's older name."""


class IngressCounts:
    """What one ingress has counted. Belongs to its event loop."""

    def __init__(self, max_model_len: int) -> None:
        self._histograms = {
            metric.name: Histogram(metric.name, metric.bounds_for(max_model_len))
            for metric in METRICS
            if metric.kind == HISTOGRAM and metric.name not in _ELSEWHERE
        }
        self._counters: Counter[tuple[str, ...]] = Counter()
        self._first_token = self._histograms["time_to_first_token_seconds"]
        self._token = self._histograms["inter_token_latency_seconds"]

    def on_response(self, path: str, status: int) -> None:
        self._counters["http_responses_total", path, str(status)] += 1

    def on_tokens(self, request: RequestRecord, sequence: SequenceRecord, num_tokens: int) -> None:
        """Count what a sequence got since the last call; `num_tokens` are its tokens in all."""
        num_new = num_tokens - sequence.num_tokens
        if num_new <= 0:
            return
        now = time.monotonic()
        if sequence.first_at:
            self._token.observe((now - sequence.last_at) / num_new, num_new)
        else:
            sequence.first_at = now
            self._first_token.observe(now - request.arrived_at)
            if num_new > 1:
                self._token.observe(0.0, num_new - 1)
            if sequence.is_first_choice:
                self._counters["prompt_tokens_total",] += sequence.num_prompt_tokens
                self._counters["prompt_tokens_cached_total",] += sequence.num_cached_tokens
                self._histograms["request_prompt_tokens"].observe(sequence.num_prompt_tokens)
        self._counters["generation_tokens_total",] += num_new
        sequence.num_tokens, sequence.last_at = num_tokens, now

    def on_end(self, request: RequestRecord, sequence: SequenceRecord, finish_reason: str) -> None:
        now = time.monotonic()
        if sequence is request.sequences[0]:  # once for a request
            self._histograms["request_params_n"].observe(request.n)
            if request.max_tokens is not None:
                self._histograms["request_params_max_tokens"].observe(request.max_tokens)
        sequence.finish_reason, sequence.ended_at = finish_reason, now
        self._counters["request_success_total", finish_reason] += 1
        for engine, why, _ in sequence.engine_choices:
            self._counters["choices_total", engine.partition("/")[0], why.value] += 1
        self._counters["moves_total",] += sequence.num_moves
        self._histograms["e2e_request_latency_seconds"].observe(now - request.arrived_at)
        self._histograms["request_generation_tokens"].observe(sequence.num_tokens)
        self._histograms["request_max_num_generation_tokens"].observe(sequence.max_tokens)
        if not sequence.first_at:
            return
        prefill_s, decode_s = sequence.prefill_s, sequence.decode_s
        self._histograms["request_queue_time_seconds"].observe(sequence.queued_s)
        self._histograms["request_prefill_time_seconds"].observe(prefill_s)
        self._histograms["request_decode_time_seconds"].observe(decode_s)
        self._histograms["request_inference_time_seconds"].observe(prefill_s + decode_s)
        if sequence.kv_wait_s:
            self._histograms["request_kv_wait_time_seconds"].observe(sequence.kv_wait_s)
        if sequence.num_tokens > 1:
            mean_s = decode_s / (sequence.num_tokens - 1)
            self._histograms["request_time_per_output_token_seconds"].observe(mean_s)

    def counts(self) -> Counts:
        counts: Counts = dict(self._counters)
        for histogram in self._histograms.values():
            histogram.put_into(counts)
        self._token.put_into(counts, "time_per_output_token_seconds")
        return counts
