"""What a configuration field may hold, from its annotation: a `Kind`, in words and as a check.

`bool`, `Literal`, an enumeration and `| None` say all themselves; other annotations name a kind, as
in `Annotated[int, whole_number(0)]`. A kind makes a value canonical while it checks it. Lists
become tuples and names become members, so two configurations that mean the same are equal and hash
the same, whether they came from Python, YAML or JSON.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from compile.errors import FieldError

Plain = bool | int | float | str | None
"""What survives JSON, hashing and a trip to another process."""

OP_NAME = re.compile(r"[A-Za-z_]\w*(::|\.)[A-Za-z_]\w*(\.[A-Za-z_]\w*)?")
"""`namespace::name` or `namespace.name`, with or without an overload."""
MAX_SIZE = 1 << 20
"""Of a batch. A larger one is a typing error, and a rule that fills sizes in would not end."""


class Options(Mapping[str, Any]):
    """A mapping that cannot be changed, unlike a dict, and can be pickled, unlike a proxy."""

    def __init__(self, content: Mapping[str, Any] | None = None) -> None:
        self._content = dict(content or {})

    def __getitem__(self, key: str) -> Any:
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def __hash__(self) -> int:
        return hash(frozenset(self._content.items()))

    def __repr__(self) -> str:
        return repr(self._content)


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Kind:
    """What one field may hold.

    Invariant: `accept` returns the value as it is kept, and returns that one unchanged; it raises
    ValueError for a value that cannot be used. `wanted` says the same in words.
    """

    wanted: str
    accept: Callable[[Any], Any]
    is_text: bool = False
    """The value itself is text, so text is not read as JSON."""
    read: Callable[[Any], Any] = _same
    """Applied to values inside objects that come as text."""

    def from_text(self, value: Any) -> Any:
        """Return what text on a command line stands for; other values as they are."""
        if isinstance(value, str) and not (self.is_text and value != "null"):
            value = read_json(value)
        return self.read(value)


def read(given: Mapping[str, Any], kinds: Mapping[str, Kind], section: str) -> dict[str, Any]:
    """Return fields of `section` as they are kept, from text, JSON, YAML or Python.

    Text is read as JSON if the field does not hold text.

    Raises:
        FieldError: a field is unknown or holds what cannot be used.
    """
    for name, value in given.items():
        if name not in kinds:
            raise FieldError(f"{section}.{name}", f"one of {', '.join(kinds)}", value)
    return {
        name: accepted(f"{section}.{name}", kinds[name], kinds[name].from_text(value))
        for name, value in given.items()
    }


def accepted(field: str, kind: Kind, value: Any) -> Any:
    """Return a field's value as it is kept; raises FieldError."""
    try:
        return kind.accept(value)
    except ValueError:
        raise FieldError(field, kind.wanted, value) from None


def read_json(text: str) -> Any:
    """Return what text says as JSON, in any case for true and false; else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return json.loads(text)
    except ValueError:
        return text


def kind_of(annotation: Any) -> Kind:
    """Return what a field with this annotation may hold."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        named: Kind = arguments[1]
        return named
    if get_origin(annotation) is Literal:
        return _one_of(arguments)
    if NoneType in arguments:
        kind = kind_of(next(each for each in arguments if each is not NoneType))
        accept = kind.accept
        return replace(
            kind,
            wanted=f"{kind.wanted}, or null",
            accept=lambda value: None if value is None else accept(value),
        )
    if annotation is bool:
        return _where("true or false", lambda value: isinstance(value, bool))
    return _member(annotation)


def _where(
    wanted: str,
    is_met: Callable[[Any], bool],
    keep: Callable[[Any], Any] = _same,
    *,
    is_text: bool = False,
) -> Kind:
    """Return the kind of values that meet a condition, kept as `keep` returns them."""

    def accept(value: Any) -> Any:
        if not is_met(value):
            raise ValueError(value)
        return keep(value)

    return Kind(wanted, accept, is_text)


def _one_of(words: tuple[str, ...]) -> Kind:
    def spelt(value: Any) -> Any:
        # YAML reads two words as booleans.
        return ("on" if value else "off") if isinstance(value, bool) else value

    return _where(
        f"one of {', '.join(words)}",
        lambda value: isinstance(value, str | bool) and spelt(value) in words,
        spelt,
        is_text=True,
    )


def _member(kind: type[Enum]) -> Kind:
    """A member of an enumeration, or its name in any case."""

    def name(value: Any) -> Any:
        return value.name if isinstance(value, kind) else value

    return _where(
        f"one of {', '.join(kind.__members__)}",
        lambda value: isinstance(name(value), str) and name(value).upper() in kind.__members__,
        lambda value: kind[name(value).upper()],
        is_text=True,
    )


def whole_number(least: int, most: int | None = None, *, wanted: str = "") -> Kind:
    """An int, and not a bool, within bounds."""
    limit = f"of at least {least}" if most is None else f"from {least} to {most}"
    return _where(
        wanted or f"a whole number {limit}",
        lambda value: _is_int(value) and least <= value and (most is None or value <= most),
        int,
    )


def path() -> Kind:
    """A path as text; empty means none."""
    return _where(
        "a path", lambda value: isinstance(value, str | os.PathLike), os.fspath, is_text=True
    )


def list_of(
    item: Callable[[Any], bool],
    wanted: str,
    is_met: Callable[[tuple[Any, ...]], bool] = lambda items: True,
    keep: Callable[[tuple[Any, ...]], Any] = _same,
) -> Kind:
    """A list whose items are all accepted, and which is as a whole; kept as a tuple."""
    return _where(
        wanted,
        lambda value: (
            isinstance(value, list | tuple) and all(map(item, value)) and is_met(tuple(value))
        ),
        lambda value: keep(tuple(value)),
    )


def op_names() -> Kind:
    """Ops as torch spells them, with a dot too; kept as `namespace::name`. May be empty."""
    return list_of(
        lambda name: isinstance(name, str) and OP_NAME.fullmatch(name) is not None,
        "a list of ops such as lockstep::name",
        keep=lambda names: tuple(n if "::" in n else n.replace(".", "::", 1) for n in names),
    )


def different_names(of: str) -> Kind:
    """Names as Python has them, none of them twice. May be empty."""
    return list_of(
        lambda name: isinstance(name, str) and name.isidentifier(),
        f"a list of different names of {of}",
        lambda names: len(set(names)) == len(names),
    )


def sizes(default: tuple[int, ...] = ()) -> Kind:
    """Sizes of batches: at least one; an empty list stands for the default if there is one."""
    return list_of(
        lambda size: is_size(size) and size <= MAX_SIZE,
        f"a list of whole numbers from 1 to {MAX_SIZE}",
        lambda found: bool(found or default),
        lambda found: found or default,
    )


def ascending() -> Kind:
    """Sizes in the order that a search relies on; may be empty."""
    return list_of(
        is_size,
        "ascending whole numbers of at least 1",
        lambda found: list(found) == sorted(set(found)),
    )


def ranges() -> Kind:
    """Pairs (first, last) of sizes, none of which share one; kept in ascending order."""

    def kept(pairs: tuple[Any, ...]) -> tuple[tuple[int, int], ...]:
        return tuple(sorted((first, last) for first, last in pairs))

    return list_of(
        _is_range,
        "a list of pairs [first, last] that do not overlap",
        lambda pairs: all(one[1] < other[0] for one, other in pairwise(kept(pairs))),
        kept,
    )


def options() -> Kind:
    """Options of a compiler by name; an object inside an object is a dotted name."""

    def accept(value: Any) -> Options:
        if not isinstance(value, Mapping):
            raise ValueError(value)
        pairs = [(key, _plain(inner)) for key, inner in _flatten(value)]
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError(value)
        return Options(found)

    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {
            key: read_json(inner) if isinstance(inner, str) else read(inner)
            for key, inner in value.items()
        }

    return Kind(
        "an object of plain values (text, numbers, true, false, null, lists)", accept, read=read
    )


def is_size(value: Any) -> bool:
    """Return whether a value is a whole number of at least 1."""
    return _is_int(value) and value >= 1


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_range(pair: Any) -> bool:
    is_pair = isinstance(pair, list | tuple) and len(pair) == 2 and all(map(is_size, pair))
    return is_pair and pair[0] <= pair[1]


def _flatten(value: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if not isinstance(key, str):
            raise ValueError(key)
        if isinstance(inner, Mapping):
            yield from _flatten(inner, f"{prefix}{key}.")
        else:
            yield prefix + key, inner


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_plain(inner) for inner in value)
    if not isinstance(value, Plain) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(value)
    return value
