"""A request's JSON: checked before any work grows with it, and made into structs.

There are four classes of fields. *Implemented*: a field of the struct that an object becomes.
*Inert*: known and not built yet, so accepted only with the value that changes nothing; one that
gets built moves from `INERT` of the struct into its fields. *Ignored*: known, and without effect on
an answer whatever its value, as a client's name for its own user is (`IGNORED`). *Unknown*:
refused. A null is the same as leaving the field out, in every class.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from compile.errors import FieldError, Words
from model.fields import Source, convert, hints_of, is_struct, members
from serve.openai.errors import ApiError

SMALL_BYTES = 64 * 1024
"""A body of this size is not counted: parsing it takes milliseconds, whatever it holds."""
MAX_VALUES = 200_000
"""Strings, lists and objects of one body; more get 400. Each costs the interpreter some 200 ns and
100 bytes, in one go that nothing interrupts."""
MAX_NUMBERS = 400_000
"""Numbers of one body, or twice `max_model_len` if that is more, since a prompt may be token ids;
more get 400. Each costs a fifth of a string."""
MAX_DIGITS = 400
"""Digits in a row; more get 400. The cost of a long integer grows with the square of its length.
Floats have 309 at most."""
_DIGITS_ALIKE = bytes.maketrans(b"123456789", b"000000000")

S = TypeVar("S", bound=msgspec.Struct)


def parse(body: bytes, kind: type[S], max_model_len: int) -> S:
    """Return the struct that the JSON object in a body holds. ApiError if there is none, or too
    many values, or an unknown field; FieldError if a field is missing, not built or holds what it
    cannot."""
    return convert(parse_fields(body, kind, max_model_len), kind, Source.JSON)


def parse_fields(body: bytes, kind: type[msgspec.Struct], max_model_len: int) -> dict[str, Any]:
    """Return the fields that are implemented and given; raises as `parse`."""
    check_values(body, max_model_len)
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"body: wanted JSON, found {len(body)} bytes: {error}") from error
    if not isinstance(found, dict):
        raise ApiError(400, f"body: wanted a JSON object, found {type(found).__name__}")
    return _given_fields(found, kind, "")


def check_values(body: bytes, max_model_len: int) -> None:
    """Refuse JSON of very many or very long values before they are built; a few ms for each MB."""
    if len(body) <= SMALL_BYTES:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = plain.count(b'"') // 2
    _check("strings", num_strings, MAX_VALUES)
    structure = b"".join(plain.split(b'"')[::2])
    _check("lists and objects", structure.count(b"[") + structure.count(b"{"), MAX_VALUES)
    max_numbers = max(MAX_NUMBERS, 2 * max_model_len)
    _check("numbers", structure.count(b",") - num_strings, max_numbers)
    if b"0" * (MAX_DIGITS + 1) in structure.translate(_DIGITS_ALIKE):
        message = f"body: wanted numbers of at most {MAX_DIGITS} digits, found a longer one"
        raise ApiError(400, message)


def _check(what: str, found: int, limit: int) -> None:
    if found > limit:
        raise ApiError(400, f"body: wanted at most {limit} {what}, found {found}")


def convert_object(found: dict[str, Any], kind: type[S], at: str) -> S:
    """Return the struct that an object holds, which is at `at` in a body; raises as `parse`."""
    return convert(_given_fields(found, kind, at), kind, Source.JSON, at)


@cache
def inert_fields(kind: type) -> dict[str, tuple[Any, ...]]:
    """Return the fields that are not built, each with the values beside null that are accepted."""
    found: dict[str, tuple[Any, ...]] = {}
    for each in reversed(kind.__mro__):
        found |= vars(each).get("INERT", {})
    return found


@cache
def ignored_fields(kind: type) -> frozenset[str]:
    return frozenset().union(*(vars(each).get("IGNORED", ()) for each in kind.__mro__))


@cache
def known_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    return ignored_fields(kind).union(kind.__struct_fields__, inert_fields(kind))


def structs_within(kind: Any) -> list[type[msgspec.Struct]]:
    """Return the structs that a value of this type may be or, in a list, have."""
    struct, item = _parts(kind)
    return [*([] if struct is None else [struct]), *([] if item is None else structs_within(item))]


@cache
def _nested(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {name: hint for name, hint in hints_of(kind).items() if structs_within(hint)}


@cache
def _parts(kind: Any) -> tuple[type[msgspec.Struct] | None, Any]:
    """Return the struct that a value of this type may be, and the type of the items of a list."""
    kinds = [bare for bare, _ in members(kind)]
    struct = next((bare for bare in kinds if is_struct(bare)), None)
    return struct, next((get_args(bare)[0] for bare in kinds if get_origin(bare) is list), None)


def _given(found: Any, kind: Any, at: str) -> Any:
    """Return a value with the fields of objects in it that are implemented and given. What has
    another type stays as it is: converting it gives the better message."""
    struct, item = _parts(kind)
    if struct is not None and isinstance(found, dict):
        return _given_fields(found, struct, at)
    if item is not None and isinstance(found, list):
        return [_given(each, item, f"{at}[{i}]") for i, each in enumerate(found)]
    return found


def _given_fields(found: dict[str, Any], kind: type[msgspec.Struct], at: str) -> dict[str, Any]:
    if isinstance(found.get("type"), str) and "type" in kind.__struct_fields__:
        # An object of another type has other fields: the type is what is wrong with it.
        convert(found["type"], hints_of(kind)["type"], Source.JSON, join_path(at, "type"))
    given = {name: value for name, value in found.items() if value is not None}
    for name in found:
        if name not in known_fields(kind):
            param = join_path(at, name)
            raise ApiError(400, f"{param}: unknown field", param=param)
    for name, accepted in inert_fields(kind).items():
        if name in given and not any(_is_same(given[name], one) for one in accepted):
            values = " or ".join(_json(one) for one in (*accepted, None))
            value = Words(f"{_json(given[name])}; other values are not built yet")
            raise FieldError(join_path(at, name), values, value)
    nested = _nested(kind)
    return {
        name: _given(value, nested[name], join_path(at, name)) if name in nested else value
        for name, value in given.items()
        if name in kind.__struct_fields__
    }


def join_path(at: str, name: str) -> str:
    """Return the path of a field of the object at `at`; empty is the body itself."""
    return f"{at}.{name}" if at else name


def _is_same(found: Any, accepted: Any) -> bool:
    """Compare as JSON does: 1 and 1.0 are the same, 1 and true are not."""
    return isinstance(found, bool) == isinstance(accepted, bool) and bool(found == accepted)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
