"""Typed fields of a checkpoint's JSON files, and the error for what cannot be used.

A file comes from outside. It may be damaged or not be a file at all, and a number in it may be
large enough to build a model for hours. All of it ends in a `FieldError`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from compile.errors import FieldError, Words

LARGEST = 1 << 28
"""Bound of every integer: the bytes of a product of two still fit in 64 bits."""
MAX_JSON_BYTES = 64 << 20
"""Bound of a JSON file: an index of a million tensors is as large."""


def refused(field: str, wanted: str, found: object, source: Path | str) -> FieldError:
    """Return the error for `field` of a file, in one line of readable length."""
    # Words are whole: they may end with what matters.
    shown = found if isinstance(found, Words) else _cut(_repr(found))
    return FieldError(_line(_cut(field)), _line(wanted), Words(_line(f"{shown} in {source}")))


def _line(text: str) -> str:
    # JSON may hold halves of surrogate pairs, which no terminal or socket takes.
    return " ".join(text.split()).encode("utf-8", "backslashreplace").decode()


def _repr(value: object) -> str:
    try:
        return repr(value)
    except ValueError:
        # Python refuses to write integers of thousands of digits.
        return f"a {type(value).__name__} of thousands of digits"


def _cut(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object that a regular file, or a link to one, holds.

    Raises:
        FieldError: the file cannot be read, is not JSON, holds something else, or names a key
            twice.
    """
    check_file(path)
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise refused(path.name, f"at most {MAX_JSON_BYTES} bytes", size, path)
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except FieldError:
        raise
    except OSError as error:
        found = error.strerror or type(error).__name__
        raise refused(path.name, "a readable file", Words(found), path) from error
    except (ValueError, RecursionError) as error:
        raise refused(path.name, "JSON", Words(_cut(str(error))), path) from error
    if not isinstance(value, dict):
        raise refused(path.name, "a JSON object", value, path)
    return value


def check_file(path: Path) -> None:
    """Refuse what is not a regular file: opening a pipe or a device might never return.

    Links are followed: caches store a checkpoint's files as links to their contents.

    Raises:
        FieldError: names the file.
    """
    try:
        path.stat()
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or str(error)
        raise refused(path.name, "a readable file", Words(found), path) from error
    if not path.is_file():
        kind = "a directory" if path.is_dir() else "something else"
        raise refused(path.name, "a regular file", Words(kind), path)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{_cut(twice)!r} named twice")
    return values


class Fields:
    """Reads typed fields of one file; a field that is absent takes the family's default."""

    def __init__(
        self, values: Mapping[str, Any], defaults: Mapping[str, Any], source: Path | str
    ) -> None:
        self.values = values
        self.defaults = defaults
        self.source = source

    def value(self, name: str) -> Any:
        """Return a field as it stands in the file, or its default."""
        return self.values.get(name, self.defaults[name])

    def integer(self, name: str, minimum: int = 1, maximum: int = LARGEST) -> int:
        """Return a field that is an integer within the bounds; all of these raise FieldError."""
        return whole_number(name, self.value(name), self.source, minimum, maximum)

    def optional_integer(self, name: str, minimum: int = 1) -> int | None:
        """Return a field that is an integer or null."""
        return None if self.value(name) is None else self.integer(name, minimum)

    def number(self, name: str) -> float:
        """Return a field that is a number above 0."""
        return positive_number(name, self.value(name), self.source)

    def flag(self, name: str) -> bool:
        """Return a flag; one that the family does not know is off, whatever the file says."""
        return name in self.defaults and boolean(name, self.value(name), self.source)

    def choice(self, name: str, choices: Iterable[str]) -> str:
        """Return a field that is one of these texts."""
        value = self.value(name)
        if not isinstance(value, str) or value not in choices:
            raise refused(name, " or ".join(choices), value, self.source)
        return value


def whole_number(
    name: str, value: object, source: Path | str, minimum: int = 1, maximum: int = LARGEST
) -> int:
    """Return `value` if it is an integer within the bounds."""
    if type(value) is not int or value < minimum:
        raise refused(name, f"an integer of at least {minimum}", value, source)
    if value > maximum:
        raise refused(name, f"an integer of at most {maximum}", value, source)
    return value


def boolean(name: str, value: object, source: Path | str) -> bool:
    """Return `value` if it is true or false."""
    if not isinstance(value, bool):
        raise refused(name, "true or false", value, source)
    return value


def positive_number(name: str, value: object, source: Path | str) -> float:
    """Return `value` as a float if it is a finite number above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else math.nan  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number > 0):
        raise refused(name, "a number above 0", value, source)
    return number
