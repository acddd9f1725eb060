"""Grammars: which tokens may come next, so that a text fits a JSON schema, a regex or a grammar.

By the grammar library (llguidance), which this folder alone knows. All of it is native code without
the interpreter's lock, apart from the loading of a vocabulary. Compiling and matching have a
budget: a grammar that spends it is refused, or ends its sequence with an error. The budget does not
hold everything, so what strangers send is compiled in a process that may die first
(`serve/requests/grammar_process.py`).
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from cluster.grammar.matcher import CompiledGrammar, Masks, first_line

MAX_LEXER_STATES = 20_000
"""Of one compiled grammar, some 1.5 kB each. Schemas of hundreds of properties have some thousands;
a regex may have more than there is memory for."""
MAX_GRAMMAR_SYMBOLS = 50_000
"""Of one compiled grammar, in its rules. A row of as many that may all be left out takes some
hundred milliseconds."""
MAX_LEXER_FUEL = 200_000
"""Of the library's units, to compile a grammar: some 40 MB at the most."""
MAX_STEP_FUEL = 50_000
"""The same to fill one mask. Four times as much were a tenth of a second and 100 MB."""
TRIED_TOKENS = 48
"""Of a text that is drawn to see what a grammar's masks cost."""
MAX_MASK_S = 0.1
"""Of a processor, for a mask of one sequence; an ordinary one takes below a millisecond, and the
first ones of a regex over all of Unicode some tens."""
JSON_SPACE = r" |\r?\n[ \t]{0,32}"
"""Between two parts of a JSON text: a space, or a new line with its indentation. A model that may
go on with spaces for ever does."""


class GrammarError(ValueError):
    """A grammar cannot be compiled; the message says why."""


class VocabularyError(ValueError):
    """A tokenizer's tokens have no bytes to match; the message says why."""


# --- from what a client asks for to the library's text ------------------------------------------


def of_json_schema(schema: dict[str, Any] | bool) -> str:
    try:
        text = json.dumps(schema, ensure_ascii=False)
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error
    # A schema may set options of the library; not the one that ignores what is not supported.
    return _library_text(
        LLMatcher.grammar_from_json_schema,
        text,
        defaults={"whitespace_pattern": JSON_SPACE},
        overrides={"lenient": False},
    )


def of_regex(regex: str) -> str:
    """Return the grammar of the texts that a regular expression matches as a whole."""
    return _library_text(LLMatcher.grammar_from_regex, regex)


def of_choice(choices: Sequence[str]) -> str:
    """Return the grammar of these texts: one lexeme, since a parser may not hold thousands."""
    texts = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(texts))


def of_grammar(text: str) -> str:
    """Return a context-free grammar, in Lark's form or in GBNF (`root ::= ...`)."""
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # the library raises a bare one for an unknown rule
        raise GrammarError(str(error) or type(error).__name__) from error


def _library_text(make: Any, *args: Any, **kwargs: Any) -> str:
    try:
        return str(make(*args, **kwargs))
    except ValueError as error:
        raise GrammarError(str(error)) from error


# --- compiling ------------------------------------------------------------------------------------


class Vocabulary:
    """A model's tokens as bytes. Immutable; any thread may compile with it. The library has one
    token that stands for the end of a text. Here it is a special token whose bit is moved to those
    that end a sequence, which a request names."""

    def __init__(self, tokenizer_json: Path, vocab_size: int = 0) -> None:
        """Load a tokenizer.json, for a model of at least `vocab_size` tokens. Takes some 5 ms for
        each thousand tokens, and holds the interpreter's lock meanwhile."""
        try:
            text = tokenizer_json.read_text(encoding="utf-8")
            found = json.loads(text)
            added = [token for token in found["added_tokens"] if token["special"]]
            num_tokens = 1 + max(
                *(token["id"] for token in found["added_tokens"]), _last_id(found["model"]["vocab"])
            )
        except OSError as error:
            raise VocabularyError(f"wanted a tokenizer.json, found none: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise VocabularyError(f"wanted a tokenizer.json with special tokens: {error}") from None
        if not added:
            raise VocabularyError("wanted a tokenizer.json with special tokens, found none")
        if _has_metaspace(found.get("decoder")):
            wanted = "a decoder of bytes, or one that replaces U+2581"
            raise VocabularyError(f"wanted {wanted}, found Metaspace")
        self._end_id: int = max(token["id"] for token in added)
        try:
            self._tokenizer = LLTokenizer(
                text, n_vocab=max(num_tokens, vocab_size), eos_token=self._end_id
            )
        except ValueError as error:
            raise VocabularyError(first_line(str(error))) from error
        self.num_words = -(-int(self._tokenizer.vocab_size) // 32)
        self._limits = LLParserLimits(
            initial_lexer_fuel=MAX_LEXER_FUEL,
            step_lexer_fuel=MAX_STEP_FUEL,
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SYMBOLS,
            verbose_errors=False,
        )

    def compile(self, text: str) -> CompiledGrammar:
        """Return a grammar that has a first token; else a `GrammarError` says why."""
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(first_line(matcher.get_error()))
        if warnings := matcher.get_grammar_warnings():
            raise GrammarError(first_line("; ".join(warnings)))
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise GrammarError(f"no text fits it, or too many do ({first_line(first.get_error())})")
        return CompiledGrammar(matcher)

    def try_out(self, grammar: CompiledGrammar) -> None:
        """Draw the beginning of a text; a `GrammarError` if a mask takes over `MAX_MASK_S`."""
        state, rng = grammar.copy(), random.Random(0)
        for _ in range(TRIED_TOKENS):
            began = time.thread_time()
            mask = np.frombuffer(state.compute_bitmask(), dtype=np.uint8)
            if state.is_error():
                if (error := first_line(state.get_error())).startswith(_DEAD_END):
                    return  # another text may fit
                raise GrammarError(f"a step of it is too much ({error})")
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            allowed = allowed[allowed != self._end_id]
            if not len(allowed):
                return
            state.consume_token(int(rng.choice(allowed)))
            if (took_s := time.thread_time() - began) > MAX_MASK_S:
                raise GrammarError(f"a step of it takes {took_s:.2f} s, more than {MAX_MASK_S:g} s")

    def move_ends(self, masks: Masks, rows: Sequence[int], end_token_ids: Sequence[int]) -> None:
        index = np.array(rows)
        word, bit = divmod(self._end_id, 32)
        may_end = masks[index, word] >> np.uint32(bit) & np.uint32(1)
        for token_id, is_set in (
            (self._end_id, 0 * may_end),
            *((i, may_end) for i in end_token_ids),
        ):
            word, bit = divmod(token_id, 32)
            without = masks[index, word] & ~np.uint32(1 << bit)
            masks[index, word] = without | is_set << np.uint32(bit)


def vocabulary_of(checkpoint: Path, vocab_size: int) -> Vocabulary | VocabularyError:
    """Return a checkpoint's vocabulary, or why its requests cannot have grammars."""
    try:
        return Vocabulary(checkpoint / "tokenizer.json", vocab_size)
    except VocabularyError as error:
        return error


def _has_metaspace(decoder: dict[str, Any] | None) -> bool:
    """Return whether U+2581 stands for a space in a way that the library does not know."""
    parts = (decoder or {}).get("decoders", [decoder or {}])
    return any(part.get("type") == "Metaspace" for part in parts)


def _last_id(vocab: dict[str, int] | list[Any]) -> int:
    return len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)


_DEAD_END = "NoExtension"
"""With which the library's error begins where nothing can follow."""
