"""POST /v1/responses: items in, items out, in one answer or as typed events.

A request is equivalent to a chat (`ResponsesChat`). The server keeps nothing between requests:
`store` is false, and a conversation comes whole, as `input`. Items that an answer had can be sent
back as they were.

An answer's output is one list, whether it is sent whole or item by item: reasoning, a message,
calls, each where it began. Both come from `_Output`, which the events tell the life of.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from cluster.wire.messages import MaxTokens
from compile.errors import FieldError, Words
from model.fields import says
from serve.clients import CacheSalt
from serve.config import ApiSettings
from serve.openai.answer_parser import AnswerDelta, AnswerParser, ReasoningFormat
from serve.openai.answers import Usage
from serve.openai.body import convert_object, join_path
from serve.openai.chat import ConversationRenderer, new_call_id
from serve.openai.generation import Endpoint, Generation
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
    RequestFields,
    ResponseFormat,
    TextPart,
    Tool,
    ToolCall,
)
from serve.openai.tool_parser import CallDelta, ToolFormat
from serve.requests.choice import Choice, OutputDelta
from serve.requests.sampling import SamplingFields
from serve.requests.tokenizer import Tokenizer

Json = dict[str, Any]

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


class _InputItem(msgspec.Struct, frozen=True, kw_only=True):
    INERT: ClassVar[Inert] = {"encrypted_content": ()}

    type: str = "message"
    id: str = ""
    status: str = ""


class _MessageItem(_InputItem, frozen=True, kw_only=True):
    role: Annotated[
        Literal["user", "assistant", "system", "developer"],
        says("user, assistant, system, developer"),
    ]
    content: str | list[_Part]
    phase: str = ""


class _CallItem(_InputItem, frozen=True, kw_only=True):
    call_id: str
    name: str
    arguments: str


class _CallOutputItem(_InputItem, frozen=True, kw_only=True):
    call_id: str
    output: str | list[_Part]


class _ReasoningItem(_InputItem, frozen=True, kw_only=True):
    summary: list[_Part] = []
    content: list[_Part] = []


_ITEMS: dict[str, type[_InputItem]] = {
    "message": _MessageItem,
    "function_call": _CallItem,
    "function_call_output": _CallOutputItem,
    "reasoning": _ReasoningItem,
}


class ResponsesChat(ChatRequest, frozen=True, kw_only=True):
    """The chat that a request is equivalent to; errors name the request's own fields."""

    def __post_init__(self) -> None:
        RequestFields.__post_init__(self)  # messages are made of items, which were checked

    def spelling(self, param: str) -> str:
        own = {"max_tokens": "max_output_tokens", "prompt": "input", "messages": "input"}
        spelt = own.get(param) or super().spelling(param)
        if not spelt.startswith("response_format"):
            return spelt
        return "text.format.schema" if spelt.endswith(".schema") else "text.format"


_FUNCTION_FIELDS = Function.__struct_fields__
_SHARED = sorted({*ResponsesRequest.__struct_fields__} & {*ChatRequest.__struct_fields__})


def _chat_of(request: ResponsesRequest) -> ResponsesChat:
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
        "tools": [
            Tool(
                type="function",
                function=Function(**{name: getattr(flat, name) for name in _FUNCTION_FIELDS}),
            )
            for flat in request.tools
        ],
        "response_format": _response_format(request.text.format),
    }
    if isinstance(choice, FlatChoice):
        name = FunctionName(name=choice.name)
        shared["tool_choice"] = NamedToolChoice(type="function", function=name)
    return ResponsesChat(**shared)


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


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a stream, with the fields that its type has."""

    type: str
    sequence_number: int
    response: Json | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: Json | UnsetType = UNSET
    part: Json | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET


_TEXTS = {
    "message": "output_text",
    "function_call": "function_call_arguments",
    "reasoning": "reasoning_text",
}
"""What events call the text of each kind of item."""


class _OutputItem:
    def __init__(self, kind: str, index: int, **fields: Any) -> None:
        prefix = {"message": "msg", "function_call": "fc", "reasoning": "rs"}[kind]
        self.kind = kind
        self.id = f"{prefix}_{secrets.token_hex(16)}"
        self.index = index
        self.status = "in_progress"
        self._fields = fields
        self.parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def part(self, text: str) -> Json:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def json(self) -> Json:
        found = {"id": self.id, "type": self.kind, "status": self.status, **self._fields}
        if self.kind == "function_call":
            return found | {"arguments": self.text}
        return found | {"content": [self.part(self.text)] if self.parts else []}


class _Output:
    def __init__(self, calls: ToolFormat | None) -> None:
        self.items: list[_OutputItem] = []
        self._calls = calls
        self._num_events = 0
        self._open: dict[str, _OutputItem] = {}
        """By kind: the item that is not done."""

    def event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return Event(type=f"response.{kind}", sequence_number=self._num_events - 1, **fields)

    def add(self, delta: AnswerDelta) -> Iterator[Event]:
        if delta.reasoning:
            yield from self._add("reasoning", delta.reasoning, summary=[])
        before = [call for call in delta.calls if call.number < delta.content_at]
        yield from self._add_calls(before)
        if delta.content:
            yield from self._close("reasoning", "completed")
            yield from self._add("message", delta.content, role="assistant")
        yield from self._add_calls(delta.calls[len(before) :])

    def end(self, finish_reason: str | None) -> Iterator[Event]:
        """Close what is open; after an answer that was cut it is incomplete."""
        if not self.items:
            yield from self._add("message", "", role="assistant")
        status = "completed" if finish_reason == "stop" else "incomplete"
        for item in sorted(self._open.values(), key=lambda item: item.index):
            yield from self._close(item.kind, status)

    def _add_calls(self, calls: list[CallDelta]) -> Iterator[Event]:
        for call in calls:
            fields = {}
            if call.name is not None:
                yield from self._close("reasoning", "completed")
                yield from self._close("function_call", "completed")
                assert self._calls is not None
                fields = {"call_id": new_call_id(self._calls), "name": call.name}
            yield from self._add("function_call", call.arguments, **fields)

    def _add(self, kind: str, text: str, **fields: Any) -> Iterator[Event]:
        """Add text to the open item of a kind, or to a new one."""
        item = self._open.get(kind)
        if item is None:
            item = self._open[kind] = _OutputItem(kind, len(self.items), **fields)
            self.items.append(item)
            yield self.event("output_item.added", output_index=item.index, item=item.json())
            if kind == "message":
                yield self._of_item(item, "content_part.added", part=item.part(""))
        item.parts.append(text)
        if text:
            yield self._of_item(item, f"{_TEXTS[kind]}.delta", delta=text)

    def _of_item(self, item: _OutputItem, kind: str, **fields: Any) -> Event:
        if item.kind != "function_call":
            fields["content_index"] = 0
        if kind.startswith("output_text"):
            fields["logprobs"] = []
        return self.event(kind, item_id=item.id, output_index=item.index, **fields)

    def _close(self, kind: str, status: str) -> Iterator[Event]:
        item = self._open.pop(kind, None)
        if item is None:
            return
        item.status = status
        done = {"text": item.text}
        if kind == "function_call":
            done = {"arguments": item.text, "name": item.json()["name"]}
        yield self._of_item(item, f"{_TEXTS[kind]}.done", **done)
        if kind == "message":
            yield self._of_item(item, "content_part.done", part=item.part(item.text))
        yield self.event("output_item.done", output_index=item.index, item=item.json())


class ResponsesRenderer(ConversationRenderer):
    has_typed_events = True

    def __init__(
        self, request: ResponsesRequest, settings: ApiSettings, tokenizer: Tokenizer
    ) -> None:
        chat = _chat_of(request)
        try:
            super().__init__("resp", chat, settings, tokenizer)
        except FieldError as error:
            raise error.renamed(chat.spelling(error.field)) from error
        self._given = request
        self._output = _Output(self._answers.tools)
        self._parser: AnswerParser | None = None
        self._finish_reason: str | None = None
        self._offsets: list[int] = []
        """Where the text of each token begins, of a model that thinks."""

    def response(self, generation: Generation) -> Any:
        [choice] = generation.choices
        list(self._absorb(choice, choice.take()))
        return self._response(self._final_status(), generation.usage())

    def chunks(self, choice: Choice, usage: Usage | UnsetType | None) -> Iterator[msgspec.Struct]:
        found = choice.take()
        if self._parser is None:
            for kind in ("created", "in_progress"):
                yield self._output.event(kind, response=self._response("in_progress", None))
        yield from self._absorb(choice, found)

    def ending(self, generation: Generation) -> Iterator[msgspec.Struct]:
        status = self._final_status()
        yield self._output.event(status, response=self._response(status, generation.usage()))

    def _absorb(self, choice: Choice, found: OutputDelta) -> Iterator[Event]:
        if self._parser is None:
            self._parser = self.new_parser(choice)
        if self._answers.reasoning is not ReasoningFormat.NONE:
            self._offsets += found.offsets
        self._finish_reason = found.finish_reason
        is_last = found.finish_reason is not None
        yield from self._output.add(self._parser.push(found.text, is_last=is_last))
        if is_last:
            yield from self._output.end(found.finish_reason)

    def _final_status(self) -> str:
        return "completed" if self._finish_reason == "stop" else "incomplete"

    def _response(self, status: str, usage: Usage | None) -> Json:
        given = self._given
        reason = {"length": "max_output_tokens"}.get(self._finish_reason or "", "aborted")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "metadata": given.metadata,
            "model": self.model,
            "output": [item.json() for item in self._output.items],
            "parallel_tool_calls": given.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": given.temperature,
            "text": {"format": given.text.format or {"type": "text"}},
            "tool_choice": given.tool_choice or ("auto" if given.tools else "none"),
            "tools": given.tools,
            "top_p": given.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else self._usage(usage),
        }

    def _usage(self, usage: Usage) -> Json:
        assert self._parser is not None
        num_reasoning_tokens = bisect_left(self._offsets, self._parser.num_reasoning_chars)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }


RESPONSES = Endpoint(ResponsesRequest, ResponsesRenderer)
