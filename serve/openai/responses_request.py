"""The body of POST /v1/responses, and the chat that it stands for.

The server keeps nothing between requests: `store` is false, and a conversation comes whole, as
`input`. Items that an answer had can be sent back as they were.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from serve.openai.errors import BadRequest
from serve.openai.fields import FieldTable, convert, join_path, parse_fields
from serve.openai.request_parser import LABELS, screen_response_format
from serve.openai.schema import (
    CalledFunction,
    ChatRequest,
    Function,
    FunctionName,
    Message,
    NamedToolChoice,
    ResponseFormat,
    TextPart,
    Tool,
    ToolCall,
)

MAX_METADATA = 16
"""OpenAI's bound on the keys of `metadata`, which is given back; more get 400."""
MAX_METADATA_CHARS = 512
"""The same on each of its texts."""
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/responses. Fields of sampling are those of chat completions."""

    input: str | list[dict[str, Any]]
    """A text, or items: messages, and of earlier answers `function_call`, `function_call_output`
    and `reasoning`. Their ids and states have no meaning here."""
    model: str | None = None
    """The name that is served; null: whichever that is."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: int | None = None
    """Output tokens at most; null: what the model's length leaves."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that have this probability together."""
    top_k: int = 0
    """Draw from so many of the likeliest tokens only."""
    min_p: float = 0.0
    """Least probability of a token that is drawn, relative to the likeliest token's."""
    presence_penalty: float = 0.0
    """As in chat completions."""
    frequency_penalty: float = 0.0
    """As in chat completions."""
    repetition_penalty: float = 1.0
    """As in chat completions."""
    seed: int | None = None
    """Same seed, same tokens; null draws one."""
    logit_bias: dict[str, float] = {}
    """As in chat completions."""
    min_tokens: int = 0
    """Output tokens before a stop token or a stop string may end the text."""
    stop: str | list[str] = []
    """What ends the output."""
    stop_token_ids: list[int] = []
    """As in chat completions."""
    ignore_eos: bool = False
    """Go on behind the checkpoint's end-of-sequence tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further variables for the chat template."""
    tools: list[dict[str, Any]] = []
    """Functions that the model may call, each with its name beside its `type`."""
    tool_choice: str | dict[str, Any] | None = None
    """As in chat completions; a function is named beside `type`."""
    parallel_tool_calls: bool = True
    """False: of several calls the first one is given."""
    metadata: dict[str, str] = {}
    """Given back with the answer: up to `MAX_METADATA` texts of `MAX_METADATA_CHARS` characters."""
    text: dict[str, Any] = {}
    """`format`: as `response_format` of chat completions, with the fields of `json_schema` beside
    `type`."""
    cache_salt: str | None = None
    """As in chat completions."""
    stream: bool = False
    """Send the answer as typed events while it is generated."""


RESPONSES_FIELDS = FieldTable(
    struct=ResponsesRequest,
    inert={
        "background": (False,),
        "background_options": (),
        "context_management": (),
        "conversation": (),
        "access_programs": (),
        "image": (),
        "include": ([],),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "reasoning": ({},),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "stream_options": ({}, {"include_obfuscation": False}),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    },
    ignored=LABELS,
)


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class _MessageItem(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "message"
    role: str
    content: str | list[_Part]
    id: str = ""
    status: str = ""
    phase: str = ""


class _CallItem(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    call_id: str
    name: str
    arguments: str
    id: str = ""
    status: str = ""


class _CallOutputItem(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    call_id: str
    output: str | list[_Part]
    id: str = ""
    status: str = ""


class _ReasoningItem(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    summary: list[_Part] = []
    content: list[_Part] = []
    id: str = ""
    status: str = ""


class _FlatFunction(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    name: str
    description: str | UnsetType = UNSET
    parameters: dict[str, Any] | UnsetType = UNSET
    strict: bool | UnsetType = UNSET


class _Text(msgspec.Struct, frozen=True, kw_only=True):
    format: dict[str, Any] | None = None


class _TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    name: str = "response"
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool = False


class _FlatChoice(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    name: str


_ITEMS: dict[str, type[msgspec.Struct]] = {
    "message": _MessageItem,
    "function_call": _CallItem,
    "function_call_output": _CallOutputItem,
    "reasoning": _ReasoningItem,
}


class ResponsesChat(ChatRequest, frozen=True, kw_only=True):
    """The chat that a request stands for; errors name the request's own fields."""

    def spelling(self, param: str) -> str:
        """Return the JSON field behind a parameter of sampling."""
        own = {"max_tokens": "max_output_tokens", "prompt": "input"}
        spelt = own.get(param) or super().spelling(param)
        if not spelt.startswith("response_format"):
            return spelt
        return "text.format.schema" if spelt.endswith(".schema") else "text.format"


def parse_responses(body: bytes) -> tuple[ResponsesRequest, ResponsesChat]:
    """Return the request in `body`, and the chat that it stands for.

    Raises:
        BadRequest: not JSON, or a field that is missing, unknown, not built or of another type.
    """
    request = convert(parse_fields(body, RESPONSES_FIELDS), ResponsesRequest)
    if len(request.metadata) > MAX_METADATA:
        found = f"wanted at most {MAX_METADATA} texts, found {len(request.metadata)}"
        raise BadRequest(f"metadata: {found}", param="metadata")
    if any(len(text) > MAX_METADATA_CHARS for pair in request.metadata.items() for text in pair):
        wanted = f"wanted texts of at most {MAX_METADATA_CHARS} characters, found a longer one"
        raise BadRequest(f"metadata: {wanted}", param="metadata")
    chat = ResponsesChat(
        messages=_messages(request),
        model=request.model,
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        seed=request.seed,
        logit_bias=request.logit_bias,
        min_tokens=request.min_tokens,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        chat_template_kwargs=request.chat_template_kwargs,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)],
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request.text),
        cache_salt=request.cache_salt,
        stream=request.stream,
    )
    return request, chat


def _messages(request: ResponsesRequest) -> list[Message]:
    messages: list[Message] = []
    if request.instructions is not None:
        messages.append(Message(role="system", content=request.instructions))
    if isinstance(request.input, str):
        return [*messages, Message(role="user", content=request.input)]
    if not request.input:
        raise BadRequest("input: wanted at least one item, found none", param="input")
    for i, found in enumerate(request.input):
        message = _message(found, f"input[{i}]")
        if messages and _is_one_turn(messages[-1], message):
            message = _joined(messages.pop(), message)
        messages.append(message)
    return messages


def _message(found: dict[str, Any], at: str) -> Message:
    kind = found.get("type", "message")
    struct = _ITEMS.get(kind) if isinstance(kind, str) else None
    if struct is None:
        param = join_path(at, "type")
        raise BadRequest(f"{param}: wanted one of {', '.join(_ITEMS)}, found {kind}", param=param)
    item = _item(found, at, struct)
    match item:
        case _MessageItem():
            if item.role not in _ROLES:
                param = join_path(at, "role")
                wanted = f"wanted {', '.join(_ROLES)}, found {item.role}"
                raise BadRequest(f"{param}: {wanted}", param=param)
            return Message(role=item.role, content=_content(item.content, join_path(at, "content")))
        case _CallItem():
            function = CalledFunction(name=item.name, arguments=item.arguments)
            call = ToolCall(id=item.call_id, function=function)
            return Message(role="assistant", tool_calls=[call])
        case _CallOutputItem():
            content = _content(item.output, join_path(at, "output"))
            return Message(role="tool", tool_call_id=item.call_id, content=content)
        case _ReasoningItem():
            parts = item.content or item.summary
            return Message(role="assistant", reasoning="\n".join(part.text for part in parts))
    raise AssertionError(kind)


def _item(found: dict[str, Any], at: str, struct: type[msgspec.Struct]) -> msgspec.Struct:
    screened = FieldTable(struct=struct, inert={"encrypted_content": ()}).screen(found, at)
    for name in ("content", "output", "summary"):
        if isinstance(screened.get(name), list):
            table = FieldTable(struct=_Part, inert={})
            screened[name] = [
                table.screen(part, join_path(at, f"{name}[{i}]"))
                for i, part in enumerate(screened[name])
            ]
    return convert(screened, struct, at)


def _content(content: str | list[_Part], at: str) -> str | list[TextPart]:
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type not in _TEXT_PARTS:
            param = f"{at}[{i}].type"
            message = f"{param}: wanted input_text or output_text, found {part.type}"
            raise BadRequest(f"{message}; other parts are not built yet", param=param)
    return [TextPart(type="text", text=part.text) for part in content]


def _is_one_turn(before: Message, message: Message) -> bool:
    """Return whether two items are parts of one turn: reasoning, content, calls in this order."""
    if before.role != "assistant" or message.role != "assistant":
        return False
    is_before_content = before.content is None and not before.tool_calls
    return is_before_content or (message.content is None and bool(message.tool_calls))


def _joined(before: Message, message: Message) -> Message:
    return Message(
        role="assistant",
        content=before.content if message.content is None else message.content,
        tool_calls=before.tool_calls + message.tool_calls,
        reasoning=before.reasoning if before.reasoning is not None else message.reasoning,
    )


def _tool(found: dict[str, Any], at: str) -> Tool:
    kind = found.get("type")
    if kind != "function":
        param = join_path(at, "type")
        raise BadRequest(f"{param}: wanted function, found {kind}; not built yet", param=param)
    screened = FieldTable(struct=_FlatFunction, inert={}).screen(found, at)
    flat = convert(screened, _FlatFunction, at)
    function = Function(
        name=flat.name,
        description=flat.description,
        parameters=flat.parameters,
        strict=flat.strict,
    )
    return Tool(type="function", function=function)


def _response_format(found: dict[str, Any]) -> ResponseFormat | None:
    at = "text.format"
    text = FieldTable(struct=_Text, inert={"verbosity": ("medium",)}).screen(found, "text")
    wanted = convert(text, _Text, "text").format
    if wanted is None:
        return None
    screened = FieldTable(struct=_TextFormat, inert={}).screen(wanted, at)
    flat = convert(screened, _TextFormat, at)
    fields: dict[str, Any] = {"type": flat.type}
    if flat.schema is not None:
        fields["json_schema"] = {"name": flat.name, "schema": flat.schema}
    try:
        screened = screen_response_format(fields)
    except BadRequest as error:
        param = f"{at}.schema" if "json_schema" in str(error.param) else f"{at}.type"
        message = str(error).replace(str(error.param), param, 1)
        raise BadRequest(message, param=param) from error
    return convert(screened, ResponseFormat, at)


def _choice(found: str | dict[str, Any] | None) -> str | NamedToolChoice | None:
    if not isinstance(found, dict):
        return found
    screened = FieldTable(struct=_FlatChoice, inert={}).screen(found, "tool_choice")
    flat = convert(screened, _FlatChoice, "tool_choice")
    return NamedToolChoice(type=flat.type, function=FunctionName(name=flat.name))
