"""The step channel: order, wake-ups and who is let in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from local_ranks import CREDENTIALS, HOST, wait_for
from wire_structs import hello_of, plan_of

from cluster.engine.lockstep import AloneLockstep
from cluster.group import channel
from cluster.group.channel import StepReceiver, StepSender
from cluster.group.links import LinkAddress
from cluster.wire.group_messages import (
    DropKV,
    EndOfSteps,
    FollowerHello,
    HandoffsEnded,
    LeaderHello,
    ReadEnded,
    StepFrame,
)
from cluster.wire.messages import PROTOCOL_VERSION, FrameError, encode
from cluster.wire.sockets import Doorbell

OURS = LeaderHello(PROTOCOL_VERSION, "test", 1, "n")
PLAN = plan_of([1], epoch=1)


@pytest.fixture
def sender(context: Any) -> Iterator[StepSender]:
    made = StepSender(context, 2, host=HOST, credentials=CREDENTIALS)
    yield made
    if not made.links[0].socket.closed:
        made.close()


def accept(sender: StepSender) -> list[FollowerHello]:
    return sender.accept(OURS, lambda name: None)


class End:
    """A follower's end, opened on a thread: it waits for the leader's answer."""

    def __init__(self, context: Any, address: LinkAddress, hello: FollowerHello) -> None:
        self.doorbell = Doorbell()
        self.receiver = StepReceiver(context, address, self.doorbell, credentials=CREDENTIALS)
        self.error = ""
        self._thread = threading.Thread(target=self._open, args=(hello,), daemon=True)
        self._thread.start()

    def wait_until_open(self) -> StepReceiver:
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()
        return self.receiver

    def _open(self, hello: FollowerHello) -> None:
        try:
            self.receiver.open(hello)
        except FrameError as error:
            self.error = str(error)


Connect = Callable[[LinkAddress, FollowerHello], End]


def connect_all(connect: Connect, sender: StepSender) -> list[End]:
    ends = [connect(address, hello_of(i + 1)) for i, address in enumerate(sender.addresses)]
    accept(sender)
    return ends


@pytest.fixture
def connect(context: Any) -> Iterator[Connect]:
    ends: list[End] = []

    def make(address: LinkAddress, hello: FollowerHello) -> End:
        ends.append(End(context, address, hello))
        return ends[-1]

    yield make
    for end in ends:
        end.wait_until_open().close()


@pytest.mark.parametrize("way", ["ipc", "tcp"])
def test_every_follower_gets_everything_in_order(
    connect: Connect, sender: StepSender, way: str
) -> None:
    addresses = [
        address if way == "ipc" else replace(address, node="another", ipc="")
        for address in sender.addresses
    ]
    opening = [connect(address, hello_of(i + 1)) for i, address in enumerate(addresses)]
    assert [h.tp_rank for h in accept(sender)] == [1, 2]
    ends = [end.wait_until_open() for end in opening]
    agreed = AloneLockstep().agree(PLAN.vote())
    for handoff_id in range(100):
        sender.send(PLAN, agreed)
        sender.tell(DropKV(handoff_id))
    for end in ends:
        for handoff_id in range(100):
            frame = end.receive()
            assert isinstance(frame, StepFrame)
            assert (frame.plan, frame.agreed) == (PLAN, agreed)
            assert end.receive() == DropKV(handoff_id)
    ends[1].report(HandoffsEnded([3]))
    ends[0].report(ReadEnded("r", ""))
    deadline = time.monotonic() + 60
    reports: list[Any] = []
    while len(reports) < 2 and time.monotonic() < deadline:
        reports += sender.take_reports()
    assert sorted(reports, key=lambda r: r[0]) == [(1, ReadEnded("r", "")), (2, HandoffsEnded([3]))]
    sender.close()
    for end in ends:
        assert end.receive() == EndOfSteps()


def test_a_ring_ends_a_wait_for_a_frame(connect: Connect, sender: StepSender) -> None:
    ends = connect_all(connect, sender)
    receiver = ends[0].wait_until_open()
    threading.Timer(0.05, ends[0].doorbell.ring).start()
    began = time.monotonic()
    assert receiver.receive() is None
    assert time.monotonic() - began < 60
    sender.tell(DropKV(1))
    assert receiver.receive() == DropKV(1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"protocol": 99}, f"protocol: wanted {PROTOCOL_VERSION}, found 99"),
        ({"config_hash": "xyz"}, "config_hash: wanted test, found xyz"),
        ({"epoch": 0}, "epoch: wanted 1, found 0"),
    ],
)
def test_a_stranger_is_refused_on_both_sides(
    connect: Connect, sender: StepSender, fields: dict[str, Any], message: str
) -> None:
    end = connect(sender.addresses[0], hello_of(1, **fields))
    with pytest.raises(FrameError, match=message):
        accept(sender)
    end.wait_until_open()
    [field] = fields
    assert end.error.startswith(f"{field}: wanted {fields[field]}, found ")


def test_a_rank_at_the_wrong_place_is_refused(connect: Connect, sender: StepSender) -> None:
    connect(sender.addresses[0], hello_of(2))
    with pytest.raises(FrameError, match="tp_rank: wanted 1, found 2"):
        accept(sender)


def test_a_follower_that_is_gone_is_an_error_and_not_a_wait(
    connect: Connect, sender: StepSender
) -> None:
    ends = connect_all(connect, sender)
    ends[1].wait_until_open().close()
    with pytest.raises(ConnectionError, match="follower tp=2: wanted an open channel"):
        wait_for(lambda: sender.tell(DropKV(1)))


@pytest.mark.feature("P14")
def test_a_connection_that_broke_is_named_though_there_is_a_new_one(
    connect: Connect, sender: StepSender, relay_to: Callable[[int], Any]
) -> None:
    relay = relay_to(int(sender.addresses[1].tcp.rpartition(":")[2]))
    through = LinkAddress("another", "", f"tcp://{HOST}:{relay.port}")
    ends = [connect(sender.addresses[0], hello_of(1)), connect(through, hello_of(2))]
    accept(sender)
    follower = ends[1].wait_until_open()
    follower.report(HandoffsEnded([1]))
    wait_for(sender.take_reports)
    sender.check()
    relay.cut()
    follower.report(HandoffsEnded([2]))  # lost, or not: nobody can tell
    with pytest.raises(ConnectionError, match="follower tp=2: wanted its connection unbroken"):
        wait_for(sender.check)


@pytest.mark.parametrize("body", [b"xy", b"", encode(DropKV(1)), encode(HandoffsEnded([-1]))[:-1]])
def test_a_follower_that_reports_nonsense_is_named(
    connect: Connect, sender: StepSender, body: bytes
) -> None:
    ends = connect_all(connect, sender)
    ends[1].wait_until_open()._link.send(body)
    with pytest.raises(FrameError, match=r"^follower tp=2: frame: wanted "):
        wait_for(sender.take_reports)


def test_a_leader_that_sends_nonsense_is_named(connect: Connect, sender: StepSender) -> None:
    ends = connect_all(connect, sender)
    for link, body in zip(sender.links, (b"xy", encode(HandoffsEnded([1]))), strict=True):
        link.send(body)
    for end in ends:
        with pytest.raises(FrameError, match=r"^leader: frame: wanted "):
            end.wait_until_open().receive()


def test_reports_beyond_a_borders_share_are_taken_at_the_next(
    connect: Connect, sender: StepSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of one follower do not keep another's waiting."""
    monkeypatch.setattr(channel, "MAX_REPORTS_S", 1000.0)
    ends = connect_all(connect, sender)
    for i in range(3 * channel.MAX_REPORTS):
        ends[0].wait_until_open().report(HandoffsEnded([i]))
    ends[1].wait_until_open().report(ReadEnded("r", ""))
    time.sleep(2)  # they come without a sign of the last
    first = sender.take_reports()
    assert channel.MAX_REPORTS - 2 <= len(first) <= channel.MAX_REPORTS
    assert (2, ReadEnded("r", "")) in first[:2]
    rest = [report for _ in range(3) for report in sender.take_reports()]
    found = [report.handoff_ids[0] for tp, report in [*first, *rest] if tp == 1]  # type: ignore[union-attr]
    assert found == list(range(3 * channel.MAX_REPORTS))
