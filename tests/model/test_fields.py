"""What users give becomes structs, and an error says what is wanted of a value that cannot."""

from __future__ import annotations

import gc
import weakref
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from compile.errors import FieldError
from model.fields import Source, at_least, convert, says, words_for

ARGUMENT, JSON, PYTHON = Source.ARGUMENT, Source.JSON, Source.PYTHON
Size = Annotated[int, Meta(ge=1, le=8)]


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sizes: list[Size] = []
    mode: Annotated[Literal["on", "off"], says("on or off", {"": "others are not built"})] = "on"


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    inner: Inner = Inner()
    inners: list[Inner] = []
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    wait_s: Annotated[float, at_least(0.5)] = 1.0
    biases: Annotated[dict[str, Annotated[float, Meta(ge=-1, le=1)]], Meta(max_length=2)] = {}
    stop: Annotated[str, Meta(min_length=1, max_length=3)] = "a"
    size: Size | None = None


@pytest.mark.parametrize(
    ("source", "found", "line"),
    [
        (ARGUMENT, {"size": "many"}, "size: wanted int | null, found 'many'"),
        (JSON, {"size": "many"}, "size: wanted int | null, found str"),
        (PYTHON, {"size": "many"}, "size: wanted an integer from 1 to 8, found 'many'"),
        (ARGUMENT, {"size": "9"}, "size: wanted an integer from 1 to 8, found 9"),
        (JSON, {"size": 0}, "size: wanted an integer from 1 to 8, found 0"),
        (JSON, {"share": 0}, "share: wanted a number above 0 and at most 1, found 0.0"),
        (ARGUMENT, {"wait_s": "inf"}, "wait_s: wanted a finite number of at least 0.5, found inf"),
        (ARGUMENT, {"wait_s": "nan"}, "wait_s: wanted a finite number of at least 0.5, found nan"),
        (JSON, {"inner": {"sizes": [1, 9]}}, "inner.sizes: wanted an integer from 1 to 8, found 9"),
        (JSON, {"inners": [{}, {"sizes": "a"}]}, "inners[1].sizes: wanted array, found str"),
        (ARGUMENT, {"inner": {"x": 1}}, "inner.x: wanted one of sizes, mode, found 1"),
        (ARGUMENT, {"inner": {"mode": "a"}}, "inner.mode: wanted on or off, found 'a'"),
        (
            JSON,
            {"inner": {"mode": "a"}},
            "inner.mode: wanted on or off, found a; others are not built",
        ),
        (JSON, {"biases": {"a": 0, "b": 2}}, "biases: wanted a number from -1 to 1, found 2.0"),
        (JSON, {"biases": dict.fromkeys("abc", 0)}, "biases: wanted at most 2, found 3"),
        (JSON, {"stop": ""}, "stop: wanted texts of at least one character, found an empty one"),
        (JSON, {"stop": "abcd"}, "stop: wanted texts of at most 3 characters, found 4 characters"),
    ],
)
def test_an_error_names_the_field_and_what_is_wanted_of_it(
    source: Source, found: dict[str, Any], line: str
) -> None:
    with pytest.raises(FieldError) as caught:
        convert(found, Outer, source)
    assert str(caught.value) == line
    with pytest.raises(FieldError) as caught:
        convert(found, Outer, source, "at[0]")
    assert str(caught.value) == f"at[0].{line}"


def test_text_stands_for_numbers_in_arguments_alone() -> None:
    found = {"size": "3", "inner": {"sizes": ["1"]}}
    assert convert(found, Outer, ARGUMENT) == Outer(size=3, inner=Inner(sizes=[1]))
    for source in (JSON, PYTHON):
        with pytest.raises(FieldError, match=r"^(size|inner\.sizes)"):
            convert(found, Outer, source)


def test_a_type_without_bounds_says_all_by_itself() -> None:
    assert words_for(Size | None) == "an integer from 1 to 8"
    assert words_for(str) == words_for(list[Size]) == ""


def test_an_error_holds_its_value_no_longer_than_it_is_handled() -> None:
    class Body(dict[str, Any]):
        pass

    body = Body(size=9)
    held = weakref.ref(body)
    gc.disable()
    try:
        with pytest.raises(FieldError):
            convert(body, Outer, JSON)
        del body
        assert held() is None
    finally:
        gc.enable()
