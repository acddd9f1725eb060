"""How the body of a generating request becomes a struct of `schema.py`.

Every field that OpenAI or vLLM documents is in a table here, implemented or inert (`fields.py`).
An inert one has the values that change nothing; null is always one of them.
"""

from __future__ import annotations

from typing import Any

from serve.openai.errors import BadRequest
from serve.openai.fields import FieldTable, convert, join_path, parse_fields
from serve.openai.schema import (
    CalledFunction,
    ChatRequest,
    CompletionRequest,
    Function,
    FunctionName,
    JsonSchemaFormat,
    Message,
    NamedToolChoice,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    TextPart,
    Tool,
    ToolCall,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLES_NOT_BUILT = ("function",)
_FIELDS_OF_ROLES = {
    "tool_call_id": ("tool",),
    "tool_calls": ("assistant",),
    "reasoning": ("assistant",),
    "reasoning_content": ("assistant",),
}
"""Fields of a message that only these roles have."""

LABELS = frozenset({"user", "safety_identifier", "prompt_cache_key"})
"""By these OpenAI tells a client's own users apart, in its records and in its cache."""

_INERT: dict[str, tuple[Any, ...]] = {
    # vLLM: sampling
    "best_of": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "length_penalty": (1,),
    "watermarking": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "logprob_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "repetition_detection": (),
    "thinking_token_budget": (),
    # vLLM: structured output
    "structural_tag": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    # vLLM: the request
    "priority": (0,),
    "request_id": (),
    "session_id": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "stream_interval": (1,),
    "return_tokens_as_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_mm_kwargs": (True,),
    "routed_experts_prompt_start": (0,),
}

CHAT_FIELDS = FieldTable(
    struct=ChatRequest,
    inert={
        **_INERT,
        "echo": (False,),
        # OpenAI
        "store": (False,),
        "service_tier": ("auto", "default"),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "moderation": (),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "functions": ([],),
        "function_call": ("none",),
        # vLLM
        "documents": ([],),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "return_prompt_text": (False,),
    },
    # Metadata of chats that are stored, and none is.
    ignored=LABELS | {"metadata"},
)

COMPLETION_FIELDS = FieldTable(
    struct=CompletionRequest,
    inert={**_INERT, "suffix": (), "prompt_embeds": ()},
    ignored=frozenset({"user"}),
)

STREAM_OPTIONS_FIELDS = FieldTable(struct=StreamOptions, inert={"include_obfuscation": (False,)})

_RESPONSE_FORMATS = ("text", "json_object", "json_schema")
RESPONSE_FORMAT_FIELDS = FieldTable(struct=ResponseFormat, inert={})
JSON_SCHEMA_FIELDS = FieldTable(struct=JsonSchemaFormat, inert={})
STRUCTURED_FIELDS = FieldTable(
    struct=StructuredOutputs,
    inert={
        "structural_tag": (),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "disable_fallback": (False,),
        "whitespace_pattern": (),
    },
)

# Clients send an assistant's message back as they received it, with some of these empty, or as they
# keep it: LiteLLM adds `provider_specific_fields`, openai's `parse` what it made of a text, and who
# joins a stream's deltas leaves `index` in the calls.
_OF_LITELLM = frozenset({"provider_specific_fields"})
MESSAGE_FIELDS = FieldTable(
    struct=Message,
    inert={
        "refusal": (),
        "annotations": ([],),
        "audio": (),
        "function_call": (),
    },
    ignored=_OF_LITELLM | {"parsed"},
)
TOOL_CALL_FIELDS = FieldTable(struct=ToolCall, inert={}, ignored=_OF_LITELLM | {"index"})
CALLED_FUNCTION_FIELDS = FieldTable(
    struct=CalledFunction, inert={}, ignored=_OF_LITELLM | {"parsed_arguments"}
)
TOOL_FIELDS = FieldTable(struct=Tool, inert={})
FUNCTION_FIELDS = FieldTable(struct=Function, inert={})
NAMED_CHOICE_FIELDS = FieldTable(struct=NamedToolChoice, inert={})
FUNCTION_NAME_FIELDS = FieldTable(struct=FunctionName, inert={})

PART_FIELDS = FieldTable(struct=TextPart, inert={"prompt_cache_breakpoint": ()})


def parse_chat(body: bytes) -> ChatRequest:
    """Return the chat request in `body`.

    Raises:
        BadRequest: not JSON, or a field that is missing, unknown, not built or of another type.
    """
    return chat_request(_parse_object(body, CHAT_FIELDS))


def chat_request(fields: dict[str, Any]) -> ChatRequest:
    """Return the chat completion with these fields; raises BadRequest."""
    if isinstance(fields.get("messages"), list):
        fields["messages"] = [
            _screen_message(message, f"messages[{i}]")
            for i, message in enumerate(fields["messages"])
        ]
    if isinstance(fields.get("tools"), list):
        fields["tools"] = [
            _screen_function_of(tool, f"tools[{i}]", TOOL_FIELDS, FUNCTION_FIELDS)
            for i, tool in enumerate(fields["tools"])
        ]
    if isinstance(fields.get("tool_choice"), dict):
        fields["tool_choice"] = _screen_function_of(
            fields["tool_choice"], "tool_choice", NAMED_CHOICE_FIELDS, FUNCTION_NAME_FIELDS
        )
    request = convert(fields, ChatRequest)
    if not request.messages:
        raise BadRequest("messages: wanted at least one, found none", param="messages")
    for i, message in enumerate(request.messages):
        _check_message(message, f"messages[{i}]")
    if request.add_generation_prompt and request.continue_final_message:
        raise BadRequest(
            "continue_final_message: wanted false with add_generation_prompt true, found true",
            param="continue_final_message",
        )
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Return the completions request in `body`.

    Raises:
        BadRequest: not JSON, or a field that is missing, unknown, not built or of another type.
    """
    return convert(_parse_object(body, COMPLETION_FIELDS), CompletionRequest)


def _parse_object(body: bytes, table: FieldTable) -> dict[str, Any]:
    fields = parse_fields(body, table)
    if "stream_options" in fields:
        fields["stream_options"] = STREAM_OPTIONS_FIELDS.screen(
            fields["stream_options"], "stream_options"
        )
        if fields.get("stream", False) is False:
            message = "stream_options: wanted only with stream true, found stream false"
            raise BadRequest(message, param="stream_options")
    if "response_format" in fields:
        fields["response_format"] = screen_response_format(fields["response_format"])
    if "structured_outputs" in fields:
        fields["structured_outputs"] = STRUCTURED_FIELDS.screen(
            fields["structured_outputs"], "structured_outputs"
        )
    return fields


def screen_response_format(found: Any) -> Any:
    """Return the fields of a `response_format`; raises BadRequest."""
    wanted = RESPONSE_FORMAT_FIELDS.screen(found, "response_format")
    if not isinstance(wanted, dict):
        return wanted
    kind, schema = wanted.get("type"), wanted.get("json_schema")
    if isinstance(kind, str) and kind not in _RESPONSE_FORMATS:
        param = "response_format.type"
        message = f"{param}: wanted {', '.join(_RESPONSE_FORMATS)}, found {kind[:100]}"
        raise BadRequest(message, param=param)
    if (kind == "json_schema") != (schema is not None):
        param, found = "response_format.json_schema", "none" if schema is None else "one"
        message = f"{param}: wanted one with type json_schema alone, found {found}"
        raise BadRequest(message, param=param)
    if schema is not None:
        schema = JSON_SCHEMA_FIELDS.screen(schema, "response_format.json_schema")
        wanted = {**wanted, "json_schema": schema}
    return wanted


def _screen_message(found: Any, at: str) -> Any:
    message = MESSAGE_FIELDS.screen(found, at)
    if isinstance(message, dict) and isinstance(message.get("content"), list):
        message["content"] = [
            _screen_part(part, f"{at}.content[{i}]") for i, part in enumerate(message["content"])
        ]
    if isinstance(message, dict) and isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [
            _screen_function_of(
                call, f"{at}.tool_calls[{i}]", TOOL_CALL_FIELDS, CALLED_FUNCTION_FIELDS
            )
            for i, call in enumerate(message["tool_calls"])
        ]
    return message


def _screen_function_of(found: Any, at: str, table: FieldTable, of_function: FieldTable) -> Any:
    """Screen an object and the `function` in it."""
    screened = table.screen(found, at)
    if isinstance(screened, dict) and "function" in screened:
        at = join_path(at, "function")
        screened["function"] = of_function.screen(screened["function"], at)
    return screened


def _screen_part(found: Any, at: str) -> Any:
    kind = found.get("type") if isinstance(found, dict) else None
    if isinstance(kind, str) and kind != "text":
        param = f"{at}.type"
        message = f"{param}: wanted text, found {kind}; other parts are not built yet"
        raise BadRequest(message, param=param)
    return PART_FIELDS.screen(found, at)


def _check_message(message: Message, at: str) -> None:
    role, param = message.role, join_path(at, "role")
    if role not in ROLES:
        built = "; not built yet" if role in _ROLES_NOT_BUILT else ""
        raise BadRequest(f"{param}: wanted {', '.join(ROLES)}, found {role}{built}", param=param)
    for name, roles in _FIELDS_OF_ROLES.items():
        if role not in roles and getattr(message, name):
            param = join_path(at, name)
            message_text = f"{param}: wanted none but of role {roles[0]}, found one of role {role}"
            raise BadRequest(f"{message_text}; that is not built yet", param=param)
    if message.content is None and not message.tool_calls:
        param = join_path(at, "content")
        raise BadRequest(f"{param}: wanted a value, found none", param=param)
    for i, call in enumerate(message.tool_calls):
        if call.type != "function":
            param = join_path(at, f"tool_calls[{i}].type")
            raise BadRequest(f"{param}: wanted function, found {call.type}", param=param)
