"""Compilation fields on the command lines of Lockstep's own entry points, as vLLM spells them.

    -O3                                  a level
    -cc.cudagraph_mode=FULL              one field; further dots go into objects
    -cc '{"level": 3}'                   several, as JSON; so does --compilation-config

What is given in several ways is merged, in depth. A field that is given twice is an error: which
of the two was meant, nobody can tell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from compile.aliases import AliasError, fields_of
from compile.config import CompilationConfigError
from compile.validate import read_json

_FIELD = re.compile(
    r"(?:-cc|--compilation[-_]config)(?P<path>(?:\.[\w.]+)?)(?:=(?P<value>.*))?", re.DOTALL
)
_LEVEL = re.compile(r"-O=?(?P<value>\d+)?")


def split_arguments(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return compilation fields as they are kept, and all other arguments in their order.

    Raises:
        CompilationConfigError: a field is unknown, holds what cannot be used or is given twice.
    """
    given: dict[str, Any] = {}
    others: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if argument == "--":
            others += [argument, *waiting]
            break
        if level := _LEVEL.fullmatch(argument):
            path, value = ["level"], level["value"]
        elif found := _FIELD.fullmatch(argument):
            path, value = [key for key in found["path"].split(".") if key], found["value"]
        else:
            others.append(argument)
            continue
        if value is None:
            value = _next(waiting, argument)
        merge(given, path, value if path else _object(value))
    return fields_of(given), others


def merge(into: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Put a value at its path; objects are merged key by key.

    Raises:
        CompilationConfigError: the path, or a part of it, holds a value already.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            merge(into, [*path, *str(key).split(".")], inner)
        return
    *parents, last = path
    for key in parents:
        into = into.setdefault(key, {})
        if not isinstance(into, dict):
            raise CompilationConfigError(".".join(path), f"{key} to have fields", into)
    if last in into:
        raise CompilationConfigError(".".join(path), "one value", "it twice")
    into[last] = value


def _next(waiting: list[str], argument: str) -> str:
    if not waiting:
        raise AliasError(argument, "a value", "the end of the line")
    return waiting.pop(0)


def _object(text: str) -> Mapping[str, Any]:
    value = read_json(text)
    if not isinstance(value, Mapping):
        raise AliasError("-cc", "a JSON object", text)
    return value
