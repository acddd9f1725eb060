"""Structured output: what the text must be, checked before an engine has the request.

It is compiled as the engines will compile it, and the beginning of a text is drawn from it, so that
what they could not serve is refused by the field's name. An ingress has that done by another
process, since some of what is sent takes minutes, or all memory (`grammar_process.py`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

import msgspec

from cluster.grammar.compile import (
    GrammarError,
    Vocabulary,
    VocabularyError,
    of_choice,
    of_grammar,
    of_json_schema,
    of_regex,
)
from cluster.wire.messages import MAX_GRAMMAR_CHARS
from compile.errors import FieldError, Words

MAX_STRUCTURED_CHARS = 64 * 1024
"""Characters of a JSON schema, regex, list of choices or grammar; more get 400."""
MAX_CHECKED = 4096
"""Grammars of which is remembered whether they compile, by the hash of what was asked for."""
MAX_CHECKED_CHARS = 1 << 24
"""Of these grammars as engines take them."""


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True):
    """What the text must be. Invariant: exactly one field is given. Raises FieldError when built
    with another number of them, or with a value of another type."""

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema, as an object or as its text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    """A regular expression that the whole text matches, in Rust's syntax without look-around."""
    choice: list[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """A context-free grammar, in Lark's form or in GBNF."""

    def __post_init__(self) -> None:
        if self.json_object is False:
            raise _error("json_object", "true", "false")
        given = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        if len(given) != 1:
            wanted = f"one of {', '.join(self.__struct_fields__)}"
            raise FieldError("structured_outputs", wanted, Words(", ".join(given) or "none"))
        num_chars = self.num_chars
        if num_chars > MAX_STRUCTURED_CHARS:
            wanted = f"at most {MAX_STRUCTURED_CHARS} characters"
            raise _error(self.kind, wanted, f"{num_chars}")

    @property
    def kind(self) -> str:
        return next(name for name in self.__struct_fields__ if getattr(self, name) is not None)

    @property
    def num_chars(self) -> int:
        kind, value = self.kind, getattr(self, self.kind)
        match kind, value:
            case "json_object", True:
                return 0
            case "choice", list() if value and all(isinstance(text, str) for text in value):
                if "" in value:
                    raise _error(kind, "texts of at least one character", "an empty one")
                return sum(map(len, value))
            case "json", dict() | bool():
                try:
                    return len(msgspec.json.encode(value))
                except (TypeError, RecursionError) as error:
                    raise _error(kind, "a JSON schema", f"what is none ({error})") from error
            case "json" | "regex" | "grammar", str() if value:
                return len(value)
        wanted = {
            "choice": "a list of at least one text",
            "json": "a JSON schema",
            "json_object": "true",
        }
        raise _error(kind, wanted.get(kind, "a text of at least one character"), repr(value)[:100])

    def library_text(self) -> str:
        """Return it as engines take it; raises GrammarError."""
        if self.regex is not None:
            return of_regex(self.regex)
        if self.choice is not None:
            return of_choice(self.choice)
        if self.grammar is not None:
            return of_grammar(self.grammar)
        schema: Any = {"type": "object"} if self.json_object else self.json
        if isinstance(schema, str):
            try:
                schema = msgspec.json.decode(schema)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise GrammarError(f"its text is not JSON: {error}") from error
        if not isinstance(schema, dict | bool):
            raise GrammarError(f"it is a {type(schema).__name__}")
        return of_json_schema(schema)


_WANTED = {
    "json": "a JSON schema that can be compiled",
    "json_object": "true with a model that can be held to it",
    "regex": "a regular expression that can be compiled",
    "choice": "texts that can be compiled",
    "grammar": "a grammar that can be compiled",
}


def _error(kind: str, wanted: str, found: str) -> FieldError:
    return FieldError(f"structured_outputs.{kind}", wanted, Words(found))


def check(vocabulary: Vocabulary | VocabularyError, wanted: StructuredOutputsParams) -> str:
    """Return what is wanted as engines take it; raises FieldError where they could not serve it."""
    try:
        text = wanted.library_text()
        if len(text) > MAX_GRAMMAR_CHARS:
            most = f"at most {MAX_GRAMMAR_CHARS} characters as a grammar"
            raise _error(wanted.kind, most, str(len(text)))
        if isinstance(vocabulary, VocabularyError):
            raise GrammarError(f"the model's tokenizer: {vocabulary}")
        vocabulary.try_out(vocabulary.compile(text))
    except GrammarError as error:
        raise refused(wanted, str(error)) from error
    return text


def refused(wanted: StructuredOutputsParams, why: str) -> FieldError:
    return _error(wanted.kind, _WANTED[wanted.kind], f"one that is not: {why}")


class Verdicts:
    """What was found of grammars so far. Belongs to one thread."""

    def __init__(self) -> None:
        self._found: OrderedDict[bytes, str | FieldError] = OrderedDict()
        self._num_chars = 0

    def known(self, wanted: StructuredOutputsParams) -> str | None:
        """Return it as engines take it, or raise what is wrong; None if that is not known."""
        key = key_of(wanted)
        found = self._found.get(key)
        if found is not None:
            self._found.move_to_end(key)
        if isinstance(found, FieldError):
            raise _copy(found)
        return found

    def keep(self, wanted: StructuredOutputsParams, found: str | FieldError) -> None:
        key = key_of(wanted)
        self._num_chars += _num_chars(found) - _num_chars(self._found.get(key, ""))
        self._found[key] = _copy(found) if isinstance(found, FieldError) else found
        while len(self._found) > MAX_CHECKED or self._num_chars > MAX_CHECKED_CHARS:
            _, dropped = self._found.popitem(last=False)
            self._num_chars -= _num_chars(dropped)

    def find(
        self, vocabulary: Vocabulary | VocabularyError, wanted: StructuredOutputsParams
    ) -> str:
        text = self.known(wanted)
        if text is None:
            try:
                text = check(vocabulary, wanted)
            except FieldError as error:
                self.keep(wanted, error)
                raise
            self.keep(wanted, text)
        return text


def _copy(error: FieldError) -> FieldError:
    """Return an error without a traceback, and all that it holds."""
    return FieldError(error.field, error.wanted, error.found)


def _num_chars(found: str | FieldError) -> int:
    return len(found) if isinstance(found, str) else 0


def key_of(wanted: StructuredOutputsParams) -> bytes:
    return hashlib.sha256(msgspec.json.encode(wanted)).digest()
