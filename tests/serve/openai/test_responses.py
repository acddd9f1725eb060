"""POST /v1/responses with the official client: items in, items out, typed events."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from serve.arguments import DeployArgs
from serve.config import ApiSettings
from serve.openai.app import build_app
from serve.openai.generation import Serving
from serve.requests.tokenizer import Tokenizer

pytestmark = pytest.mark.feature("R06")

PATH = "/v1/responses"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<{{ m.role }}>{% if m.reasoning %}({{ m.reasoning }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}{{ m.tool_call_id }}{% endfor %}"
)
NOW: dict[str, Any] = {"type": "function", "name": "now", "parameters": {"type": "object"}}
IMAGE = {"type": "input_image", "text": ""}
CALL = '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>'


@pytest.fixture
def app(with_template: Any, backend: Any, admission: Any) -> Any:
    tokenizer = backend.tokenizer = Tokenizer.from_dir(with_template(TEMPLATE))
    settings = ApiSettings(
        served_model_name="m", max_model_len=4000, args=DeployArgs(reasoning_parser="qwen3")
    )
    return build_app(Serving(settings, backend, lambda: tokenizer, admission))


def writes(backend: Any, text: str, finish_reason: str = "stop") -> None:
    backend.writes(backend.tokenizer, text, finish_reason=finish_reason)


def prompt_of(backend: Any) -> str:
    text: str = backend.tokenizer.decode(backend.requests[-1].prompt_token_ids)
    return text


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def test_a_text_is_answered_and_streamed_alike(client: openai.OpenAI, backend: Any) -> None:
    writes(backend, "hello world")
    asked: Any = {"model": "m", "input": "hi", "instructions": "be brief", "max_output_tokens": 50}
    whole = client.responses.create(**asked, temperature=0, metadata={"a": "b"})
    assert (whole.output_text, whole.status) == ("hello world", "completed")
    assert prompt_of(backend) == "<system>be brief<user>hi"
    assert backend.requests[-1].sampling.max_tokens == 50
    assert whole.metadata == {"a": "b"} and whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == "hello world"
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"} and len(kinds) > 9
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize(
    "fields",
    [
        {"ignore_eos": True, "min_tokens": 3, "stop_token_ids": [7]},
        {"logit_bias": {"5": 1.5}, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2},
        {"stop": "wor", "include_stop_str_in_output": True, "skip_special_tokens": False},
    ],
)
def test_fields_of_sampling_mean_what_they_mean_in_a_chat(
    call: Any, backend: Any, fields: dict[str, Any]
) -> None:
    given = {**fields, "seed": 1}
    writes(backend, "hello world")
    of_chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, **given}
    [choice] = call("POST", "/v1/chat/completions", json=of_chat).json()["choices"]
    answer = call("POST", PATH, json={"input": "hi", "max_output_tokens": 9, **given}).json()
    [item] = answer["output"]
    [chat, response] = backend.requests
    assert chat.sampling == response.sampling
    assert item["content"][0]["text"] == choice["message"]["content"]


@pytest.mark.parametrize("text", [
    f"<think>which clock</think>Let me see.\n{CALL}{CALL} Done.",
    f"{CALL}then{CALL}",
    f"<think>no more {CALL}",
    "",
    '<tool_call>{"name": "now", "arguments": {"zo',
])  # fmt: skip
@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_the_events_make_up_the_items_of_the_whole_answer(
    call: Any, backend: Any, text: str, finish_reason: str
) -> None:
    writes(backend, text, finish_reason)
    body = {"input": "hi", "tools": [NOW]}
    whole = call("POST", PATH, json=body).json()
    raw = call("POST", PATH, json={**body, "stream": True}).text
    assert "[DONE]" not in raw
    items: dict[int, dict[str, Any]] = {}
    texts: dict[int, str] = {}
    for block in raw.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        index = event.get("output_index", -1)
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert index == len(texts)
                texts[index] = ""
            case kind if kind.endswith(".delta"):
                texts[index] += event["delta"]
            case kind if kind.endswith(("text.done", "arguments.done")):
                assert texts[index] == event.get("text", event.get("arguments"))
            case "output_item.done":
                items[index] = event["item"]
    status = "completed" if finish_reason == "stop" else "incomplete"
    assert event["type"] == f"response.{status}" and whole["status"] == status
    assert event["response"]["output"] == [items[i] for i in range(len(items))]
    assert [without_ids(i) for i in event["response"]["output"]] == [
        without_ids(item) for item in whole["output"]
    ]
    assert event["response"]["usage"] == whole["usage"]
    thought = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert (thought > 0) == ("<think>" in text)


def test_calls_and_results_go_back_in_as_items(client: openai.OpenAI, backend: Any) -> None:
    writes(backend, f"<think>which clock</think>Let me see.{CALL}")
    asked: Any = {"model": "m", "tools": [NOW]}
    turns: list[Any] = [{"role": "user", "content": "what time is it"}]
    first = client.responses.create(**asked, input=turns)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    found = first.output[-1]
    assert found.type == "function_call" and found.arguments == '{"zone": "UTC"}'
    turns += [item.model_dump(exclude_none=True) for item in first.output]
    turns.append({"type": "function_call_output", "call_id": found.call_id, "output": "noon"})
    client.responses.create(**asked, input=turns)
    assert prompt_of(backend).endswith(
        "<user>what time is it<assistant>(which clock)Let me see.<tool_call>"
        f'{{"name": "now", "arguments": {{"zone": "UTC"}}}}</tool_call><tool>noon{found.call_id}'
    )


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "found none"),
    ({"input": []}, "input", "at least one"),
    ({"input": 3}, "input", "found int"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type", "wanted one of message"),
    ({"input": [{"role": "user", "content": "a", "x": 1}]}, "input[0].x", "unknown"),
    (
        {"input": [{"role": "user", "content": [IMAGE]}]},
        "input[0].content[0].type",
        "found input_image",
    ),
    ({"input": [{"type": "function_call", "name": "a"}]}, "input[0].call_id", "found none"),
    ({"input": "a" * 200_000}, "input", "characters"),
    ({"input": "a", "background": True}, "background", "wanted false"),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "not built"),
    ({"input": "a", "store": True}, "store", "wanted false"),
    ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format.type", "found xml"),
    ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", "none"),
    ({"input": "a", "text": {"verbosity": "low"}}, "text.verbosity", "medium"),
    ({"input": "a", "max_output_tokens": 9999}, "max_output_tokens", "found 9999"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type", "found web_search"),
    ({"input": "a", "metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16"),
    ({"input": "a", "metadata": {"a": "b" * 513}}, "metadata", "at most 512"),
    ({"input": "a", "n": 2}, "n", "unknown"),
]


@pytest.mark.parametrize(("body", "param", "reason"), BAD, ids=[f"{b[1]}-{b[2]}" for b in BAD])
def test_bad_requests_are_400_and_name_the_field(
    call: Any, body: dict[str, Any], param: str, reason: str
) -> None:
    answer = call("POST", PATH, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error["message"]
    assert reason in error["message"]


def test_an_error_behind_the_first_event_is_an_event(call: Any, backend: Any) -> None:
    writes(backend, "hello world")
    backend.raises = RuntimeError("lost")
    raw = call("POST", PATH, json={"input": "hi", "stream": True}).text
    last = raw.removesuffix("\n\n").split("\n\n")[-1]
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == 500
