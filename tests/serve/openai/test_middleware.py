"""Request ids, the log line of a request, counters of answers, and what /health says."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray.serve._private.http_util import RequestIdMiddleware
from starlette.applications import Starlette

from cluster.observe.logs import JsonFormatter
from serve.observe.request_log import RequestLog
from serve.openai import endpoint
from serve.openai.app import build_app
from serve.openai.completions import COMPLETIONS
from serve.openai.generation import Serving
from serve.openai.middleware import MAX_ID_CHARS, MAX_TRACE_CHARS

pytestmark = pytest.mark.feature("R15")

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
SECRET = "the cat sat on the mat"
BODY = {"messages": [{"role": "user", "content": SECRET}]}


class Lines(logging.Handler):
    """Takes what a thread logs."""

    def __init__(self) -> None:
        super().__init__()
        self.records: queue.Queue[logging.LogRecord] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.put(record)

    def next(self) -> logging.LogRecord:
        return self.records.get(timeout=30)


@pytest.fixture
def lines(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    """The request log of the app; no line comes late, which would be another test's."""
    monkeypatch.setattr("serve.observe.request_log.PAUSE_S", 0.0)
    handler, logger = Lines(), logging.getLogger("lockstep.request")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    serving.on_end.append(RequestLog().write)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def app(serving: Serving, lines: Lines) -> Starlette:
    return build_app(serving)


Call = Callable[..., Any]


@pytest.mark.parametrize(
    ("method", "path", "fields", "status"),
    [
        ("POST", CHAT, {"json": BODY}, 200),
        ("POST", CHAT, {"json": {**BODY, "stream": True}}, 200),
        ("POST", CHAT, {"json": {}}, 400),
        ("GET", CHAT, {}, 405),
        ("GET", "/nowhere", {}, 404),
        ("GET", "/health", {}, 200),
        ("GET", "/metrics", {}, 200),
        ("POST", TEXT, {"content": b"x" * 30_000}, 413),
    ],
)
def test_every_answer_has_the_id_of_its_request(
    call: Call, method: str, path: str, fields: dict[str, Any], status: int
) -> None:
    answer = call(method, path, headers={"X-Request-Id": "client-7/b:1"}, **fields)
    assert answer.status_code == status
    assert answer.headers["x-request-id"] == "client-7/b:1"
    ids = {call(method, path, **fields).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2 and all(len(each) == 32 for each in ids)


@pytest.mark.parametrize("bad", ["", "a b", "a" * (MAX_ID_CHARS + 1), "ü", 'x"', "{}"])
def test_an_id_that_is_none_gets_400_and_is_not_echoed(call: Call, bad: str) -> None:
    answer = call("POST", CHAT, json=BODY, headers={"X-Request-Id": bad.encode()})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("x-request-id: wanted 1 to 128 letters")
    assert answer.headers["x-request-id"] not in ("", bad)


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_tells_of_a_request_what_an_operator_needs_and_no_prompt(
    call: Call, lines: Lines, stream: bool
) -> None:
    headers = {"X-Request-Id": "abc", "Authorization": "Bearer sk-hidden"}
    body = {**BODY, "n": 2, "stream": stream, "user": None}
    answer = call("POST", CHAT, json=body, headers=headers)
    logged = lines.next()
    text = logged.getMessage()
    assert SECRET not in text and "hello" not in text and "sk-hidden" not in text
    told: dict[str, Any] = logged.fields  # type: ignore[attr-defined]
    assert told["request_id"] == "abc" and told["path"] == CHAT and told["status"] == 200
    assert told["choices"] == 2 and told["stream"] == stream and told["model"] == "scripted"
    assert told["finish_reason"] == "stop" and told["attempts"] == 1
    assert 0 < told["ttft_s"] <= told["duration_s"] and told["tpot_s"] >= 0
    if not stream:
        assert told["id"] == answer.json()["id"]
        usage = answer.json()["usage"]
        assert told["prompt_tokens"] == usage["prompt_tokens"]
        assert told["completion_tokens"] == usage["completion_tokens"]
    assert f"request_id=abc id={told['id']} path={CHAT} status=200" in text
    line = JsonFormatter().format(logged)
    assert "\n" not in line
    found = json.loads(line)
    assert found["completion_tokens"] == told["completion_tokens"] and found["level"] == "info"
    assert found["logger"] == "lockstep.request" and SECRET not in line


@pytest.mark.parametrize("is_traced", [True, False])
def test_the_trace_that_a_client_names_is_noted_where_requests_are_traced(
    serving: Serving, send_to: Call, is_traced: bool
) -> None:
    found: list[Any] = []
    serving.on_end.append(found.append)
    serving.is_traced = is_traced
    headers = {"traceparent": "00-1-2-01", "tracestate": "a" * (MAX_TRACE_CHARS + 1)}
    body = {**BODY, "n": 2, "temperature": 0.5, "top_p": 0.75}
    send_to(build_app(serving), "POST", CHAT, json=body, headers=headers)
    [record] = found
    assert record.traceparent == ("00-1-2-01" if is_traced else "") and not record.tracestate
    assert (record.n, record.temperature, record.top_p) == (2, 0.5, 0.75)


def test_requests_that_fail_are_logged_too_and_reads_are_not(
    call: Call, lines: Lines, backend: Any
) -> None:
    call("GET", "/v1/models")
    call("POST", CHAT, json={"messages": SECRET})
    backend.raises = RuntimeError(SECRET)
    call("POST", CHAT, json=BODY)
    refused, failed = lines.next(), lines.next()
    assert refused.fields["status"] == 400  # type: ignore[attr-defined]
    assert failed.fields["status"] == 500  # type: ignore[attr-defined]
    assert failed.fields["finish_reason"] == "error"  # type: ignore[attr-defined]
    assert not any(SECRET in each.getMessage() for each in (refused, failed))
    assert lines.records.empty()


def test_calls_by_handle_are_logged_and_counted(serving: Serving, lines: Lines) -> None:
    body = {"prompt": SECRET, "max_tokens": 4}
    answer = asyncio.run(endpoint.answer(serving, COMPLETIONS, body))
    told: dict[str, Any] = lines.next().fields  # type: ignore[attr-defined]
    assert told["path"] == "handle" and told["id"] == answer["id"] and told["status"] == 200
    assert serving.counts.counts()["request_success_total", "stop"] == 1


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize"])
def test_a_client_that_leaves_while_its_body_is_read_is_no_failure_of_the_server(
    connect: Any, serving: Serving, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """As behind Ray's proxy, where the call for the rest of the body fails instead of ending."""
    connection = connect(b'{"prompt": "', path)
    connection.parts[0]["more_body"] = True
    connection.parts.append(ray.exceptions.TaskCancelledError)
    asyncio.run(connection(build_app(serving)))
    counted = {key: n for key, n in serving.counts.counts().items() if "http_responses" in key[0]}
    assert counted == {("http_responses_total", path, "499"): 1}
    assert connection.messages[0]["status"] == 499
    assert "a request failed" not in caplog.text
    assert serving.admission.num_live == serving.admission.num_bytes == 0


def test_where_ray_names_answers_they_are_not_named_twice(serving: Serving, send_to: Call) -> None:
    app = RequestIdMiddleware(build_app(serving, sends_id=False))
    for headers in ({}, {"X-Request-Id": "client-7"}):
        answer = send_to(app, "GET", "/v1/models", headers=headers)
        [found] = answer.headers.get_list("x-request-id")
        assert found == headers.get("X-Request-Id", found) and found


def series(call: Call) -> dict[tuple[str, ...], float]:
    text = call("GET", "/metrics").text
    return {
        (s.name, *(v for k, v in sorted(s.labels.items()) if k not in ("model_name", "engine"))): (
            s.value
        )
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_labels_take_no_values_that_clients_choose(call: Call) -> None:
    for i in range(20):
        call("GET", f"/v1/models/{i}")
        call("GET", f"/{i}")
        call("POST", CHAT, json={**BODY, "model": f"m{i}"})
    found = series(call)
    answers = {key: n for key, n in found.items() if key[0] == "lockstep:http_responses_total"}
    name = "lockstep:http_responses_total"
    assert answers == {
        (name, "404", "/v1/models/{}"): 20,
        (name, "404", "other"): 20,
        (name, "404", CHAT): 20,
    }


def test_a_client_that_leaves_and_a_failure_are_counted_as_such(call: Call, backend: Any) -> None:
    backend.raises = RuntimeError("no")
    assert call("POST", CHAT, json=BODY).status_code == 500
    name = "lockstep:request_success_total"
    assert series(call)[name, "error"] == 1
    # Tokens that came before the failure are counted.
    assert series(call)["lockstep:generation_tokens_total",] == len(backend.pieces)
