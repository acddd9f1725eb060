"""How the bodies of generating requests become structs of `schema.py`, and what no type says."""

from __future__ import annotations

from compile.errors import FieldError, Words
from serve.openai.fields import join_path, parse
from serve.openai.schema import ChatRequest, CompletionRequest, Message, RequestFields

_FIELDS_OF_ROLES = {
    "tool_call_id": "tool",
    "tool_calls": "assistant",
    "reasoning": "assistant",
    "reasoning_content": "assistant",
}
"""Fields of a message that only one role has."""


def parse_chat(body: bytes) -> ChatRequest:
    """Return the chat request in `body`; raises as `fields.parse`."""
    request = parse(body, ChatRequest)
    _check_stream_options(request)
    check_turns(request)
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Return the completions request in `body`; raises as `fields.parse`."""
    request = parse(body, CompletionRequest)
    _check_stream_options(request)
    return request


def check_turns(request: ChatRequest) -> None:
    """Refuse messages with fields of another role or without content; raises FieldError."""
    for i, message in enumerate(request.messages):
        _check_message(message, f"messages[{i}]")
    if request.add_generation_prompt and request.continue_final_message:
        wanted = "false with add_generation_prompt true"
        raise FieldError("continue_final_message", wanted, Words("true"))


def _check_stream_options(request: RequestFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise FieldError("stream_options", "only with stream true", Words("stream false"))


def _check_message(message: Message, at: str) -> None:
    for name, role in _FIELDS_OF_ROLES.items():
        if message.role != role and getattr(message, name):
            found = Words(f"one of role {message.role}; that is not built yet")
            raise FieldError(join_path(at, name), f"none but of role {role}", found)
    if message.content is None and not message.tool_calls:
        raise FieldError(join_path(at, "content"), "a value", Words("none"))
