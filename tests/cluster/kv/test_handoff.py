"""Handoffs and leases; those of a group end when they have ended on all of its ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.kv.handoff import GroupHolder, GroupReader, KVHolder
from cluster.wire.group_messages import (
    CancelRead,
    DropKV,
    ExpectKV,
    HoldKV,
    KVOrder,
    ReadEnded,
    StartRead,
)
from cluster.wire.messages import FrameError, KVHandoff

HANDOFF = KVHandoff(1, "r", [], [5], [1], 4, 64, "kv", 10.0)


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=0.0)


@pytest.fixture
def holder(clock: SimpleNamespace) -> KVHolder:
    return KVHolder(10.0, lambda: clock.now)


@pytest.mark.feature("P18")
def test_a_lease_that_ran_out_is_dead_before_anyone_looks(
    holder: KVHolder, clock: SimpleNamespace
) -> None:
    handoff_id = holder.hold("r", [3], [1])
    clock.now = 10.0
    assert not holder.is_alive(handoff_id)
    assert not holder.renew(handoff_id)
    assert not holder.release(handoff_id, 1)
    assert holder.num_blocks_sent == 0
    assert holder.take_ended() == [], "its blocks are freed by the tick alone"
    assert holder.tick() == [handoff_id]
    assert holder.take_ended() == [handoff_id]


def test_the_next_deadline_is_that_of_the_least_recently_renewed(
    holder: KVHolder, clock: SimpleNamespace
) -> None:
    assert holder.next_deadline() is None
    first, second = holder.hold("a", [1], [1]), holder.hold("b", [2], [1])
    clock.now = 4.0
    assert holder.renew(first)
    assert holder.next_deadline() == 10.0
    clock.now = 11.0
    assert holder.tick() == [second]
    assert holder.next_deadline() == 14.0


def test_a_handoff_covers_its_blocks_in_their_generations_only(holder: KVHolder) -> None:
    handoff_id = holder.hold("r", [3, 4], [7, 8])
    assert holder.covers(handoff_id, [4], [8])
    assert not holder.covers(handoff_id, [4], [9])
    assert not holder.covers(handoff_id, [5], [1])
    assert not holder.covers(handoff_id, [3, 4], [7])
    holder.drop(handoff_id)
    assert not holder.covers(handoff_id, [4], [8])


@settings(max_examples=300, deadline=None, print_blob=True, database=None)
@given(data=st.data())
def test_a_lease_that_ended_never_lives_again(data: st.DataObject) -> None:
    clock = SimpleNamespace(now=0.0)
    holder = KVHolder(5.0, lambda: clock.now)
    deadlines = [0.0]  # by handoff; there is no handoff 0
    ended: list[int] = []
    num_sent = 0
    for _ in range(data.draw(st.integers(1, 40))):
        clock.now += data.draw(st.sampled_from([0, 0, 1, 3]))
        action = data.draw(st.sampled_from(["hold", "renew", "release", "drop", "tick", "take"]))
        handoff_id = data.draw(st.integers(0, len(deadlines) - 1))
        alive = clock.now < deadlines[handoff_id]
        match action:
            case "hold":
                assert holder.hold("r", [1], [1]) == len(deadlines)
                deadlines.append(clock.now + 5)
            case "renew":
                assert holder.renew(handoff_id) == alive
                deadlines[handoff_id] = clock.now + 5 if alive else 0
            case "release":
                assert holder.release(handoff_id, 2) == alive
                num_sent += 2 * alive
                assert holder.num_blocks_sent == num_sent
                deadlines[handoff_id] = 0
            case "drop":
                holder.drop(handoff_id)
                deadlines[handoff_id] = 0
            case "tick":
                holder.tick()
                assert holder.num_held == sum(clock.now < deadline for deadline in deadlines)
            case "take":
                ended += holder.take_ended()
        for known, deadline in enumerate(deadlines):
            assert holder.is_alive(known) == (clock.now < deadline)
    clock.now += 5
    holder.tick()
    ended += holder.take_ended()
    assert sorted(ended) == list(range(1, len(deadlines)))


# --- of a group -----------------------------------------------------------------------------------


class FakeReader:
    """A rank's reader that ends reads when told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.finished: list[ReadEnded] = []

    def expect(self, request_id: str, handoff: KVHandoff) -> None:
        self.calls.append("expect")

    def start(self, request_id: str, handoff: KVHandoff, source: list[int], dst: list[int]) -> None:
        self.calls.append("start")

    def cancel(self, request_id: str) -> None:
        self.calls.append("cancel")

    def take_finished(self) -> list[ReadEnded]:
        finished, self.finished = self.finished, []
        return finished


@pytest.fixture
def orders() -> list[KVOrder]:
    """What was told to the followers."""
    return []


def test_blocks_are_freed_when_the_handoff_has_ended_on_every_rank(orders: list[KVOrder]) -> None:
    local = KVHolder(10.0, lambda: 0.0)
    holder = GroupHolder(local, 2, orders.append)
    handoff_id = holder.hold("r", [5], [1])
    assert orders == [HoldKV(handoff_id, "r", [5], [1])]
    holder.on_handoffs_ended([handoff_id])
    local.release(handoff_id, 1)
    assert holder.take_ended() == []
    assert holder.num_held == 1
    holder.on_handoffs_ended([handoff_id])
    assert holder.num_held == 0
    assert holder.take_ended() == [handoff_id]
    assert holder.take_ended() == []


def test_a_dropped_handoff_is_dropped_on_every_rank(orders: list[KVOrder]) -> None:
    holder = GroupHolder(KVHolder(10.0, lambda: 0.0), 1, orders.append)
    first, second = holder.hold("a", [1], [1]), holder.hold("b", [2], [1])
    holder.drop(first)
    assert orders[2:] == [DropKV(first)]
    holder.on_handoffs_ended([second])
    assert holder.take_ended() == []
    holder.on_handoffs_ended([first])
    assert holder.take_ended() == [first]


@pytest.mark.parametrize("last", ["leader", "follower"])
@pytest.mark.parametrize("errors", [{}, {"leader": "kv lease"}, {"follower": "kv lease"}])
def test_a_read_ends_with_its_last_rank_and_is_as_good_as_its_worst(
    orders: list[KVOrder], last: str, errors: dict[str, str]
) -> None:
    local = FakeReader()
    reader = GroupReader(local, 1, orders.append)
    reader.expect("r", HANDOFF)
    reader.start("r", HANDOFF, [0], [7])
    assert local.calls == ["expect", "start"]
    assert orders == [ExpectKV("r", HANDOFF), StartRead("r", HANDOFF, [0], [7])]

    def finish(rank: str) -> None:
        error = errors.get(rank, "")
        if rank == "leader":
            local.finished.append(ReadEnded("r", error))
        else:
            reader.on_read_ended("r", error)

    finish("follower" if last == "leader" else "leader")
    assert reader.take_finished() == []
    finish(last)
    error = next(iter(errors.values()), "")
    assert reader.take_finished() == [ReadEnded("r", error)]
    assert reader.take_finished() == []


def test_a_cancelled_read_still_waits_for_every_rank(orders: list[KVOrder]) -> None:
    local = FakeReader()
    reader = GroupReader(local, 1, orders.append)
    reader.expect("r", HANDOFF)
    reader.start("r", HANDOFF, [0], [7])
    local.finished.append(ReadEnded("r", ""))
    assert reader.take_finished() == []
    reader.cancel("r")
    assert orders[-1] == CancelRead("r")
    reader.on_read_ended("r", "aborted")
    assert reader.take_finished() == [ReadEnded("r", "aborted")]


def test_reports_of_what_nobody_asked_for_are_refused_by_name(orders: list[KVOrder]) -> None:
    holder = GroupHolder(KVHolder(10.0, lambda: 0.0), 0, orders.append)
    handoff_id = holder.hold("r", [5], [1])
    holder.drop(handoff_id)
    assert holder.take_ended() == [handoff_id]
    for strange in (handoff_id, 77, 2**53):
        wanted = f"^handoff: wanted one that is held, found the end of {strange}$"
        with pytest.raises(FrameError, match=wanted):
            holder.on_handoffs_ended([strange])
    reader = GroupReader(FakeReader(), 1, orders.append)
    reader.expect("r", HANDOFF)
    wanted = r"^read: wanted one that was started, found the end of 'r'$"
    with pytest.raises(FrameError, match=wanted):
        reader.on_read_ended("r", "")
