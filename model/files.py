"""A checkpoint's JSON files. What cannot be used is a `FieldError` of one line with the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compile.errors import FieldError, Words

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
    """Return the JSON object that a regular file holds; no key comes twice."""
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
    """Refuse what is not a regular file, or a link to one: opening a pipe might never return."""
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
