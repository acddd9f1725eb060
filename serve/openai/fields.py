"""How JSON objects of a request become structs: four classes of fields, and where errors point.

*Implemented*: a field of the struct that the object becomes. *Inert*: known and not built yet, so
accepted only with the value that changes nothing; one that gets built moves from the table into the
struct. *Ignored*: known, and without effect on an answer whatever its value, as a client's name for
its own user is. *Unknown*: refused. A null is the same as leaving the field out, in every class.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from serve.openai.errors import BadRequest

S = TypeVar("S", bound=msgspec.Struct)


class FieldTable(msgspec.Struct, frozen=True):
    """The fields of one kind of object: of `struct`, inert at these values, or ignored."""

    struct: type[msgspec.Struct]
    inert: dict[str, tuple[Any, ...]]
    ignored: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """All fields that are known."""
        return self.ignored.union(self.struct.__struct_fields__, self.inert)

    def screen(self, found: Any, at: str = "") -> Any:
        """Return `found` with the fields that are implemented and given.

        Anything but an object is returned as it is: converting it gives the better message.

        Raises:
            BadRequest: an unknown field, or an inert one at another value.
        """
        if not isinstance(found, dict):
            return found
        given = {name: value for name, value in found.items() if value is not None}
        for name in found:
            self._check_name(name, at)
        for name, value in given.items():
            self._check_inert(name, value, at)
        without_effect = self.ignored.union(self.inert)
        return {name: given[name] for name in given if name not in without_effect}

    def _check_name(self, name: str, at: str) -> None:
        if name not in self.names:
            param = join_path(at, name)
            raise BadRequest(f"{param}: unknown field", param=param)

    def _check_inert(self, name: str, value: Any, at: str) -> None:
        accepted = self.inert.get(name)
        if accepted is None or any(_is_same(value, one) for one in accepted):
            return
        param = join_path(at, name)
        wanted = " or ".join(_json(one) for one in (*accepted, None))
        raise BadRequest(
            f"{param}: wanted {wanted}, found {_json(value)}; other values are not built yet",
            param=param,
        )


def convert(found: Any, kind: type[S], at: str = "") -> S:
    """Return the struct that a screened object holds, which itself is at `at` in the body.

    Raises:
        BadRequest: a field has another type; `param` is its path as in `messages[0].content`.
    """
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise _bad_type(str(error), at) from error


def join_path(at: str, name: str) -> str:
    """Return the path of a field of the object at `at`; empty is the body itself."""
    return f"{at}.{name}" if at else name


def _bad_type(message: str, at: str) -> BadRequest:
    """Put msgspec's «Expected `str`, got `int` - at `$.messages[0].content`» in Lockstep's form."""
    text, _, path = message.partition(" - at `$")
    param = join_path(at, path.strip("`").lstrip(".")).rstrip(".") or None
    if missing := re.fullmatch(r"Object missing required field `(.+)`", text):
        param = join_path(param or "", missing[1])
        return BadRequest(f"{param}: wanted a value, found none", param=param)
    text = re.sub(r"Expected (.+), got (.+)", r"wanted \1, found \2", text).replace("`", "")
    return BadRequest(f"{param or 'body'}: {text}", param=param)


def _is_same(found: Any, accepted: Any) -> bool:
    """Compare as JSON does: 1 and 1.0 are the same, 1 and true are not."""
    return isinstance(found, bool) == isinstance(accepted, bool) and bool(found == accepted)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def parse_fields(body: bytes, table: FieldTable) -> dict[str, Any]:
    """Return the fields of the JSON object in a body that are implemented and given.

    Raises:
        BadRequest: no JSON object, an unknown field, or an inert one at another value.
    """
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"body: wanted JSON, found {len(body)} bytes: {error}") from error
    if not isinstance(found, dict):
        raise BadRequest(f"body: wanted a JSON object, found {type(found).__name__}")
    fields: dict[str, Any] = table.screen(found)
    return fields
