"""Attacks by structured output and tools: schemas, regexes and grammars that explode.

Some are new with every request, so that nothing is remembered of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import msgspec
from hostile_bodies import chats, completions
from hostile_target import CHAT, COMPLETIONS, Attack, Target, chat, completion, status_of
from raw_http import Connection, request

NUM_SCHEMAS = 10_000
MAX_TOKENS = 40


def held(kind: str, value: Any, **fields: Any) -> bytes:
    """Return the body of a completion that is held to something."""
    wanted = {"max_tokens": MAX_TOKENS, "temperature": 1.0, **fields}
    return completion(structured_outputs={kind: value}, **wanted)


def holding(kind: str, *values: Any) -> Attack:
    """Return the attack that asks for each of these once."""
    return completions(*(partial(held, kind, value) for value in values))


def new_each_time(
    make: Callable[[int], bytes], path: str = COMPLETIONS, at_once: int = 4
) -> Attack:
    """Return the attack that posts a body made of the next number, over and over."""

    async def attack(to: Target) -> None:
        numbers = count()
        await to.again(lambda: to.post(path, make(next(numbers))), at_once)

    return Attack(attack)


# --- schemas -------------------------------------------------------------------------------------


def an_object(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def deep(depth: int) -> msgspec.Raw:
    """Return a schema of objects within objects, as text: no encoder goes so deep."""
    head, tail = msgspec.json.encode(an_object(a=None)).split(b"null")
    return msgspec.Raw(head * depth + b'{"type":"integer"}' + tail * depth)


def definitions(num: int, make: Callable[[dict[str, Any]], Any], end: Any) -> dict[str, Any]:
    """Return a schema of definitions each of which is made of a reference to the next."""
    found = {f"d{i}": make({"$ref": f"#/$defs/d{i + 1}"}) for i in range(num)}
    return {"$ref": "#/$defs/d0", "$defs": found | {f"d{num}": end}}


def patterns(num: int) -> dict[str, Any]:
    """Return a schema of texts that match many patterns at once, each of many states."""
    each = [{"type": "string", "pattern": f"[ab]*a[ab]{{{n}}}"} for n in range(10, 10 + num)]
    return {"allOf": each}


def cycle_of(keyword: str) -> dict[str, Any]:
    """Return a schema that refers to itself through a keyword."""
    itself = {"$ref": "#/$defs/a"}
    return {**itself, "$defs": {"a": {keyword: [itself, {"type": "object"}]}}}


def product(num: int, width: int) -> dict[str, Any]:
    """Return a schema that is as many others as there are ways to choose one in each part."""
    parts = range(num), range(width)
    either = [[{"properties": {f"p{i}_{j}": {}}} for j in parts[1]] for i in parts[0]]
    return {"type": "object", "allOf": [{"anyOf": each} for each in either]}


INTEGER = {"type": "integer"}
SCHEMAS = {
    "schema-deep": holding("json", *map(deep, (30, 60, 400, 800))),
    "schema-wide": holding(
        "json",
        an_object(**{f"k{i}": INTEGER for i in range(1400)}),
        {"type": "object", "properties": {f"k{i}": {} for i in range(2800)}},
        {"type": "object", "patternProperties": {f"^k{i}_": {} for i in range(900)}},
    ),
    "schema-references": holding(
        "json",
        definitions(1300, lambda ref: ref, {"type": "null"}),
        definitions(40, lambda ref: {"type": "array", "prefixItems": [ref, ref]}, INTEGER),
        definitions(30, lambda ref: {"allOf": [ref, ref]}, {"type": "object"}),
        definitions(30, lambda ref: {"anyOf": [ref, {"type": "array", "items": ref}]}, INTEGER),
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        *map(cycle_of, ("allOf", "anyOf", "oneOf")),
        {"$ref": "http://127.0.0.1:9/x"},
        {"$ref": "#/" + "a/" * 20_000},
    ),
    "schema-unions": holding(
        "json",
        {"anyOf": [an_object(**{f"k{i}": INTEGER}) for i in range(500)]},
        {"oneOf": [an_object(t={"const": i}, v=INTEGER) for i in range(400)]},
        {"enum": [f"value {i}" for i in range(4500)]},
        {"enum": ["x" * 30_000, "x" * 30_000 + "y"]},
        product(8, 4),
        product(20, 2),
        product(200, 3),
    ),
    "schema-counts": holding(
        "json",
        *({"type": "array", "items": INTEGER, key: 10**6} for key in ("minItems", "maxItems")),
        *({"type": "string", key: 10**6} for key in ("minLength", "maxLength")),
        {"type": "array", "items": INTEGER, "minItems": 10**18, "maxItems": 10**19},
        {"type": "object", "minProperties": 10**6},
        an_object(**{f"k{i}": {"type": "string", "maxLength": 10**6 + i} for i in range(500)}),
    ),
    "schema-numbers": holding(
        "json",
        {"type": "integer", "multipleOf": 9_999_991, "minimum": 3},
        {"allOf": [{"type": "integer", "multipleOf": n} for n in (997, 991, 983, 977)]},
        {"type": "number", "minimum": 1.5e-300, "maximum": 1.5e300},
        {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
        {"type": "number", "multipleOf": 1e-9},
    ),
    "schema-patterns": new_each_time(lambda i: held("json", patterns(20 + i)), at_once=2),
    "schema-odd": holding(
        "json",
        *("{", "[]", "null", "7", '{"type":', "[" * 60_000, '{"a":' * 9000),
        *({"type": odd} for odd in ("strng", None, [], 7, ["null", "null"])),
        *({key: 7} for key in ("properties", "items", "anyOf", "enum", "$ref", "pattern")),
        {"x-guidance": {"lenient": True, "whitespace_pattern": "(a{1000}){1000}"}},
        {"x-guidance": {"whitespace_pattern": "(", "item_separator": "[ab]*a[ab]{900}"}},
    ),
}

# --- regexes and grammars ------------------------------------------------------------------------


def chain(num: int, form: str, name: str = "r") -> str:
    """Return a grammar of rules each of which is made of the next."""
    rules = (f"{name}{i}: " + form.format(f"{name}{i + 1}") for i in range(num))
    return "\n".join([f"start: {name}0", *rules, f'{name}{num}: "a"'])


def slow_masks(prefix: str) -> str:
    """Return a grammar that is ambiguous without end behind a text."""
    return f'start: "{prefix}" e\ne: e e | e "+" e | "a" | ""'


REGEXES = {
    "regex-counts": holding(
        "regex",
        *("(a{1000}){1000}", "((a{100}){100}){100}", "a{1000000000}", "(.|\\n){0,50000}"),
        *("(a?){5000}a{5000}", "(a|b|ab)*c" * 2000, ".*" * 5000 + "x"),
    ),
    "regex-nested": holding(
        "regex",
        *("((((a*)*)*)*)*b", "(" * 900 + "a" + ")" * 900, "(" * 30_000 + "a" + ")" * 30_000),
        *("[ab]*a[ab]{400}", "(.*a.{25}|.*b.{25}|.*c.{25})*", "(?i)" + "stra\u00dfe" * 5000),
    ),
    "regex-unicode": holding(
        "regex",
        *(r"\w{1,1000}", r"[\p{L}\p{N}]{100}\p{Greek}{100}", r"(\p{L}|\p{M}|\p{N}|\p{S}){0,3000}x"),
        *(r"[^\x00-\x7f]{500}", r"\p{Any}*\p{Han}{30}", "[\U0001f600-\U0001f64f]{1,9}"),
    ),
    "regex-new-each-time": new_each_time(
        lambda i: held("regex", f"{i}((.*a.{{12}}b)|(.*c.{{13}}d)|(.*e.{{14}}f))+"), at_once=8
    ),
    "choices": completions(
        lambda: held("choice", [f"choice {i}" for i in range(4000)]),
        lambda: held("choice", ["a" * i for i in range(1, 340)]),
        lambda: held("choice", ["\U0001f600" * i for i in range(1, 200)]),
    ),
}

GRAMMARS = {
    "grammar-ambiguous": holding(
        "grammar",
        'start: start start | "a" | ',
        slow_masks("a"),
        "start: e\ne: e e e e | e e e | e e | /./ | /.+/",
        'start: "zz" e\ne: e e e | e e | "a" | "b" | /[a-z]/ | /[a-z]+/ | ""',
    ),
    "grammar-masks-hidden": new_each_time(
        lambda i: held("grammar", slow_masks("abc" * 40 + str(i)), max_tokens=400, n=16)
    ),
    "grammar-nullable": holding(
        "grammar",
        *(f'start: {" ".join(["x?"] * num)}\nx: "a"' for num in (600, 4000, 10_000)),
        *(f'start: "zz" {" ".join(["x?"] * num)}\nx: "a"' for num in (600, 4000, 10_000)),
    ),
    "grammar-chains": holding(
        "grammar",
        *(chain(num, "{0} {0}") for num in (40, 3000)),
        *(chain(num, '{0} | {0} "b"', "T") for num in (25, 2500)),
        chain(4500, "{0}"),
        'start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x"',
        'start: A\nA: B{1000}\nB: C{1000}\nC: "x"{1000}',
    ),
    "grammar-crash-new-each-time": new_each_time(
        lambda i: held("grammar", chain(3000 + i, "{0} {0}")), at_once=8
    ),
    "grammar-huge": holding(
        "grammar",
        "start: " + " | ".join(f'"k{i}"' for i in range(6000)),
        "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
        "start: (" + " | ".join(f"/[a-z]{{1,{i % 50 + 1}}}{i}/" for i in range(1500)) + ")*",
        "start: T\nT: /.*a.{20}/ & /.*b.{21}/ & /.*c.{22}/",
        "start: " + " | ".join(f'%json {{"enum": ["k{i}"]}}' for i in range(900)),
    ),
    "gbnf": holding(
        "grammar",
        *('root ::= "a"' + "\n" * 60_000, "root ::= " + "(" * 60_000, "root ::= [" + "a" * 60_000),
        *('root ::= "' + "\\n" * 30_000 + '"', 'root ::= "a"' + "\n#" * 30_000),
        'root ::= "a"{1000000}',
    ),
}

# --- tools and templates -------------------------------------------------------------------------


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    """Return a function that a model may call."""
    return {"type": "function", "function": {"name": name, "parameters": parameters or {}}}


def forced(*tools: dict[str, Any], **fields: Any) -> bytes:
    """Return the body of a conversation in which one of these has to be called."""
    wanted = {"max_tokens": MAX_TOKENS, "tool_choice": "required", **fields}
    return chat("hi", tools=list(tools), **wanted)


NAMES = (
    "",
    " ",
    "a b",
    "f\n",
    "\u00e9",
    "<tool_call>",
    '"',
    "\\",
    "f" * 65,
    "../x",
    "\x00",
    "f\u202e",
)
MESSAGES = [
    {"role": "user", "content": "hi"},
    {"role": "tool", "tool_call_id": "x" * 100_000, "content": "{"},
]


def called(arguments: str) -> bytes:
    """Return the body of a conversation in which a function was called with these arguments."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    return chat("hi", messages=turns, tools=[tool("f")])


TOOLS = {
    "tools-many": chats(
        lambda: forced(*(tool(f"f{i}") for i in range(128))),
        lambda: forced(*(tool(f"f{i}", an_object(**{f"p{i}": {}})) for i in range(128))),
        lambda: forced(*(tool(f"f{i}") for i in range(5000))),
        lambda: forced(*(tool("f") for _ in range(100))),
    ),
    "tools-explode": chats(
        lambda: forced(tool("f", patterns(30))),
        lambda: forced(tool("f", product(20, 2))),
        lambda: forced(tool("f", deep(12)), tool("g", deep(40))),
        lambda: forced(tool("f", {"type": "string", "pattern": "(a{1000}){1000}"})),
        lambda: forced(
            *(tool(f"f{i}", definitions(12, lambda r: r, {"const": i})) for i in range(9))
        ),
        lambda: forced(
            *(
                tool(f"f{i}", {"type": "object", "properties": {f"k{j}": {} for j in range(30)}})
                for i in range(40)
            )
        ),
    ),
    "tools-odd": chats(
        *(partial(forced, tool(name)) for name in NAMES),
        *(partial(forced, tool("f", odd)) for odd in ([], 7, "x", {"type": "strng"}, {"$ref": ""})),
        *(partial(forced, tool("f"), tool_choice=odd) for odd in ("all", "", 7, {}, [], {"a": 1})),
        *(partial(forced, odd) for odd in ({}, {"type": "web"}, {"function": {}}, {"x": "y"})),
    ),
    "tools-in-answers": chats(
        *(
            partial(chat, f"Write {text * 40}", tools=[tool("f")], max_tokens=400, stream=stream)
            for text in ('<tool_call>{"name":"f","arguments":{"a":[', '{"name":"f"', "<tool_call>")
            for stream in (False, True)
        )
    ),
    "tools-arguments": chats(
        *(partial(called, text) for text in ("{", "[]", "7", "", '{"a":' * 20_000, "[" * 900_000)),
        *(partial(called, text) for text in (json.dumps({"a": "b" * 900_000}), "{}" * 300_000)),
        lambda: chat("hi", messages=MESSAGES),
    ),
    "template-kwargs": chats(
        *(
            partial(chat, "hi", chat_template_kwargs=kwargs)
            for kwargs in (
                {"tools": [tool("f")] * 9000},
                {"enable_thinking": "x" * 900_000},
                {"documents": [{"a": "b"}] * 90_000},
                {"add_generation_prompt": {}},
                {"bos_token": "{{ 7 * 7 }}" * 9000},
                {"eos_token": "<|im_end|>" * 90_000},
                {"chat_template": "{% for a in range(10**9) %}{% endfor %}"},
                {"messages": 1},
            )
        ),
        *(
            partial(chat, "hi", chat_template=text)
            for text in (
                "{{ 1 }}",
                "../../etc/passwd",
                "",
                "{% for a in range(10**9) %}x{% endfor %}",
            )
        ),
    ),
}

# --- many ----------------------------------------------------------------------------------------


def small_schema(number: int) -> bytes:
    """Return the body of a completion that is held to a schema of its own."""
    schema = an_object(**{f"k{number}": INTEGER, "name": {"type": "string", "maxLength": 9}})
    return held("json", schema, max_tokens=1)


async def distinct_schemas(to: Target) -> None:
    """Ask for as many schemas, 16 at a time, one token each, however long that takes."""
    numbers: Iterator[int] = iter(range(NUM_SCHEMAS))

    async def client() -> None:
        for number in numbers:
            await to.post(COMPLETIONS, small_schema(number))

    await asyncio.gather(*(client() for _ in range(16)))


async def same_schema(to: Target) -> None:
    """Ask for a new schema by 64 clients at once, over and over."""
    for number in count(NUM_SCHEMAS):
        body = small_schema(number)
        await asyncio.gather(*(to.post(COMPLETIONS, body) for _ in range(64)))
        if to.is_over:
            return


async def left_schemas(to: Target) -> None:
    """Leave while schemas are compiled, and have others ask for the same ones."""

    async def leave(body: bytes) -> None:
        with to.sending(body):
            async with await Connection.open(to.address) as made:
                await made.send(request("POST", COMPLETIONS, body))
                await asyncio.sleep(0.01)

    for number in count(2 * NUM_SCHEMAS):
        schema = an_object(**{f"k{number}_{i}": {"type": "string"} for i in range(300)})
        body = held("json", schema, max_tokens=1)
        await asyncio.gather(*(leave(body) for _ in range(4)))
        await to.post(COMPLETIONS, body)
        if to.is_over:
            return


NEW_SCHEMA_S = 5.0
"""How long an ordinary schema that is new may take while others are costly."""
BEFORE_NEXT_S = 0.5


async def costly_neighbours(to: Target) -> None:
    """Ask for costly patterns by eight clients at once, and beside them for ordinary new schemas.

    What becomes of the ordinary ones is counted as `honest`.
    """
    numbers = count(20)

    async def costly() -> None:
        await to.post(COMPLETIONS, held("json", patterns(next(numbers))))

    async def honest() -> None:
        name = f"name{next(numbers)}"
        body = held("json", an_object(**{name: INTEGER}), max_tokens=1)
        outcome = "late"
        with suppress(TimeoutError):
            async with asyncio.timeout(NEW_SCHEMA_S), await Connection.open(to.address) as made:
                await made.send(request("POST", COMPLETIONS, body))
                outcome = status_of(await made.answer("POST"))
        to.outcomes[f"honest {outcome}"] += 1
        await asyncio.sleep(BEFORE_NEXT_S)

    await asyncio.gather(to.again(costly, 8), to.again(honest))


MANY = {
    "schemas-10000": Attack(distinct_schemas, times=40),
    "schema-64-at-once": Attack(same_schema),
    "schema-left": Attack(left_schemas),
    "schema-neighbours": Attack(costly_neighbours, times=3),
    "schema-of-honest": new_each_time(
        lambda i: chat("hi", response_format={"type": "json_object"}, max_tokens=MAX_TOKENS),
        CHAT,
        at_once=8,
    ),
}

ATTACKS = SCHEMAS | REGEXES | GRAMMARS | TOOLS | MANY
