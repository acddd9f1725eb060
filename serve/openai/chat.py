"""POST /v1/chat/completions: a conversation in, the assistant's message out, or `n` of them."""

from __future__ import annotations

import re
import secrets
import string
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from compile.errors import FieldError, Words
from serve.config import ApiSettings
from serve.event_loop import Check
from serve.openai.answer_parser import (
    ALL_CONTENT,
    CLOSER,
    OPENER,
    TAIL_TOKENS,
    AnswerDelta,
    AnswerFormat,
    AnswerParser,
    ReasoningFormat,
)
from serve.openai.answers import (
    AnsweredCall,
    AnsweredCallDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    FunctionCall,
    Usage,
    chat_logprobs,
    prompt_logprobs,
)
from serve.openai.body import check_values
from serve.openai.errors import ApiError
from serve.openai.generation import Endpoint, Generation
from serve.openai.schema import ChatRequest, Message, NamedToolChoice, Tool, check_num_chars
from serve.openai.tool_parser import MAX_NAME_CHARS, NAME_PATTERN, CallDelta, ToolFormat
from serve.requests.choice import Choice
from serve.requests.sampling import SamplingParams
from serve.requests.structured import StructuredOutputsParams
from serve.requests.tokenizer import Tokenizer

MESSAGE_CHARS = 64
"""About what a template adds to a message: roles and markers are work too."""
NO_DELTA = ChatDelta()
MAX_TOOL_CHARS = 1 << 18
"""Characters of all `tools` as JSON, which chat templates write out in full; more get 400."""
MAX_DEPTH = 32
"""Lists and objects within one another in `parameters` or in a call's `arguments`; templates write
them by recursion. More get 400."""
AUTO = "auto"
_NAME = re.compile(rf"{NAME_PATTERN}{{1,{MAX_NAME_CHARS}}}")
_ALPHANUMERIC = string.ascii_letters + string.digits
_MISTRAL_ID_CHARS = 9
"""The length that Mistral's templates want of an id."""


class ConversationRenderer:
    """What the renderers of chats and of responses have in common. A chat template writes the
    prompt, and an answer has reasoning, content and calls."""

    num_prompts = 1
    num_prompt_copies = 1

    def __init__(
        self,
        id_prefix: str,
        request: ChatRequest,
        settings: ApiSettings,
        tokenizer: Tokenizer,
    ) -> None:
        """Read a request; raises ApiError and FieldError."""
        self.size = _checked_size(request, settings, tokenizer)
        params = request.sampling_params()
        answers = _answer_format(request, settings, tokenizer)
        self.id = f"{id_prefix}-{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.model = ""
        self.request = request
        self.params = with_forced_calls(request, params) if answers.is_forced else params
        self.shown_token_ids: frozenset[int] = frozenset()
        if answers != ALL_CONTENT:
            self.shown_token_ids = tokenizer.special_ids_of(answers.markers)
        self._tokenizer = tokenizer
        self._answers = answers

    def encode(self, max_tokens: int, check: Check) -> list[list[int]]:
        request, tokenizer = self.request, self._tokenizer
        tools = tools_for_template(request.tools) if _shows_tools(request) else None
        has_parts = any(isinstance(message.content, list) for message in request.messages)
        takes_parts = has_parts and tokenizer.takes_parts(request.chat_template)
        add_generation_prompt = request.add_generation_prompt
        if add_generation_prompt is None:
            add_generation_prompt = not request.continue_final_message
        prompt = tokenizer.apply_chat_template(
            [message.for_template(takes_parts) for message in request.messages],
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=request.continue_final_message,
            add_special_tokens=request.add_special_tokens,
            chat_template=request.chat_template,
            max_tokens=max_tokens,
            check=check,
            **request.chat_template_kwargs,
        )
        return [prompt]

    def new_parser(self, choice: Choice) -> AnswerParser:
        return AnswerParser(self._answers, self._prompt_end(choice))

    def _prompt_end(self, choice: Choice) -> str:
        """Return the end of the prompt, which says whether the answer begins within reasoning."""
        if self._answers.reasoning is ReasoningFormat.NONE:
            return ""
        if self.request.continue_final_message:
            text = self.request.messages[-1].text
            opened, closed = text.rfind(OPENER), text.rfind(CLOSER)
            if opened != closed:
                return OPENER if opened > closed else CLOSER
        tail = choice.request.prompt_token_ids[-TAIL_TOKENS:]
        return self._tokenizer.decode(tail, skip_special_tokens=False)


class ChatRenderer(ConversationRenderer):
    has_typed_events = False

    def __init__(self, request: ChatRequest, settings: ApiSettings, tokenizer: Tokenizer) -> None:
        super().__init__("chatcmpl", request, settings, tokenizer)
        self._parsers: dict[int, AnswerParser] = {}
        """Of each choice that has begun; its role is sent."""

    def response(self, generation: Generation) -> msgspec.Struct:
        first = generation.choices[0]
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._whole(choice) for choice in generation.choices],
            usage=generation.usage(),
            prompt_logprobs=prompt_logprobs(self._tokenizer, first, self.request.prompt_logprobs),
            prompt_token_ids=self._prompt_token_ids(first),
        )

    def _whole(self, choice: Choice) -> ChatChoice:
        found, fields = self._take(choice, self.new_parser(choice))
        calls = [
            AnsweredCall(
                id=self._call_id(),
                function=FunctionCall(name=call.name or "", arguments=call.arguments),
            )
            for call in found.calls
        ]
        reasoning = (found.reasoning if self.request.include_reasoning else "") or UNSET
        message = ChatMessage(
            content=found.content or (None if calls or found.reasoning else ""),
            reasoning=reasoning,
            reasoning_content=reasoning,
            tool_calls=calls or UNSET,
        )
        return ChatChoice(message=message, **fields)

    def chunks(self, choice: Choice, usage: Usage | UnsetType | None) -> Iterator[msgspec.Struct]:
        is_first = choice.index not in self._parsers
        if is_first:
            self._parsers[choice.index] = self.new_parser(choice)
        found, fields = self._take(choice, self._parsers[choice.index])
        if is_first:
            role = ChatDelta(role="assistant", content="")
            begun = ChatChunkChoice(
                index=choice.index, delta=role, logprobs=None, finish_reason=None, stop_reason=None
            )
            yield self._chunk([begun], usage, self._prompt_token_ids(choice))
        reasoning = (found.reasoning if self.request.include_reasoning else "") or UNSET
        delta = ChatDelta(
            content=found.content or UNSET,
            reasoning=reasoning,
            reasoning_content=reasoning,
            tool_calls=[self._call_delta(call) for call in found.calls] or UNSET,
        )
        tells_of_tokens = fields["token_ids"] or (fields["logprobs"] and fields["logprobs"].content)
        if delta != NO_DELTA or fields["finish_reason"] or tells_of_tokens:
            yield self._chunk([ChatChunkChoice(delta=delta, **fields)], usage)

    def ending(self, generation: Generation) -> Iterator[msgspec.Struct]:
        options = self.request.stream_options
        if options is not None and options.include_usage:
            yield self._chunk([], generation.usage())

    def _take(self, choice: Choice, parser: AnswerParser) -> tuple[AnswerDelta, dict[str, Any]]:
        request, found = self.request, choice.take()
        answer = parser.push(found.text, is_last=found.finish_reason is not None)
        # An answer that was cut ends with that, calls or not.
        is_called = found.finish_reason == "stop" and parser.has_calls
        logprobs = None
        if request.logprobs:
            logprobs = chat_logprobs(self._tokenizer, found.token_ids, found.logprobs)
        return answer, {
            "index": choice.index,
            "logprobs": logprobs,
            "finish_reason": "tool_calls" if is_called else found.finish_reason,
            "stop_reason": found.stop_reason,
            "token_ids": found.token_ids if request.return_token_ids else UNSET,
        }

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )

    def _call_delta(self, call: CallDelta) -> AnsweredCallDelta:
        is_first = call.name is not None
        return AnsweredCallDelta(
            index=call.number,
            id=self._call_id() if is_first else UNSET,
            type="function" if is_first else UNSET,
            function=FunctionCall(name=call.name or UNSET, arguments=call.arguments),
        )

    def _call_id(self) -> str:
        assert self._answers.tools is not None
        return new_call_id(self._answers.tools)

    def _prompt_token_ids(self, choice: Choice) -> list[int] | UnsetType:
        return choice.request.prompt_token_ids if self.request.return_token_ids else UNSET


CHAT = Endpoint(ChatRequest, ChatRenderer)


def _checked_size(request: ChatRequest, settings: ApiSettings, tokenizer: Tokenizer) -> int:
    """Return about how many characters a template writes, and refuse a chat beyond the limits. A
    client's template is refused too: it is a program."""
    max_messages = settings.max_model_len
    num_messages = len(request.messages)
    num_calls = sum(len(message.tool_calls) for message in request.messages)
    num_chars = 0
    if request.tools or request.tool_choice is not None or num_calls:
        num_chars = check_tools(request, max_messages)
    for message in request.messages:
        num_chars += message.num_chars
    if num_messages + num_calls > max_messages:
        wanted = f"at most {max_messages}, a token of the model's length for each"
        with_calls = f" with {num_calls} calls" if num_calls else ""
        raise FieldError("messages", wanted, Words(f"{num_messages + num_calls}{with_calls}"))
    request.check_limits(settings, tokenizer)
    check_num_chars("messages", num_chars, settings, tokenizer)
    template = request.chat_template
    if template is not None and template not in tokenizer.template_names:
        names = ", ".join(tokenizer.template_names) or "it has one without a name"
        one = f"the name of one of the checkpoint's templates ({names})"
        found = Words(f"{len(template)} characters")
        raise FieldError("chat_template", f"{one}, since a template is a program", found)
    for name in request.chat_template_kwargs:
        if name in tokenizer.template_parameters:
            param = f"chat_template_kwargs.{name}"
            wanted = f"{param}: wanted variables of the template only"
            raise ApiError(400, wanted, param=param)
    return num_chars + MESSAGE_CHARS * (num_messages + num_calls)


def _answer_format(
    request: ChatRequest, settings: ApiSettings, tokenizer: Tokenizer
) -> AnswerFormat:
    reasoning = ReasoningFormat(settings.args.reasoning_parser)
    if not _shows_tools(request):
        return AnswerFormat(reasoning=reasoning)
    choice = request.tool_choice
    forced_name = choice.function.name if isinstance(choice, NamedToolChoice) else None
    is_forced = choice == "required" or forced_name is not None
    return AnswerFormat(
        # A text that is held to a schema from its first token on has no reasoning.
        reasoning=ReasoningFormat.NONE if is_forced else reasoning,
        is_forced=is_forced,
        forced_name=forced_name,
        tools=tool_format(tokenizer, settings.args.tool_call_parser, request.chat_template),
        names=tuple(tool.function.name for tool in request.tools),
        parallel=request.parallel_tool_calls,
    )


def _shows_tools(request: ChatRequest) -> bool:
    return bool(request.tools) and request.tool_choice != "none"


# The functions that a request lets the model call: their limits, format and JSON schema.


def check_tools(request: ChatRequest, max_model_len: int) -> int:
    """Return the characters of tools as JSON, once they, `tool_choice` and earlier calls were
    checked; raises ApiError and FieldError."""
    tools = request.tools
    num_chars = len(msgspec.json.encode(tools).decode()) if tools else 0
    if num_chars > MAX_TOOL_CHARS:
        raise FieldError("tools", f"at most {MAX_TOOL_CHARS} characters of JSON", num_chars)
    names: set[str] = set()
    for i, tool in enumerate(tools):
        at = f"tools[{i}]"
        name = tool.function.name
        if not _NAME.fullmatch(name):
            wanted = f"1 to {MAX_NAME_CHARS} letters, digits, _ or -"
            raise FieldError(f"{at}.function.name", wanted, Words(name[:MAX_NAME_CHARS]))
        if name in names:
            wanted = "another name than those before"
            raise FieldError(f"{at}.function.name", wanted, Words(name))
        names.add(name)
        check_depth(tool.function.parameters, f"{at}.function.parameters")
    _check_choice(request, names)
    _check_calls(request.messages, max_model_len)
    return num_chars


def _check_choice(request: ChatRequest, names: set[str]) -> None:
    choice = request.tool_choice
    if choice is None or choice == "none":
        return
    if isinstance(choice, NamedToolChoice):
        if choice.function.name not in names:
            wanted = "the name of one of tools"
            raise FieldError("tool_choice.function.name", wanted, Words(choice.function.name))
    elif choice not in ("auto", "required"):
        raise FieldError("tool_choice", "none, auto, required or a function", Words(choice))
    if not names:
        raise FieldError("tool_choice", "tools with it", Words("none"))


def check_depth(value: Any, at: str) -> None:
    """Refuse JSON that is nested more than `MAX_DEPTH` deep; raises FieldError."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            return
    raise FieldError(at, f"at most {MAX_DEPTH} levels of lists and objects", Words("more"))


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _check_calls(messages: Sequence[Message], max_model_len: int) -> None:
    """Check the arguments of calls of earlier turns, which are JSON within JSON."""
    calls = [call.function.arguments for message in messages for call in message.tool_calls]
    if not calls:
        return
    check_values("".join(calls).encode("utf-8", "replace"), max_model_len)
    for i, message in enumerate(messages):
        for j, call in enumerate(message.tool_calls):
            at = f"messages[{i}].tool_calls[{j}].function.arguments"
            check_depth(call.function.arguments_for_template(), at)


def tools_for_template(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return tools as transformers' templates take them; they know nothing of `strict`."""
    found: list[dict[str, Any]] = msgspec.to_builtins(tools)
    for tool in found:
        tool["function"].pop("strict", None)
    return found


def tool_format(tokenizer: Tokenizer, wanted: str, chat_template: str | None) -> ToolFormat:
    """Return how the model behind a chat template writes calls. wanted: the name of a format, or
    auto: found by having the template write a call. FieldError if it does not write tools, or calls
    in a format that is not known."""
    written = tokenizer.written_tools(chat_template)
    if not written.has_tools:
        wanted_none = "none, since the model's chat template does not write them"
        raise FieldError("tools", wanted_none, Words("some"))
    if wanted != AUTO:
        return ToolFormat(wanted)
    found = format_of(written.call)
    if found is None:
        known = (
            "a model whose chat template writes calls in a known format, or tool_call_parser given "
            "when the server starts"
        )
        raise FieldError("tools", known, Words("neither"))
    return found


def format_of(call: str) -> ToolFormat | None:
    """Return the format in which a chat template has written a call, or None for another one."""
    if re.search(r"<tool_call>\s*\{", call):
        return ToolFormat.HERMES
    if "[TOOL_CALLS]" in call:
        return ToolFormat.MISTRAL
    if re.search(r'\{[^{}]*"name"[^{}]*"parameters"', call):
        return ToolFormat.LLAMA3_JSON
    return None


def new_call_id(tool_format: ToolFormat) -> str:
    """Return an id that the model's chat template takes back."""
    if tool_format is ToolFormat.MISTRAL:
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(_MISTRAL_ID_CHARS))
    return f"call_{secrets.token_hex(12)}"


def with_forced_calls(request: ChatRequest, params: SamplingParams) -> SamplingParams:
    """Hold the text to the calls that `tool_choice` forces. A `response_format` is of texts that
    are answers, as with OpenAI: beside forced calls there is none. Raises FieldError where the text
    is held to something else or tools contradict each other."""
    if params.structured_outputs is not None and not request.formats_text:
        wanted = "none or auto beside a form of the whole output"
        raise FieldError("tool_choice", wanted, Words("calls that are forced"))
    assert request.tool_choice is not None
    schema = calls_schema(request.tools, request.tool_choice, parallel=request.parallel_tool_calls)
    try:
        calls = StructuredOutputsParams(json=schema)
    except FieldError as error:
        raise error.renamed("tools") from error
    return msgspec.structs.replace(params, structured_outputs=calls)


def calls_schema(
    tools: Sequence[Tool], choice: str | NamedToolChoice, *, parallel: bool = True
) -> dict[str, Any]:
    """Return the JSON schema of what a model has to write where a choice forces calls. Of
    `required` it is a list of `{"name": ..., "parameters": {...}}`, as in vLLM; of a named function
    its parameters alone."""
    if isinstance(choice, NamedToolChoice):
        [tool] = [tool for tool in tools if tool.function.name == choice.function.name]
        return _parameters(tool)
    definitions: dict[str, dict[str, Any]] = {}
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call_schema(tool, definitions) for tool in tools]},
    }
    if not parallel:
        schema["maxItems"] = 1
    return {**schema, **definitions}


def _parameters(tool: Tool) -> dict[str, Any]:
    parameters = tool.function.parameters
    return parameters or {"type": "object", "properties": {}}


def _call_schema(tool: Tool, definitions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of one call; what its parameters define moves to the root's definitions.
    References are absolute, so they still lead there. FieldError if two tools define one name
    differently."""
    parameters = dict(_parameters(tool))
    for keyword in ("$defs", "definitions"):
        moved = parameters.pop(keyword, {})
        known = definitions.setdefault(keyword, {}) if moved else {}
        for name, definition in moved.items():
            if known.setdefault(name, definition) != definition:
                wanted = f"the same {keyword}.{name} in all of them"
                raise FieldError("tools", wanted, Words("two"))
    properties = {"name": {"const": tool.function.name}, "parameters": parameters}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
