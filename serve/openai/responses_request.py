"""The body of POST /v1/responses, and the chat that it stands for.

The server keeps nothing between requests: `store` is false, and a conversation comes whole, as
`input`. Items that an answer had can be sent back as they were.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from cluster.wire.messages import MaxTokens
from compile.errors import FieldError, Words
from model.fields import says
from serve.openai.fields import convert_object, join_path, parse
from serve.openai.schema import (
    LABELS,
    MAX_TOOLS,
    CalledFunction,
    ChatRequest,
    Function,
    FunctionName,
    Inert,
    JsonSchemaFormat,
    LogitBias,
    Message,
    NamedToolChoice,
    ResponseFormat,
    TextPart,
    Tool,
    ToolCall,
)
from serve.requests.cache_salt import CacheSalt
from serve.requests.sampling import SamplingFields

MAX_METADATA = 16
"""OpenAI's bound on the keys of `metadata`, which is given back; more get 400."""
MAX_METADATA_CHARS = 512
"""The same on each of its texts."""


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`text.format`: a `response_format` with the fields of its `json_schema` beside the type."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"], says("text, json_object, json_schema")
    ]
    """`text`, `json_object` or `json_schema`."""
    name: str | UnsetType = UNSET
    """What the client calls the schema."""
    schema: dict[str, Any] | UnsetType = UNSET
    """The JSON schema, with type `json_schema` alone."""
    description: str | UnsetType = UNSET
    """For people."""
    strict: bool | UnsetType = UNSET
    """The answer fits the schema in either case."""


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`text`."""

    INERT: ClassVar[Inert] = {"verbosity": ("medium",)}

    format: TextFormat | UnsetType = UNSET
    """What the text must be."""


class FlatFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function in `tools`."""

    type: Annotated[Literal["function"], says("function", {"": "not built yet"})]
    """`function`."""
    name: str
    """As in chat completions."""
    description: str | UnsetType = UNSET
    """As in chat completions."""
    parameters: dict[str, Any] | UnsetType = UNSET
    """As in chat completions."""
    strict: bool | UnsetType = UNSET
    """As in chat completions."""


class FlatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    """`function`."""
    name: str
    """Which one."""


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/responses. Fields of sampling are those of chat completions."""

    INERT: ClassVar[Inert] = {
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
    }
    IGNORED: ClassVar[frozenset[str]] = LABELS

    input: str | list[dict[str, Any]]
    """A text, or items: messages, and of earlier answers `function_call`, `function_call_output`
    and `reasoning`. Their ids and states have no meaning here."""
    model: str | None = None
    """The name that is served; null: whichever that is."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: MaxTokens | None = None
    """Output tokens at most; null: what the model's length leaves."""
    logit_bias: LogitBias = msgspec.field(default_factory=dict)
    """As in chat completions."""
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further variables for the chat template."""
    tools: Annotated[list[FlatFunction], Meta(max_length=MAX_TOOLS)] = msgspec.field(
        default_factory=list
    )
    """Functions that the model may call, each with its name beside its `type`."""
    tool_choice: str | FlatChoice | None = None
    """As in chat completions; a function is named beside `type`."""
    parallel_tool_calls: bool = True
    """False: of several calls the first one is given."""
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    """Given back with the answer: up to `MAX_METADATA` texts of `MAX_METADATA_CHARS` characters."""
    text: TextOptions = TextOptions()
    """`format`: as `response_format` of chat completions, with the fields of `json_schema` beside
    `type`."""
    cache_salt: CacheSalt | None = None
    """As in chat completions."""
    stream: bool = False
    """Send the answer as typed events while it is generated."""


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    type: Annotated[
        Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"],
        says("input_text or output_text", {"": "other parts are not built yet"}),
    ]
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class _Item(msgspec.Struct, frozen=True, kw_only=True):
    INERT: ClassVar[Inert] = {"encrypted_content": ()}

    type: str = "message"
    id: str = ""
    status: str = ""


class _MessageItem(_Item, frozen=True, kw_only=True):
    role: Annotated[
        Literal["user", "assistant", "system", "developer"],
        says("user, assistant, system, developer"),
    ]
    content: str | list[_Part]
    phase: str = ""


class _CallItem(_Item, frozen=True, kw_only=True):
    call_id: str
    name: str
    arguments: str


class _CallOutputItem(_Item, frozen=True, kw_only=True):
    call_id: str
    output: str | list[_Part]


class _ReasoningItem(_Item, frozen=True, kw_only=True):
    summary: list[_Part] = []
    content: list[_Part] = []


_ITEMS: dict[str, type[_Item]] = {
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


_SHARED = sorted({*ResponsesRequest.__struct_fields__} & {*ChatRequest.__struct_fields__})


def parse_responses(body: bytes) -> tuple[ResponsesRequest, ResponsesChat]:
    """Return the request in `body`, and the chat that it stands for; raises as `fields.parse`."""
    request = parse(body, ResponsesRequest)
    if len(request.metadata) > MAX_METADATA:
        raise FieldError("metadata", f"at most {MAX_METADATA} texts", len(request.metadata))
    if any(len(text) > MAX_METADATA_CHARS for pair in request.metadata.items() for text in pair):
        wanted = f"texts of at most {MAX_METADATA_CHARS} characters"
        raise FieldError("metadata", wanted, Words("a longer one"))
    choice = request.tool_choice
    shared: dict[str, Any] = {name: getattr(request, name) for name in _SHARED}
    shared |= {
        "messages": _messages(request),
        "max_tokens": request.max_output_tokens,
        "tools": [_tool(function) for function in request.tools],
        "response_format": _response_format(request.text.format),
    }
    if isinstance(choice, FlatChoice):
        name = FunctionName(name=choice.name)
        shared["tool_choice"] = NamedToolChoice(type="function", function=name)
    return request, ResponsesChat(**shared)


def _messages(request: ResponsesRequest) -> list[Message]:
    messages: list[Message] = []
    if request.instructions is not None:
        messages.append(Message(role="system", content=request.instructions))
    if isinstance(request.input, str):
        return [*messages, Message(role="user", content=request.input)]
    if not request.input:
        raise FieldError("input", "at least one item", Words("none"))
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
        raise FieldError(join_path(at, "type"), f"one of {', '.join(_ITEMS)}", Words(kind))
    match convert_object(found, struct, at):
        case _MessageItem() as item:
            return Message(role=item.role, content=_content(item.content))
        case _CallItem() as item:
            function = CalledFunction(name=item.name, arguments=item.arguments)
            call = ToolCall(id=item.call_id, function=function)
            return Message(role="assistant", tool_calls=[call])
        case _CallOutputItem() as item:
            content = _content(item.output)
            return Message(role="tool", tool_call_id=item.call_id, content=content)
        case _ReasoningItem() as item:
            parts = item.content or item.summary
            return Message(role="assistant", reasoning="\n".join(part.text for part in parts))
    raise AssertionError(kind)


def _content(content: str | list[_Part]) -> str | list[TextPart]:
    if isinstance(content, str):
        return content
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


def _tool(flat: FlatFunction) -> Tool:
    function = Function(
        name=flat.name,
        description=flat.description,
        parameters=flat.parameters,
        strict=flat.strict,
    )
    return Tool(type="function", function=function)


def _response_format(wanted: TextFormat | UnsetType) -> ResponseFormat | None:
    if wanted is UNSET:
        return None
    schema = None
    if wanted.schema is not UNSET:
        schema = JsonSchemaFormat(name=wanted.name or "", schema=wanted.schema)
    try:
        return ResponseFormat(type=wanted.type, json_schema=schema)
    except FieldError as error:
        raise error.renamed("text.format.schema") from error
