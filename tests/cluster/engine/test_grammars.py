"""Sequences with a grammar in the scheduler: compiled first, then told each token once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import sim_engine as sim

from cluster.grammar.matcher import CompileResult, MaskedRow
from cluster.wire.messages import FinishReason, Grammar

END = 7


class NotedMatcher:
    """Keeps the tokens that it was told."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.error = ""
        self.told: list[int] = []


class NotedGrammars:
    """Compiles when it is told to, and notes what a step's masks are made of."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.forgotten: list[str] = []
        self.results: list[CompileResult] = []
        self.matchers: list[NotedMatcher] = []
        self.filled: dict[int, int] = {}

    def compile(self, request_id: str, grammar: Grammar) -> None:
        self.asked.append(request_id)

    def start(self, end_token_ids: Sequence[int]) -> NotedMatcher:
        assert tuple(end_token_ids) == (END,)
        self.matchers.append(NotedMatcher())
        return self.matchers[-1]

    def take_compiled(self) -> list[CompileResult]:
        results, self.results = self.results, []
        return results

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)

    def fill(self, step: int, num_rows: int, rows: list[MaskedRow]) -> None:
        self.filled[step] = len(rows)
        assert all(row.index < num_rows for row in rows)
        for row in rows:
            assert isinstance(row.matcher, NotedMatcher)
            row.matcher.told += row.token_ids


@pytest.fixture
def grammars() -> NotedGrammars:
    return NotedGrammars()


def request_with_grammar(request_id: str, **fields: Any) -> Any:
    request = sim.make_request(request_id, [1, 2, 3], stop=(END,), **fields)
    sampling = msgspec.structs.replace(request.sampling, grammar=Grammar("g", (END,)))
    return msgspec.structs.replace(request, sampling=sampling)


def test_a_request_queues_in_its_order_once_its_grammar_is_compiled(
    grammars: NotedGrammars,
) -> None:
    engine = sim.FakeEngine(sim.Shape(max_num_seqs=1), grammars=grammars)
    engine.submit(request_with_grammar("held", max_tokens=3))
    engine.submit(request_with_grammar("bad"))
    engine.submit(request_with_grammar("gone"))
    assert engine.step() == [] and engine.plans[-1].rows == []
    engine.scheduler.abort(["gone"])
    assert grammars.forgotten == ["gone"]
    engine.submit(sim.make_request("later", [4, 5], max_tokens=2))
    grammars.results = [CompileResult("held", grammars, ""), CompileResult("bad", None, "why")]
    outputs = engine.run()
    assert outputs["bad"][-1].finish_reason is FinishReason.ERROR
    assert outputs["bad"][-1].error == "why"
    assert list(outputs)[-2:] == ["held", "later"]
    told = [token for output in outputs["held"] for token in output.token_ids]
    assert grammars.matchers[0].told == told[:-1]
    assert sum(grammars.filled.values()) == len(told)


def test_output_of_another_engine_is_told_at_once(grammars: NotedGrammars) -> None:
    engine = sim.FakeEngine(sim.Shape(), grammars=grammars)
    engine.submit(request_with_grammar("r", output=[11, 12, 13], max_tokens=5))
    grammars.results = [CompileResult("r", grammars, "")]
    outputs = engine.run()["r"]
    drawn = [token for output in outputs for token in output.token_ids]
    assert grammars.matchers[0].told == [11, 12, 13, *drawn[:-1]]
