"""Every metric: its name, its labels, what it means. One table, which all that shows metrics reads.

Names, buckets and meanings of those that vLLM has are vLLM's with another prefix. The label
`engine` is the name of an engine as in `prefill-0-0` (pool, replica, data-parallel rank), or
`ingress`, or a pool. No label takes values that clients choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from cluster.observe.counts import BUCKET, SUM, Counts, bound_text

PREFIX = "lockstep:"
INGRESS = "ingress"
COMMON_LABELS = ("model_name", "engine")

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = tuple(float(n) for n in (1, 8, *(2**i for i in range(4, 15))))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True)
class Metric:
    """One metric. Invariant: a counter's name ends with `_total`."""

    name: str
    kind: str
    meaning: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    """A histogram's; empty: 1, 2, 5, 10, ... up to the model's length."""

    def bounds_for(self, max_model_len: int) -> tuple[float, ...]:
        if self.bounds:
            return self.bounds
        powers = (10**i for i in range(len(str(max_model_len))))
        rounded = [digit * power for power in powers for digit in (1, 2, 5)]
        return tuple(float(bound) for bound in rounded if bound <= max_model_len) or (1.0,)


def _gauge(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, GAUGE, meaning, labels)


def _counter(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, COUNTER, meaning, labels)


def _histogram(name: str, meaning: str, bounds: tuple[float, ...] = ()) -> Metric:
    return Metric(name, HISTOGRAM, meaning, bounds=bounds)


METRICS = (
    # as in vLLM
    _gauge("num_requests_running", "Sequences that run in the engine."),
    _gauge("num_requests_waiting", "Sequences that wait for a row, for KV or for their grammar."),
    _gauge(
        "num_requests_waiting_by_reason",
        "The same by what they wait for: `deferred` while their KV is being read, else `capacity`.",
        "reason",
    ),
    _gauge("kv_cache_usage_perc", "Share of KV blocks that are in use; 1 is all."),
    _counter("prefix_cache_queries_total", "Tokens looked up in the prefix cache."),
    _counter("prefix_cache_hits_total", "Tokens found in the prefix cache."),
    _counter("num_preemptions_total", "Sequences that gave up their blocks for others."),
    _counter("spec_decode_num_drafts_total", "Drafts of next tokens that steps have checked."),
    _counter("spec_decode_num_draft_tokens_total", "Tokens of these drafts."),
    _counter("spec_decode_num_accepted_tokens_total", "Those of them that were what was drawn."),
    _counter("prompt_tokens_total", "Prompt tokens of requests that got a first token."),
    _counter("prompt_tokens_cached_total", "Those of them found in the prefix cache."),
    _counter("generation_tokens_total", "Tokens that clients were sent."),
    _counter(
        "request_success_total",
        "Sequences that ended: `stop`, `length`, `abort` (the client left, or time was up) or "
        "`error`.",
        "finished_reason",
    ),
    _histogram(
        "iteration_tokens_total", "Tokens of one step of the engine, without padding.", _STEP_TOKENS
    ),
    _histogram(
        "time_to_first_token_seconds",
        "From a request's arrival to a sequence's first token.",
        _FIRST_TOKEN_S,
    ),
    _histogram(
        "inter_token_latency_seconds",
        "Between two tokens of a sequence; those that come together share the time since the one "
        "before.",
        _TOKEN_S,
    ),
    _histogram(
        "time_per_output_token_seconds",
        "The same as `inter_token_latency_seconds`, by its older name.",
        _TOKEN_S,
    ),
    _histogram(
        "request_time_per_output_token_seconds",
        "Mean time between a sequence's tokens, if it has two or more.",
        _TOKEN_S,
    ),
    _histogram(
        "e2e_request_latency_seconds",
        "From a request's arrival to the end of a sequence.",
        _REQUEST_S,
    ),
    _histogram(
        "request_queue_time_seconds",
        "From a sequence's arrival at its first engine until it got a row.",
        _REQUEST_S,
    ),
    _histogram("request_prefill_time_seconds", "From there to its first token.", _REQUEST_S),
    _histogram("request_decode_time_seconds", "From its first token to its last.", _REQUEST_S),
    _histogram(
        "request_inference_time_seconds",
        "From the row of its first engine to its last token.",
        _REQUEST_S,
    ),
    _histogram("request_prompt_tokens", "Tokens of a prompt."),
    _histogram("request_generation_tokens", "Tokens of a sequence's output."),
    _histogram("request_max_num_generation_tokens", "Tokens that a sequence might have had."),
    _histogram("request_params_n", "`n` of a request.", _CHOICES),
    _histogram("request_params_max_tokens", "`max_tokens` of a request that has it."),
    _gauge(
        "cache_config_info",
        "Always 1; its labels tell the KV cache of the engine.",
        *("block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization"),
        "num_gpu_blocks",
    ),
    # Lockstep's own
    _histogram(
        "request_kv_wait_time_seconds",
        "From a sequence's arrival at its decode engine until its KV was there and it had a row.",
        _FIRST_TOKEN_S,
    ),
    _counter(
        "http_responses_total",
        "Answers by route (`other` for what is none) and status.",
        "path",
        "code",
    ),
    _counter(
        "steps_total",
        "Steps by what was replayed (`none`, `piecewise`, `full`) and what the engine's sequences"
        " did (`dummy`, `decode`, `mixed`).",
        "mode",
        "kind",
    ),
    _counter("step_seconds_total", "Seconds that steps took, by what they did.", "kind"),
    _counter(
        "graph_replays_total",
        "Steps that replayed graphs, by mode and by tokens, padding included.",
        "mode",
        "size",
    ),
    _counter(
        "graph_padding_tokens_total",
        "Tokens of padding that replays of graphs computed, by mode and by all tokens.",
        "mode",
        "size",
    ),
    _counter("scheduled_tokens_total", "Tokens that steps computed, without padding."),
    _counter("padding_tokens_total", "Tokens of padding that steps computed beside those."),
    _counter("prompt_tokens_computed_total", "Prompt positions that were computed."),
    _counter("votes_total", "Votes that the engine's leader cast."),
    _counter("dp_wait_seconds_total", "Seconds between its votes and the last ones of others."),
    _counter(
        "compile_cache_misses_total",
        "Why something was compiled although there is a cache: `cold` (nothing was compiled "
        "before), `unreadable` (an artifact), or the part of the key that changed.",
        "reason",
    ),
    _counter("compilations_total", "Pieces that were compiled, while serving as well."),
    _counter("late_compilations_total", "Those of them after the rank was ready."),
    _counter("kv_transfer_sent_bytes_total", "Bytes of KV that readers took under a valid lease."),
    _counter("kv_transfer_received_bytes_total", "Bytes of KV that were read under a valid lease."),
    _counter("kv_transfers_total", "Reads of KV under a valid lease, by all ranks."),
    _counter("kv_transfer_failures_total", "Reads of KV that failed."),
    _counter("kv_transfer_seconds_total", "Seconds that reads of KV under a valid lease took."),
    _counter("kv_leases_expired_total", "Handoffs whose reader was not heard of in time."),
    _gauge("replicas", "Replicas of a pool by their state, as in `/ready`.", "state"),
    _gauge("replicas_wanted", "Replicas that a pool is scaled to; of scaled pools alone."),
    _counter(
        "scale_decisions_total",
        "How often a pool was to have another number of replicas: up for its `load` or `queue`, "
        "down since it was `calm`, or as its `bounds` are.",
        "reason",
    ),
    _counter(
        "choices_total",
        "Engines that were chosen for sequences that have ended: since it was the `only` one, by "
        "what was cached (`prefix`) or to do there (`load`), among `equal` ones, or to compute a "
        "prompt where it decodes (`on_decode`).",
        "pool",
        "reason",
    ),
    _counter("moves_total", "How often sequences that have ended left an engine that drained."),
    _counter(
        "rank_restarts_total",
        "Ends of rank groups, by the rank that was named (`dp=0 tp=1`).",
        "rank",
    ),
)
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


IN_METRICS_ALONE = {"is_in_metrics_alone": True}


@dataclass(frozen=True)
class SchedulerStats:
    """Gauges and counters of one scheduler. `/ready` shows all but those `IN_METRICS_ALONE`."""

    num_running: int = 0
    num_waiting: int = 0
    """Waiting for a row, for KV or for their grammar."""
    num_waiting_for_kv: int = 0
    num_queued_tokens: int = 0
    """Of prompts, and of what is computed again: nothing of theirs is computed or planned yet."""
    num_handoffs: int = 0
    """Whose KV is held here until another engine has read it."""
    num_blocks: int = 0
    num_free_blocks: int = 0
    prompt_tokens_computed: int = 0
    """Prompt positions computed here, again after a pre-emption included."""
    num_preemptions: int = field(default=0, metadata=IN_METRICS_ALONE)
    prefix_queries: int = field(default=0, metadata=IN_METRICS_ALONE)
    prefix_hits: int = field(default=0, metadata=IN_METRICS_ALONE)
    num_drafts: int = field(default=0, metadata=IN_METRICS_ALONE)
    """Drafts that a step has checked, of one or more tokens each."""
    num_draft_tokens: int = field(default=0, metadata=IN_METRICS_ALONE)
    num_accepted_tokens: int = field(default=0, metadata=IN_METRICS_ALONE)


@dataclass(frozen=True)
class MetricsSnapshot:
    """All values at one moment, by engine. Invariant: no total is below what an earlier one had."""

    totals: dict[str, Counts]
    engines: dict[str, SchedulerStats]
    replicas_wanted: dict[str, int] = field(default_factory=dict)
    """By pool, of those that are scaled."""
    replicas: dict[str, dict[str, int]] = field(default_factory=dict)
    """By pool and state."""


@dataclass(frozen=True)
class Sample:
    """One series of a metric: the values of its labels, and its value. Of a histogram `value` is
    the sum, and `buckets` has for each upper bound how many lie below."""

    labels: tuple[str, ...]
    value: float
    buckets: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Described:
    model_name: str
    max_model_len: int
    cache_info: tuple[tuple[str, str], ...] = ()
    """The labels of `cache_config_info`, but for the number of blocks."""


def samples(
    snapshot: MetricsSnapshot, described: Described
) -> Iterator[tuple[Metric, list[Sample]]]:
    """Yield every metric with its samples; one that nothing counted yet has none, or a zero."""
    by_name: dict[str, dict[str, dict[tuple[str, ...], float]]] = {}
    for engine, counts in snapshot.totals.items():
        for (name, *own_labels), value in counts.items():
            by_name.setdefault(name, {}).setdefault(engine, {})[tuple(own_labels)] = value
    for metric in METRICS:
        found: list[Sample] = []
        if metric.kind == GAUGE:
            found += _gauges(metric, snapshot, described)
        for engine, values in by_name.get(metric.name, {}).items():
            labels = (described.model_name, engine)
            if metric.kind == COUNTER:
                found += [Sample((*labels, *own), value) for own, value in values.items()]
            elif metric.kind == HISTOGRAM:
                bounds = metric.bounds_for(described.max_model_len)
                found.append(_cumulated(labels, values, bounds))
        yield metric, found


def _gauges(metric: Metric, snapshot: MetricsSnapshot, described: Described) -> Iterator[Sample]:
    if metric.name == "replicas_wanted":
        for pool, wanted in snapshot.replicas_wanted.items():
            yield Sample((described.model_name, pool), wanted)
    if metric.name == "replicas":
        for pool, states in snapshot.replicas.items():
            for state, number in states.items():
                yield Sample((described.model_name, pool, state), number)
    for engine, now in snapshot.engines.items():
        labels = (described.model_name, engine)
        match metric.name:
            case "num_requests_running":
                yield Sample(labels, now.num_running)
            case "num_requests_waiting":
                yield Sample(labels, now.num_waiting)
            case "num_requests_waiting_by_reason":
                deferred = now.num_waiting_for_kv
                yield Sample((*labels, "capacity"), now.num_waiting - deferred)
                yield Sample((*labels, "deferred"), deferred)
            case "kv_cache_usage_perc":
                yield Sample(labels, 1 - now.num_free_blocks / max(now.num_blocks, 1))
            case "cache_config_info":
                values = {**dict(described.cache_info), "num_gpu_blocks": str(now.num_blocks)}
                yield Sample((*labels, *(values.get(name, "") for name in metric.labels)), 1)


def _cumulated(
    labels: tuple[str, ...], values: Mapping[tuple[str, ...], float], bounds: tuple[float, ...]
) -> Sample:
    """Return a histogram's sample; what another deployment counted goes where it fits."""
    counted = sorted((float(own[1]), n) for own, n in values.items() if own[0] == BUCKET)
    buckets: list[tuple[str, float]] = []
    below, i = 0.0, 0
    for bound in (*bounds, float("inf")):
        while i < len(counted) and counted[i][0] <= bound:
            below += counted[i][1]
            i += 1
        buckets.append((bound_text(bound), below))
    return Sample(labels, values.get((SUM,), 0.0), tuple(buckets))
