"""Who gets a place, who is told when to come back, and who loses one."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.admission import MIN_BODY_RATE, MIN_ENDS, Admission, Overloaded, Place


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def admission(clock: Clock | None = None, **limits: Any) -> Admission:
    given = {"max_running": 4, "max_queued": 4, "max_queue_wait_s": 10.0}
    return Admission(
        **{"max_body_bytes": 1000, "retry_after_s": 2.0, **given, **limits},
        clock=clock or Clock(),
    )


def test_places_are_taken_and_given_back() -> None:
    admitting = admission()
    places = [admitting.enter() for _ in range(8)]
    with pytest.raises(Overloaded, match="no room for 1 more beside 8 of 8"):
        admitting.enter()
    places[0].leave()
    places[0].leave()
    place = admitting.enter()
    with pytest.raises(Overloaded, match="no room for 2 more beside 8 of 8"):
        place.grow(3)
    for other in places[1:4]:
        other.leave()
    place.grow(3)
    assert admitting.num_live == 7
    place.leave()
    assert admitting.num_live == 4


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["enter", "grow", "end", "leave"]), st.integers(1, 5))))
def test_what_is_counted_is_what_places_hold(steps: list[tuple[str, int]]) -> None:
    admitting = admission()
    places: list[Place] = []
    for what, number in steps:
        try:
            if what == "enter":
                places.append(admitting.enter())
                places[-1].hold(number * 500)
            elif places and what == "grow":
                places[number % len(places)].grow(number)
            elif places and what == "end":
                places[number % len(places)].end_sequences()
            elif places:
                places.pop(number % len(places)).leave()
        except Overloaded as error:
            assert error.retry_after_s >= 2.0
        assert admitting.num_live == sum(place.num_sequences for place in places) <= 8
        assert admitting.num_bytes == sum(place.num_bytes for place in places) <= 8000
    for place in places:
        place.leave()
    assert (admitting.num_live, admitting.num_bytes) == (0, 0)


def test_bodies_hold_only_so_many_bytes_at_once() -> None:
    admitting = admission()
    first, second = admitting.enter(), admitting.enter()
    first.hold(7500)
    with pytest.raises(Overloaded, match="at most 8000 bytes of requests at once"):
        second.hold(501)
    first.let_go_of_bytes()
    second.hold(501)


def serve_at(admitting: Admission, clock: Clock, *, per_second: float, seconds: float) -> None:
    """Let places end at a rate, while more ask for one than there are."""
    places = [admitting.enter() for _ in range(admitting.max_live - admitting.num_live)]
    until = clock.now + seconds
    while clock.now < until:
        clock.now += 1 / per_second
        place = places.pop(0)
        place.end_sequences()
        place.leave()
        with suppress(Overloaded):
            places.append(admitting.enter())


def test_the_queue_is_bounded_by_the_wait_that_it_means() -> None:
    clock = Clock()
    admitting = admission(clock, max_queued=100, max_queue_wait_s=10.0)
    serve_at(admitting, clock, per_second=5, seconds=60)
    with pytest.raises(Overloaded, match="wanted a wait of at most 10 s, found") as refused:
        for _ in range(200):
            admitting.enter()
    num_waiting = admitting.num_live - 4
    assert num_waiting == pytest.approx(50, abs=3)  # ten seconds at five a second
    assert 0 < refused.value.retry_after_s < 30


def test_who_is_refused_for_room_is_told_when_there_will_be_some() -> None:
    clock = Clock()
    admitting = admission(clock, max_queued=100, max_queue_wait_s=1e6)
    serve_at(admitting, clock, per_second=5, seconds=20)
    place = admitting.enter() if admitting.num_live < admitting.max_live else None
    with pytest.raises(Overloaded) as refused:
        for _ in range(admitting.max_live):
            admitting.enter()
    assert refused.value.retry_after_s == 2.0  # the next place is free sooner than that
    assert place is None or place.num_sequences == 1


def test_a_rate_is_believed_only_of_enough_ends_while_others_waited() -> None:
    clock = Clock()
    admitting = admission(clock, max_queued=1000, max_queue_wait_s=1.0)
    for _ in range(100):  # nobody waits: how fast these end says nothing of a full server
        place = admitting.enter()
        clock.now += 1
        place.end_sequences()
        place.leave()
    places = [admitting.enter() for _ in range(500)]
    for place in places[: MIN_ENDS - 1]:
        clock.now += 1
        place.end_sequences()
    admitting.enter()
    places[MIN_ENDS].end_sequences()
    with pytest.raises(Overloaded, match="a wait of at most 1 s"):
        admitting.enter()


def reading(admitting: Admission, evicted: list[int], name: int) -> Place:
    place = admitting.enter()
    place.on_evicted = lambda: evicted.append(name)
    return place


def test_a_body_that_comes_slowly_gives_way_where_its_place_is_wanted() -> None:
    clock = Clock()
    admitting = admission(clock, max_body_bytes=1 << 20)
    evicted: list[int] = []
    places = [reading(admitting, evicted, name) for name in range(8)]
    with pytest.raises(Overloaded):
        admitting.enter()  # all have only just begun
    clock.now = 10.0
    for place in places[:3]:
        place.hold(10 * MIN_BODY_RATE)
    places[3].on_evicted = None  # has its body
    admitting.enter()
    assert evicted == [4]
    assert admitting.num_live == 8
    places[4].leave()  # its handler ends later
    assert admitting.num_live == 8
    for _ in range(3):
        admitting.enter()
    with pytest.raises(Overloaded):
        admitting.enter()
    assert evicted == [4, 5, 6, 7]
