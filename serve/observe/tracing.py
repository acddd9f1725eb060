"""Traces of requests, sent to a collector by OTLP (`otlp_traces_endpoint`).

When a request has ended, its spans are made from the times in its record, by a thread of their own:

- `llm_request`, from its arrival to its last byte, a child of the client's span if it named one
  (`traceparent`). Attributes are named as vLLM's and as the semantic conventions of OpenTelemetry.
- `router`: until it is submitted, so reading, tokenizing and waiting for its turn.
- `queue`: until it has a row of its first engine; `prefill`: until its first token.
- `transfer`, with two pools: until its KV is in the decode pool and it has a row there.
- `decode`: until its last token.

They follow one another, as the metrics divide a request's time. A sequence that is lost and
computed again has the last four of each attempt, and `llm_request` has an event with the reason.
Nothing of prompts, answers, headers or keys is in a span.

`opentelemetry` is imported only where traces are asked for.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from compile.errors import FieldError
from serve.observe.request_log import RecordThread
from serve.requests.records import ABORTED, FAILED, Attempt, RequestRecord, SequenceRecord

log = logging.getLogger("lockstep.tracing")

FIELD = "otlp_traces_endpoint"
SCHEMES = ("http", "https", "grpc")
GRPC, HTTP = "grpc", "http/protobuf"
EXPORTERS = {
    GRPC: "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    HTTP: "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
MAX_UNTRACED = 2_000
"""Ended requests that wait for their spans to be made; more have none."""
MAX_TRACED = 8
"""Sequences of one request that have spans."""
CLOSE_S = 5.0
"""How long the last spans may take to be sent when an ingress ends."""
EXPORTER_LOG, QUEUE_LOG = "opentelemetry.exporter.otlp", "opentelemetry.sdk._shared_internal"
"""Loggers that write lines for each batch that fails, and while spans wait for that."""
CLIENT_LEFT = 499


class Phase(NamedTuple):
    """A part of a sequence's time, from clock readings."""

    name: str
    began_at: float
    ended_at: float
    engine: str = ""
    error: str = ""
    """Why the attempt ended in it, if it did so without a result."""


class Tracing:
    """Makes and sends the spans of one process's requests. `write` is for its event loop."""

    def __init__(self, exporter: Any, instance: str) -> None:
        """Start the thread. `instance` names this process among those of the service."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.instance.id": instance})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "lockstep"}))
        # Not the process's global provider: that is for other code that traces here.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_ReportedOnce(exporter)))
        self._tracer = self._provider.get_tracer("lockstep")
        self._thread = RecordThread(
            "tracing", MAX_UNTRACED, self._make, at_close=self._provider.shutdown
        )
        self.write = self._thread.write

    def close(self) -> None:
        self._thread.close(CLOSE_S)

    def _make(self, record: RequestRecord, ended_at: float, num_dropped: int) -> None:
        try:
            make_spans(self._tracer, record, ended_at)
        except Exception:
            log.exception("the spans of a request could not be made")
        if num_dropped:
            log.warning("%d requests have no spans: too many ended at once", num_dropped)


def check_endpoint(endpoint: str) -> Any:
    """Return the class of an exporter; FieldError if this is no URL, or a package is missing."""
    try:
        url = urlsplit(endpoint)
        is_url = url.scheme in SCHEMES and bool(url.hostname) and url.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        wanted = "a URL such as http://localhost:4317 or http://localhost:4318/v1/traces"
        raise FieldError(FIELD, wanted, endpoint)
    for module in ("opentelemetry.sdk.trace", EXPORTERS[_protocol(endpoint)]):
        try:
            exporters = importlib.import_module(module)
        except ImportError as error:
            wanted = f"the module {module} (pip install 'lockstep-serve[tracing]')"
            raise FieldError(FIELD, wanted, str(error)) from None
    return exporters.OTLPSpanExporter


def otlp_exporter(endpoint: str) -> Any:
    return check_endpoint(endpoint)(endpoint=endpoint)


def make_spans(tracer: Any, record: RequestRecord, ended_at: float) -> None:
    """Make the spans of a request; those that the sampler leaves out cost next to nothing."""
    from opentelemetry.trace import SpanKind, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    ended_ns, ended_mono = time.time_ns(), time.monotonic()

    def wall(at: float) -> int:
        return ended_ns - int((ended_mono - at) * 1e9)

    carrier = {"traceparent": record.traceparent, "tracestate": record.tracestate}
    parent = TraceContextTextMapPropagator().extract({k: v for k, v in carrier.items() if v})
    span = tracer.start_span(
        "llm_request", parent, SpanKind.SERVER, start_time=wall(record.arrived_at)
    )
    if not span.is_recording():
        return
    span.set_attributes(attributes_of(record, ended_at))
    if error := error_of(record):
        _fail(span, error)
    inside = set_span_in_context(span)
    for index, sequence in enumerate(record.sequences[:MAX_TRACED]):
        if index == 0 and sequence.attempts:
            _child(tracer, inside, Phase("router", record.arrived_at, sequence.submitted_at), wall)
        for attempt in sequence.attempts:
            place = {"lockstep.choice": index, "lockstep.attempt": attempt.number}
            for phase in phases_of(sequence, attempt):
                _child(tracer, inside, phase, wall, place)
            if attempt.lost:
                span.add_event("lost", {**place, "reason": attempt.lost}, wall(attempt.lost_at))
    span.end(wall(ended_at))


def attributes_of(record: RequestRecord, ended_at: float) -> dict[str, Any]:
    """Return a request span's attributes: vLLM's names, and the conventions' others."""
    sequences = record.sequences
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion" if record.id.startswith("cmpl-") else "chat",
        "gen_ai.request.id": record.request_id,
        "http.route": record.path,
        "http.response.status_code": record.status,
        "gen_ai.latency.e2e": ended_at - record.arrived_at,
    }
    if record.id:
        attributes |= {
            "gen_ai.response.id": record.id,
            "gen_ai.request.model": record.model,
            "gen_ai.response.model": record.model,
            "gen_ai.request.n": record.n,
            "gen_ai.request.choice.count": record.n,
            "gen_ai.request.temperature": record.temperature,
            "gen_ai.request.top_p": record.top_p,
        }
    if sequences:
        cached = sum(each.num_cached_tokens for each in sequences if each.is_first_choice)
        attributes |= {
            "gen_ai.request.max_tokens": sequences[0].max_tokens,
            "gen_ai.usage.num_sequences": len(sequences),
            "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": record.num_tokens,
            "gen_ai.usage.output_tokens": record.num_tokens,
            "gen_ai.usage.cache_read.input_tokens": cached,
            "gen_ai.response.finish_reasons": [each.finish_reason for each in sequences],
            "lockstep.attempts": max(each.num_attempts for each in sequences),
        }
    if started := [each for each in sequences if each.first_at]:
        first = min(started, key=lambda each: each.first_at)
        prefill_s, decode_s = first.prefill_s, max(each.decode_s for each in started)
        attributes |= {
            "gen_ai.latency.time_to_first_token": first.first_at - record.arrived_at,
            "gen_ai.latency.time_in_queue": first.queued_s,
            "gen_ai.latency.time_in_model_prefill": prefill_s,
            "gen_ai.latency.time_in_model_decode": decode_s,
            "gen_ai.latency.time_in_model_inference": prefill_s + decode_s,
        }
    return attributes


def error_of(record: RequestRecord) -> str:
    """Return how a request failed; empty if it did not, or by its client's fault (4xx)."""
    reasons = {each.finish_reason for each in record.sequences}
    failed = next((reason for reason in (FAILED, ABORTED) if reason in reasons), "")
    if record.status in (0, CLIENT_LEFT):
        return failed or ABORTED
    return failed or (str(record.status) if record.status >= 500 else "")


def phases_of(sequence: SequenceRecord, attempt: Attempt) -> Iterator[Phase]:
    is_last = attempt.number == sequence.num_attempts - 1
    reason = sequence.finish_reason if is_last else ""
    error = attempt.lost or (reason if reason in (FAILED, ABORTED) else "")
    end = attempt.lost_at or (sequence.ended_at if error else sequence.last_at)
    first, *others = attempt.engines or [""]
    if not attempt.first_at:
        yield Phase("prefill", attempt.submitted_at, end, first, error)
        return
    computed_at = attempt.handed_over_at or attempt.first_at
    seated_at = min(attempt.submitted_at + attempt.queued_s, computed_at)
    yield Phase("queue", attempt.submitted_at, seated_at, first)
    yield Phase("prefill", seated_at, computed_at, first)
    decoding_at, decoder = computed_at, first
    if attempt.handed_over_at:
        decoder = others[-1] if others else ""
        if not attempt.resumed_at:
            yield Phase("transfer", computed_at, end, decoder, error)
            return
        decoding_at = min(computed_at + attempt.kv_wait_s, attempt.resumed_at)
        yield Phase("transfer", computed_at, decoding_at, decoder)
    if error or sequence.num_tokens > 1:
        yield Phase("decode", decoding_at, max(decoding_at, end), decoder, error)


def _child(
    tracer: Any, inside: Any, phase: Phase, wall: Any, place: dict[str, int] | None = None
) -> None:
    attributes: dict[str, Any] = dict(place or {})
    if phase.engine:
        attributes["lockstep.engine"] = phase.engine
    began = wall(phase.began_at)
    span = tracer.start_span(phase.name, inside, attributes=attributes, start_time=began)
    if phase.error:
        _fail(span, phase.error)
    span.end(max(began, wall(phase.ended_at)))


def _fail(span: Any, error: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, error))
    span.set_attribute("error.type", error)


def _protocol(endpoint: str) -> str:
    """Return the protocol that the environment names, or the one that the URL looks like."""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if found := os.environ.get(name):
            if found not in EXPORTERS:
                raise FieldError(name, f"{GRPC} or {HTTP}", found)
            return found
    return HTTP if urlsplit(endpoint).path.strip("/") else GRPC


class _ReportedOnce(logging.Handler):
    """An exporter that logs when its collector stops taking spans, and when it takes them again. As
    a handler it keeps the first reason of a failure, in place of the lines of each."""

    def __init__(self, exporter: Any) -> None:
        super().__init__()
        self._exporter = exporter
        self._num_lost = 0
        self._reason = ""
        for name, handler in ((EXPORTER_LOG, self), (QUEUE_LOG, logging.NullHandler())):
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [handler], False
        self.shutdown, self.force_flush = exporter.shutdown, exporter.force_flush

    def emit(self, record: logging.LogRecord) -> None:
        self._reason = self._reason or record.getMessage()

    def export(self, spans: Any) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._reason = ""
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if not self._num_lost:
                found = self._reason or "no answer"
                log.warning("%s: wanted a collector that takes spans, found: %s", FIELD, found)
            self._num_lost += len(spans)
        elif self._num_lost:
            log.warning("%s: takes spans again; %d were lost", FIELD, self._num_lost)
            self._num_lost = 0
        return result
