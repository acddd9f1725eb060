"""Every argument, limit and request field: `python -m serve.reference` prints serve/REFERENCE.md.

Names, types, bounds and defaults come from the structs, meanings from the docstrings below fields
and constants. One without a docstring is an error.

    python -m serve.reference > serve/REFERENCE.md
    python -m serve.reference --check [FILE]        exit code 1 unless the file is up to date
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from cluster.metrics import COMMON_LABELS, HISTOGRAM, INGRESS, METRICS, PREFIX
from compile.config import FIELDS, WANTED, CompilationConfig
from compile.resolve import PRESETS
from serve.arguments import ALIASES, DeployArgs, IngressArgs, KVArgs, PoolArgs
from serve.compilation import SECTIONS, requested
from serve.fields import hints_of, words_for
from serve.openai import responses_request, schema, tokenizing
from serve.openai.fields import ignored_fields, inert_fields

ROOT = Path(__file__).resolve().parent.parent
LIMIT = re.compile(r"(MAX|MIN|DEFAULT)_[A-Z_]+|[A-Z][A-Z_]*_(S|TIMES)")
CLUSTER_FILES = (
    "config",
    "messages",
    "engine/watchdog",
    "actors/rank_group",
    "actors/placement",
    "grammars",
    "rank/grammar_masks",
)
"""Those outside of serve/ whose limits a user meets."""


def document() -> str:
    """Return the text of serve/REFERENCE.md.

    Raises:
        ValueError: a field or constant has no docstring.
    """
    return "\n\n".join(_sections()) + "\n"


def _sections() -> Iterator[str]:
    yield """\
# Arguments, limits and request fields

`python -m serve.reference` prints this file from the code; change it there.

## Arguments of `deploy`

They are `key=value` with dots (`serve run serve.app:deploy decode.replicas=2`), or YAML, as a file
of their own (`config=FILE`) or in one of Ray Serve ([tiny.yaml](../examples/configs/tiny.yaml)).
They are strict: an unknown key, a value of the wrong type or a field given twice ends the start
with exit code 1 and one line, `FIELD: wanted ..., found ...`. What is named here but not built yet
is refused by name. Defaults are in JSON."""
    yield _fields(DeployArgs)
    yield "### `prefill.*`, `decode.*`, `mixed.*`"
    yield _fields(PoolArgs)
    yield "### `ingress.*`"
    yield _fields(IngressArgs)
    yield "### `kv.*`"
    yield _fields(KVArgs)
    yield "### `compilation.*`"
    presets = ", ".join(f"{mode.name} in {name} pools" for name, mode in PRESETS.items())
    yield f"Where no `cudagraph_mode` is given, it is {presets}."
    yield _fields(CompilationConfig, has_bounds=True)
    yield "### Other spellings"
    yield _table("argument | stands for", _spellings())
    yield """\
## Limits

Constants of the code. Limits that can be set are among the arguments; those of one field, with
these constants in them, are among the request fields. A status is what a request beyond gets."""
    yield _table("limit | value | file | meaning", _limits())
    yield """\
## Request fields

A null is the same as leaving a field out; an unknown field gets 400. Both
`POST /v1/chat/completions` and `POST /v1/completions` take these:"""
    shared = schema.RequestFields.__struct_fields__
    yield _fields(schema.RequestFields, has_bounds=True)
    yield "### Of chat completions"
    yield _fields(schema.ChatRequest, has_bounds=True, without=shared)
    yield "### Of a message, and of a part of its content"
    yield _fields(schema.Message)
    yield _fields(schema.TextPart)
    yield "### Of `tools`, of `function` in one, and of a `tool_choice` that names a function"
    yield _fields(schema.Tool)
    yield _fields(schema.Function)
    yield _fields(schema.NamedToolChoice)
    yield _fields(schema.FunctionName)
    yield "### Of a message's `tool_calls`, and of `function` in one"
    yield _fields(schema.ToolCall)
    yield _fields(schema.CalledFunction)
    yield "### Of completions"
    yield _fields(schema.CompletionRequest, has_bounds=True, without=shared)
    yield "### Of responses"
    yield _fields(responses_request.ResponsesRequest, has_bounds=True)
    yield "### Of its `text`, of the `format` in it, of `tools`, and of a `tool_choice`"
    yield _fields(responses_request.TextOptions)
    yield _fields(responses_request.TextFormat)
    yield _fields(responses_request.FlatFunction)
    yield _fields(responses_request.FlatChoice)
    yield "### Of `stream_options`"
    yield _fields(schema.StreamOptions)
    yield "### Of `POST /tokenize`"
    yield _fields(tokenizing.TokenizeRequest)
    yield "### Of `POST /detokenize`"
    yield _fields(tokenizing.DetokenizeRequest)
    yield "### Of `response_format`, and of its `json_schema`"
    yield _fields(schema.ResponseFormat)
    yield _fields(schema.JsonSchemaFormat)
    yield "### Of `structured_outputs`"
    yield _fields(schema.StructuredOutputs)
    yield """\
### Without effect

OpenAI or vLLM know these fields, and Lockstep has not built them: each is accepted at the values
below, which change nothing, and gets 400 at any other."""
    yield _table("field | accepted | of", _inert())
    yield """\
`anything` is accepted of fields that cannot change an answer. So it is of those that clients add to
messages which they send back: `provider_specific_fields` and `parsed` of a message,
`provider_specific_fields` and `index` of a tool call, `provider_specific_fields` and
`parsed_arguments` of its function."""
    yield f"""\
## Metrics

`GET /metrics`, for Prometheus, as text or as OpenMetrics. Every metric also has the labels
{" and ".join(f"`{label}`" for label in COMMON_LABELS)}: an engine as in `prefill-0-0` (pool,
replica, data-parallel rank), or `{INGRESS}`. Names that vLLM has are vLLM's with `{PREFIX}` in
place of `vllm:`. Ray's own endpoints have them as gauges that begin with `lockstep_`."""
    yield _table("metric | kind | labels | buckets | meaning", _metrics())


def _metrics() -> Iterator[tuple[str, ...]]:
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        bounds = "1, 2, 5, ... to the model's length"
        if metric.bounds:
            bounds = ", ".join(f"{bound:g}" for bound in metric.bounds)
        buckets = bounds if metric.kind == HISTOGRAM else ""
        yield f"`{PREFIX}{metric.name}`", metric.kind, labels, buckets, metric.meaning


def _table(head: str, rows: Iterable[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    if missing := [row[0] for row in cells if not row[-1]]:
        raise ValueError(f"docstring: wanted one below {', '.join(missing)}, found none")
    rule = "|".join("---" for _ in head.split("|"))
    return "\n".join([f"| {head} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in cells)])


def _fields(kind: type, *, has_bounds: bool = False, without: tuple[str, ...] = ()) -> str:
    """Return the table of a struct's fields."""
    classes = [cls for cls in reversed(kind.__mro__) if "__annotations__" in vars(cls)]
    nodes = [ast.parse(inspect.getsource(cls)).body[0] for cls in classes]
    meanings = dict(pair for node in nodes for pair in _docstrings(node))
    types = get_type_hints(kind)
    rows = []
    for name, default in _defaults(kind):
        if name not in without:
            bounds = [_bounds(kind, name)] if has_bounds else []
            value = _value(name, default)
            rows.append([f"`{name}`", f"`{_type(types[name])}`", value, *bounds, meanings[name]])
    return _table(f"field | type | default | {'bounds | ' if has_bounds else ''}meaning", rows)


def _bounds(kind: type, name: str) -> str:
    if kind is CompilationConfig:
        return WANTED[name]
    return words_for(hints_of(kind)[name])


def _type(kind: Any) -> str:
    """Return a type as a struct has it, without bounds."""
    arguments = [_type(each) for each in get_args(kind) if each is not msgspec.UnsetType]
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(arguments)
    if get_origin(kind) is Literal:
        return "str"
    name = {NoneType: "None", ...: "..."}.get(kind, getattr(kind, "__name__", str(kind)))
    return f"{name}[{', '.join(arguments)}]" if arguments else name


def _defaults(kind: type) -> Iterator[tuple[str, Any]]:
    if kind is CompilationConfig:
        defaults = requested({}).to_dict()
        yield from ((name, defaults[name]) for name in FIELDS)
        return
    for field in msgspec.structs.fields(kind):
        is_made = field.default_factory is not msgspec.NODEFAULT
        yield field.name, field.default_factory() if is_made else field.default


def _docstrings(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names that a class or module assigns, each with the docstring below it."""
    assert isinstance(node, ast.ClassDef | ast.Module)
    for assigned, below in pairwise([*node.body, ast.Pass()]):
        if not isinstance(assigned, ast.AnnAssign | ast.Assign):
            continue
        match below:
            case ast.Expr(ast.Constant(str(text))):
                meaning = " ".join(text.split())
            case _:
                meaning = ""
        targets = assigned.targets if isinstance(assigned, ast.Assign) else [assigned.target]
        for target in targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            yield from ((name.id, meaning) for name in names if isinstance(name, ast.Name))


def _value(name: str, value: object) -> str:
    """Return a default or a constant as JSON; empty for what is required, unset or a section."""
    if value in (msgspec.NODEFAULT, msgspec.UNSET) or isinstance(value, msgspec.Struct):
        return "required" if value is msgspec.NODEFAULT else ""
    text = f"`{json.dumps(value, default=attrgetter('value'))}`"
    if "bytes" in name.lower() and isinstance(value, int) and value >= 1 << 20:
        return f"{text} ({value >> 20} MiB)"
    return text


def _spellings() -> Iterator[tuple[str, str]]:
    for name, path in ALIASES.items():
        yield f"`{name}`", f"`{'.'.join(path)}`"
    for name, wanted in SECTIONS.items():
        yield f"`{name}`", wanted


def _limits() -> Iterator[tuple[str, str, str, str]]:
    beside = [ROOT / "cluster" / f"{name}.py" for name in CLUSTER_FILES]
    for path in [*sorted((ROOT / "serve").rglob("*.py")), *beside]:
        file = path.relative_to(ROOT).with_suffix("")
        for name, meaning in _docstrings(ast.parse(path.read_text())):
            if LIMIT.fullmatch(name):
                value = getattr(importlib.import_module(".".join(file.parts)), name)
                yield f"`{name}`", _value(name, value), f"`{file}.py`", meaning


def _inert() -> Iterator[tuple[str, str, str]]:
    chat, completion = (
        _without_effect(kind) for kind in (schema.ChatRequest, schema.CompletionRequest)
    )
    for name, values in (chat | completion).items():
        of = "both" if name in chat and name in completion else "chat" if name in chat else "texts"
        yield f"`{name}`", values, of
    for name, values in _without_effect(responses_request.ResponsesRequest).items():
        yield f"`{name}`", values, "responses"


def _without_effect(kind: type) -> dict[str, str]:
    inert = {
        name: " or ".join(_value("", value) for value in (*values, None))
        for name, values in inert_fields(kind).items()
    }
    return inert | {name: "anything" for name in sorted(ignored_fields(kind))}


def main() -> None:
    """Print the document, or compare it with a file."""
    parser = argparse.ArgumentParser(prog="python -m serve.reference")
    default = ROOT / "serve" / "REFERENCE.md"
    parser.add_argument("--check", nargs="?", type=Path, const=default, metavar="FILE")
    path = parser.parse_args().check
    if path is None:
        print(document(), end="")
    elif path.read_text() != document():
        wanted = "what `python -m serve.reference` prints"
        raise SystemExit(f"{path}: wanted {wanted}, found another text: write it anew")


if __name__ == "__main__":
    main()
