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
from wire_structs import plan_of, rules_of, sampling_of, submit_of

from cluster.engine.lockstep import AloneLockstep
from cluster.wire import credentials, group_messages, messages
from cluster.wire.credentials import Credentials, Header
from cluster.wire.messages import FrameError, GrowingWire, StepPlan, Wire, decode, encode

pytestmark = pytest.mark.feature("Y03")

STRUCTS: list[type[Wire]] = [
    kind
    for module in (messages, group_messages, credentials)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, Wire) and kind not in (Wire, GrowingWire)
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


def whole_plan(rows: list[int], token_ids: list[int], **fields: Any) -> StepPlan:
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
        return st.builds(whole_plan if annotation is StepPlan else annotation, **fields)
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


def same_content(left: Any, right: Any) -> bool:
    """Compare plain msgpack: NaN equals NaN, and an integer may stand for its nearest float.

    A float field reads an integer too, and one beyond 2**53 may lie between two floats. What the
    left one does not know it has skipped.
    """
    if isinstance(left, list) and isinstance(right, list):
        return len(left) <= len(right) and all(map(same_content, left, right))
    if isinstance(left, float) and type(right) is int:
        right = float(right)
    return bool(left == right or (left != left and right != right))


def refused(data: bytes, kind: Any) -> FrameError:
    with pytest.raises(FrameError) as caught:
        decode(data, kind)
    return caught.value


AGREED = AloneLockstep().agree(plan_of([1, 1]).vote())


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
def test_structs_are_frozen_positional_strict_and_without_defaults(kind: type[Wire]) -> None:
    """Those that may grow skip what they do not know, and fill in what others do not know."""
    config, grows = kind.__struct_config__, issubclass(kind, GrowingWire)
    assert config.frozen and config.array_like and config.forbid_unknown_fields is not grows
    assert config.gc is False
    assert grows or kind.__struct_defaults__ == ()


def grown(value: Any) -> Any:
    """Return a frame as the next release sends it: each struct that may grow has a field more."""
    if isinstance(value, list | tuple):
        return [grown(each) for each in value]
    if not isinstance(value, Wire):
        return value
    fields = [grown(getattr(value, name)) for name in value.__struct_fields__]
    tag = value.__struct_config__.tag
    more = [{"field": 1}] if isinstance(value, GrowingWire) else []
    return [*([tag] if tag is not None else []), *fields, *more]


@pytest.mark.feature("X08")
@pytest.mark.parametrize(
    "kind", [messages.Inbound, messages.OutputFrame, messages.EngineOutput, messages.KVCall]
)
@few
@given(data=st.data())
def test_frames_of_the_next_release_are_read_and_it_reads_ours(
    kind: Any, data: st.DataObject
) -> None:
    value = data.draw(values(kind))
    assert decode(encode(grown(value)), kind) == value
    old = type(value)
    tag = old.__struct_config__.tag
    new = msgspec.defstruct(
        old.__name__, [("added", int, 7)], bases=(old,), frozen=True, kw_only=True, tag=tag
    )
    found = decode(encode(value), new)
    assert found.added == 7
    assert all(getattr(found, name) == getattr(value, name) for name in old.__struct_fields__)


@pytest.mark.parametrize(
    "kind", [*STRUCTS, *UNIONS.values()], ids=[*(kind.__name__ for kind in STRUCTS), *UNIONS]
)
@few
@given(data=st.data())
def test_round_trip(kind: Any, data: st.DataObject) -> None:
    """Exactly: 1, 1.0 and True are three values, and so are 0.0 and -0.0."""
    value = data.draw(values(kind))
    # From a view of a larger buffer.
    frame = memoryview(b"\0" * 3 + encode(value) + b"\0")[3:-1]
    found = decode(frame, kind)
    assert type(found) is type(value)
    assert found == value and repr(found) == repr(value)


@every_struct
@few
@given(data=st.data())
def test_a_frame_that_is_not_exactly_one_struct_is_refused(
    kind: type[Wire], data: st.DataObject
) -> None:
    """It is cut, goes on, lacks its last fields or has another, which one that grows may have; what
    it may lack are those that have a default."""
    frame = encode(data.draw(values(kind)))
    fields = raw(frame)
    num_needed = len(fields) - len(kind.__struct_defaults__)
    altered = [
        frame[: data.draw(st.integers(0, len(frame) - 1))],
        frame + data.draw(st.binary(min_size=1, max_size=8)),
        encode(fields[: data.draw(st.integers(0, num_needed - 1))]),
    ]
    if not issubclass(kind, GrowingWire):
        more = data.draw(st.none() | st.integers(0, 9) | st.text(max_size=2))
        altered.append(encode([*fields, more]))
    for each in altered:
        assert kind.__name__ in str(refused(each, kind))


def test_a_request_of_the_release_before_has_no_adapter() -> None:
    request = submit_of("r", [1]).request
    *before, lora = raw(encode(msgspec.structs.replace(request, adapter_id=3)))
    assert lora == 3
    assert decode(encode(before), type(request)) == request


@pytest.mark.parametrize("change", ["short", "long"])
@pytest.mark.parametrize("outer", [submit_of("r", [1]).request, AGREED], ids=["request", "agreed"])
def test_a_struct_inside_another_is_held_to_its_length(outer: Any, change: str) -> None:
    place = type(outer).__struct_fields__.index("batch" if outer is AGREED else "sampling")
    fields = raw(encode(outer))
    fields[place] = fields[place][:-1] if change == "short" else [*fields[place], 0]
    if outer is not AGREED and change == "long":
        assert decode(encode(fields), type(outer)) == outer  # the next release has more
        return
    assert f"$[{place}]" in str(refused(encode(fields), type(outer)))


@every_struct
@few
@given(data=st.data())
def test_a_frame_of_another_type_is_refused_or_fits_exactly(
    kind: type[Wire], data: st.DataObject
) -> None:
    other = data.draw(st.sampled_from([struct for struct in STRUCTS if struct is not kind]))
    frame = encode(data.draw(values(other)))
    is_long_enough = issubclass(kind, GrowingWire) and num_fields(other) > num_fields(kind)
    if num_fields(other) != num_fields(kind) and not is_long_enough:
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
@given(data=st.data(), random=st.binary(max_size=64))
def test_random_and_changed_bytes_never_raise_anything_else(
    kind: type[Wire], data: st.DataObject, random: bytes
) -> None:
    _refused_or_unchanged(random, kind)
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


def outside(annotation: Any) -> list[Any]:
    """Return values just outside of each of a field's bounds."""
    if typing.get_origin(annotation) is not typing.Annotated:
        return []
    kind, meta = typing.get_args(annotation)
    found: list[Any] = []
    if kind in (int, float):
        step = 1 if kind is int else 1e-6
        if meta.ge is not None:
            found.append(meta.ge - step)
        if meta.le is not None:
            found.append(meta.le + step)
        if kind is float:
            found.append(float("nan"))
    elif meta.pattern is not None:
        found += ["ipc://x", "tcp://host:1", "tcp://1.2.3:4", "tcp://256.1.1.1:1"]
        found += ["tcp://1.2.3.4:1\n", "*"]
    elif meta.max_length is not None:
        item = {str: "x", bytes: b"x"}.get(kind, [1])
        found.append(item * (meta.max_length + 1))
    return found


@every_struct
@given(data=st.data())
@settings(max_examples=1)
def test_what_lies_outside_of_a_fields_bounds_is_refused_with_its_place(
    kind: type[Wire], data: st.DataObject
) -> None:
    fields = raw(encode(data.draw(values(kind))))
    is_tagged = kind.__struct_config__.tag is not None
    hints = typing.get_type_hints(kind, include_extras=True)
    for place, name in enumerate(kind.__struct_fields__, start=int(is_tagged)):
        for value in outside(hints[name]):
            altered = [*fields[:place], value, *fields[place + 1 :]]
            assert f"$[{place}]" in str(refused(encode(altered), kind)), (name, value)


@pytest.mark.parametrize(
    ("field", "found"),
    [
        ("temperature", 2e6),
        ("top_p", 0.0),
        ("max_tokens", 0),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [7] * 513),
        ("num_logprobs", 21),
        ("rules", rules_of(presence_penalty=2.1)),
        ("rules", rules_of(repetition_penalty=0.0)),
        ("rules", rules_of(biases=(float("nan"),))),
        ("rules", rules_of(bias_token_ids=(1,) * 1025)),
    ],
)
def test_what_no_model_could_take_is_refused_with_its_place(field: str, found: Any) -> None:
    sampling = sampling_of(**{field: found})
    place = messages.Sampling.__struct_fields__.index(field)
    assert f"$[{place}]" in str(refused(encode(sampling), messages.Sampling))


def test_a_submission_that_is_none_still_names_its_request() -> None:
    frame = encode(submit_of("r", [-1]))
    refused(frame, messages.Inbound)
    assert messages.request_id_of(frame) == "r"
    for other in (frame[:-1], b"", encode(messages.Abort(["r"])), encode(["Submit", 1, 2])):
        assert messages.request_id_of(other) == ""


CREDENTIALS = Credentials("aa11", b"s" * 32)
OURS = CREDENTIALS.header


def test_nothing_shows_a_secret() -> None:
    secret = b"never to be seen, 32 bytes long."
    shown = f"{Credentials('aa11', secret)!r} {Credentials('aa11', secret)}"
    assert "aa11" in shown and "never" not in shown
    with pytest.raises(ValueError, match=r"^secret: wanted 32 bytes, found 3$"):
        Credentials("aa11", b"abc")


@pytest.mark.feature("X08")
def test_who_is_one_version_apart_is_read_and_nobody_else() -> None:
    ours = messages.PROTOCOL_VERSION
    for found in (ours - 1, ours, ours + 1):
        CREDENTIALS.check(encode(Header(found)))
    for found in (ours - 2, ours + 2):
        wanted = rf"^protocol: wanted version {ours - 1} to {ours + 1}, found {found}$"
        with pytest.raises(FrameError, match=wanted):
            CREDENTIALS.check(encode(Header(found)))


@pytest.mark.parametrize(
    "data",
    [b"", OURS[:-1], OURS + b"\0", encode(["a"]), encode({"protocol": 1}), b"GET / HTTP/1.1"],
    ids=["empty", "short", "long", "field", "map", "http"],
)
def test_what_is_no_header_is_refused(data: bytes) -> None:
    with pytest.raises(FrameError, match="Header"):
        CREDENTIALS.check(data)


@pytest.mark.parametrize(
    ("num_new", "num_decodes", "kind"),
    [([], 0, 0), ([1], 1, 1), ([1, 1], 2, 1), ([1, 5], 1, 2), ([5], 0, 2), ([1], 0, 2)],
)
def test_a_plan_votes_for_what_it_holds(num_new: list[int], num_decodes: int, kind: int) -> None:
    vote = plan_of(num_new, epoch=3, step=8, num_decodes=num_decodes).vote()
    assert (vote.epoch, vote.step, vote.kind) == (3, 8, kind)
    assert (vote.num_tokens, vote.num_seqs) == (sum(num_new), len(num_new))
    assert vote.max_query_len == max(num_new, default=0)
    assert vote.has_work is bool(num_new)
    assert vote.draining is False
