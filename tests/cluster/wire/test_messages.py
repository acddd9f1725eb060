"""No frame is understood by guessing: it fits its struct exactly or is refused by name.

The wire structs are positional, so a short, long or foreign frame could otherwise be filled in
silently. Hypothesis builds every struct from its own annotations.
"""

from __future__ import annotations

import enum
import functools
import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cluster.engine.lockstep import agree
from cluster.wire import credentials, group_messages, messages
from cluster.wire.credentials import Credentials, Header
from cluster.wire.messages import FrameError, StepAgreement, StepPlan, Wire, decode, encode
from compile.dispatch import CapturedGraphs

pytestmark = pytest.mark.feature("Y03")

STRUCTS: list[type[Wire]] = [
    kind
    for module in (messages, group_messages, credentials)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, Wire) and kind is not Wire
    if kind.__module__ == module.__name__ and not name.startswith("_")
]
UNIONS = {
    "Inbound": messages.Inbound,
    "KVCall": messages.KVCall,
    "ToFollower": group_messages.ToFollower,
    "FollowerReport": group_messages.FollowerReport,
    "ToPeer": group_messages.ToPeer,
}

# Each of the structs gets so many; with more of them the same fields come again.
few = settings(max_examples=40)
every_struct = pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
every_union = pytest.mark.parametrize("union", UNIONS.values(), ids=UNIONS)

SCALARS: dict[object, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    # NaN travels as well, but is unequal to itself.
    float: st.floats(allow_nan=False),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
    bool: st.booleans(),
    type(None): st.none(),
}


def bounded(kind: Any, meta: msgspec.Meta) -> st.SearchStrategy[Any]:
    """Return a strategy for every value of a type that its bounds allow."""
    if kind is int:
        return st.integers(meta.ge, 2**64 - 1 if meta.le is None else meta.le)
    if kind is float:
        least = meta.ge if meta.gt is None else meta.gt
        return st.floats(least, meta.le, exclude_min=meta.gt is not None)
    if meta.pattern is not None:
        return st.from_regex(meta.pattern)
    if kind is str:
        return st.text(min_size=meta.min_length or 0, max_size=8)
    return values(kind)


def plan_of(rows: list[int], token_ids: list[int], **fields: Any) -> StepPlan:
    """Return a plan whose numbers are those of its lists, whatever was drawn."""
    fields |= {"num_seqs": len(rows), "num_tokens": len(token_ids)}
    return StepPlan(rows=rows, token_ids=token_ids, **fields)


@functools.cache
def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for every value that the annotation allows."""
    if annotation in SCALARS:
        return SCALARS[annotation]
    if typing.get_origin(annotation) is typing.Annotated:
        kind, meta = typing.get_args(annotation)
        return bounded(kind, meta)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return st.sampled_from(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Wire):
        hints = typing.get_type_hints(annotation, include_extras=True)
        fields = {name: values(hint) for name, hint in hints.items()}
        return st.builds(plan_of if annotation is StepPlan else annotation, **fields)
    if isinstance(annotation, type) and issubclass(annotation, tuple):
        hints = typing.get_type_hints(annotation)
        return st.builds(annotation, **{name: values(hint) for name, hint in hints.items()})
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        return st.lists(values(args[0]), max_size=3)
    if origin is tuple and args[1:] == (...,):
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin in (types.UnionType, typing.Union):
        return st.one_of([values(arg) for arg in args])
    raise NotImplementedError(f"no strategy for {annotation}: add it where the struct is added")


def raw(data: bytes) -> Any:
    """Return the frame as plain msgpack, without any struct."""
    return msgspec.msgpack.decode(data)


def same(left: Any, right: Any) -> bool:
    """Compare exactly: 1, 1.0 and True are three values, and so are 0.0 and -0.0."""
    return bool(left == right) and repr(left) == repr(right)


def same_content(left: Any, right: Any) -> bool:
    """Compare plain msgpack: NaN equals NaN, and an integer may stand for its nearest float.

    A float field reads an integer too, and one beyond 2**53 may lie between two floats.
    """
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_content, left, right))
    if isinstance(left, float) and type(right) is int:
        right = float(right)
    return bool(left == right or (left != left and right != right))


def refused(data: bytes, kind: Any) -> FrameError:
    with pytest.raises(FrameError) as caught:
        decode(data, kind)
    return caught.value


def num_fields(kind: type[Wire]) -> int:
    """Return the length of the kind's frame: its fields and, in a union's member, its tag."""
    config = kind.__struct_config__
    return len(kind.__struct_fields__) + (config.tag is not None)


def test_every_struct_of_the_modules_is_found() -> None:
    names = [kind.__name__ for kind in STRUCTS]
    assert {"Submit", "OutputFrame", "StepPlan", "KVRead", "Header", "StepFrame"} <= set(names)
    assert len(names) == len(set(names))
    for union in UNIONS.values():
        assert set(typing.get_args(union)) <= set(STRUCTS)


@every_struct
def test_no_field_has_a_default(kind: type[Wire]) -> None:
    assert kind.__struct_defaults__ == ()


@every_struct
def test_structs_are_frozen_positional_and_strict(kind: type[Wire]) -> None:
    config = kind.__struct_config__
    assert config.frozen
    assert config.array_like
    assert config.forbid_unknown_fields
    assert config.gc is False


@every_struct
@few
@given(data=st.data())
def test_round_trip(kind: type[Wire], data: st.DataObject) -> None:
    value = data.draw(values(kind))
    found = decode(encode(value), kind)
    assert type(found) is kind
    assert same(found, value)


@every_union
@given(data=st.data())
def test_round_trip_through_its_union(union: Any, data: st.DataObject) -> None:
    value = data.draw(values(union))
    found = decode(encode(value), union)
    assert type(found) is type(value)
    assert same(found, value)


@every_struct
def test_a_frame_is_read_from_a_view_of_a_larger_buffer(kind: type[Wire]) -> None:
    frame = encode(Header(1, "abc"))
    buffer = memoryview(b"\0" * 3 + frame + b"\0")
    assert decode(buffer[3:-1], Header) == Header(1, "abc")


@every_struct
@few
@given(data=st.data())
def test_a_frame_cut_anywhere_is_refused(kind: type[Wire], data: st.DataObject) -> None:
    frame = encode(data.draw(values(kind)))
    length = data.draw(st.integers(0, len(frame) - 1))
    assert kind.__name__ in str(refused(frame[:length], kind))


@every_struct
@few
@given(data=st.data())
def test_bytes_after_the_frame_are_refused(kind: type[Wire], data: st.DataObject) -> None:
    frame = encode(data.draw(values(kind)))
    rest = data.draw(st.binary(min_size=1, max_size=8))
    assert kind.__name__ in str(refused(frame + rest, kind))


@every_struct
@few
@given(data=st.data())
def test_a_frame_without_its_last_fields_is_not_filled_in(
    kind: type[Wire], data: st.DataObject
) -> None:
    fields = raw(encode(data.draw(values(kind))))
    kept = data.draw(st.integers(0, len(fields) - 1))
    assert kind.__name__ in str(refused(encode(fields[:kept]), kind))


@every_struct
@few
@given(data=st.data())
def test_a_frame_with_another_field_is_refused(kind: type[Wire], data: st.DataObject) -> None:
    fields = raw(encode(data.draw(values(kind))))
    extra = data.draw(st.none() | st.integers(0, 9) | st.text(max_size=2))
    assert kind.__name__ in str(refused(encode([*fields, extra]), kind))


@pytest.mark.parametrize("change", ["short", "long"])
def test_a_struct_inside_another_is_held_to_its_length(change: str) -> None:
    sampling = messages.Sampling(0.0, 0, 1.0, 0.0, 7, 5, (2,), -1, -1, None, None)
    fields = raw(encode(messages.GenerateRequest("r", [1], [], sampling, "", b"")))
    fields[3] = fields[3][:-1] if change == "short" else [*fields[3], 0]
    assert "$[3]" in str(refused(encode(fields), messages.GenerateRequest))


@every_struct
@few
@given(data=st.data())
def test_a_frame_of_another_type_is_refused_or_fits_exactly(
    kind: type[Wire], data: st.DataObject
) -> None:
    other = data.draw(st.sampled_from([struct for struct in STRUCTS if struct is not kind]))
    frame = encode(data.draw(values(other)))
    if num_fields(other) != num_fields(kind):
        assert kind.__name__ in str(refused(frame, kind))
        return
    # Two structs of one shape cannot be told apart without a tag; nothing is changed on the way.
    _refused_or_unchanged(frame, kind)


@every_union
@given(data=st.data())
def test_a_union_refuses_a_tag_that_it_does_not_know(union: Any, data: st.DataObject) -> None:
    fields = raw(encode(data.draw(values(union))))
    tag = data.draw(st.text(max_size=8) | st.integers(0, 9) | st.none())
    assume(tag not in {member.__name__ for member in typing.get_args(union)})
    for member in typing.get_args(union):
        assert member.__name__ in str(refused(encode([tag, *fields[1:]]), union))


@every_struct
@few
@given(data=st.binary(max_size=64))
def test_random_bytes_never_raise_anything_else(kind: type[Wire], data: bytes) -> None:
    _refused_or_unchanged(data, kind)


@every_struct
@few
@given(data=st.data())
def test_a_changed_byte_never_raises_anything_else(kind: type[Wire], data: st.DataObject) -> None:
    frame = bytearray(encode(data.draw(values(kind))))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    _refused_or_unchanged(bytes(frame), kind)


def _refused_or_unchanged(data: bytes, kind: type[Wire]) -> None:
    """Either a FrameError that names the kind, or a value that holds all that the frame holds."""
    try:
        found = decode(data, kind)
    except FrameError as error:
        assert kind.__name__ in str(error)
        return
    assert type(found) is kind
    assert same_content(raw(encode(found)), raw(data))


def test_an_error_names_the_struct_the_place_and_the_length() -> None:
    error = refused(encode([1, 2]), StepPlan)
    assert "wanted StepPlan" in str(error)
    assert f"found {len(encode([1, 2]))} bytes" in str(error)
    assert "length" in str(error)


def test_a_float_field_reads_an_integer_as_its_nearest_float() -> None:
    fields = raw(encode(messages.TokenLogprobs(0.0, 1, [], [])))
    fields[0] = 2**62 + 512
    _refused_or_unchanged(encode(fields), messages.TokenLogprobs)
    assert not same_content([float(2**62)], [2**62 + 1024])


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ((0,), -0.1),
        ((0,), float("nan")),
        ((0,), 2e6),
        ((1,), -1),
        ((2,), 0.0),
        ((3,), float("nan")),
        ((4,), -1),
        ((5,), 0),
        ((6,), [-1]),
        ((6,), [7] * 513),
        ((7,), 21),
        ((8,), -2),
        ((9, 0), float("inf")),
        ((9, 1), 2.1),
        ((9, 2), 0.0),
        ((9, 3), [-1]),
        ((9, 3), [1] * 1025),
        ((9, 4), [float("nan")]),
        ((9, 4), [-101.0]),
        ((9, 5), [1]),
        ((9, 6), -1),
    ],
)
def test_what_no_model_could_take_is_refused_with_its_place(
    place: tuple[int, ...], found: Any
) -> None:
    rules = messages.LogitRules(0.0, 0.0, 1.0, (3,), (1.0,), b"\xff", 0)
    fields = raw(encode(messages.Sampling(0.0, 0, 1.0, 0.0, 7, 5, (2,), -1, -1, rules, None)))
    decode(encode(fields), messages.Sampling)
    *path, last = place
    at = functools.reduce(lambda inner, index: inner[index], path, fields)
    at[last] = found
    assert f"$[{place[0]}]" in str(refused(encode(fields), messages.Sampling))


@pytest.mark.parametrize(
    "address",
    ["ipc://x", "tcp://host:1", "tcp://1.2.3:4", "tcp://256.1.1.1:1", "tcp://1.2.3.4:1\n", "*"],
)
def test_an_address_is_a_number(address: str) -> None:
    for good in ("", "tcp://10.255.0.9:65535"):
        assert decode(encode(messages.Watch(good)), messages.Inbound).address == good
    assert "$[1]" in str(refused(encode(messages.Watch(address)), messages.Watch))


def test_a_submission_that_is_none_still_tells_who_asked() -> None:
    sampling = messages.Sampling(0.0, 0, 1.0, 0.0, 7, 5, (2,), -1, -1, None, None)
    request = messages.GenerateRequest("r", [-1], [], sampling, "tcp://10.0.0.1:9", b"")
    frame = encode(messages.Submit(request, None))
    refused(frame, messages.Inbound)
    assert messages.asker_of(frame) == ("r", "tcp://10.0.0.1:9")
    for other in (frame[:-1], b"", encode(messages.Abort(["r"])), encode(["Submit", 1, 2])):
        assert messages.asker_of(other) is None


CREDENTIALS = Credentials("aa11", b"s" * 32)
OURS = CREDENTIALS.header


def test_equal_headers_pass() -> None:
    CREDENTIALS.check(Credentials("aa11", b"t" * 32).header)


def test_nothing_shows_a_secret() -> None:
    secret = b"never to be seen, 32 bytes long."
    shown = f"{Credentials('aa11', secret)!r} {Credentials('aa11', secret)}"
    assert "aa11" in shown and "never" not in shown
    with pytest.raises(ValueError, match=r"^secret: wanted 32 bytes, found 3$"):
        Credentials("aa11", b"abc")


@pytest.mark.parametrize(
    ("theirs", "name", "wanted", "found"),
    [
        (Header(99, "aa11"), "protocol", str(messages.PROTOCOL_VERSION), "99"),
        (Header(99, "bb22"), "protocol", str(messages.PROTOCOL_VERSION), "99"),
        (Header(messages.PROTOCOL_VERSION, "bb22"), "config_hash", "aa11", "bb22"),
    ],
)
def test_a_header_mismatch_names_the_field_with_both_values(
    theirs: Header, name: str, wanted: str, found: str
) -> None:
    with pytest.raises(FrameError, match=f"^{name}: wanted .*{wanted}, found .*{found}"):
        CREDENTIALS.check(encode(theirs))


@pytest.mark.parametrize(
    "data",
    [b"", OURS[:-1], OURS + b"\0", encode([1, "a", 0]), encode({"protocol": 1}), b"GET / HTTP/1.1"],
    ids=["empty", "short", "long", "field", "map", "http"],
)
def test_what_is_no_header_is_refused(data: bytes) -> None:
    with pytest.raises(FrameError, match="Header"):
        CREDENTIALS.check(data)


def _plan(num_new: list[int], num_decodes: int) -> StepPlan:
    num_seqs = len(num_new)
    return StepPlan(
        epoch=3,
        step=8,
        num_seqs=num_seqs,
        num_tokens=sum(num_new),
        admitted=[],
        new_blocks=[],
        rows=list(range(num_seqs)),
        num_computed=[0] * num_seqs,
        num_new=num_new,
        output_index=[0] * num_seqs,
        token_ids=[1] * sum(num_new),
        num_decodes=num_decodes,
        prompt_targets=[],
    )


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("mode", 3, "<= 2"),
        ("batch", [2], "length 3, got 1"),
        ("batch", [2, 2, True, 0], "length 3, got 4"),
        ("batch", {"num_tokens": 2, "num_seqs": 2, "uniform_decode": True}, "array"),
    ],
)
def test_an_agreement_that_lacks_a_size_or_names_no_mode_is_refused(
    field: str, value: Any, named: str
) -> None:
    agreed = agree([_plan([1, 1], 2).vote()], CapturedGraphs())
    found = raw(encode(agreed))
    assert decode(encode(found), StepAgreement) == agreed
    found[StepAgreement.__struct_fields__.index(field)] = value
    assert named in str(refused(encode(found), StepAgreement))


@pytest.mark.parametrize("field", ["num_seqs", "num_tokens"])
def test_a_plan_whose_numbers_are_not_those_of_its_lists_is_refused(field: str) -> None:
    plan = _plan([1, 2], 1)
    place = StepPlan.__struct_fields__.index(field)
    found = decode(encode(plan), list)
    assert decode(encode(found), StepPlan) == plan
    found[place] += 1
    with pytest.raises(FrameError, match=rf"StepPlan.*{field}: wanted [23], found [34]"):
        decode(encode(found), StepPlan)


@pytest.mark.parametrize(
    ("num_new", "num_decodes", "kind"),
    [([], 0, 0), ([1], 1, 1), ([1, 1], 2, 1), ([1, 5], 1, 2), ([5], 0, 2), ([1], 0, 2)],
)
def test_a_plan_votes_for_what_it_holds(num_new: list[int], num_decodes: int, kind: int) -> None:
    vote = _plan(num_new, num_decodes).vote()
    assert (vote.epoch, vote.step, vote.kind) == (3, 8, kind)
    assert (vote.num_tokens, vote.num_seqs) == (sum(num_new), len(num_new))
    assert vote.max_query_len == max(num_new, default=0)
    assert vote.has_work is bool(num_new)
    assert vote.draining is False
