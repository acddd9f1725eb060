"""Compiled grammars and masks beside the step thread, with the bundled model's vocabulary."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cluster.grammar import masks as grammar_masks
from cluster.grammar.compile import Vocabulary, of_grammar, of_regex
from cluster.grammar.masks import GrammarMasks, MaskFiller
from cluster.grammar.matcher import CompiledGrammar, CompileResult, MaskedRow, Masks, Matcher
from cluster.wire.messages import Grammar

TOKENIZER = Path(__file__).resolve().parents[3] / "examples" / "tiny" / "tokenizer.json"
END = 2
ENDLESS = of_grammar('start: e\ne: e e | e "+" e | "a" | ""')
"""Of texts that are read in more ways the longer they are, so that masks take ever longer."""


class SlowVocabulary(Vocabulary):
    """Compiles when it is told to."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER)
        self.may_compile = threading.Event()
        self.num_compiled = 0

    def compile(self, text: str) -> CompiledGrammar:
        self.num_compiled += 1
        assert self.may_compile.wait(60)
        return super().compile(text)


@pytest.fixture
def vocabulary() -> SlowVocabulary:
    return SlowVocabulary()


@pytest.fixture
def masks(vocabulary: SlowVocabulary) -> Iterator[GrammarMasks]:
    masks = GrammarMasks(vocabulary, num_threads=2, wake=lambda: None)
    yield masks
    vocabulary.may_compile.set()
    masks.close()


def results(masks: GrammarMasks, count: int) -> list[CompileResult]:
    found: list[CompileResult] = []
    deadline = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < deadline
        found += masks.take_compiled()
        time.sleep(0.01)
    return found


def grammar(text: str) -> Grammar:
    return Grammar(text, (END,))


@pytest.mark.feature("R09")
def test_a_grammar_is_compiled_once_for_all_who_want_it_and_not_again_after_one_left(
    masks: GrammarMasks, vocabulary: SlowVocabulary
) -> None:
    wanted = grammar(of_regex("[a-c]x"))
    assert masks.compile("left", wanted) is None
    masks.forget("left")
    names = [f"r{i}" for i in range(64)]
    for name in names:
        assert masks.compile(name, wanted) is None
    vocabulary.may_compile.set()
    found = results(masks, 64)
    assert [result.request_id for result in found] == names
    assert len({id(result.compiled) for result in found}) == 1
    masks.compile("last", grammar(of_regex("another")))
    assert [result.request_id for result in results(masks, 1)] == ["last"]
    assert masks.compile("late", wanted) is found[0].compiled
    assert vocabulary.num_compiled == 2


def bits(mask: np.ndarray) -> set[int]:  # type: ignore[type-arg]
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def fill(filler: MaskFiller, matchers: list[Matcher], token: dict[Matcher, list[int]]) -> Masks:
    rows = [MaskedRow(i, matcher, token.get(matcher, []), []) for i, matcher in enumerate(matchers)]
    return filler.fill(len(matchers), rows)


@pytest.mark.feature("R09")
def test_masks_that_take_long_end_their_own_sequences_and_no_others(
    masks: GrammarMasks, vocabulary: SlowVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_masks, "SLOW_FILL_S", 0.0)
    monkeypatch.setattr(grammar_masks, "MAX_COSTLY_S", 0.02)
    vocabulary.may_compile.set()
    masks.compile("slow", grammar(ENDLESS))
    masks.compile("quick", grammar(of_regex("a+")))
    by_name = {each.request_id: each.compiled for each in results(masks, 2)}
    slow, quick = by_name["slow"], by_name["quick"]
    assert isinstance(slow, CompiledGrammar) and isinstance(quick, CompiledGrammar)
    filler = MaskFiller(vocabulary, 2)
    matchers = [slow.start((END,)), quick.start((END,)), slow.start((END,))]
    [letter] = vocabulary._tokenizer.tokenize_str("a")
    found = fill(filler, matchers, {})
    deadline = time.monotonic() + 120
    while not (matchers[0].error or matchers[2].error):
        assert time.monotonic() < deadline
        found = fill(filler, matchers, {matcher: [letter] for matcher in matchers})
        assert letter in bits(found[1]) and END in bits(found[1])
        assert vocabulary._tokenizer.tokenize_str("b")[0] not in bits(found[1])
    assert grammar_masks.TOO_COSTLY in (matchers[0].error, matchers[2].error)
    assert not matchers[1].error
    # Nobody begins with the same grammar, and others do.
    assert masks.compile("again", grammar(ENDLESS)) is None
    [again] = results(masks, 1)
    assert again.compiled is None and again.error == f"grammar: {grammar_masks.TOO_COSTLY}"
    assert masks.compile("another", grammar(of_regex("a+"))) is quick


@pytest.mark.feature("R09")
def test_many_rows_of_which_one_call_is_slow_are_filled_as_in_one(
    vocabulary: SlowVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary.may_compile.set()
    compiled = [vocabulary.compile(of_regex(f"[a-c]{{{i + 1}}}")) for i in range(40)]
    wanted = [fill(MaskFiller(vocabulary, 2), [each.start((END,))], {})[0] for each in compiled]
    for slow_s in (60.0, 0.0):
        monkeypatch.setattr(grammar_masks, "SLOW_FILL_S", slow_s)
        filler = MaskFiller(vocabulary, 2)
        for _ in range(3):
            matchers = [each.start((END,)) for each in compiled]
            found = fill(filler, matchers, {})
            assert [bits(row) for row in found] == [bits(row) for row in wanted]
            assert not any(matcher.error for matcher in matchers)
