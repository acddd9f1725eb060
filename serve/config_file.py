"""The YAML file that `config=FILE` names: the arguments of `deploy`, and nothing given twice.

Plain YAML readers keep the last of two equal keys in silence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from compile.errors import FieldError


def read_file(name: Any) -> dict[str, Any]:
    """Return the arguments in a file, nested as they stand there.

    Raises:
        FieldError: it cannot be read, is no YAML of keys and values, or has a key twice.
    """
    if not isinstance(name, str):
        raise FieldError("config", "the name of a YAML file", name)
    path = Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "bytes that are no UTF-8"
        raise FieldError("config", "a YAML file", f"{path}: {reason}") from None
    try:
        _check_keys(yaml.compose(text, yaml.SafeLoader), (), ())
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise FieldError("config", "a YAML file", f"{path}: {_told(error)}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise FieldError("config", "a YAML file of keys and values", f"{path}: a {_kind(found)}")
    if "config" in found:
        raise FieldError("config", "a file that names no other", str(path))
    return found


def _check_keys(
    node: yaml.Node | None, path: tuple[str, ...], outer: tuple[yaml.Node, ...]
) -> None:
    """Refuse keys that are given twice or are no text, and an anchor that contains itself."""
    if node in outer:
        raise FieldError(".".join(path), "a value that does not contain itself", "an alias of it")
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item, path, (*outer, node))
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise FieldError(".".join(path) or "config", "keys that are text", "a list or object")
        field = (*path, key.value)
        if key.value in seen:
            line = key.start_mark.line + 1
            raise FieldError(".".join(field), "one value", f"it twice, again in line {line}")
        seen.add(key.value)
        _check_keys(value, field, (*outer, node))


def _told(error: yaml.YAMLError) -> str:
    """Return what is wrong and where, in one line."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return "no YAML"
    return f"{error.problem} in line {error.problem_mark.line + 1}"


def _kind(value: Any) -> str:
    return "list" if isinstance(value, list) else "single value"
