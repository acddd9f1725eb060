"""Grammars of strangers: what ends the process that compiles them is refused, the next is not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve.config import bundled_model
from serve.grammar_process import GrammarProcess
from serve.parameters import ParameterError
from serve.structured import GrammarChecks, StructuredOutputsParams

ONE_IS_FINE = StructuredOutputsParams(regex="[a-c]{3}x")


@pytest.fixture(scope="module")
def process() -> Iterator[GrammarProcess]:
    process = GrammarProcess(Path(bundled_model()))
    process.start()
    yield process


def patterns(count: int) -> dict[str, Any]:
    """Return a schema of texts that match many patterns at once, each of many states."""
    each = [{"type": "string", "pattern": f"[ab]*a[ab]{{{n}}}"} for n in range(10, 10 + count)]
    return {"allOf": each}


CHAIN = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(3000))


@pytest.mark.feature("R09")
@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"json": patterns(30)}, "structured_outputs.json: .*(longer than 2 s|MiB)"),
        (
            {"grammar": f'start: r0\n{CHAIN}\nr3000: "a"'},
            "structured_outputs.grammar: .*too deep",
        ),
        ({"grammar": 'root ::= "a"' + "\n" * 60_000}, "structured_outputs.grammar: .*longer than"),
    ],
)
def test_what_would_end_an_ingress_ends_its_process_and_is_refused_by_name(
    process: GrammarProcess, wanted: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        process.text(StructuredOutputsParams(**wanted))
    assert process.text(ONE_IS_FINE)


@pytest.mark.feature("R09")
@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "(a{1000}){1000}"},
        {"grammar": "start: " + " ".join(["x?"] * 9000) + '\nx: "a"'},
        {"json": {"type": "object", "properties": {f"k{i}": {} for i in range(2500)}}},
        {"grammar": 'start: a{1000}\na: b{1000}\nb: "x"'},
    ],
)  # fmt: skip
def test_what_spends_its_budget_in_its_first_steps_is_refused(
    process: GrammarProcess, wanted: dict[str, Any]
) -> None:
    [kind] = wanted
    with pytest.raises(ParameterError, match=f"structured_outputs.{kind}: "):
        process.text(StructuredOutputsParams(**wanted))


@pytest.mark.feature("R09")
def test_what_is_large_and_ordinary_is_taken(process: GrammarProcess) -> None:
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(30):
        nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
    schemas: list[dict[str, Any]] = [
        nested,
        {"enum": [f"value {i}" for i in range(3000)]},
        {"properties": {f"key_{i}": {"type": ["string", "integer"]} for i in range(200)}},
        {"anyOf": [{"properties": {"t": {"const": i}}, "required": ["t"]} for i in range(300)]},
        {"type": "array", "items": {"type": "number"}, "minItems": 10**6},
        {"type": "string", "minLength": 10**6},
    ]
    for schema in schemas:
        assert process.text(StructuredOutputsParams(json=schema))
    assert process.text(StructuredOutputsParams(choice=[f"choice {i}" for i in range(3000)]))


def test_a_process_that_was_killed_is_replaced(process: GrammarProcess) -> None:
    assert process.text(ONE_IS_FINE)
    assert process._process is not None
    pid = process._process.pid
    os.kill(pid, signal.SIGKILL)
    process._process.wait(10)
    assert process.text(StructuredOutputsParams(regex="[d-f]"))
    assert process._process is not None and process._process.pid != pid


def test_the_process_ends_with_its_caller() -> None:
    process = GrammarProcess(Path(bundled_model()))
    process.start()
    running = process._process
    assert running is not None
    del process
    assert running.wait(10) == 0


def test_a_model_without_a_tokenizer_is_refused_by_name(tmp_path: Any) -> None:
    with pytest.raises(ParameterError, match=r"structured_outputs.regex: .*tokenizer.json"):
        GrammarProcess(tmp_path).text(ONE_IS_FINE)


def test_each_is_found_once_and_errors_are_remembered() -> None:
    asked: list[str] = []

    def find(wanted: StructuredOutputsParams) -> str:
        asked.append(str(wanted.regex))
        if wanted.regex == "bad":
            raise ParameterError("structured_outputs.regex", "one", "another")
        return "text"

    checks = GrammarChecks(find)
    good, bad = (StructuredOutputsParams(regex=regex) for regex in ("good", "bad"))
    assert checks.known(good) is None and checks.known(bad) is None
    for _ in range(3):
        assert checks.text(good) == checks.known(good) or len(asked) == 1
        with pytest.raises(ParameterError, match="found another"):
            checks.text(bad)
    assert asked == ["good", "bad"]
    with pytest.raises(ParameterError, match="found another"):
        checks.known(bad)
