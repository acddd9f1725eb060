"""Grammars of strangers: what ends its process is refused, what was ended from outside is not."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from compile.errors import FieldError
from serve.config import bundled_model
from serve.requests import grammar_process
from serve.requests.grammar_process import GrammarProcess, GrammarProcessLost, Tried
from serve.requests.structured import StructuredOutputsParams

pytestmark = pytest.mark.feature("R09")

ONE_IS_FINE = StructuredOutputsParams(regex="[a-c]{3}x")


@pytest.fixture(scope="module")
def process() -> Iterator[GrammarProcess]:
    yield GrammarProcess(Path(bundled_model()))


def text_of(process: GrammarProcess, wanted: StructuredOutputsParams) -> str:
    """Return a grammar as engines take it, or raise why not."""
    tried = process.compile(wanted, max_cpu_s=15.0)  # what takes 2 s on a busy machine can take 4
    assert not tried.is_over_time
    if isinstance(tried.found, FieldError):
        raise tried.found
    return tried.found


def patterns(count: int) -> dict[str, Any]:
    """Return a schema of texts that match many patterns at once, each of many states."""
    each = [{"type": "string", "pattern": f"[ab]*a[ab]{{{n}}}"} for n in range(10, 10 + count)]
    return {"allOf": each}


CHAIN = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(3000))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"json": patterns(60)}, "structured_outputs.json: .*MiB"),
        ({"grammar": f'start: r0\n{CHAIN}\nr3000: "a"'}, "structured_outputs.grammar: .*too deep"),
    ],
)
def test_what_would_end_an_ingress_ends_its_process_and_is_refused_by_name(
    process: GrammarProcess, wanted: dict[str, Any], message: str
) -> None:
    with pytest.raises(FieldError, match=message):
        text_of(process, StructuredOutputsParams(**wanted))
    assert text_of(process, ONE_IS_FINE)


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
    with pytest.raises(FieldError, match=f"structured_outputs.{kind}: "):
        text_of(process, StructuredOutputsParams(**wanted))


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
        assert text_of(process, StructuredOutputsParams(json=schema))
    assert text_of(process, StructuredOutputsParams(choice=[f"choice {i}" for i in range(3000)]))


def children_of(process: GrammarProcess) -> list[psutil.Process]:
    return psutil.Process(process.start().pid).children()


def begin(process: GrammarProcess, wanted: StructuredOutputsParams) -> Future[Tried]:
    """Have a costly grammar compiled; return when a child does so."""
    process.start()
    future = ThreadPoolExecutor(1).submit(process.compile, wanted)
    while not children_of(process):
        assert not future.done()
    return future


COSTLY = StructuredOutputsParams(json=patterns(30))


def test_too_much_time_is_of_a_processor_and_ends_no_process(process: GrammarProcess) -> None:
    pid = process.start().pid
    for budget_s in (0.1, 0.3):
        tried = process.compile(COSTLY, budget_s)
        assert tried.is_over_time and not tried.text and tried.error is None
        assert tried.cpu_s == pytest.approx(budget_s, abs=0.1)
    assert process.compile(ONE_IS_FINE, 0.1).text
    assert process.start().pid == pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGPROF])
def test_a_child_that_is_ended_from_outside_says_nothing_of_its_grammar(
    process: GrammarProcess, number: signal.Signals
) -> None:
    future = begin(process, COSTLY)
    children_of(process)[0].send_signal(number)
    with pytest.raises(GrammarProcessLost, match=number.name):
        future.result()
    assert text_of(process, ONE_IS_FINE)


def test_a_process_that_is_killed_says_nothing_of_its_grammar(process: GrammarProcess) -> None:
    future = begin(process, COSTLY)
    [child] = children_of(process)
    process.start().kill()
    with pytest.raises(GrammarProcessLost, match="SIGKILL"):
        future.result()
    assert text_of(process, ONE_IS_FINE)
    child.wait(60)  # its time is limited though nobody waits for it


def test_a_process_that_is_not_run_says_nothing_of_its_grammar(
    process: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that gets no processor is as one that is stopped: all its time is by the clock."""
    monkeypatch.setattr(grammar_process, "MAX_WAIT_S", 0.5)
    stopped = process.start()
    stopped.send_signal(signal.SIGSTOP)
    with pytest.raises(GrammarProcessLost):
        process.compile(ONE_IS_FINE)
    assert stopped.wait(60) == -signal.SIGKILL
    monkeypatch.undo()
    assert text_of(process, ONE_IS_FINE)


def test_the_process_ends_with_its_caller() -> None:
    process = GrammarProcess(Path(bundled_model()))
    running = process.start()
    del process
    assert running.wait(60) == 0


def test_a_model_without_a_tokenizer_is_refused_by_name(tmp_path: Any) -> None:
    with pytest.raises(FieldError, match=r"structured_outputs.regex: .*tokenizer.json"):
        text_of(GrammarProcess(tmp_path), ONE_IS_FINE)
