"""The four classes of request fields, over the whole table."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params as openai_completion
from openai.types.chat import completion_create_params as openai_chat

from serve.openai.body import ignored_fields, inert_fields, known_fields
from serve.openai.body import parse as parse_body
from serve.openai.errors import as_api_error
from serve.openai.schema import ChatRequest, CompletionRequest

MINIMAL: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completion": {"prompt": "hi"},
}
STRUCTS: dict[str, type[msgspec.Struct]] = {"chat": ChatRequest, "completion": CompletionRequest}
INERT = [
    (kind, name, accepted)
    for kind, struct in STRUCTS.items()
    for name, accepted in inert_fields(struct).items()
]


def parse(kind: str, fields: dict[str, Any]) -> Any:
    body = msgspec.json.encode({**MINIMAL[kind], **fields})
    return parse_body(body, STRUCTS[kind], 256)


def refused(kind: str, fields: dict[str, Any]) -> tuple[str, str | None]:
    """Return what a client reads of a request that is refused, and the field's name."""
    with pytest.raises(Exception) as raised:
        parse(kind, fields)
    error = as_api_error(raised.value)
    assert error.status == 400
    return error.message, error.param


@pytest.mark.parametrize(("kind", "name", "accepted"), INERT)
def test_inert_field_is_accepted_only_where_it_changes_nothing(
    kind: str, name: str, accepted: tuple[Any, ...]
) -> None:
    for value in (*accepted, None):
        assert parse(kind, {name: value}) == parse(kind, {})
    for value in ("another", 17, [17], {"another": 17}):
        message, param = refused(kind, {name: value})
        assert "not built yet" in message and param == name


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
    assert refused(kind, {name: other})[1] == name


@pytest.mark.parametrize("kind", STRUCTS)
def test_implemented_fields_accept_null_as_left_out(kind: str) -> None:
    for name in STRUCTS[kind].__struct_fields__:
        if name not in MINIMAL[kind]:
            assert parse(kind, {name: None}) == parse(kind, {})


@pytest.mark.parametrize("kind", STRUCTS)
@pytest.mark.parametrize("name", ["temprature", "guided", "Messages", ""])
def test_unknown_field_is_refused_by_name(kind: str, name: str) -> None:
    for value in (1, None):
        message, param = refused(kind, {name: value})
        assert "unknown" in message and param == name


@pytest.mark.parametrize("kind", STRUCTS)
def test_no_field_is_in_two_classes(kind: str) -> None:
    struct = STRUCTS[kind]
    classes = (struct.__struct_fields__, inert_fields(struct), ignored_fields(struct))
    assert len(known_fields(struct)) == sum(map(len, classes))


def test_every_parameter_of_the_official_client_is_known() -> None:
    chat = {
        **openai_chat.CompletionCreateParamsBase.__annotations__,
        **openai_chat.CompletionCreateParamsStreaming.__annotations__,
    }
    completion = {
        **openai_completion.CompletionCreateParamsBase.__annotations__,
        **openai_completion.CompletionCreateParamsStreaming.__annotations__,
    }
    for names, struct in ((chat, ChatRequest), (completion, CompletionRequest)):
        assert len(names) > 15
        assert set(names) <= known_fields(struct)


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
