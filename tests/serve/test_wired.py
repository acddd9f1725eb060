"""What an application is configured with reaches what serves: one start, a test for each option.

Its limits are small enough to be met; prompts run in a group of two engines, decodes in two groups.
"""

from __future__ import annotations

import json
import operator
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
from adapters import two_adapters
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from ray import serve as ray_serve

from serve.admission import MAX_BODIES
from serve.observe.page import FILES

pytestmark = pytest.mark.ray

KEY, OTHER_KEY, ADMIN_KEY = "sesame", "cinnamon", "cardamom"
MAX_LIVE = 2 * 2 + 2
"""Two replicas of two sequences each, and two sequences that wait."""
MAX_BODY_BYTES = 30_000
MAX_ANSWER_BYTES = 3 << 20
REQUEST_TIMEOUT_S = 20
LEASE_S = 5
WATCHDOG_S = 12
"""So much longer than a lease that a lease ends before its reader is given up."""
OPTIONS = [
    *("dtype=float32", "O=0", "kv_memory=64MiB", "max_num_seqs=2", "max_queued_requests=2"),
    *("prefill.data_parallel_size=2", "decode.replicas=2", f"api_keys={KEY},{OTHER_KEY}"),
    *(f"max_body_bytes={MAX_BODY_BYTES}", f"max_answer_bytes={MAX_ANSWER_BYTES}"),
    *(f"request_timeout_s={REQUEST_TIMEOUT_S}", f"watchdog_s={WATCHDOG_S}"),
    *(f"kv.lease_s={LEASE_S}", "log_format=json", "max_loras=3", f"admin_keys={ADMIN_KEY}"),
    *("speculative_config.method=ngram", "speculative_config.num_speculative_tokens=3"),
]
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
        deadline = time.monotonic() + 600
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


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture(scope="module")
def adapters(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Any]:
    """Where LoRA adapters are, and transformers' model with each of them merged."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    return dict(zip(*two_adapters(tmp_path_factory.mktemp("adapters"), model.eval()), strict=True))


@pytest.fixture(scope="module")
def app(
    collector: Collector, adapters: dict[Path, Any], start_shared_app: Callable[..., Any]
) -> Any:
    """Ends before the collector, for which its last spans would wait."""
    traced = f"otlp_traces_endpoint={collector.url}"
    modules = ",".join(f"{path.name}={path}" for path in adapters)
    return start_shared_app("wired", *OPTIONS, traced, f"lora_modules={modules}")


@pytest.fixture(scope="module")
def client(app: Any) -> Iterator[openai.OpenAI]:
    with app.client(KEY) as made:
        yield made


@pytest.fixture(scope="module")
def unfinished(app: Any) -> Iterator[socket.socket]:
    """A request whose body never ends; its time passes while other tests run."""
    host, port = app.url.removeprefix("http://").partition("/")[0].split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST /wired/v1/completions HTTP/1.1\r\nHost: {host}\r\n"
        head += f"Authorization: Bearer {KEY}\r\nContent-Length: 100\r\n\r\n"
        connection.sendall(head.encode() + b'{"prompt"')
        yield connection


@dataclass
class Outage:
    """What was seen from the stop of all decode ranks on."""

    before: tuple[int, dict[str, Any]]
    """What `/health` answered before it."""
    health: tuple[int, dict[str, Any]] = (200, {})
    """The first answer of `/health` that is not 200, or the last one."""
    is_well_again: bool = False
    """Whether `/health` answered 200 once more."""
    num_expired: int = 0
    """Leases that ended since, as prefill ranks count them."""
    prefill: list[dict[str, Any]] = field(default_factory=list)
    """The prefill ranks, once they had nothing to hold any more."""

    @property
    def is_over(self) -> bool:
        """Whether all was seen."""
        return self.is_well_again and bool(self.num_expired and self.prefill)


def num_expired(app: Any) -> int:
    """Return how many leases have ended unread, of all prefill ranks."""
    name = "lockstep:kv_leases_expired_total"
    return int(sum(value for (found, _), value in app.totals().items() if found == name))


def is_idle(rank: dict[str, Any]) -> bool:
    """Return whether a rank holds nothing."""
    return not rank["num_handoffs"] and bool(rank["num_free_blocks"] == rank["num_blocks"])


@pytest.fixture(scope="module")
def outage(app: Any, client: openai.OpenAI) -> Outage:
    """Stop all decode ranks and ask for a completion, whose KV nobody can read then.

    Looks until all was seen, as groups are rebuilt; what was not seen by then is for the tests.
    """
    app.settled_ranks()
    seen = Outage(before=app.get("/health"))
    expired_before = num_expired(app)
    for rank in app.ready_ranks("decode"):
        os.kill(rank["pid"], signal.SIGSTOP)
    stream = complete(client, "7 8 9", max_tokens=50, stream=True)
    deadline = time.monotonic() + 600
    while not seen.is_over and time.monotonic() < deadline:
        if seen.health[0] == 200:
            seen.health = app.get("/health")
        elif app.get("/health")[0] == 200:
            seen.is_well_again = True
        if not seen.num_expired:
            seen.num_expired = num_expired(app) - expired_before
        else:
            ranks = app.ranks("prefill")
            if all(is_idle(rank) for rank in ranks):
                seen.prefill = ranks
        time.sleep(0.1)
    stream.close()
    return seen


def complete(client: openai.OpenAI, prompt: str, **fields: Any) -> Any:
    extra = {"ignore_eos": True, **fields.pop("extra_body", {})}
    return client.completions.create(
        model="lockstep-tiny", prompt=prompt, temperature=0, extra_body=extra, **fields
    )


@pytest.mark.feature("R18")
def test_who_has_no_key_is_refused_and_who_has_one_is_answered(
    app: Any, client: openai.OpenAI
) -> None:
    status, body = app.get("/v1/models")
    assert (status, body["error"]["code"]) == (401, 401)
    assert client.models.list().data[0].id == "lockstep-tiny"
    with pytest.raises(openai.AuthenticationError):
        complete(client.with_options(api_key="simsim"), "1 2 3", max_tokens=1)
    # The page and what it draws need none.
    for path in (*FILES, "/status"):
        assert httpx.get(app.url + path, timeout=300).status_code == 200
    assert app.get("/status")[1]["needs_key"] is True


@pytest.mark.feature("R01", "P06", "P08", "R21")
def test_each_pool_has_the_replicas_and_each_engine_of_a_group_some_of_the_prompts(
    app: Any, client: openai.OpenAI
) -> None:
    """Prompts are computed by prefill ranks alone, and decoded by both decode replicas."""
    answers: list[Any] = []
    num_tokens = 0

    def ask(first: int) -> Any:
        return complete(client, f"Count from {first} to {first + 30}.", max_tokens=80)

    def computed(ranks: dict[str, list[dict[str, Any]]]) -> bool:
        found = sum(rank["prompt_tokens_computed"] for rank in ranks["prefill"])
        sent = sum(rank["kv_bytes_sent"] for rank in ranks["prefill"])
        received = sum(rank["kv_bytes_received"] for rank in ranks["decode"])
        return bool(found >= num_tokens and sent == received)

    deadline = time.monotonic() + 600
    while True:  # Serve draws a replica: four requests may all go to one
        with ThreadPoolExecutor(4) as threads:
            answers += threads.map(ask, range(len(answers), len(answers) + 4))
        usages = [answer.usage for answer in answers]
        assert {usage.completion_tokens for usage in usages} == {80}
        num_tokens = sum(
            usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens for usage in usages
        )
        ranks = app.settled_ranks(computed)
        if all(rank["kv_bytes_received"] for rank in ranks["decode"]):
            break
        assert time.monotonic() < deadline, ranks
    assert len({rank["pid"] for pool in ranks.values() for rank in pool}) == 4
    assert [rank["dp_rank"] for rank in ranks["prefill"]] == [0, 1]
    by_engine = [rank["prompt_tokens_computed"] for rank in ranks["prefill"]]
    assert sum(by_engine) == num_tokens and all(by_engine)
    replicas = app.get("/ready")[1]["pools"]["decode"]["replicas"]
    assert [len(replica["ranks"]) for replica in replicas] == [1, 1]
    assert [rank["prompt_tokens_computed"] for rank in ranks["decode"]] == [0, 0]


@pytest.mark.feature("R17")
def test_prompts_go_to_the_prefill_engine_that_has_their_beginning_cached(
    app: Any, client: openai.OpenAI
) -> None:
    """Several beginnings come at once, and are divided; then each comes again, alone."""

    def num_cached(start: int) -> int:
        head = " ".join(f"{number}," for number in range(start, start + 80))
        usage = complete(client, f"{head} and", max_tokens=1).usage
        assert usage.prompt_tokens > 300
        return int(usage.prompt_tokens_details.cached_tokens)

    def num_computed() -> list[int]:
        return [rank["prompt_tokens_computed"] for rank in app.ready_ranks("prefill")]

    before, starts = num_computed(), range(1000, 5000, 1000)
    with ThreadPoolExecutor(len(starts)) as threads:
        assert max(threads.map(num_cached, starts)) < 100
    app.wait_until(lambda: all(map(operator.gt, num_computed(), before)))
    assert min(map(num_cached, starts)) > 300


def check_greedy_tokens(client: openai.OpenAI, name: str, model: Any) -> None:
    """Assert that requests for `name` get the tokens of transformers' model."""
    prompt = [70 + i % 9 for i in range(40)]
    answer = client.completions.create(
        model=name,
        prompt=prompt,
        max_tokens=8,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(8):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    [choice] = answer.model_dump()["choices"]
    assert choice["token_ids"] == ids[len(prompt) :]
    assert answer.model == name


@pytest.mark.feature("S10")
def test_a_request_names_an_adapter_as_its_model(
    client: openai.OpenAI, adapters: dict[Path, Any]
) -> None:
    """Its prompt is computed in one pool and its tokens in another, both with the adapter."""
    for path, model in adapters.items():
        check_greedy_tokens(client, path.name, model)
    parents = {card.id: card.model_dump()["parent"] for card in client.models.list().data}
    assert parents == {"lockstep-tiny": None, "plain": "lockstep-tiny", "stable": "lockstep-tiny"}


@pytest.mark.feature("S10")
def test_adapters_come_and_go_while_an_application_serves(
    app: Any, client: openai.OpenAI, adapters: dict[Path, Any]
) -> None:
    """In one place after another, and under a name that another one had."""

    def post(what: str, key: str = ADMIN_KEY, **body: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{app.url}/v1/{what}_lora_adapter"
        return httpx.post(url, json=body, headers=headers, timeout=300)

    def load(**body: str) -> httpx.Response:
        answer = post("load", **body)
        assert answer.status_code == 200 or "fewer than 1" in answer.text, answer.text
        return answer

    for path, model in [*adapters.items(), *adapters.items()]:
        asked = {"lora_name": "loaded", "lora_path": str(path)}
        assert post("load", KEY, **asked).status_code == 403
        # The place of the one before is free once all ingresses have heard of it.
        app.wait_until(lambda asked=asked: "fewer than 1" not in load(**asked).text)
        card = client.models.retrieve("loaded").model_dump()
        assert card["parent"] == "lockstep-tiny"
        assert "loaded" in [card.id for card in client.models.list().data]
        check_greedy_tokens(client, "loaded", model)
        assert post("unload", lora_name="loaded").json()["deleted"]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="loaded", prompt="1")
    handle: Any = ray_serve.get_app_handle("wired")
    [path, *_] = adapters

    def loads() -> bool:
        try:
            card = handle.load_lora_adapter.remote("by-handle", str(path)).result()
        except Exception as error:
            assert "fewer than 1" in str(error)
            return False
        return bool(card["id"] == "by-handle")

    app.wait_until(loads)
    check_greedy_tokens(client, "by-handle", adapters[path])
    assert handle.unload_lora_adapter.remote("by-handle").result()["deleted"]


@pytest.mark.feature("T05")
def test_answers_with_drafts_are_right_and_metrics_tell_how_many_were(
    app: Any, client: openai.OpenAI
) -> None:
    answer = client.chat.completions.create(
        model="lockstep-tiny",
        messages=[{"role": "user", "content": "Count from 1 to 30."}],
        temperature=0,
        max_tokens=200,
    )
    assert answer.choices[0].message.content == " ".join(map(str, range(1, 31)))

    def are_told() -> bool:
        tokens, accepted = app.num_drafted("draft_tokens"), app.num_drafted("accepted_tokens")
        assert not tokens["prefill"]
        return 0 < accepted["decode"] < tokens["decode"] and tokens >= app.num_drafted("drafts")

    app.wait_until(are_told)


@pytest.mark.feature("R13", "R19")
def test_more_sequences_than_may_wait_are_refused_and_the_page_counts_those_that_live(
    app: Any, client: openai.OpenAI
) -> None:
    stream = complete(client, "1 2 3", max_tokens=1500, n=MAX_LIVE, stream=True)
    next(iter(stream))
    figures = app.get("/status")[1]
    with pytest.raises(openai.RateLimitError) as refused:
        complete(client, "4 5 6", max_tokens=1)
    stream.close()
    # The next test's requests want their places.
    app.wait_until(lambda: app.get("/status")[1]["num_live"] == 0)
    assert (figures["num_live"], figures["max_live"]) == (MAX_LIVE, MAX_LIVE)
    assert f"of {MAX_LIVE}" in refused.value.message
    assert int(refused.value.response.headers["Retry-After"]) > 0


@pytest.mark.feature("R12", "R22")
def test_a_body_is_as_large_as_it_may_be(
    app: Any, client: openai.OpenAI, unfinished: socket.socket
) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        complete(client, "1 " * MAX_BODY_BYTES, max_tokens=1)
    assert refused.value.status_code == 413
    assert f"at most {MAX_BODY_BYTES} bytes" in refused.value.message


@pytest.mark.feature("R12", "R22")
def test_an_answer_is_as_large_as_it_may_be(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, "1 2", max_tokens=1900, n=4, logprobs=5, stream=True)
    assert f"max_answer_bytes, here {MAX_ANSWER_BYTES} bytes" in refused.value.message


@pytest.mark.feature("R12", "R22")
def test_answers_on_their_way_hold_as_many_bytes_as_the_largest_bodies(
    client: openai.OpenAI,
) -> None:
    with pytest.raises(openai.RateLimitError) as refused:
        complete(client, "1 2", max_tokens=40, n=4, logprobs=20)
    assert f"at most {MAX_BODIES * MAX_BODY_BYTES} bytes" in refused.value.message


@pytest.mark.feature("R03")
def test_a_handle_completes_what_http_completes(app: Any, client: openai.OpenAI) -> None:
    handle: Any = ray_serve.get_app_handle("wired")
    body = {"prompt": "Monday Tuesday", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    found = handle.complete.remote(body).result(timeout_s=60)
    posted = complete(client, "Monday Tuesday", max_tokens=8)
    assert found["object"] == "text_completion"
    assert found["choices"][0]["text"] == posted.choices[0].text
    chunks = list(handle.options(stream=True).stream_complete.remote(body))
    streamed = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert streamed == posted.choices[0].text


@pytest.mark.feature("R18", "T01")
def test_a_key_does_not_find_what_another_one_asked(client: openai.OpenAI) -> None:
    prompt = "The prefix cache says how prompts begin. " * 3

    def cached(asks: openai.OpenAI, **fields: Any) -> int:
        usage = complete(asks, prompt, max_tokens=1, extra_body=fields).usage
        return int(usage.prompt_tokens_details.cached_tokens)

    assert cached(client) == 0
    deadline = time.monotonic() + 600
    in_a_row = 0
    while in_a_row < 4:  # both engines have it
        assert time.monotonic() < deadline
        in_a_row = in_a_row + 1 if cached(client) else 0
    assert cached(client.with_options(api_key=OTHER_KEY)) == 0
    assert cached(client, cache_salt="mine") == 0
    assert cached(client)


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
    app: Any, client: openai.OpenAI, ray_cluster: Any, collector: Collector
) -> None:
    answer = ask(client, "whole", max_tokens=30)
    ask(client, "two", max_tokens=10, n=2)
    with ask(client, "left", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}) as it:
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
    ids = [each["request_id"] for each in requests]
    assert [ids.count(each) for each in ("whole", "two", "left", "bad")] == [1, 1, 1, 1]
    [line] = [each for each in requests if each["request_id"] == "whole"]
    assert line["id"] == answer.id and line["status"] == 200 and line["level"] == "info"
    assert line["completion_tokens"] == answer.usage.completion_tokens
    assert 0 < line["queue_s"] < line["ttft_s"] < line["duration_s"]
    assert line["engines"].startswith("prefill/") and ",decode/" in line["engines"]
    assert (line["finish_reason"], line["attempts"]) == (answer.choices[0].finish_reason, 1)
    for secret in (KEY, PROMPT, str(answer.choices[0].message.content)):
        assert not any(secret in each for each in lines)
        assert not any(secret.encode() in body for body in collector.bodies)


@pytest.mark.feature("P18")
def test_kv_that_no_rank_reads_is_free_again_when_its_lease_has_ended(outage: Outage) -> None:
    assert outage.num_expired == 1
    assert [rank["epoch"] for rank in outage.prefill] == [0, 0]


@pytest.mark.feature("P09", "R06")
def test_health_names_a_rank_that_hangs_until_its_group_is_rebuilt(
    app: Any, client: openai.OpenAI, outage: Outage
) -> None:
    assert outage.before == (200, {"status": "ok"})
    assert outage.health[0] == 503
    message = outage.health[1]["error"]["message"]
    assert message.startswith("decode pool: rank dp=0 tp=0 epoch=0: no heartbeat for ")
    assert outage.is_well_again
    assert [rank["epoch"] for rank in app.ready_ranks("decode")] == [1, 1]
    assert complete(client, "7 8 9", max_tokens=2).choices[0].text


@pytest.mark.feature("R12", "R22")
def test_a_body_that_does_not_end_takes_as_long_as_a_request_may(unfinished: socket.socket) -> None:
    answer = unfinished.recv(1 << 16)
    while b"}}" not in answer:
        more = unfinished.recv(1 << 16)
        assert more, answer
        answer += more
    assert b" 408 " in answer.partition(b"\r\n")[0]
    error = json.loads(answer[answer.index(b'{"error"') : answer.rindex(b"}") + 1])["error"]
    assert f"within {REQUEST_TIMEOUT_S} s" in error["message"]
