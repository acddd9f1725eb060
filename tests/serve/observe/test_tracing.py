"""Spans of requests: their times, attributes and errors, and how they reach a collector."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from compile.errors import FieldError
from serve.config import deploy_config
from serve.observe.tracing import (
    EXPORTERS,
    GRPC,
    HTTP,
    MAX_TRACED,
    Tracing,
    check_endpoint,
    make_spans,
    otlp_exporter,
)
from serve.pools.chooser import Why
from serve.requests.records import Attempt, EngineChoice, RequestRecord, SequenceRecord

pytestmark = pytest.mark.feature("R15")

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NOW = time.monotonic()


def attempt(number: int = 0, at: float = 1.0, **fields: Any) -> Attempt:
    """One through two pools: queued 1 s, prefilled 2 s, transferred 1 s; engines are named."""
    times = {"queued_s": 1.0, "first_at": NOW + at + 3, "handed_over_at": NOW + at + 3}
    times |= {"kv_wait_s": 1.0, "resumed_at": NOW + at + 4.5}
    engines = fields.pop("engines", ["prefill/a/0", "decode/b/1"])
    choices = [EngineChoice(engine, Why.LOAD, 0) for engine in engines]
    return Attempt(number, NOW + at, **{**times, "engine_choices": choices, **fields})


def sequence(*attempts: Attempt, **fields: Any) -> SequenceRecord:
    known = {"num_prompt_tokens": 7, "num_cached_tokens": 2, "max_tokens": 20, "num_tokens": 5}
    ends = {"first_at": NOW + 4, "last_at": NOW + 9, "ended_at": NOW + 9, "finish_reason": "stop"}
    all_attempts = list(attempts) or [attempt()]
    ends |= {"attempts": all_attempts, "num_attempts": len(all_attempts)}
    return SequenceRecord(**{**known, **ends, **fields})


def request(*sequences: SequenceRecord, **fields: Any) -> RequestRecord:
    known = {"id": "chatcmpl-1", "model": "tiny", "n": 1, "temperature": 0.5, "top_p": 0.9}
    record = RequestRecord("client-1", "/v1/chat/completions", NOW, 200, True)
    record.sequences = list(sequences)
    for name, value in {**known, **fields}.items():
        setattr(record, name, value)
    return record


def spans_of(record: RequestRecord) -> tuple[Any, list[Any]]:
    """Return the span of a request, and those below it in the order of their times."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    make_spans(provider.get_tracer("test"), record, NOW + 10)
    spans = {span.name == "llm_request": span for span in exporter.get_finished_spans()}
    children = [s for s in exporter.get_finished_spans() if s.name != "llm_request"]
    assert all(s.parent.span_id == spans[True].context.span_id for s in children)
    return spans[True], children


def seconds(spans: list[Any]) -> list[tuple[str, float]]:
    return [(s.name, round((s.end_time - s.start_time) / 1e9, 6)) for s in spans]


def test_the_spans_of_a_request_divide_its_time() -> None:
    root, children = spans_of(request(sequence()))
    assert seconds(children) == [
        ("router", 1),
        ("queue", 1),
        ("prefill", 2),
        ("transfer", 1),
        ("decode", 4),
    ]
    assert seconds([root]) == [("llm_request", 10)] and root.kind is SpanKind.SERVER
    assert abs(root.start_time / 1e9 - (time.time() - time.monotonic() + NOW)) < 1
    assert children[0].start_time == root.start_time
    for before, after in pairwise(children):
        assert abs(before.end_time - after.start_time) < 1000
    engines = [child.attributes.get("lockstep.engine") for child in children]
    assert engines == [None, "prefill/a/0", "prefill/a/0", "decode/b/1", "decode/b/1"]
    assert {s.status.status_code for s in (root, *children)} == {StatusCode.UNSET}


def test_attributes_are_those_of_vllm_and_of_the_conventions() -> None:
    root, _ = spans_of(request(sequence()))
    found = {name: value for name, value in root.attributes.items() if "latency" not in name}
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.id": "client-1",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.n": 1,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.usage.prompt_tokens": 7,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ("stop",),
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "lockstep.attempts": 1,
    }
    latencies = {
        name.removeprefix("gen_ai.latency."): round(value, 6)
        for name, value in root.attributes.items()
        if "latency" in name
    }
    assert latencies == {
        "e2e": 10,
        "time_to_first_token": 4,
        "time_in_queue": 1,
        "time_in_model_prefill": 2,
        "time_in_model_decode": 5,
        "time_in_model_inference": 7,
    }


def test_a_mixed_pool_has_no_transfer_and_a_single_token_no_decode() -> None:
    mixed = {"handed_over_at": 0.0, "kv_wait_s": 0.0, "resumed_at": 0.0, "engines": ["mixed/a/0"]}
    _, children = spans_of(request(sequence(attempt(**mixed))))
    assert seconds(children)[1:] == [("queue", 1), ("prefill", 2), ("decode", 5)]
    _, children = spans_of(request(sequence(attempt(**mixed), num_tokens=1)))
    assert seconds(children)[1:] == [("queue", 1), ("prefill", 2)]


def test_a_request_belongs_to_the_trace_that_its_client_names() -> None:
    named = f"00-{TRACE_ID}-{PARENT_ID}-01"
    root, _ = spans_of(request(sequence(), traceparent=named, tracestate="a=b"))
    assert f"{root.context.trace_id:032x}" == TRACE_ID
    assert f"{root.parent.span_id:016x}" == PARENT_ID
    assert root.context.trace_state.get("a") == "b"
    root, _ = spans_of(request(sequence(), traceparent="nonsense"))
    assert root.parent is None
    unsampled = request(sequence(), traceparent=f"00-{TRACE_ID}-{PARENT_ID}-00")
    assert sent(unsampled) == [], "the client does not sample"


def test_a_request_that_lost_its_ranks_has_the_spans_of_both_attempts() -> None:
    lost = attempt(handed_over_at=0.0, first_at=0.0, resumed_at=0.0, engines=[])
    lost.lost_at, lost.lost = NOW + 2, "died"
    root, children = spans_of(request(sequence(lost, attempt(1, at=2.5, engines=["p", "d"]))))
    assert seconds(children) == [
        ("router", 1),
        ("prefill", 1),
        ("queue", 1),
        ("prefill", 2),
        ("transfer", 1),
        ("decode", 2.5),
    ]
    [event] = root.events
    assert (event.name, event.attributes["reason"]) == ("lost", "died")
    assert round((event.timestamp - root.start_time) / 1e9, 6) == 2
    assert [c.attributes.get("lockstep.attempt") for c in children] == [None, 0, 1, 1, 1, 1]
    assert children[1].status.description == "died"
    # It was answered all the same.
    assert root.status.status_code is StatusCode.UNSET and root.attributes["lockstep.attempts"] == 2


@pytest.mark.parametrize(
    ("fields", "status", "last", "error"),
    [
        ({}, 200, "decode", "abort"),
        ({"resumed_at": 0.0, "kv_wait_s": 0.0}, 200, "transfer", "abort"),
        ({"resumed_at": 0.0, "handed_over_at": 0.0, "first_at": 0.0}, 499, "prefill", "abort"),
        ({}, 500, "decode", "error"),
    ],
)
def test_a_request_that_ends_early_has_an_error_where_it_ended(
    fields: dict[str, Any], status: int, last: str, error: str
) -> None:
    ended = sequence(attempt(**fields), finish_reason=error, num_tokens=0, first_at=0.0)
    root, children = spans_of(request(ended, status=status))
    assert children[-1].name == last
    for span in (root, children[-1]):
        assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, error)
        assert span.attributes["error.type"] == error
    assert not any(child.status.description for child in children[:-1])
    assert round((root.end_time - children[-1].end_time) / 1e9, 6) == 1


@pytest.mark.parametrize(
    ("status", "error"), [(400, None), (429, None), (503, "503"), (0, "abort")]
)
def test_a_request_that_never_ran_has_one_span(status: int, error: str | None) -> None:
    root, children = spans_of(request(id="", status=status))
    assert children == [] and root.attributes["http.response.status_code"] == status
    assert root.status.description == error and root.attributes.get("error.type") == error


def test_the_first_choices_of_a_request_are_told_apart() -> None:
    root, children = spans_of(request(*(sequence() for _ in range(MAX_TRACED + 1))))
    choices = [child.attributes["lockstep.choice"] for child in children if child.name == "decode"]
    assert choices == list(range(MAX_TRACED))
    assert root.attributes["gen_ai.usage.num_sequences"] == MAX_TRACED + 1
    assert [child.name for child in children].count("router") == 1


class Collector(SpanExporter):
    """Takes spans, or says that it does not."""

    def __init__(self) -> None:
        self.results: list[SpanExportResult] = []
        self.spans: list[Any] = []

    def export(self, spans: Any) -> SpanExportResult:
        logging.getLogger("opentelemetry.exporter.otlp.x").error("refused by its port")
        result = self.results.pop(0) if self.results else SpanExportResult.SUCCESS
        self.spans += spans
        return result


def sent(record: RequestRecord, instance: str = "this") -> list[Any]:
    """Return the spans of a request that reach a collector by the end."""
    collector = Collector()
    tracing = Tracing(collector, instance)
    tracing.write(record)
    tracing.close()
    return collector.spans


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines that are logged, while batches are sent every 10 ms."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "4")
    lines: list[str] = []
    logger = logging.getLogger("lockstep.tracing")
    monkeypatch.setattr(logger, "warning", lambda text, *args: lines.append(text % args))
    return lines


def test_a_collector_that_fails_is_told_once_and_so_is_its_return(
    told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    collector = Collector()
    collector.results = [SpanExportResult.FAILURE] * 3
    tracing = Tracing(collector, "this")
    for number in range(1, 5):
        tracing.write(request(id=""))
        wait_for(lambda number=number: len(collector.spans) == number)  # type: ignore[misc]
    tracing.close()
    wanted = "otlp_traces_endpoint: wanted a collector that takes spans, found: refused by its port"
    assert told == [wanted, "otlp_traces_endpoint: takes spans again; 3 were lost"]
    assert "refused" not in "".join(capsys.readouterr())


def test_what_was_written_is_sent_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    spans = sent(request(sequence()), "replica-7")
    assert len(spans) == 6
    resource = spans[0].resource.attributes
    assert (resource["service.name"], resource["service.instance.id"]) == ("mine", "replica-7")


def test_the_environment_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    assert sent(request(sequence())) == []


@pytest.mark.parametrize("bad", ["localhost:4317", "ftp://host", "http://", "http://h:99999", "x"])
def test_an_endpoint_that_is_no_url_is_refused(bad: str) -> None:
    with pytest.raises(FieldError, match=r"^otlp_traces_endpoint: wanted a URL such as http://"):
        deploy_config({"otlp_traces_endpoint": bad})


@pytest.mark.parametrize(
    ("endpoint", "named", "protocol"),
    [
        ("http://localhost:4317", "", GRPC),
        ("grpc://localhost:4317", "", GRPC),
        ("http://localhost:4318/v1/traces", "", HTTP),
        ("http://localhost:4318", HTTP, HTTP),
        ("http://localhost:4317/x", GRPC, GRPC),
    ],
)
def test_missing_packages_are_named_with_what_to_install(
    endpoint: str, named: str, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL", raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", named)
    monkeypatch.setitem(sys.modules, EXPORTERS[protocol], None)
    with pytest.raises(FieldError) as found:
        check_endpoint(endpoint)
    wanted = f"wanted the module {EXPORTERS[protocol]} (pip install 'lockstep-serve[tracing]')"
    assert str(found.value).startswith(f"otlp_traces_endpoint: {wanted}, found 'import of ")


def test_spans_reach_a_collector_over_grpc() -> None:
    pytest.importorskip(EXPORTERS[GRPC], reason="needs the extra `tracing`")
    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    class Servicer(service.TraceServiceServicer):  # type: ignore[misc, unused-ignore]
        body = b""

        def Export(self, request: Any, context: Any) -> Any:
            self.body += request.SerializeToString()
            return ExportTraceServiceResponse()

    server, servicer = grpc.server(ThreadPoolExecutor(2)), Servicer()
    service.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        tracing = Tracing(otlp_exporter(f"http://127.0.0.1:{port}"), "this")
        tracing.write(request(sequence()))
        tracing.close()
    finally:
        server.stop(None).wait()
    assert b"llm_request" in servicer.body and b"transfer" in servicer.body


def test_a_port_on_which_nobody_listens_is_told(told: list[str], free_port: int) -> None:
    pytest.importorskip(EXPORTERS[HTTP], reason="needs the extra `tracing`")
    tracing = Tracing(otlp_exporter(f"http://127.0.0.1:{free_port}/v1/traces"), "this")
    began = time.monotonic()
    for _ in range(100):
        tracing.write(request(sequence()))
    assert time.monotonic() - began < 30, "the event loop would have waited"
    wait_for(lambda: bool(told))
    tracing.close()
    [line] = told
    assert line.startswith("otlp_traces_endpoint: wanted a collector that takes spans, found: ")
    assert "refused" in line


def test_nothing_is_imported_where_nothing_is_traced(printed: Any) -> None:
    code = (
        "import sys; from serve.config import deploy_config; import serve.observe.tracing;"
        "assert deploy_config({}).args.otlp_traces_endpoint is None;"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    assert printed(sys.executable, "-c", code).strip() == "[]"
