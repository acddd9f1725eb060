"""How values from outside become structs, and what an error says of a value that cannot.

A field is declared once: its type has the bounds (`Meta`), and the words for them where the bounds
alone would not do. Arguments of `deploy`, requests and a checkpoint's files are all read this way,
and `/openapi.json` and the pages in serve/docs/reference are written from it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from compile.errors import FieldError, Words

T = TypeVar("T")

LARGEST_INDEX = 2**31 - 1
_AT = re.compile(r" - at `(key` in `)?\$(.*)`")
_KEY = re.compile(r"\.([^.\[]+)|\[([^\]]+)\]")
_INDICES = re.compile(r"(\[[^\]]+\])+$")
_MISSING = re.compile(r"Object missing required field `(.+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.+)`")
_OTHER_TYPE = re.compile(r"Expected (.+), got (.+)")
_LENGTH = re.compile(r"Expected `(\w+)` of length (<=|>=) (\d+)")


def says(words: str, hints: Mapping[str, str] | None = None) -> Meta:
    """Return what a field's type says of its values; `hints` are what an error adds for some words
    that were found, and for others (the empty one)."""
    return Meta(extra={"wanted": words, "hints": hints or {}})


def at_least(least: int | float) -> Meta:
    """Return the bound of a number; one that is no integer is finite as well."""
    most = sys.float_info.max if isinstance(least, float) else None
    return Meta(ge=least, le=most, extra={"wanted": f"a finite number of at least {least:g}"})


class Source(Enum):
    """Where a value comes from, and so what an error says if it has another type."""

    ARGUMENT = "argument"
    """Of the command line or YAML, where text stands for numbers too: type and quoted value."""
    JSON = "json"
    """Of a request's body: a type is wanted, and a type was found."""
    PYTHON = "python"
    """Of a call, or of a checkpoint's files: what is wanted in words, and the quoted value."""


def convert(found: Any, kind: type[T], source: Source, at: str = "") -> T:
    """Return `found`, which is at `at` in what a user gave, as a `kind`; a FieldError names the
    field by its path, as in `messages[0].content`."""
    try:
        return msgspec.convert(found, kind, strict=source is not Source.ARGUMENT)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, FieldError):  # of a struct's own check
            raise error.__cause__ from None
        # In no variable: with its traceback it would keep the value until garbage is collected.
        raise _refused(str(error), found, kind, source).at(at) from error


def words_for(kind: Any) -> str:
    """Return what is wanted of a field of this type; empty where its type says all."""
    return next(filter(None, (_words(bare, metas) for bare, metas in members(kind))), "")


def _words(bare: Any, metas: list[Meta]) -> str:
    for meta in metas:
        if meta.extra is not None:
            return str(meta.extra["wanted"])
    if bare is bool:
        return "true or false"
    if bare in (int, float) and metas:
        return _range(bare, metas)
    if get_origin(bare) is Literal:
        *others, last = map(str, get_args(bare))
        return f"{', '.join(others)} or {last}" if others else last
    if isinstance(bare, type) and issubclass(bare, Enum):
        return f"one of {', '.join(str(member.value) for member in bare)}"
    return ""


@cache
def hints_of(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _range(bare: type, metas: list[Meta]) -> str:
    noun = "an integer" if bare is int else "a number"
    least, above, most = [
        next((bound for meta in metas if (bound := getattr(meta, name)) is not None), None)
        for name in ("ge", "gt", "le")
    ]
    if least is None:
        return f"{noun} above {_shown(above)} and at most {_shown(most)}"
    if most is None or most == LARGEST_INDEX:
        return f"{noun} from {_shown(least)} up"
    return f"{noun} from {_shown(least)} to {_shown(most)}"


def _shown(bound: int | float | None) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def members(kind: Any) -> Iterator[tuple[Any, list[Meta]]]:
    """Yield the types that a type stands for, each with the bounds of its values."""
    if get_origin(kind) is Annotated:
        bare, *metas = get_args(kind)
        for each, inner in members(bare):
            yield each, [*metas, *inner]
    elif get_origin(kind) in (Union, UnionType):
        for member in get_args(kind):
            yield from members(member)
    else:
        yield kind, []


def _refused(message: str, found: Any, kind: Any, source: Source) -> FieldError:
    """Return the error for one of msgspec's, as «Expected `str`, got `int` - at `$.a[0].b`»."""
    at = _AT.search(message)
    text, is_key, path = (message[: at.start()], at[1], at[2]) if at else (message, None, "")
    words = ""
    for name, index in _KEY.findall(path):
        kind, found = _inner(kind, found, name or index)
        words = words_for(kind) or words
    if is_key:
        kind, found = _unfit(found, kind, 0)
        words = words_for(kind) or words
    field = path.removeprefix(".")
    if missing := _MISSING.fullmatch(text):
        field = f"{field}.{missing[1]}" if field else missing[1]
        return FieldError(field, "a value", Words("none"))
    if unknown := _UNKNOWN.fullmatch(text):
        [names] = [b.__struct_encode_fields__ for b, _ in members(kind) if is_struct(b)]
        field = f"{field}.{unknown[1]}" if field else unknown[1]
        return FieldError(field, f"one of {', '.join(names)}", found[unknown[1]])
    if other := _OTHER_TYPE.fullmatch(text.replace("`", "")):
        if source is Source.PYTHON:
            return FieldError(_INDICES.sub("", field), words or other[1], found)
        return FieldError(field, other[1], Words(other[2]) if source is Source.JSON else found)
    field = _INDICES.sub("", field)
    if length := _LENGTH.fullmatch(text):
        return FieldError(field, *_of_length(length, kind, found))
    numbers = [bare for bare, _ in members(kind) if bare in (int, float)]
    if numbers and source is not Source.PYTHON:
        found = msgspec.convert(found, numbers[0], strict=False)
    hint = _hint(kind, found) if isinstance(found, str) else ""
    shown = Words(f"{found}{hint}") if source is Source.JSON else found
    return FieldError(field, words_for(kind) or text, shown)


def _hint(kind: Any, found: str) -> str:
    for _, metas in members(kind):
        for meta in metas:
            hints = (meta.extra or {}).get("hints", {})
            if hint := hints.get(found, hints.get("", "")):
                return f"; {hint}"
    return ""


def _of_length(bound: re.Match[str], kind: Any, found: Any) -> tuple[str, object]:
    noun, sign, limit = bound.groups()
    of_noun = {"str": str, "array": list, "object": dict}[noun]
    pairs = [pair for pair in members(kind) if (get_origin(pair[0]) or pair[0]) is of_noun]
    words = _words(*pairs[0])
    if noun == "str" and words:
        return words, len(found)
    if noun == "str" and sign == "<=":
        return f"texts of at most {limit} characters", Words(f"{len(found)} characters")
    if noun == "str":
        return "texts of at least one character", Words("an empty one")
    if sign == "<=":
        return f"at most {limit}", len(found)
    return (words, found) if words else ("at least one", Words("none"))


def _inner(kind: Any, found: Any, key: str) -> tuple[Any, Any]:
    for bare, _ in members(kind):
        if is_struct(bare) and isinstance(found, dict):
            index = bare.__struct_encode_fields__.index(key)
            return hints_of(bare)[bare.__struct_fields__[index]], found.get(key)
        if get_origin(bare) in (list, tuple) and isinstance(found, list | tuple):
            return get_args(bare)[0], found[int(key)]
        if get_origin(bare) is dict and isinstance(found, dict):
            return _unfit(found, bare, 1)
    return Any, found


def _unfit(found: dict[Any, Any], kind: Any, which: int) -> tuple[Any, Any]:
    """Return the type of a dictionary's keys (0) or values (1), and the first that has another."""
    [kind] = [get_args(bare)[which] for bare, _ in members(kind) if get_origin(bare) is dict]
    return kind, next(pair[which] for pair in found.items() if not _fits(pair[which], kind))


def _fits(found: Any, kind: Any) -> bool:
    try:
        msgspec.convert(found, kind)
    except msgspec.ValidationError:
        return False
    return True


def is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
