"""What a served application tells operators of its requests: spans by OTLP, lines of JSON."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

pytestmark = [pytest.mark.ray, pytest.mark.slow]

KEY = "sk-nobody-may-read-this"
PROMPT = "Count from 3 to 19."
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PHASES = ["router", "queue", "prefill", "transfer", "decode"]


class Collector:
    """An OTLP/HTTP collector on a free port."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def trace(self, request_id: str) -> tuple[Any, list[Any]]:
        """Wait for the span of a request; return it and those below it, in their order."""
        deadline = time.monotonic() + 6000
        while time.monotonic() < deadline:
            spans = list(self._spans())
            for span in spans:
                if attributes(span).get("gen_ai.request.id") == request_id:
                    below = [each for each in spans if each.parent_span_id == span.span_id]
                    return span, sorted(below, key=lambda each: int(each.start_time_unix_nano))
            time.sleep(0.1)
        raise AssertionError(f"no span of {request_id}")

    def _spans(self) -> Iterator[Any]:
        for body in list(self.bodies):
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    yield from scope.spans


def attributes(span: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


def length(span: Any) -> int:
    return int(span.end_time_unix_nano) - int(span.start_time_unix_nano)


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


def ask(client: openai.OpenAI, request_id: str, **fields: Any) -> Any:
    headers = {"X-Request-Id": request_id, "traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    return client.chat.completions.create(
        model="lockstep-tiny",
        messages=[{"role": "user", "content": PROMPT}],
        extra_headers=headers,
        temperature=0,
        **fields,
    )


def request_lines(session: Path, request_ids: list[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """Wait for the lines of these requests; return all of the ingress, and those of requests."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        for file in session.glob("logs/worker-*.err"):
            text = file.read_text()
            if all(f'"request_id":"{each}"' in text for each in request_ids):
                lines = [line for line in text.splitlines() if "lockstep." in line]
                found = [json.loads(line) for line in lines]
                return lines, [each for each in found if each["logger"] == "lockstep.request"]
        time.sleep(0.1)
    raise AssertionError(f"no lines of {request_ids}")


@pytest.mark.feature("R15")
def test_a_request_through_two_pools_is_traced_and_logged_without_its_prompt(
    start_app: Callable[..., Any],
    ray_cluster: Any,
    collector: Collector,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["dtype=float32", "O=0", "max_num_seqs=8", "kv_memory=64MiB", f"api_keys={KEY}"]
    options += ["log_format=json", f"otlp_traces_endpoint={collector.url}"]
    app = start_app("traced", *options)
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key=KEY, max_retries=0) as client:
        answer = ask(client, "whole", max_tokens=30)
        ask(client, "two", max_tokens=10, n=2)
        with ask(
            client, "left", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
        ) as it:
            next(iter(it))
        with pytest.raises(openai.BadRequestError):
            ask(client, "bad", max_tokens=-1)

    root, children = collector.trace("whole")
    assert root.name == "llm_request" and [child.name for child in children] == PHASES
    assert root.trace_id.hex() == TRACE_ID and root.parent_span_id.hex() == PARENT_ID
    assert {child.trace_id.hex() for child in children} == {TRACE_ID}
    assert 0 < sum(map(length, children)) <= length(root)
    assert root.start_time_unix_nano == children[0].start_time_unix_nano
    assert children[-1].end_time_unix_nano <= root.end_time_unix_nano
    engines = [attributes(child).get("lockstep.engine", "-").split("/")[0] for child in children]
    assert engines == ["-", "prefill", "prefill", "decode", "decode"]
    told = attributes(root)
    assert told["gen_ai.response.id"] == answer.id
    assert told["gen_ai.usage.prompt_tokens"] == answer.usage.prompt_tokens
    assert told["gen_ai.usage.completion_tokens"] == answer.usage.completion_tokens
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.request.temperature"]) == (30, 0)
    assert root.status.code == Status.STATUS_CODE_UNSET

    _, children = collector.trace("two")
    assert [child.name for child in children].count("decode") == 2
    left, children = collector.trace("left")
    assert (left.status.code, left.status.message) == (Status.STATUS_CODE_ERROR, "abort")
    assert children[-1].status.message == "abort"
    bad, children = collector.trace("bad")
    assert children == [] and attributes(bad)["http.response.status_code"] == 400

    session = Path(ray_cluster.address_info["session_dir"])
    lines, requests = request_lines(session, ["whole", "two", "left", "bad"])
    assert sorted(each["request_id"] for each in requests) == ["bad", "left", "two", "whole"]
    [line] = [each for each in requests if each["request_id"] == "whole"]
    assert line["id"] == answer.id and line["status"] == 200 and line["level"] == "info"
    assert line["completion_tokens"] == answer.usage.completion_tokens
    assert 0 < line["queue_s"] < line["ttft_s"] < line["duration_s"]
    assert line["engines"].startswith("prefill/") and ",decode/" in line["engines"]
    assert (line["finish_reason"], line["attempts"]) == (answer.choices[0].finish_reason, 1)
    for secret in (KEY, PROMPT, str(answer.choices[0].message.content)):
        assert not any(secret in each for each in lines)
        assert not any(secret.encode() in body for body in collector.bodies)
    with capsys.disabled():
        parts = ", ".join(f"{s.name} {length(s) / 1e6:.2f}" for s in collector.trace("whole")[1])
        print(f"\nllm_request {length(root) / 1e6:.2f} ms: {parts}")
