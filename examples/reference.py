"""Write the reference in serve/docs/reference/ from the code, one page a subject.

Names, types, bounds and defaults come from the structs, meanings from the docstrings below fields
and constants. A field of a request or a constant without a docstring is an error.

    python examples/reference.py            write the pages
    python examples/reference.py --check    exit code 1 unless they are up to date
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from cluster.observe.metrics import COMMON_LABELS, HISTOGRAM, INGRESS, METRICS, PREFIX
from compile import environment
from compile.config import FIELDS, WANTED, CompilationConfig
from compile.resolve import PRESETS
from model.fields import hints_of, words_for
from serve.arguments import (
    ALIASES,
    DeployArgs,
    EngineArgs,
    IngressArgs,
    KVArgs,
    PoolArgs,
    PrefillArgs,
    SpeculativeArgs,
)
from serve.compilation import DEFAULT_LEVEL, SECTIONS
from serve.openai import answers, responses, schema, tokenizing
from serve.openai.body import ignored_fields, inert_fields
from serve.openai.errors import STATUSES

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "serve" / "docs" / "reference"
LIMIT = re.compile(r"(MAX|MIN|DEFAULT)_[A-Z_]+|[A-Z][A-Z_]*_(S|TIMES)")
CLUSTER_FILES = (
    "config",
    "wire/messages",
    "engine/watchdog",
    "actors/rank_group",
    "actors/status_board",
    "grammar/compile",
    "grammar/masks",
)
"""Files outside of serve/ whose limits a user meets."""
ANSWERS = (
    (answers.ChatCompletion, answers.ChatChoice, answers.ChatMessage),
    (answers.ChatChunk, answers.ChatChunkChoice, answers.ChatDelta),
    (answers.AnsweredCall, answers.AnsweredCallDelta, answers.FunctionCall),
    (answers.ChatLogprobs, answers.ChatTokenLogprob, answers.TopLogprob),
    (answers.Completion, answers.CompletionChoice, answers.CompletionLogprobs),
    (answers.Usage, answers.PromptTokensDetails, answers.PromptLogprob),
    (answers.ModelList, answers.ModelCard, answers.ModelDeleted),
    (answers.Tokenized, answers.Detokenized),
)
VARIABLES = {
    environment.CACHE_ROOT: "The directory below which compiled code and C++ kernels are kept; "
    "`compilation.cache_dir` overrides it for compiled code. Default: `lockstep` in "
    "`XDG_CACHE_HOME`, or `~/.cache/lockstep`.",
    environment.DISABLE_COMPILE_CACHE: "`1`: compiled code is neither read nor written.",
    environment.COMPILE_CACHE_SAVE_FORMAT: "`binary` (default) or `unpacked`, which leaves the "
    "generated code readable beside the index of each rank; "
    "`compilation.compile_cache_save_format` overrides it.",
    environment.LOG_LEVEL: "Level of all loggers of Lockstep, as Python's logging spells it; "
    "`DEBUG` logs each decision about compiling, caching and capturing.",
    environment.CXX: "The C++ compiler for Inductor and for the CPU kernels. Default: `g++`.",
    environment.CC: "The C compiler for Triton. Default: `gcc`, else `clang`.",
}
"""What the variables that `compile/environment.py` reads do."""
EXIT_CODES = (
    ("`serve run serve.app:deploy`", "1", "An argument is refused, before Ray starts."),
    ("the same", "1", "The port is in use, or Serve already listens elsewhere in the cluster."),
    ("the same", "1", "A pool cannot start, or turns out to be unable to compile its model."),
    ("`python -m compile.explain`", "1", "The model cannot be traced, or the cache is empty."),
    ("`python -m compile.waste`", "1", "The trace has no steps that could replay graphs."),
    ("`python examples/reference.py --check`", "1", "A page is not up to date."),
    ("`python examples/bench/gpu_check.py`", "1", "A part did not run or was wrong."),
)


def pages() -> dict[str, str]:
    """Return the text of every page by its file name.

    Raises:
        ValueError: a field or constant has no docstring.
    """
    found = {name: (title, "\n\n".join(sections())) for name, title, sections in PAGES}
    texts = {name: f"# {title}\n\n{text}\n" for name, (title, text) in found.items()}
    links = "\n".join(f"- [{title}]({name})" for name, (title, _) in found.items())
    return {"README.md": f"# Reference\n\n{INTRODUCTION}\n\n{links}\n", **texts}


INTRODUCTION = """\
These pages are written from the code by `python examples/reference.py`. To change one, change the
declaration or its docstring and run the command again."""


def _arguments() -> Iterator[str]:
    yield """\
Arguments are `key=value`, with dots for nested keys
(`serve run serve.app:deploy decode.replicas=2`), or YAML: a file of their own (`config=FILE`), or
`args` in a file of Ray Serve ([tiny.yaml](../../../examples/configs/tiny.yaml)). An unknown key, a
value of the wrong type or a field that is given twice ends the start with exit code 1 and one line,
`FIELD: wanted ..., found ...`. Arguments that are listed here but not built yet are refused by
name. Defaults are in JSON."""
    shared = EngineArgs.__struct_fields__
    yield _fields(DeployArgs, without=shared)
    yield """\
## Of all pools, or of one

Each of these is told to all pools, or to one by its own name, which goes before:
`max_num_seqs=64 decode.max_num_seqs=256`."""
    yield _fields(EngineArgs)
    yield "## `prefill.*`, `decode.*`, `mixed.*`"
    yield "These, and the ones above."
    yield _fields(PoolArgs, without=shared)
    yield "## `prefill.*`"
    yield "This one besides."
    yield _fields(PrefillArgs, without=PoolArgs.__struct_fields__)
    yield "## `ingress.*`"
    yield _fields(IngressArgs)
    yield "## `kv.*`"
    yield _fields(KVArgs)
    yield "## `speculative_config.*`"
    yield _fields(SpeculativeArgs)
    yield "## `compilation.*`"
    yield "These have [a page of their own](compilation.md)."


def _compilation() -> Iterator[str]:
    presets = ", ".join(f"{mode.name} in {name} pools" for name, mode in PRESETS.items())
    yield f"""\
Fields of `compilation.*`, which `cc.*` abbreviates. `LLM(compilation_config=...)` takes the same
ones. The default of `cudagraph_mode` depends on the pool: {presets}."""
    yield _fields(CompilationConfig, has_bounds=True)
    yield "## Other spellings"
    yield _table("argument | stands for", _spellings())


def _requests() -> Iterator[str]:
    yield """\
A null is the same as leaving a field out; an unknown field gets 400. Names such as
`MAX_STOP_STRINGS` are explained among the [limits](limits.md).

## Chat completions and completions

Both `POST /v1/chat/completions` and `POST /v1/completions` take these:"""
    shared = schema.RequestFields.__struct_fields__
    yield _fields(schema.RequestFields, has_bounds=True)
    yield "## Chat completions"
    yield _fields(schema.ChatRequest, has_bounds=True, without=shared)
    yield from _structs(3, schema.Message, schema.TextPart, schema.Tool, schema.Function)
    yield from _structs(3, schema.NamedToolChoice, schema.FunctionName)
    yield from _structs(3, schema.ToolCall, schema.CalledFunction)
    yield "## Completions"
    yield _fields(schema.CompletionRequest, has_bounds=True, without=shared)
    yield "## Fields that are objects"
    yield from _structs(3, schema.StreamOptions, schema.ResponseFormat, schema.JsonSchemaFormat)
    yield from _structs(3, schema.StructuredOutputs)
    yield "## Responses"
    yield _fields(responses.ResponsesRequest, has_bounds=True)
    yield from _structs(3, responses.TextOptions, responses.TextFormat)
    yield from _structs(3, responses.FlatFunction, responses.FlatChoice)
    yield "## `POST /tokenize`"
    yield _fields(tokenizing.TokenizeRequest)
    yield "## `POST /detokenize`"
    yield _fields(tokenizing.DetokenizeRequest)
    yield "## `POST /v1/load_lora_adapter`"
    yield _fields(schema.LoadAdapterRequest)
    yield "## `POST /v1/unload_lora_adapter`"
    yield _fields(schema.UnloadAdapterRequest)
    yield """\
## Fields without effect

OpenAI or vLLM know these fields, and Lockstep has not built them. Each is accepted at the values
below, which change nothing, and gets 400 at any other."""
    yield _table("field | accepted | of", _inert())
    yield """\
`anything` marks fields that cannot change an answer. Neither can those that clients add to messages
which they send back, which are accepted with any value too: `provider_specific_fields` and `parsed`
of a message, `provider_specific_fields` and `index` of a tool call, `provider_specific_fields` and
`parsed_arguments` of its function."""


def _answers() -> Iterator[str]:
    yield """\
Fields have OpenAI's names and meanings; a meaning stands here where Lockstep or vLLM adds one. A
field whose default is empty may be left out. Streams of `/v1/responses` send OpenAI's typed events.
[Errors](errors.md) have a page of their own."""
    for group in ANSWERS:
        yield from _structs(2, *group, needs_meaning=False)


def _errors() -> Iterator[str]:
    yield """\
Every error has one JSON body, `{"error": {"message", "type", "param", "code"}}`: `code` is the
status, and `param` the field at fault, where there is one. After the first byte of a stream an
error comes as one more `data:` chunk. 429 and 503 have `Retry-After`."""
    rows = ((str(code), f"`{each.type}`", each.meaning) for code, each in STATUSES.items())
    yield _table("status | type | meaning", rows)


def _limits_page() -> Iterator[str]:
    yield """\
These are constants of the code. Limits that can be set are among the [arguments](arguments.md), and
those of one field, which may refer to these constants, among the
[request fields](requests.md). A status is what a request beyond the limit gets."""
    yield _table("limit | value | file | meaning", _limits())


def _metrics_page() -> Iterator[str]:
    yield f"""\
`GET /metrics` answers for Prometheus, as text or as OpenMetrics. Every metric also has the labels
{" and ".join(f"`{label}`" for label in COMMON_LABELS)}. An engine is named by pool, replica and
data-parallel rank, as in `prefill-0-0`, or is `{INGRESS}`. Metrics that vLLM has too have vLLM's
names with `{PREFIX}` in place of `vllm:`. Ray's own endpoints export them as gauges whose names
begin with `lockstep_`."""
    yield _table("metric | kind | labels | buckets | meaning", _metrics())


def _environment() -> Iterator[str]:
    declared = {value for name, value in vars(environment).items() if _is_variable(name, value)}
    if undescribed := declared ^ set(VARIABLES):
        wanted = "the variables of compile/environment.py"
        raise ValueError(f"VARIABLES: wanted {wanted}, found other {sorted(undescribed)}")
    yield """\
Lockstep reads these variables. Set them before Ray starts, on every node. A field that is given
explicitly overrides them."""
    yield _table("variable | effect", ((f"`{k}`", text) for k, text in VARIABLES.items()))
    yield """\
Variables of Ray Serve and HAProxy are in [operating](../operating.md#behind-haproxy), those of
OpenTelemetry (`OTEL_*`) in [operating](../operating.md#tracing)."""


def _is_variable(name: str, value: object) -> bool:
    return name.isupper() and isinstance(value, str)


def _exit_codes() -> Iterator[str]:
    yield """\
The last line of the output says why. [Operating](../operating.md#signals) has the exit codes after
signals."""
    yield _table("command | exit code | when", EXIT_CODES)


Page = tuple[str, str, Callable[[], Iterator[str]]]
PAGES: tuple[Page, ...] = (
    ("arguments.md", "Arguments of `deploy`", _arguments),
    ("compilation.md", "Compilation", _compilation),
    ("requests.md", "Request fields", _requests),
    ("responses.md", "Responses", _answers),
    ("errors.md", "Errors", _errors),
    ("limits.md", "Limits", _limits_page),
    ("metrics.md", "Metrics", _metrics_page),
    ("environment.md", "Environment variables", _environment),
    ("exit_codes.md", "Exit codes", _exit_codes),
)
"""By file name: its title, and what writes its sections."""


def _structs(level: int, *kinds: type, needs_meaning: bool = True) -> Iterator[str]:
    """Yield a heading and a table for each struct."""
    for kind in kinds:
        yield f"{'#' * level} {kind.__name__}"
        if kind.__doc__ and not needs_meaning:
            yield inspect.cleandoc(kind.__doc__)
        yield _fields(kind, needs_meaning=needs_meaning)


def _metrics() -> Iterator[tuple[str, ...]]:
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        bounds = "1, 2, 5, ... to the model's length"
        if metric.bounds:
            bounds = ", ".join(f"{bound:g}" for bound in metric.bounds)
        buckets = bounds if metric.kind == HISTOGRAM else ""
        yield f"`{PREFIX}{metric.name}`", metric.kind, labels, buckets, metric.meaning


def _table(head: str, rows: Iterable[Sequence[str]], *, needs_meaning: bool = True) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    if needs_meaning and (missing := [row[0] for row in cells if not row[-1]]):
        raise ValueError(f"docstring: wanted one below {', '.join(missing)}, found none")
    rule = "|".join("---" for _ in head.split("|"))
    return "\n".join([f"| {head} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in cells)])


def _fields(
    kind: type,
    *,
    has_bounds: bool = False,
    without: tuple[str, ...] = (),
    needs_meaning: bool = True,
) -> str:
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
    head = f"field | type | default | {'bounds | ' if has_bounds else ''}meaning"
    return _table(head, rows, needs_meaning=needs_meaning)


def _bounds(kind: type, name: str) -> str:
    if kind is CompilationConfig:
        return WANTED[name]
    return words_for(hints_of(kind)[name])


def _type(kind: Any) -> str:
    """Return a type as a struct has it, without bounds."""
    arguments = [_type(each) for each in get_args(kind) if each is not msgspec.UnsetType]
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(dict.fromkeys(arguments))
    if get_origin(kind) is Literal:
        return "str"
    name = {NoneType: "None", ...: "..."}.get(kind, getattr(kind, "__name__", str(kind)))
    return f"{name}[{', '.join(arguments)}]" if arguments else name


def _defaults(kind: type) -> Iterator[tuple[str, Any]]:
    if kind is CompilationConfig:
        defaults = CompilationConfig(level=DEFAULT_LEVEL).to_dict()
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
                # Links in docstrings are relative to serve/.
                meaning = " ".join(text.split()).replace("](../", "](../../../")
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
    for alias, path in ALIASES.items():
        yield f"`{'.'.join(alias)}`", f"`{'.'.join(path)}`"
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
    for name, values in _without_effect(responses.ResponsesRequest).items():
        yield f"`{name}`", values, "responses"


def _without_effect(kind: type) -> dict[str, str]:
    inert = {
        name: " or ".join(_value("", value) for value in (*values, None))
        for name, values in inert_fields(kind).items()
    }
    return inert | {name: "anything" for name in sorted(ignored_fields(kind))}


def main() -> None:
    """Write the pages, or compare them with the files."""
    parser = argparse.ArgumentParser(description="Write the reference from the code.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the pages are")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    arguments = parser.parse_args()
    folder, wanted = arguments.folder, pages()
    if arguments.check:
        found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
        names = sorted(wanted.keys() | found.keys())
        if stale := [name for name in names if wanted.get(name) != found.get(name)]:
            command = "python examples/reference.py"
            raise SystemExit(f"{folder}: wanted what `{command}` writes, found other {stale}")
        return
    for name, text in wanted.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
