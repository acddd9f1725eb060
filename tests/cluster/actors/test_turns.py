"""One at a time, in the order of asking, and the dead hold up nobody."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cluster.actors.turns import Turns

LOST_AFTER_S = 5.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_has_its_turn_in_the_order_in_which_they_asked() -> None:
    turns = Turns(LOST_AFTER_S, Clock())
    assert turns.take("a") and not turns.take("b") and not turns.take("c")
    assert turns.take("a"), "it keeps what it has"
    turns.give_back("a")
    assert not turns.take("c") and not turns.take("a") and turns.take("b")
    turns.give_back("c")  # does not wait any more
    turns.give_back("b")
    assert turns.take("a")


def test_who_is_silent_loses_its_turn_and_its_place() -> None:
    clock = Clock()
    turns = Turns(LOST_AFTER_S, clock)
    assert turns.take("dead") and not turns.take("next")
    clock.now = LOST_AFTER_S
    assert not turns.take("next")
    clock.now += 0.1
    assert turns.take("next") and not turns.take("dead")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40))
def test_nobody_takes_what_another_has_and_nobody_starves(steps: list[tuple[str, bool]]) -> None:
    turns, holder, had = Turns(LOST_AFTER_S, Clock()), None, Counter[str]()
    for name, is_taking in [*steps, *(("abc"[i % 3], i % 2 == 0) for i in range(30))]:
        if is_taking and turns.take(name):
            assert holder in (None, name)
            holder = name
            had[name] += 1
        elif not is_taking and holder == name:
            turns.give_back(name)
            holder = None
    assert min(had[name] for name in "abc") > 0
