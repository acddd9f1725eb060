"""Who gets a place, who is told when to come back, and who loses one."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.admission import (
    LACKING_S,
    MIN_BODY_RATE,
    MIN_ENDS,
    PATIENCE_S,
    Admission,
    AdmissionSlot,
    Overloaded,
)
from serve.clients import Client

ONE, TWO = Client("one"), Client("two")
MIB = 1 << 20


class Ingress:
    """An admission with a clock of its own."""

    def __init__(self, **limits: Any) -> None:
        self.now = 0.0
        given = {"max_running": 4, "max_queued": 4, "max_queue_wait_s": 10.0}
        given |= {"max_body_bytes": 1000, "retry_after_s": 2.0, **limits}
        self.admission = Admission(**given, clock=lambda: self.now)
        self.enter = self.admission.enter
        self.evicted: list[int] = []
        """The names of bodies that lost their places, in this order."""

    def reading(self, name: int, client: Client = ONE) -> AdmissionSlot:
        """Return the place of a body that still comes."""
        place = self.enter(client)
        place.on_evicted = lambda: self.evicted.append(name)
        return place


def admission(**limits: Any) -> Admission:
    return Ingress(**limits).admission


@pytest.mark.feature("R13")
def test_places_come_and_go_with_engines_and_nobody_loses_one() -> None:
    admitting = admission(max_queued=0)
    places = [admitting.enter(ONE) for _ in range(4)]
    admitting.resize(6, 0)
    places += [admitting.enter(ONE) for _ in range(2)]
    admitting.resize(2, 1)
    for place in places[:4]:
        with pytest.raises(Overloaded, match=f"beside {admitting.num_live} of 3"):
            admitting.enter(ONE)
        place.leave()
    assert admitting.enter(ONE) and admitting.num_live == 3


def test_places_are_taken_and_given_back() -> None:
    admitting = admission()
    places = [admitting.enter(ONE) for _ in range(8)]
    with pytest.raises(Overloaded, match="no room for 1 more beside 8 of 8"):
        admitting.enter(ONE)
    places[0].leave()
    places[0].leave()
    place = admitting.enter(ONE)
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
    places: list[AdmissionSlot] = []
    for what, number in steps:
        try:
            if what == "enter":
                places.append(admitting.enter([ONE, TWO][number % 2]))
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


def serve_at(ingress: Ingress, *, per_second: float, seconds: float) -> Admission:
    """Let places end at a rate, while more ask for one than there are."""
    admitting = ingress.admission
    places = [admitting.enter(ONE) for _ in range(admitting.max_live - admitting.num_live)]
    until = ingress.now + seconds
    while ingress.now < until:
        ingress.now += 1 / per_second
        place = places.pop(0)
        place.end_sequences()
        place.leave()
        with suppress(Overloaded):
            places.append(admitting.enter(ONE))
    return admitting


def test_the_queue_is_bounded_by_the_wait_that_it_means() -> None:
    ingress = Ingress(max_queued=100, max_queue_wait_s=10.0)
    admitting = serve_at(ingress, per_second=5, seconds=60)
    with pytest.raises(Overloaded, match="wanted a wait of at most 10 s, found") as refused:
        for _ in range(200):
            admitting.enter(ONE)
    num_waiting = admitting.num_live - 4
    assert num_waiting == pytest.approx(50, abs=3)  # ten seconds at five a second
    assert 0 < refused.value.retry_after_s < 30


def test_who_is_refused_for_room_is_told_when_there_will_be_some() -> None:
    ingress = Ingress(max_queued=100, max_queue_wait_s=1e6)
    admitting = serve_at(ingress, per_second=5, seconds=20)
    with pytest.raises(Overloaded) as refused:
        for _ in range(admitting.max_live):
            admitting.enter(ONE)
    assert refused.value.retry_after_s == 2.0  # the next place is free sooner than that


def test_a_rate_is_believed_only_of_enough_ends_while_others_waited() -> None:
    ingress = Ingress(max_queued=1000, max_queue_wait_s=1.0)
    for _ in range(100):  # nobody waits: how fast these end says nothing of a full server
        place = ingress.enter(ONE)
        ingress.now += 1
        place.end_sequences()
        place.leave()
    places = [ingress.enter(ONE) for _ in range(500)]
    for place in places[: MIN_ENDS - 1]:
        ingress.now += 1
        place.end_sequences()
    ingress.enter(ONE)
    places[MIN_ENDS].end_sequences()
    with pytest.raises(Overloaded, match="a wait of at most 1 s"):
        ingress.enter(ONE)


def test_a_body_that_comes_slowly_gives_way_where_its_place_is_wanted() -> None:
    ingress = Ingress(max_body_bytes=1 << 20)
    places = [ingress.reading(name) for name in range(8)]
    with pytest.raises(Overloaded):
        ingress.enter(ONE)  # all have only just begun
    ingress.now = 10.0
    for place in places[:3]:
        place.hold(10 * MIN_BODY_RATE)
    places[3].on_evicted = None  # has its body
    ingress.enter(ONE)
    assert ingress.evicted == [4]
    assert ingress.admission.num_live == 8
    places[4].leave()  # its handler ends later
    assert ingress.admission.num_live == 8
    for _ in range(3):
        ingress.enter(ONE)
    with pytest.raises(Overloaded):
        ingress.enter(ONE)
    assert ingress.evicted == [4, 5, 6, 7]


def test_a_body_that_stands_still_is_slow_whatever_came_before() -> None:
    ingress = Ingress(max_body_bytes=8 * MIB)
    places = [ingress.reading(name) for name in range(8)]
    for place in places:
        place.hold(8 * MIB - 1)
    ingress.now = PATIENCE_S / 2
    places[0].hold(1)  # it still comes
    places[0].on_evicted = None
    ingress.now = PATIENCE_S + 0.1
    other = ingress.enter(ONE)
    assert ingress.evicted == [1]
    other.hold(4 * MIB)  # what the first one held is free
    assert ingress.evicted == [1]
    other.hold(6 * MIB)
    assert ingress.evicted == [1, 2]


def test_a_body_that_drips_is_slow_however_much_came_at_first() -> None:
    ingress = Ingress(max_body_bytes=8 * MIB)
    place = ingress.reading(0)
    place.hold(7 * MIB)
    for _ in range(40):
        ingress.now += 0.5
        place.hold(MIN_BODY_RATE // 4)
    assert place.is_slow(ingress.now)
    steady = ingress.reading(1)
    for _ in range(40):
        ingress.now += 0.5
        steady.hold(MIN_BODY_RATE // 2)
    assert not steady.is_slow(ingress.now)


def test_bodies_that_wait_for_their_rest_give_way_to_a_small_one_at_once() -> None:
    ingress = Ingress(max_queued=5, max_body_bytes=8 * MIB)
    for name in range(8):
        ingress.reading(name).hold(8 * MIB - 1 + name // 7)
    ingress.enter(ONE).hold(2000)
    assert ingress.evicted == [7]


def test_large_bodies_that_still_come_are_not_taken_for_another_large_one() -> None:
    ingress = Ingress(max_queued=20, max_body_bytes=8 * MIB)
    for name in range(8):
        ingress.reading(name).hold(8 * MIB)
    ninth = ingress.reading(8)
    with pytest.raises(Overloaded, match="bytes of requests at once"):
        ninth.hold(2 * MIB)
    assert ingress.evicted == []


def test_bytes_are_taken_from_the_client_that_holds_the_most() -> None:
    ingress = Ingress(max_queued=20, max_body_bytes=8 * MIB)
    for name in range(7):
        ingress.reading(name).hold(8 * MIB)
    ingress.reading(7, TWO).hold(8 * MIB)
    ingress.reading(8, TWO).hold(6 * MIB)
    assert ingress.evicted == [0]
    with pytest.raises(Overloaded):  # with another eight it would be the one that holds the most
        for name in range(9, 20):
            ingress.reading(name, TWO).hold(8 * MIB)
    assert ingress.evicted == [0, 1, 2]


def test_places_are_taken_from_bodies_of_the_client_that_holds_the_most() -> None:
    ingress = Ingress()
    for name in range(8):
        ingress.reading(name)
    for _ in range(4):
        ingress.enter(TWO)
    with pytest.raises(Overloaded):
        ingress.enter(TWO)
    assert ingress.evicted == [0, 1, 2, 3]


def test_what_ends_goes_to_the_client_that_was_refused() -> None:
    """One client asks for a place every millisecond, and another one twice a second."""
    ingress = Ingress(max_running=4, max_queued=60)
    greedy = [ingress.enter(ONE) for _ in range(64)]
    mine: list[AdmissionSlot] = []
    for tick in range(8000):
        ingress.now += 0.001
        if tick % 100 == 0:  # ten a second end, in their order
            greedy.pop(0).leave()
        with suppress(Overloaded):
            greedy.append(ingress.enter(ONE))
        if tick % 500 == 0:
            with suppress(Overloaded):
                mine.append(ingress.enter(TWO))
    assert len(mine) == 15  # but for the first time
    ingress.now += LACKING_S + 1
    while ingress.admission.num_live < 64:
        greedy.append(ingress.enter(ONE))  # nobody lacks any now


def test_bytes_that_end_go_to_the_client_that_was_refused() -> None:
    admitting = admission(max_queued=60)
    held = [admitting.enter(ONE) for _ in range(8)]
    for place in held:
        place.hold(1000)
    with pytest.raises(Overloaded, match="at most 8000 bytes"):
        admitting.enter(TWO).hold(500)
    held[0].leave()
    with pytest.raises(Overloaded, match="other clients wait, and this one has 7000 of 7000 bytes"):
        admitting.enter(ONE).hold(500)
    admitting.enter(TWO).hold(1000)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("ABCD"),
            st.sampled_from(["enter", "hold", "leave", "wait"]),
            st.integers(0, 7),
        ),
        max_size=200,
    )
)
def test_a_client_that_holds_less_than_all_others_is_not_kept_out_by_bodies(
    steps: list[tuple[str, str, int]],
) -> None:
    """As long as others only send, there is always room for a client that holds nothing."""
    ingress = Ingress(max_body_bytes=1000, max_queued=8)
    admitting = ingress.admission
    places: list[AdmissionSlot] = []
    for name, what, number in steps:
        try:
            if what == "enter":
                place = admitting.enter(Client(name))
                place.on_evicted = partial(places.remove, place)
                places.append(place)
            elif what == "wait":
                ingress.now += number
            elif places and what == "hold":
                places[number % len(places)].hold(number * 140)
            elif places and what == "leave":
                places.pop(number % len(places)).leave()
        except Overloaded:
            pass
        assert admitting.num_live == len(places) <= admitting.max_live
        assert admitting.num_bytes == sum(place.num_bytes for place in places) <= 8000
    newcomer = admitting.enter(Client("newcomer"))
    newcomer.hold(100)


def test_a_place_that_was_taken_as_its_body_ended_holds_nothing() -> None:
    ingress = Ingress()
    places = [ingress.reading(name) for name in range(8)]
    ingress.now = 10.0
    ingress.enter(ONE)
    assert ingress.evicted == [0]
    for place in places[1:]:
        place.leave()
    with pytest.raises(Overloaded):
        places[0].grow(3)
    places[0].end_sequences()
    places[0].leave()
    assert ingress.admission.num_live == 1


@pytest.mark.feature("S10")
def test_an_adapter_is_used_until_the_last_request_that_has_it_leaves() -> None:
    admitting = admission()
    places = [admitting.enter(client) for client in (ONE, ONE, TWO)]
    places[1].adapter_id = places[2].adapter_id = 7
    assert admitting.used_adapters == {7}
    places[1].leave()
    assert admitting.used_adapters == {7}
    places[2].leave()
    assert not admitting.used_adapters
