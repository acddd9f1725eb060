"""The four classes of request fields, over the whole table."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params as openai_completion
from openai.types.chat import completion_create_params as openai_chat

from serve.openai.errors import BadRequest
from serve.openai.request_parser import CHAT_FIELDS, COMPLETION_FIELDS, parse_chat, parse_completion

MINIMAL: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completion": {"prompt": "hi"},
}
TABLES = {"chat": CHAT_FIELDS, "completion": COMPLETION_FIELDS}
INERT = [
    (kind, name, accepted)
    for kind, table in TABLES.items()
    for name, accepted in table.inert.items()
]


def parse(kind: str, fields: dict[str, Any]) -> Any:
    body = msgspec.json.encode({**MINIMAL[kind], **fields})
    return parse_chat(body) if kind == "chat" else parse_completion(body)


@pytest.mark.parametrize(("kind", "name", "accepted"), INERT)
def test_inert_field_is_accepted_only_where_it_changes_nothing(
    kind: str, name: str, accepted: tuple[Any, ...]
) -> None:
    for value in (*accepted, None):
        assert parse(kind, {name: value}) == parse(kind, {})
    for value in ("another", 17, [17], {"another": 17}):
        with pytest.raises(BadRequest, match="not built yet") as raised:
            parse(kind, {name: value})
        assert raised.value.param == name


@pytest.mark.parametrize(("kind", "name", "other"), [
    ("chat", "parallel_tool_calls", 1),
    ("chat", "documents", [{}]),
    ("chat", "store", 0),
    ("chat", "service_tier", "flex"),
    ("completion", "echo", 0),
    ("completion", "best_of", True),
    ("completion", "length_penalty", 1.01),
])  # fmt: skip
def test_near_misses_of_a_default_are_refused(kind: str, name: str, other: Any) -> None:
    with pytest.raises(BadRequest) as raised:
        parse(kind, {name: other})
    assert raised.value.param == name


@pytest.mark.parametrize("kind", TABLES)
def test_implemented_fields_accept_null_as_left_out(kind: str) -> None:
    for name in TABLES[kind].struct.__struct_fields__:
        if name not in MINIMAL[kind]:
            assert parse(kind, {name: None}) == parse(kind, {})


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("name", ["temprature", "guided", "Messages", ""])
def test_unknown_field_is_refused_by_name(kind: str, name: str) -> None:
    for value in (1, None):
        with pytest.raises(BadRequest, match="unknown") as raised:
            parse(kind, {name: value})
        assert raised.value.param == name


@pytest.mark.parametrize("kind", TABLES)
def test_no_field_is_in_two_classes(kind: str) -> None:
    table = TABLES[kind]
    classes = (table.struct.__struct_fields__, table.inert, table.ignored)
    assert len(table.names) == sum(map(len, classes))


def test_every_parameter_of_the_official_client_is_known() -> None:
    chat = {
        **openai_chat.CompletionCreateParamsBase.__annotations__,
        **openai_chat.CompletionCreateParamsStreaming.__annotations__,
    }
    completion = {
        **openai_completion.CompletionCreateParamsBase.__annotations__,
        **openai_completion.CompletionCreateParamsStreaming.__annotations__,
    }
    for names, table in ((chat, CHAT_FIELDS), (completion, COMPLETION_FIELDS)):
        assert len(names) > 15
        assert set(names) <= table.names


@pytest.mark.feature("R06", "R12")
@pytest.mark.parametrize(("kind", "name"), [
    *(("chat", name) for name in ("user", "safety_identifier", "prompt_cache_key", "metadata")),
    ("completion", "user"),
])  # fmt: skip
def test_a_label_for_the_clients_own_records_changes_nothing(kind: str, name: str) -> None:
    for value in ("65a1", {"a": "b"}, [1], None):
        assert parse(kind, {name: value}) == parse(kind, {})


def test_an_assistants_message_comes_back_as_clients_keep_it() -> None:
    function = {"name": "now", "arguments": "{}"}
    call = {"id": "a", "type": "function", "function": function}
    kept = {
        **call,
        "index": 0,
        "provider_specific_fields": {"a": 1},
        "function": {**function, "parsed_arguments": {}, "provider_specific_fields": None},
    }
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    other = {**message, "tool_calls": [kept], "parsed": {"b": 2}, "provider_specific_fields": {}}
    assert parse("chat", {"messages": [other]}) == parse("chat", {"messages": [message]})
