"""The application as a user meets it: one command, two pools, real HTTP, the official client."""

from __future__ import annotations

import ast
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from serve.app import MAX_AT_PROXY, MAX_REFUSALS, _pool_deployment, build
from serve.config import deploy_config

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def llm() -> Any:
    """The same model in this process."""
    from serve.llm import LLM

    return LLM(max_num_seqs=8)


def ask(client: openai.OpenAI, question: str, **fields: Any) -> Any:
    return client.chat.completions.create(
        model="lockstep-tiny",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        **fields,
    )


@pytest.mark.feature("R01", "R05", "Y01")
def test_one_command_serves_what_the_offline_api_generates(client: openai.OpenAI, llm: Any) -> None:
    """`serve run serve.app:deploy` and `LLM(...)` give the same tokens for the same requests."""
    from serve.llm import SamplingParams

    questions = ["What is 12 + 30?", "Count from 3 to 9.", "What day comes after Monday?"]
    for question in questions:
        served = ask(client, question, max_tokens=60, extra_body={"return_token_ids": True})
        [offline] = llm.chat(
            [{"role": "user", "content": question}], SamplingParams(temperature=0, max_tokens=60)
        )
        choice = served.choices[0]
        assert choice.token_ids == offline.outputs[0].token_ids
        assert choice.message.content == offline.outputs[0].text
        assert choice.finish_reason == offline.outputs[0].finish_reason
        assert served.prompt_token_ids == offline.prompt_token_ids


@pytest.mark.feature("R07")
def test_a_stream_is_the_same_answer_in_pieces(client: openai.OpenAI) -> None:
    whole = ask(client, "Count from 5 to 20.", max_tokens=80)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(ask(client, "Count from 5 to 20.", max_tokens=80, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 5
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == whole.choices[0].finish_reason


@pytest.mark.feature("R07")
def test_the_raw_bytes_of_a_stream(server: Any) -> None:
    messages = [{"role": "user", "content": "What is 1 + 2?"}]
    body = {"model": "lockstep-tiny", "messages": messages, "stream": True, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    for event in events:
        assert json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk"


@pytest.mark.feature("T01")
def test_a_prompt_that_was_seen_is_found_in_the_prefix_cache(client: openai.OpenAI) -> None:
    question = "Count from 31 to 44. " * 6
    first, again = (ask(client, question, max_tokens=20) for _ in range(2))
    assert again.usage.prompt_tokens_details.cached_tokens >= again.usage.prompt_tokens - 16
    assert again.choices[0].message.content == first.choices[0].message.content


def test_models_and_health(server: Any, client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "lockstep-tiny"
    assert server.get("/health")[0] == 200
    server.wait_until_ready()
    _, body = server.get("/ready")
    assert body["status"] == "ready"
    assert body["loading"] == []
    assert body["compiling"] is False
    for pool in ("prefill", "decode"):
        [replica] = body["pools"][pool]["replicas"]
        assert replica["state"] == "ready"
        [rank] = replica["ranks"]
        about = {"tp_rank", "dp_rank", "pid", "node", "state", "epoch", "step"}
        about |= {"compiling", "compile_error"}
        blocks = {"num_blocks", "num_free_blocks", "num_handoffs"}
        loads = {"num_running", "num_waiting", "num_waiting_for_kv", "num_queued_tokens"}
        totals = {"kv_bytes_sent", "kv_bytes_received", "prompt_tokens_computed"}
        assert set(rank) == about | blocks | loads | totals
    # Nobody asked for what may tell too much.
    assert server.get("/debug/ranks")[0] == 404


@pytest.mark.feature("R09")
def test_structured_answers_of_two_pools_are_those_of_one_engine(
    client: openai.OpenAI, llm: Any
) -> None:
    from serve.llm import SamplingParams, StructuredOutputsParams

    common: dict[str, Any] = {"temperature": 0.3, "n": 3, "max_tokens": 150}
    messages: list[Any] = [{"role": "user", "content": "Name a size."}]
    for seed in range(3):
        served = client.chat.completions.create(
            model="lockstep-tiny",
            messages=messages,
            response_format=FORMAT,  # type: ignore[arg-type]
            seed=seed,
            extra_body={"return_token_ids": True},
            **common,
        )
        structured = StructuredOutputsParams(json=SCHEMA)
        params = SamplingParams(seed=seed, structured_outputs=structured, **common)
        [offline] = llm.chat(messages, params)
        for choice, other in zip(served.choices, offline.outputs, strict=True):
            if choice.finish_reason != "length":
                jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
            assert choice.token_ids == other.token_ids


@pytest.mark.feature("R09")
def test_a_structured_stream_and_a_bad_schema(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "lockstep-tiny", "prompt": "Say", "temperature": 1.0}
    choices = {"structured_outputs": {"choice": ["yes", "no"]}}
    chunks = client.completions.create(**fields, stream=True, extra_body=choices)
    assert "".join(chunk.choices[0].text for chunk in chunks) in ("yes", "no")
    with pytest.raises(openai.BadRequestError, match="guided_json"):
        client.completions.create(**fields, extra_body={"guided_json": {"type": "strng"}})


@pytest.mark.feature("R14")
def test_200_clients_that_leave_mid_stream_leave_nothing_behind(
    server: Any, client: openai.OpenAI
) -> None:
    """All blocks of both pools are free soon, by `/ready`; how soon is printed."""
    before = ask(client, "What is 12 + 30?").choices[0].message.content
    host, port = server.url.removeprefix("http://").split(":")
    messages = [{"role": "user", "content": "Count from 1 to 40."}]
    fields = {"stream": True, "max_tokens": 1500, "ignore_eos": True, "temperature": 1.0}
    body = json.dumps({"model": "lockstep-tiny", "messages": messages, **fields})
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    ).encode()

    def num_used() -> int:
        running = [server.ranks(pool)[0] for pool in ("prefill", "decode")]
        return sum(r["num_blocks"] - r["num_free_blocks"] for r in running)

    with ExitStack() as connections:
        sockets = [
            connections.enter_context(socket.create_connection((host, int(port)), timeout=60))
            for _ in range(200)
        ]
        for connection in sockets:
            connection.sendall(request)
        # The first ones stream (64 run at once); all have been taken on.
        for connection in sockets[:40]:
            while b"data:" not in connection.recv(4096):
                pass
        # What ranks tell of themselves is a moment old.
        server.wait_until(lambda: num_used() > 40, num_used, timeout_s=20)
    left = time.monotonic()
    server.wait_until(lambda: num_used() == 0, num_used, timeout_s=60)
    print(f"all blocks free after {time.monotonic() - left:.2f} s")
    assert ask(client, "What is 12 + 30?").choices[0].message.content == before == "42"


@pytest.mark.feature("R03")
def test_another_app_calls_through_a_handle(server: Any, printed: Any) -> None:
    """`examples/handle.py`, as a process of its own on the same cluster."""
    lines = printed(sys.executable, "examples/handle.py", RAY_ADDRESS=server.address)
    # Ray prints lines of its own between these, on a slow machine more of them.
    answers = dict(line.split(": ", 1) for line in lines.splitlines() if ": " in line)
    assert answers["whole"] == "42"
    assert "".join(ast.literal_eval(answers["stream"])) == "42"


@pytest.mark.feature("R12")
def test_a_body_of_50_mb_is_told_how_long_it_may_be(server: Any) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    kind = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", b" " * 50_000_000, kind)
    response = connection.getresponse()
    error = json.loads(response.read())["error"]
    connection.close()
    assert set(error) == {"message", "type", "param", "code"}
    assert (response.status, error["code"], error["param"]) == (413, 413, None)
    assert "8388608" in error["message"]


def failed_start(*args: str, **env: str) -> str:
    """Return the last line of a `serve run` that ends with exit code 1."""
    done = subprocess.run(
        [Path(sys.executable).with_name("serve"), "run", "serve.app:deploy", *args],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.feature("Q05", "R01")
def test_bad_arguments_end_the_start_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "arguments.yaml").write_text("decode:\n  replicas: many\n")
    found = failed_start(f"config={tmp_path}/arguments.yaml")
    assert found == "decode.replicas: wanted int, found 'many'"
    wanted = "mixed.tensor_parallel_size: wanted one of 1, 2, 4, 8 for a model with 8 heads"
    assert failed_start("pools=mixed", "mixed.tensor_parallel_size=3").startswith(wanted)


@pytest.mark.feature("R02")
def test_another_address_than_that_of_the_cluster_ends_the_start_with_one_line(server: Any) -> None:
    """Serve runs there already, and keeps its port."""
    port = int(server.url.rpartition(":")[2])
    wanted = f"port: wanted {port}, where Serve runs in this cluster already, found {port + 1}"
    assert failed_start(f"port={port + 1}", RAY_ADDRESS=server.address) == wanted


def _gc_and_malloc(_: Any) -> tuple[int, int]:
    """Return, in the process of an actor, how many objects collections skip, and mapped buffers.

    The latter are those that a buffer of 30 MiB adds when it is made a second time: 0 where glibc
    has learned from the first to take it from its heap. Smaller ones could fill a gap there.
    """
    import ctypes
    import gc

    class Mallinfo(ctypes.Structure):
        names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    for _ in range(2):
        before = mallinfo().hblks
        buffer = bytearray(30 << 20)
        added = mallinfo().hblks - before
        del buffer
    return gc.get_freeze_count(), added


def _collects_torch(_: Any) -> bool:
    """Return, in the process of a rank, whether collections look at what loading has imported.

    To count all that they skip would take longer than a rank may be silent where its memory was
    swapped out.
    """
    import gc
    import sys

    loaded = sys.modules["torch"].nn.Linear
    return any(each is loaded for each in gc.get_objects())


@pytest.mark.feature("R22")
def test_what_is_loaded_is_no_garbage_and_large_buffers_go_back(server: Any) -> None:
    """A collection of all that stops everybody's tokens; a body's memory must not stay."""
    import ray

    board = ray.get_actor("status:default", namespace="lockstep")
    pools = ray.get(board.actors.remote()).values()
    ranks = [rank for pool in pools for actors in pool.values() for rank in actors]
    assert len(ranks) == 2
    assert not any(ray.get([rank.__ray_call__.remote(_collects_torch) for rank in ranks]))
    named = ray.util.list_named_actors(all_namespaces=True)
    [name] = [each for each in named if "default#Ingress#" in each["name"]]
    ingress = ray.get_actor(name["name"], namespace=name["namespace"])
    server.wait_until_ready()  # a board that was silent for seconds makes it less
    num_frozen, num_mapped = ray.get(ingress.__ray_call__.remote(_gc_and_malloc))
    assert num_frozen > 100_000
    assert num_mapped == 1


@pytest.mark.feature("R01", "R21")
def test_a_pool_is_deployed_with_its_replicas() -> None:
    app = build(deploy_config({"prefill.replicas": 2, "decode.replicas": 3}))
    _, pools = app._bound_deployment.init_args
    found = {pool._bound_deployment.name: pool._bound_deployment.num_replicas for pool in pools}
    assert found == {"PrefillPool": 2, "DecodePool": 3}


@pytest.mark.feature("R21")
def test_a_replica_is_placed_as_its_pool_says() -> None:
    """The replica itself, in the first bundle, is where its ranks may be."""
    prefill: dict[str, Any] = {"num_cpus": 4, "accelerator_type": "H100"}
    prefill |= {"label_selector": {"zone": "a"}}
    prefill |= {"placement_strategy": "SPREAD"}
    app = build(deploy_config({"prefill": prefill, "num_cpus": 2}))
    _, pools = app._bound_deployment.init_args
    told, other = (pool._bound_deployment._replica_config for pool in pools)
    assert (told.placement_group_strategy, other.placement_group_strategy) == (
        "SPREAD",
        "STRICT_PACK",
    )
    rank = {"CPU": 4, "accelerator_type:H100": 0.001}
    assert told.placement_group_bundles == [{"CPU": 0.01}, rank]
    assert told.placement_group_bundle_label_selector == [{"zone": "a"}] * 2
    assert other.placement_group_bundles == [{"CPU": 0.01}, {"CPU": 2}]
    assert other.placement_group_bundle_label_selector is None


@pytest.mark.feature("R22")
@pytest.mark.feature("R16")
def test_a_pool_that_is_scaled_is_deployed_with_its_bounds_and_serves_own_delays_at_0() -> None:
    config = deploy_config({"decode.max_replicas": 3})
    prefill, decode = (_pool_deployment(config, pool) for pool in config.pools)
    assert prefill._deployment_config.autoscaling_config is None
    scaling = decode._deployment_config.autoscaling_config
    assert scaling is not None
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (1, 1, 3)
    assert scaling.upscale_delay_s == scaling.downscale_delay_s == 0
    assert scaling.policy.policy_function == "serve.pools.scaling.ScalingPolicy"


def test_serve_holds_back_what_the_ingress_cannot_even_refuse() -> None:
    config = deploy_config({"max_num_seqs": 5, "max_queued_requests": 7})
    ingress = build(config)._bound_deployment
    assert ingress.max_ongoing_requests == 5 + 7 + MAX_REFUSALS
    assert ingress.max_queued_requests == MAX_AT_PROXY
    two = build(deploy_config({"max_num_seqs": 5, "max_queued_requests": 7, "ingress.replicas": 2}))
    assert two._bound_deployment.num_replicas == 2
    assert two._bound_deployment.max_ongoing_requests == (5 + 7) // 2 + MAX_REFUSALS
    told = ingress.backpressure_config
    assert told.status_code == 429 and told.retry_after_s
