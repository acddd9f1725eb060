"""Tool calls over the served path: three formats, whole and streamed, well and badly written."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

pytestmark = pytest.mark.feature("R10")

NUM_DIALOGUES = 100
"""Of each format; the slow run has 300."""

HERMES = (
    "{%- if tools %}<|im_start|>system\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n"
    "</tools><|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role }}\n\n"
    "{% if loop.first and tools %}Answer with a name and parameters:"
    "{% for t in tools %}{{ t | tojson(indent=4) }}\n{% endfor %}{% endif %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.last %}"
    "[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}"
    "[/INST]{% elif m.tool_calls %}{{ m.content }}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}{{ ", " if not loop.last }}{% endfor %}]{{ eos_token }}'
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }} {{ m.tool_call_id }}[/TOOL_RESULTS]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
TEMPLATES = {"hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL}
SPECIAL = {HERMES: [], LLAMA: ["<|python_tag|>"], MISTRAL: ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"]}
"""Markers that decoding leaves out."""
ADDED = ["<tool_call>", "</tool_call>"]
MARKERS = [*ADDED, *SPECIAL[LLAMA], *SPECIAL[MISTRAL]]


HI = [{"role": "user", "content": "hi"}]


class Call(NamedTuple):
    name: str
    arguments: str


def write_checkpoint(base: Path, path: Path, template: str) -> Path:
    """Write a tokenizer whose markers are special tokens, as in checkpoints of the families."""
    fast: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(base)
    special = SPECIAL.get(template, SPECIAL[MISTRAL])
    fast.add_special_tokens({"additional_special_tokens": special})
    fast.add_tokens(ADDED)
    fast.chat_template = template
    fast.save_pretrained(path)
    return path


def serve_as(serving: Any, model: Any) -> None:
    """Let an app that runs already serve a model."""
    name = serving.settings.served_model_name
    serving.settings = msgspec.structs.replace(model.settings, served_model_name=name)
    serving.tokenizer = lambda: model.tokenizer


def calls_of(choice: dict[str, Any]) -> list[Call]:
    calls = choice["message"].get("tool_calls", [])
    return [Call(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def content_of(choice: dict[str, Any]) -> str:
    return choice["message"]["content"] or ""


def check_equal(whole: dict[str, Any], streamed: dict[str, Any]) -> None:
    assert calls_of(whole) == calls_of(streamed)
    assert content_of(whole) == content_of(streamed)
    assert whole["finish_reason"] == streamed["finish_reason"]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = [tool("weather", city={"type": "string"}), tool("now")]
ONE_CALL = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "weather", "parameters": {"city": "Köln"}}',
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Köln"}}]',
}


@pytest.fixture(params=TEMPLATES)
def format_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


MakeModel = Callable[..., Any]


@pytest.fixture
def make(checkpoint: Path, tmp_path: Path, chats: Any) -> MakeModel:
    """Return a model whose template is this one, with arguments of `deploy`."""
    return lambda template, **options: chats(
        write_checkpoint(checkpoint, tmp_path, template), **options
    )


@pytest.fixture
def model(make: MakeModel, format_name: str) -> Any:
    return make(TEMPLATES[format_name])


# --- generated dialogues ------------------------------------------------------------------------

names = st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True)
json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**20), 10**20),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        st.sampled_from(
            ['"', "\\", "</tool_call>", "}{][", "日本語 🎉", "<|python_tag|>", "[ARGS]"]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(max_size=8), json_values, max_size=4)
words = st.text(st.characters(exclude_characters="{<[\x00", exclude_categories=["Cs"]))
separators = st.sampled_from([(",", ":"), (", ", ": ")])


@st.composite
def dialogues(draw: st.DrawFn, format_name: str) -> tuple[list[str], str, list[Call], str]:
    """The names of tools, content, calls of them, and how the model writes both."""
    known = draw(st.lists(names, min_size=1, max_size=4, unique=True))
    calls = draw(st.lists(st.tuples(st.sampled_from(known), arguments), max_size=3))
    content = draw(words).strip(" \t\n\r")
    dump: dict[str, Any] = {"separators": draw(separators), "ensure_ascii": draw(st.booleans())}
    space = draw(st.sampled_from(["", "\n", " "]))
    made = [Call(name, json.dumps(value, **dump)) for name, value in calls]
    if not made:
        return known, content, made, content
    written = {"hermes": _hermes, "llama3_json": _llama, "mistral": _mistral}[format_name]
    return known, content, made, content + space + written(draw, made, space)


def _object(draw: st.DrawFn, call: Call, key: str) -> str:
    """A call as an object, its keys in either order, perhaps with others."""
    members = [f'"name": "{call.name}"', f'"{key}":{call.arguments}']
    if draw(st.booleans()):
        members.reverse()
    members += draw(st.sampled_from([[], ['"type": "function"'], ['"extra": [1, {"a": "}"}]']]))
    return "{" + ", ".join(members) + "}"


def _hermes(draw: st.DrawFn, calls: list[Call], space: str) -> str:
    objects = [_object(draw, call, "arguments") for call in calls]
    return space.join(f"<tool_call>{space}{found}{space}</tool_call>" for found in objects)


def _llama(draw: st.DrawFn, calls: list[Call], space: str) -> str:
    tag = draw(st.sampled_from(["", "<|python_tag|>"]))
    return tag + f";{space}".join(_object(draw, call, "parameters") for call in calls)


def _mistral(draw: st.DrawFn, calls: list[Call], space: str) -> str:
    form = draw(st.sampled_from(["list", "args", "call_id"]))
    if form == "list":
        objects = [_object(draw, call, "arguments") for call in calls]
        return f"[TOOL_CALLS]{space}[" + f",{space}".join(objects) + "]"
    between = "[ARGS]" if form == "args" else "[CALL_ID]a1B2c3D4e[ARGS]"
    return "".join(f"[TOOL_CALLS]{name}{between}{value}" for name, value in calls)


def test_calls_come_back_as_the_model_meant_them(
    model: Any, format_name: str, fuzz: Callable[[int], settings]
) -> None:
    num_dialogues = num_calls = 0

    @fuzz(NUM_DIALOGUES)
    @given(dialogue=dialogues(format_name), seed=st.integers(0, 2**32))
    def check(dialogue: tuple[list[str], str, list[Call], str], seed: int) -> None:
        nonlocal num_dialogues, num_calls
        known, content, calls, text = dialogue
        tools = [tool(name) for name in known]
        model.writes(text, rng=random.Random(seed))
        whole = model.choice(tools=tools)
        assert calls_of(whole) == calls
        assert content_of(whole) == content
        assert whole["finish_reason"] == ("tool_calls" if calls else "stop")
        assert whole["message"]["content"] is None or content or not calls
        model.writes(text, rng=random.Random(seed + 1))
        check_equal(whole, model.choice(stream=True, tools=tools))
        num_dialogues += 1
        num_calls += len(calls)

    check()
    assert num_calls > num_dialogues / 4


@st.composite
def malformed(draw: st.DrawFn, format_name: str) -> tuple[list[str], str]:
    """A dialogue with characters changed, cut or put in, or pieces of the format at random."""
    known, _, _, text = draw(dialogues(format_name))
    if draw(st.booleans()):
        parts = [*MARKERS, *'{}[]",:\\;', " ", "name", '"name":', '"arguments":', *known]
        return known, "".join(draw(st.lists(st.sampled_from(parts), max_size=20)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(text)))
        changed = draw(st.sampled_from(["", "{", "}", '"', ",", "\\", "x", "\n", "<tool_call>"]))
        text = text[:at] + changed + text[at + draw(st.integers(0, 2)) :]
    return known, text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text


def test_whatever_a_model_writes_is_an_answer_and_the_same_one_in_a_stream(
    model: Any, format_name: str, fuzz: Callable[[int], settings]
) -> None:
    @fuzz(NUM_DIALOGUES)
    @given(
        written=malformed(format_name),
        finish_reason=st.sampled_from(["stop", "length"]),
        seed=st.integers(0, 2**32),
    )
    def check(written: tuple[list[str], str], finish_reason: str, seed: int) -> None:
        known, text = written
        tools = [tool(name) for name in known]
        model.writes(text, rng=random.Random(seed), finish_reason=finish_reason)
        whole = model.choice(tools=tools)
        model.writes(text, finish_reason=finish_reason)
        check_equal(whole, model.choice(stream=True, tools=tools))
        calls = calls_of(whole)
        assert {call.name for call in calls} <= set(known)
        if not calls:
            assert (content_of(whole), whole["finish_reason"]) == (text, finish_reason)
        elif finish_reason == "length":
            assert whole["finish_reason"] == "length"

    check()


# --- by hand ------------------------------------------------------------------------------------


def test_arguments_stream_while_they_are_generated(model: Any, format_name: str) -> None:
    text = ONE_CALL[format_name].replace("Köln", "a long name of a city " * 4)
    model.writes(text)
    answer = model.post(tools=WEATHER, stream=True)
    pieces = re.findall(r'"arguments":"((?:[^"\\]|\\.)*)"', answer.text)
    assert len(pieces) > 20
    assert max(map(len, pieces)) < 16


def test_prompt_has_the_tools_as_transformers_writes_them(model: Any) -> None:
    model.writes("ok")
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "title": "t"}}
    described = [*WEATHER, {"type": "function", "function": function}]
    for tools in (WEATHER, described):
        answer = model.post(tools=tools, return_token_ids=True).json()
        wanted = model.oracle.apply_chat_template(
            HI, tools=tools, tokenize=False, add_generation_prompt=True
        )
        assert "weather" in wanted
        assert model.oracle.decode(answer["prompt_token_ids"]) == wanted


def test_calls_and_results_go_back_in(model: Any, format_name: str) -> None:
    model.writes(ONE_CALL[format_name])
    message = model.choice(tools=WEATHER)["message"]
    [call] = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
    turns = [*HI, message, result]
    answer = model.post(messages=turns, tools=WEATHER, return_token_ids=True)
    assert answer.status_code == 200, answer.text
    called = {"name": "weather", "arguments": {"city": "Köln"}}
    theirs = {"role": "assistant", "content": "", "tool_calls": [{**call, "function": called}]}
    wanted = model.oracle.apply_chat_template(
        [*HI, theirs, result], tools=WEATHER, tokenize=False, add_generation_prompt=True
    )
    assert "Köln" in wanted and "rain" in wanted
    assert model.oracle.decode(answer.json()["prompt_token_ids"]) == wanted


def test_arguments_that_are_no_object_go_back_in_as_text(make: MakeModel) -> None:
    model = make(HERMES)
    model.writes("ok")
    for text, written in (("", "{}"), ('{"a": ', '"{\\"a\\": "'), ("[1]", '"[1]"')):
        call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": text}}
        turns = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
        answer = model.post(messages=turns, tools=WEATHER, return_token_ids=True).json()
        prompt = model.oracle.decode(answer["prompt_token_ids"])
        assert f'"arguments": {written}}}' in prompt


def test_without_parallel_calls_the_first_one_is_kept(model: Any, format_name: str) -> None:
    one = ONE_CALL[format_name]
    second = one.removeprefix("<|python_tag|>") if format_name == "llama3_json" else one
    model.writes(f"{one};{second}" if format_name == "llama3_json" else one + second)
    assert len(calls_of(model.choice(tools=WEATHER))) == 2
    whole = model.choice(tools=WEATHER, parallel_tool_calls=False)
    assert calls_of(whole) == [Call("weather", '{"city": "Köln"}')]
    check_equal(whole, model.choice(stream=True, tools=WEATHER, parallel_tool_calls=False))


def test_with_choice_none_the_model_sees_no_tools(model: Any, format_name: str) -> None:
    model.writes(ONE_CALL[format_name])
    choice = model.choice(tools=WEATHER, tool_choice="none")
    assert calls_of(choice) == [] and choice["finish_reason"] == "stop"
    bare = model.post(return_token_ids=True).json()["prompt_token_ids"]
    none = model.post(tools=WEATHER, tool_choice="none", return_token_ids=True)
    assert none.json()["prompt_token_ids"] == bare


def test_special_markers_are_hidden_from_requests_without_tools(make: MakeModel) -> None:
    model = make(MISTRAL)
    model.writes('[TOOL_CALLS]now[ARGS]{"a": 1}')
    assert content_of(model.choice()) == 'now{"a": 1}'
    assert calls_of(model.choice(tools=WEATHER)) == [Call("now", '{"a": 1}')]


def test_a_format_can_be_given(make: MakeModel) -> None:
    model = make(HERMES, tool_call_parser="mistral")
    model.writes('[TOOL_CALLS]now[ARGS]{"a": 1}')
    assert calls_of(model.choice(tools=WEATHER)) == [Call("now", '{"a": 1}')]


XML = HERMES.replace('{"name": "{{ c.function.name }}", ', "<function={{ c.function.name }}>")


@pytest.mark.parametrize(("template", "reason"), [
    ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not write them"),
    (XML, "tool_call_parser"),
])  # fmt: skip
def test_tools_are_refused_where_they_would_be_lost(
    make: MakeModel, template: str, reason: str
) -> None:
    error = make(template).post(tools=WEATHER).json()["error"]
    assert (error["code"], error["param"]) == (400, "tools") and reason in error["message"]


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def called(**call: Any) -> dict[str, Any]:
    whole = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}, **call}
    return {"messages": [*HI, {"role": "assistant", "tool_calls": [whole]}]}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "found web_search"),
    ({"tools": [tool("a b")]}, "tools[0].function.name", "letters"),
    ({"tools": [tool("a" * 65)]}, "tools[0].function.name", "1 to 64"),
    ({"tools": [tool("a"), tool("a")]}, "tools[1].function.name", "another name"),
    ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools", "at most 128, found 129"),
    ({"tools": [tool("a", b="x" * 300_000)]}, "tools", "at most 262144 characters"),
    ({"tools": [tool("a", b=deep(40))]}, "tools[0].function.parameters", "at most 32 levels"),
    ({"tools": WEATHER, "tool_choice": "any"}, "tool_choice", "found any"),
    (
        {"tools": WEATHER, "tool_choice": "required", "structured_outputs": {"json_object": True}},
        *("tool_choice", "beside a form of the whole output"),
    ),
    (
        {"tools": WEATHER, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        *("tool_choice.function.name", "one of tools"),
    ),
    ({"tool_choice": "auto"}, "tool_choice", "tools with it"),
    (
        called(function={"name": "a", "arguments": json.dumps(deep(40))}),
        *("messages[1].tool_calls[0].function.arguments", "at most 32 levels"),
    ),
    ({"messages": [{**HI[0], "tool_call_id": "a"}]}, "messages[0].tool_call_id", "role tool"),
]


@pytest.mark.parametrize(("body", "param", "reason"), BAD, ids=[f"{b[1]}-{b[2]}" for b in BAD])
def test_bad_tools_are_400_and_name_the_field(
    make: MakeModel, body: dict[str, Any], param: str, reason: str
) -> None:
    answer = make(HERMES).post(**body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error["message"]
    assert reason in error["message"]


@pytest.mark.parametrize("arguments", ["[" * 100_000, "[[],[]" * 100_000, "1" * 100_000])
def test_arguments_that_explode_are_400_or_text(make: MakeModel, arguments: str) -> None:
    body = called(function={"name": "now", "arguments": arguments})
    assert make(HERMES).post(**body, tools=WEATHER).status_code in (200, 400)


def test_the_official_client_joins_the_streamed_calls(
    client: openai.OpenAI, serving: Any, make: MakeModel
) -> None:
    """The client's own accumulator, over HTTP."""
    model = make(HERMES)
    serve_as(serving, model)
    model.writes(f"Let me see.\n{ONE_CALL['hermes']}\n{ONE_CALL['hermes']}")
    asked: Any = {"model": "scripted", "messages": HI, "tools": WEATHER, "tool_choice": "auto"}
    whole = client.chat.completions.create(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == 2
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert choice.message.tool_calls is not None
        for call in choice.message.tool_calls:
            assert call.type == "function" and call.id.startswith("call_")
            assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Köln"}')


def test_the_example_runs_what_the_model_calls(
    url: str, serving: Any, backend: Any, make: MakeModel, printed: Any
) -> None:
    """`examples/tools.py`, as a process of its own."""
    model = make(HERMES)
    serve_as(serving, model)
    generate = backend.generate

    def in_turns(request: Any, *observers: Any) -> Any:
        prompt = model.tokenizer.decode(request.prompt_token_ids)
        call = '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 30}}</tool_call>'
        model.writes("It is 42." if "<tool_response>\n42\n" in prompt else call)
        return generate(request, *observers)

    backend.generate = in_turns
    lines = printed(sys.executable, "examples/tools.py", "--url", f"{url}/v1")
    assert lines == 'add({"a": 12, "b": 30}) -> 42\nIt is 42.\n'
