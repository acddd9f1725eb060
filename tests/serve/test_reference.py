"""serve/REFERENCE.md is what `python -m serve.reference` prints, and leaves nothing out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cluster.metrics import METRICS, PREFIX
from compile.config import FIELDS
from serve.arguments import DeployArgs, IngressArgs, KVArgs, PoolArgs
from serve.openai.fields import ignored_fields, inert_fields
from serve.openai.responses_request import ResponsesRequest
from serve.openai.schema import (
    CalledFunction,
    ChatRequest,
    CompletionRequest,
    Function,
    FunctionName,
    Message,
    NamedToolChoice,
    StreamOptions,
    TextPart,
    Tool,
    ToolCall,
)
from serve.openai.tokenizing import DetokenizeRequest, TokenizeRequest

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "serve" / "REFERENCE.md"
STRUCTS = (
    *(DeployArgs, PoolArgs, IngressArgs, KVArgs),
    *(ChatRequest, CompletionRequest, StreamOptions, Message, TextPart, ResponsesRequest),
    *(TokenizeRequest, DetokenizeRequest),
    *(Tool, Function, NamedToolChoice, FunctionName, ToolCall, CalledFunction),
)


def reference(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serve.reference", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def rows() -> list[list[str]]:
    """Return the cells of all tables in the committed file."""
    lines = REFERENCE.read_text(encoding="utf-8").splitlines()
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in lines
        if line.startswith("| ")
    ]


def meanings() -> dict[str, list[str]]:
    """Return the last cells of the rows that begin with a name."""
    found: dict[str, list[str]] = {}
    for row in rows():
        found.setdefault(row[0].strip("`"), []).append(row[-1])
    return found


def test_the_committed_file_is_what_the_command_prints() -> None:
    printed = reference()
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout == REFERENCE.read_text(encoding="utf-8")


def test_the_check_tells_a_file_that_is_not_up_to_date(tmp_path: Path) -> None:
    assert reference("--check").returncode == 0
    old = tmp_path / "REFERENCE.md"
    text = REFERENCE.read_text(encoding="utf-8")
    old.write_text(text.replace("`max_num_seqs`", "`max_seqs`"), encoding="utf-8")
    checked = reference("--check", old)
    assert checked.returncode == 1
    assert checked.stderr.startswith(f"{old}: wanted what `python -m serve.reference` prints")


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_field_of_every_struct_has_a_meaning(struct: type[msgspec.Struct]) -> None:
    assert [name for name in struct.__struct_fields__ if not all(meanings().get(name, [""]))] == []


def test_every_compilation_field_has_a_meaning() -> None:
    assert [name for name in FIELDS if not all(meanings().get(name, [""]))] == []


def test_every_field_without_effect_is_listed_with_what_it_accepts() -> None:
    kinds = ("both", "chat", "texts", "responses")
    listed = {row[0].strip("`"): row[1] for row in rows() if row[-1] in kinds}
    known = (ChatRequest, CompletionRequest, ResponsesRequest)
    inert = {name for struct in known for name in inert_fields(struct)}
    ignored = {name for struct in known for name in ignored_fields(struct)}
    assert set(listed) == inert | ignored
    assert {name for name, accepted in listed.items() if accepted == "anything"} == ignored
    assert all("`null`" in listed[name] for name in inert)


@pytest.mark.feature("R15")
def test_every_metric_is_listed_with_its_meaning() -> None:
    listed = {row[0].strip("`"): row for row in rows() if row[0].startswith("`lockstep:")}
    assert set(listed) == {PREFIX + metric.name for metric in METRICS}
    for metric in METRICS:
        kind, labels, _, meaning = listed[PREFIX + metric.name][1:]
        assert kind == metric.kind and meaning == metric.meaning
        assert [label.strip("` ") for label in labels.split(",") if label] == list(metric.labels)


def test_bounds_and_values_are_those_of_the_code() -> None:
    by_name = {row[0].strip("`"): row for row in reversed(rows())}
    assert by_name["temperature"][3] == "a number from 0 to 1e+06"
    assert by_name["top_logprobs"][3] == "an integer from 0 to 20"
    assert by_name["MAX_STOP_STRINGS"][1:3] == ["`64`", "`serve/sampling.py`"]
    assert by_name["max_body_bytes"][2] == "`8388608` (8 MiB)"
