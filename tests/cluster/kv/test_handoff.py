"""Handoffs and leases."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.kv.handoff import KVHolder


class Clock:
    """A clock that stands still until told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def holder(clock: Clock) -> KVHolder:
    return KVHolder(10.0, clock)


@pytest.mark.feature("P18")
def test_a_lease_that_ran_out_is_dead_before_anyone_looks(holder: KVHolder, clock: Clock) -> None:
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
    holder: KVHolder, clock: Clock
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
    clock = Clock()
    holder = KVHolder(5.0, clock)
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
