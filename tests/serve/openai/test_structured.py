"""Structured output over HTTP: every spelling reaches the model, and what is wrong gets a 400."""

from __future__ import annotations

import array
import fcntl
import json
import re
import signal
import termios
import threading
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from serve.llm import LLM

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "What is 12 + 30?"},
    CHAT: {"messages": [{"role": "user", "content": "What is 12 + 30?"}]},
}
SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": [1, 20, 300]}, "y": {"type": "boolean"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
OF_OPENAI = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}


@pytest.fixture
def app(engine_app: Any) -> Any:
    """In place of the one over a script: `call` reaches a model."""
    return engine_app


def texts(call: Any, path: str, fields: dict[str, Any]) -> list[str]:
    body = {**BODIES[path], "max_tokens": 200, "n": 3, "seed": 4, "temperature": 1.0, **fields}
    answer = call("POST", path, json=body)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [choice["text"] if path == TEXT else choice["message"]["content"] for choice in choices]


@pytest.mark.feature("R09")
@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": OF_OPENAI},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
    ],
)
def test_a_schema_in_each_spelling_holds_the_answer(
    call: Any, path: str, fields: dict[str, Any]
) -> None:
    for text in texts(call, path, fields):
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.feature("R09")
@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[xyz]{4}"}}, "[xyz]{4}"),
        ({"guided_regex": "[xyz]{4}"}, "[xyz]{4}"),
        ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"structured_outputs": {"grammar": 'root ::= "p" ("q" | "r")'}}, "p[qr]"),
        ({"guided_grammar": 'start: "p" /[qr]/'}, "p[qr]"),
    ],
)
def test_each_other_form_in_each_spelling_holds_the_answer(
    call: Any, path: str, fields: dict[str, Any], pattern: str
) -> None:
    for text in texts(call, path, fields):
        assert re.fullmatch(pattern, text), text


@pytest.mark.feature("R09")
def test_any_object_is_an_object_or_cut(call: Any) -> None:
    body = {**BODIES[CHAT], "max_tokens": 60, "n": 8, "response_format": {"type": "json_object"}}
    for choice in call("POST", CHAT, json=body).json()["choices"]:
        text = choice["message"]["content"]
        assert text.startswith("{")
        assert choice["finish_reason"] == "length" or isinstance(json.loads(text), dict)
    plain = {**BODIES[CHAT], "max_tokens": 9, "temperature": 0}
    [free] = call("POST", CHAT, json=plain).json()["choices"]
    [text] = call("POST", CHAT, json={**plain, "response_format": {"type": "text"}}).json()[
        "choices"
    ]
    assert text["message"]["content"] == free["message"]["content"]


def of_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    given = {"name": "s", "schema": schema, **fields}
    return {"response_format": {"type": "json_schema", "json_schema": given}}


AT_SCHEMA = "response_format.json_schema.schema"
NO_SCHEMA = {"json_schema": {"name": "s", "schema": {}}}


@pytest.mark.feature("R09")
@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (of_schema({"type": "strng"}), AT_SCHEMA),
        (of_schema({"not": {}}), AT_SCHEMA),
        (of_schema({"$ref": "#/nowhere"}), AT_SCHEMA),
        (of_schema({"allOf": [False]}), AT_SCHEMA),
        (of_schema({"enum": ["x" * 80_000]}), AT_SCHEMA),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", **NO_SCHEMA}}, "response_format.json_schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"guided_json": {"type": "strng"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "(("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "start: x"}, "guided_grammar"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
        ({"guided_regex": "a", "allowed_token_ids": [70]}, "allowed_token_ids"),
    ],
)
def test_what_is_wrong_is_named(call: Any, path: str, fields: dict[str, Any], param: str) -> None:
    answer = call("POST", path, json={**BODIES[path], **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["message"].startswith(param), error


# --- calls that are forced, and responses ------------------------------------------------------

RESPONSES = "/v1/responses"
PLACE = {
    "type": "object",
    "properties": {"place": {"enum": ["here", "there"]}},
    "required": ["place"],
    "additionalProperties": False,
}
COUNT = {
    "type": "object",
    "properties": {"count": {"enum": [1, 2, 3]}},
    "required": ["count"],
    "additionalProperties": False,
}
PARAMETERS = {"look": PLACE, "repeat": COUNT}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in PARAMETERS.items()
]
LOOK = {"type": "function", "function": {"name": "look"}}


def checked(calls: list[dict[str, Any]]) -> list[str]:
    """Return the names of calls whose arguments are what their functions take."""
    for found in calls:
        jsonschema.validate(json.loads(found["arguments"]), PARAMETERS[found["name"]])
    return [found["name"] for found in calls]


@pytest.mark.feature("R10")
@pytest.mark.parametrize("choice", ["required", LOOK], ids=["required", "named"])
@pytest.mark.parametrize("parallel", [True, False])
def test_forced_calls_are_calls_of_the_tools_and_nothing_else(
    call: Any, choice: Any, parallel: bool
) -> None:
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel}
    body = {**BODIES[CHAT], **fields, "max_tokens": 200, "n": 8, "seed": 7, "temperature": 0.5}
    answer = call("POST", CHAT, json=body)
    assert answer.status_code == 200, answer.text
    num_calls = 0
    for found in answer.json()["choices"]:
        calls = [made["function"] for made in found["message"]["tool_calls"]]
        is_cut = found["finish_reason"] == "length"
        assert is_cut or found["finish_reason"] == "tool_calls"
        assert is_cut or calls
        # What was cut is an argument of the last call; the list of calls has no bound.
        names = checked(calls[:-1] if is_cut else calls)
        num_calls += len(names)
        assert choice is not LOOK or set(names) <= {"look"}
        assert parallel or len(calls) <= 1
    assert num_calls


@pytest.mark.feature("R10")
def test_a_format_of_the_answer_leaves_forced_calls_as_they_are(call: Any) -> None:
    # instructor and agents with an output type send both.
    flat = {"type": "json_schema", "name": "s", "schema": COUNT}
    whole = {"type": "json_schema", "json_schema": {"name": "s", "schema": COUNT}}
    chat = {**BODIES[CHAT], "tools": TOOLS, "tool_choice": LOOK, "temperature": 0}
    found = []
    for given in ({}, {"response_format": whole}):
        [choice] = call("POST", CHAT, json={**chat, **given}).json()["choices"]
        found.append([made["function"] for made in choice["message"]["tool_calls"]])
    assert found[0] == found[1] and checked(found[1]) == ["look"]
    tool = {"type": "function", **TOOLS[0]["function"]}
    body = {"input": "Say", "tools": [tool], "tool_choice": {"type": "function", "name": "look"}}
    [item] = call("POST", RESPONSES, json={**body, "text": {"format": flat}}).json()["output"]
    assert checked([item]) == ["look"]


@pytest.mark.feature("R10")
@pytest.mark.parametrize("choice", ["required", LOOK], ids=["required", "named"])
def test_forced_calls_come_in_a_stream_as_they_do_whole(
    call: Any, joined: Any, choice: Any
) -> None:
    body = {**BODIES[CHAT], "tools": TOOLS, "tool_choice": choice, "temperature": 0}
    body |= {"max_tokens": 100, "parallel_tool_calls": False}
    [whole] = call("POST", CHAT, json=body).json()["choices"]
    streamed = joined(call("POST", CHAT, json={**body, "stream": True}).text)
    calls = [made["function"] for made in whole["message"]["tool_calls"]]
    assert calls and [made["function"] for made in streamed["message"]["tool_calls"]] == calls
    assert whole["finish_reason"] == "length" or checked(calls)


@pytest.mark.feature("R10")
def test_tools_that_cannot_be_forced_are_refused_by_their_field(call: Any) -> None:
    function = {"name": "look", "parameters": {"type": "strng"}}
    tools = [{"type": "function", "function": function}]
    for choice in ("required", LOOK):
        answer = call("POST", CHAT, json={**BODIES[CHAT], "tools": tools, "tool_choice": choice})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "tools"


@pytest.mark.feature("R10")
@pytest.mark.parametrize(("places", "status"), [(["here", "there"], 200), (["nowhere"], 400)])
def test_what_tools_define_holds_in_their_calls_and_is_the_same_in_all(
    call: Any, places: list[str], status: int
) -> None:
    """References of a tool lead to its own definitions, also where it is one of several."""
    tools = []
    for name, known in (("look", ["here", "there"]), ("go", places)):
        schema = {**PLACE, "properties": {"place": {"$ref": "#/$defs/Place"}}}
        schema["$defs"] = {"Place": {"enum": known}}
        tools.append({"type": "function", "function": {"name": name, "parameters": schema}})
    body = {**BODIES[CHAT], "tools": tools, "tool_choice": "required", "max_tokens": 100}
    answer = call("POST", CHAT, json={**body, "parallel_tool_calls": False, "seed": 2})
    assert answer.status_code == status, answer.text
    if status == 400:
        assert "the same $defs.Place" in answer.json()["error"]["message"]
        return
    [choice] = answer.json()["choices"]
    [made] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length" or made["function"]["name"] in ("look", "go")
    if choice["finish_reason"] == "tool_calls":
        jsonschema.validate(json.loads(made["function"]["arguments"]), PLACE)


@pytest.mark.feature("R09")
def test_a_response_has_the_format_that_its_text_is_to_have(call: Any) -> None:
    given = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}}
    answer = call("POST", RESPONSES, json={"input": "Say", "text": given, "seed": 1}).json()
    assert answer["status"] == "completed" and answer["text"] == given
    [item] = answer["output"]
    jsonschema.validate(json.loads(item["content"][0]["text"]), SCHEMA)
    bad = {"format": {"type": "json_schema", "name": "s", "schema": {"type": "strng"}}}
    error = call("POST", RESPONSES, json={"input": "Say", "text": bad}).json()["error"]
    assert error["param"] == "text.format.schema" and error["code"] == 400


@pytest.mark.feature("R10")
def test_a_response_is_made_of_the_calls_that_are_forced(call: Any) -> None:
    tools = [{"type": "function", "name": name, "parameters": p} for name, p in PARAMETERS.items()]
    for choice in ("required", {"type": "function", "name": "look"}):
        body = {"input": "Say", "tools": tools, "tool_choice": choice, "seed": 1}
        body["parallel_tool_calls"] = False
        answer = call("POST", RESPONSES, json=body).json()
        [item] = answer["output"]
        assert item["type"] == "function_call"
        assert answer["status"] == "incomplete" or checked([item])


@pytest.mark.feature("R09")
def test_a_schema_whose_process_was_killed_is_tried_again(call: Any, llm: LLM) -> None:
    """It gets 503 then, and is served the next time."""
    process = llm.tokenizer.grammars._idle[-1].start()  # the one that is taken next
    process.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{process.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)

    def kill() -> None:
        num_bytes = array.array("i", [0])
        while not num_bytes[0]:  # it has not read what it is asked
            time.sleep(0.001)
            fcntl.ioctl(process.stdin, termios.FIONREAD, num_bytes)
        process.kill()

    killing = threading.Thread(target=kill)
    killing.start()
    body = {**BODIES[TEXT], "max_tokens": 20, "structured_outputs": {"regex": "[uvw]{3}"}}
    answer = call("POST", TEXT, json=body)
    killing.join()
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["type"] == "service_unavailable_error"
    assert re.fullmatch("[uvw]{3}", call("POST", TEXT, json=body).json()["choices"][0]["text"])
