"""The functions that a request lets the model call: their limits, format and JSON schema."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence
from typing import Any

import msgspec

from compile.errors import FieldError, Words
from serve.openai.body import check_values
from serve.openai.schema import ChatRequest, Message, NamedToolChoice, Tool
from serve.openai.tool_parser import MAX_NAME_CHARS, NAME_PATTERN, ToolFormat
from serve.requests.sampling import SamplingParams
from serve.requests.structured import StructuredOutputsParams
from serve.requests.tokenizer import Tokenizer

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
    """Return how the model behind a chat template writes calls.

    wanted: the name of a format, or auto: found by having the template write a call. FieldError if
    it does not write tools, or calls in a format that is not known.
    """
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
    """Hold the text to the calls that `tool_choice` forces.

    A `response_format` is of texts that are answers, as with OpenAI: beside forced calls there is
    none. Raises FieldError where the text is held to something else or tools contradict each other.
    """
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
    """Return the JSON schema of what a model has to write where a choice forces calls.

    Of `required` it is a list of `{"name": ..., "parameters": {...}}`, as in vLLM; of a named
    function its parameters alone.
    """
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
    differently.
    """
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
