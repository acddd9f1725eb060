"""/tokenize, /detokenize and /openapi.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from serve.clients import UNKNOWN
from serve.openai.app import NO_TEXT
from serve.openai.body import known_fields
from serve.openai.responses import ResponsesRequest
from serve.openai.schema import ChatRequest, CompletionRequest
from serve.openai.tokenizing import TokenizeRequest
from serve.requests.tokenizer import Tokenizer

pytestmark = pytest.mark.feature("R06")

Call = Callable[..., Any]
TEXT = "hello world, the cat"
MESSAGES = [{"role": "user", "content": TEXT}]
SCORED = {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True}


def test_a_text_becomes_tokens_and_tokens_a_text(call: Call, tokenizer: Tokenizer) -> None:
    answer = call("POST", "/tokenize", json={"prompt": TEXT, "return_token_strs": True}).json()
    wanted = tokenizer.encode(TEXT)
    assert answer["tokens"] == wanted and answer["count"] == len(wanted)
    assert answer["max_model_len"] == 256
    assert answer["token_strs"] == [tokenizer.token(each) for each in wanted]
    assert call("POST", "/tokenize", json={"prompt": TEXT}).json()["token_strs"] is None
    back = call("POST", "/detokenize", json={"tokens": wanted, "model": "scripted"}).json()
    assert back == {"prompt": TEXT}
    assert call("POST", "/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
)
def test_a_conversation_becomes_what_a_chat_completion_computes(
    call: Call, backend: Any, options: dict[str, Any]
) -> None:
    found = call("POST", "/tokenize", json={"messages": MESSAGES, **options}).json()["tokens"]
    call("POST", "/v1/chat/completions", json={"messages": MESSAGES, **options})
    assert found == backend.requests[-1].prompt_token_ids
    again = call("POST", "/detokenize", json={"tokens": found}).json()["prompt"]
    assert again.startswith("<|im_start|>user\nhello"), "special tokens are kept"


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/tokenize", {}, 400, "prompt: wanted it or messages, found neither"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt: wanted it or messages, found"),
        ("/tokenize", {"messages": []}, 400, "messages: wanted at least one"),
        ("/tokenize", {"messages": [{"role": "x", "content": ""}]}, 400, "messages[0].role: "),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, 400, "tools: wanted none"),
        ("/tokenize", {"prompt": "a", "color": 1}, 400, "color: unknown field"),
        ("/tokenize", {"prompt": "a", "model": "b"}, 404, "model: wanted scripted, found b"),
        ("/tokenize", {"prompt": "the cat " * 400}, 400, "prompt: wanted at most"),
        ("/detokenize", {}, 400, "tokens: wanted a value, found none"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens: wanted token ids from 0 to "),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens: wanted token ids from 0 to "),
        ("/detokenize", {"tokens": [1], "model": "b"}, 404, "model: wanted scripted, found b"),
    ],
)
def test_a_bad_request_names_the_field(
    call: Call, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    answer = call("POST", path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"].startswith(message)


def test_nothing_is_tokenized_for_whom_there_is_no_room(
    call: Call, serving: Any, backend: Any
) -> None:
    places = [serving.admission.enter(UNKNOWN) for _ in range(serving.admission.max_live)]
    assert call("POST", "/tokenize", json={"prompt": "a"}).status_code == 429
    places.pop().leave()
    assert call("POST", "/tokenize", json={"prompt": "a"}).status_code == 200
    assert serving.admission.num_live == len(places), "its place is given back"
    backend.ready = False
    assert call("POST", "/tokenize", json={"prompt": "a"}).status_code == 503


def resolved(document: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a component as a schema of its own."""
    return {"$ref": f"#/components/schemas/{name}", "components": document["components"]}


def test_the_document_describes_every_route_and_every_field(app: Starlette, call: Call) -> None:
    document = call("GET", "/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    routes = {route.path.replace(":path", "") for route in app.routes if isinstance(route, Route)}
    assert set(document["paths"]) == routes - set(NO_TEXT)
    components = document["components"]["schemas"]
    for struct in (ChatRequest, CompletionRequest, ResponsesRequest, TokenizeRequest):
        found = components[struct.__name__]
        assert set(found["properties"]) == known_fields(struct)
        assert found["additionalProperties"] is False
    for component in components.values():
        jsonschema.Draft202012Validator.check_schema(component)


@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        ("/v1/chat/completions", "ChatCompletion", {"messages": MESSAGES}),
        ("/v1/chat/completions", "ChatCompletion", {"messages": MESSAGES, **SCORED}),
        ("/v1/completions", "Completion", {"prompt": TEXT, "logprobs": 2, "prompt_logprobs": 0}),
        ("/tokenize", "Tokenized", {"prompt": TEXT, "return_token_strs": True}),
        ("/detokenize", "Detokenized", {"tokens": [5, 6]}),
        ("/v1/chat/completions", "ErrorBody", {"messages": 1}),
    ],
)
def test_answers_have_the_schema_that_the_document_gives(
    call: Call, path: str, name: str, body: dict[str, Any]
) -> None:
    document = call("GET", "/openapi.json").json()
    answer = call("POST", path, json=body)
    jsonschema.validate(answer.json(), resolved(document, name))
    content = document["paths"][path]["post"]["responses"][str(answer.status_code)]["content"]
    assert content["application/json"]["schema"]["$ref"].endswith(f"/{name}")


@pytest.mark.parametrize(
    ("fields", "is_accepted"),
    [
        ({}, True),
        ({"temperature": 0}, True),
        ({"temperature": -1}, False),
        ({"top_logprobs": 21, "logprobs": True}, False),
        ({"tools": []}, True),
        ({"tools": [1]}, False),
        ({"color": 1}, False),
        ({"stop": ["a", "b"]}, True),
        ({"top_p": 0}, False),
        ({"cache_salt": ""}, False),
        ({"logit_bias": {"5": 101}}, False),
        ({"allowed_token_ids": []}, False),
        ({"messages": [{"role": "king", "content": "a"}]}, False),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]}, False),
        ({"tools": [{"type": "web_search", "function": {"name": "a"}}]}, False),
        ({"response_format": {"type": "xml"}}, False),
    ],
)
def test_the_document_accepts_what_the_server_accepts(
    call: Call, fields: dict[str, Any], is_accepted: bool
) -> None:
    document = call("GET", "/openapi.json").json()
    body = {"messages": MESSAGES, **fields}
    validator = jsonschema.Draft202012Validator(resolved(document, "ChatRequest"))
    assert validator.is_valid(body) == is_accepted
    status = call("POST", "/v1/chat/completions", json=body).status_code
    assert status == (200 if is_accepted else 400)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True}),
        ("/v1/completions", {"prompt": TEXT, "logprobs": 1}),
        ("/v1/responses", {"input": TEXT}),
    ],
)
@pytest.mark.parametrize("error", ["", "it broke"])
def test_events_have_the_schema_that_the_document_gives(
    call: Call, backend: Any, path: str, body: dict[str, Any], error: str
) -> None:
    if error:
        backend.error, backend.finish_reason = error, "error"
    document = call("GET", "/openapi.json").json()
    answered = document["paths"][path]["post"]["responses"]["200"]["content"]
    schema = answered["text/event-stream"]["schema"]
    text = schema["properties"]["data"]
    [payload] = [kind for kind in text.get("anyOf", [text]) if "contentSchema" in kind]
    of_json = {**payload["contentSchema"], "components": document["components"]}
    raw = call("POST", path, json={**body, "stream": True}).text
    events = [
        dict(line.split(": ", 1) for line in block.splitlines())
        for block in raw.removesuffix("\n\n").split("\n\n")
    ]
    assert len(events) > 2 and ("it broke" in raw) == bool(error)
    for event in events:
        jsonschema.validate(event, schema)
        if event["data"] != "[DONE]":
            jsonschema.validate(json.loads(event["data"]), of_json)
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({"id": 1}, of_json)
