"""What a model is to write where `tool_choice` forces calls, and what is read from it."""

from __future__ import annotations

import json

import pytest

from compile.errors import FieldError
from serve.openai.answer_parser import AnswerFormat, AnswerParser
from serve.openai.schema import Function, FunctionName, NamedToolChoice, Tool
from serve.openai.tool_parser import CallDelta, ToolFormat
from serve.openai.tools import calls_schema

UNIT = {"$defs": {"Unit": {"enum": ["C", "F"]}}}
WEATHER = {"type": "object", "properties": {"unit": {"$ref": "#/$defs/Unit"}}}
TOOLS = [
    Tool(type="function", function=Function(name="weather", parameters={**WEATHER, **UNIT})),
    Tool(type="function", function=Function(name="now")),
]
NOW = NamedToolChoice(type="function", function=FunctionName(name="now"))


def test_required_is_a_list_of_calls_with_the_definitions_at_its_root() -> None:
    schema = calls_schema(TOOLS, "required")
    assert schema["type"] == "array" and schema["minItems"] == 1 and "maxItems" not in schema
    assert schema["$defs"] == UNIT["$defs"]
    weather, now = schema["items"]["anyOf"]
    assert weather["properties"] == {"name": {"const": "weather"}, "parameters": WEATHER}
    assert now["properties"]["parameters"] == {"type": "object", "properties": {}}
    for call in (weather, now):
        assert call["required"] == ["name", "parameters"]
        assert call["additionalProperties"] is False
    assert calls_schema(TOOLS, "required", parallel=False)["maxItems"] == 1
    assert "$defs" in (TOOLS[0].function.parameters or {}), "a request's own schema is left alone"


def test_a_named_function_is_its_parameters() -> None:
    assert calls_schema(TOOLS, NOW) == {"type": "object", "properties": {}}
    named = NamedToolChoice(type="function", function=FunctionName(name="weather"))
    assert calls_schema(TOOLS, named) == {**WEATHER, **UNIT}


def test_definitions_that_contradict_each_other_are_refused() -> None:
    other = Function(name="b", parameters={"$defs": {"Unit": {"enum": ["K"]}}})
    with pytest.raises(FieldError, match=r"the same \$defs.Unit"):
        calls_schema([*TOOLS, Tool(type="function", function=other)], "required")


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("forced_name", "text", "calls"), [
    (
        None,
        '[{"name": "weather", "parameters": {"unit": "C"}}, {"name": "now", "parameters": {}}]',
        [("weather", '{"unit": "C"}'), ("now", "{}")],
    ),
    ("now", ' {"zone": "}"} ', [("now", '{"zone": "}"}')]),
    ("now", '{"zone": "U', [("now", '{"zone": "U')]),
])  # fmt: skip
def test_forced_text_is_read_as_calls(
    forced_name: str | None, text: str, calls: list[tuple[str, str]], size: int
) -> None:
    names = tuple(tool.function.name for tool in TOOLS)
    answers = AnswerFormat(
        tools=ToolFormat.HERMES, names=names, is_forced=True, forced_name=forced_name
    )
    parser = AnswerParser(answers, "")
    found: dict[int, tuple[str, str]] = {}
    deltas: list[CallDelta] = []
    for at in range(0, len(text), size):
        is_last = at + size >= len(text)
        delta = parser.push(text[at : at + size], is_last=is_last)
        assert delta.content == ""
        deltas += delta.calls
    for part in deltas:
        name, arguments = found.get(part.number, (part.name or "", ""))
        found[part.number] = (name, arguments + part.arguments)
    assert list(found.values()) == calls
    assert all(json.loads(arguments) for _, arguments in calls[:1] if arguments.endswith("}"))
