"""How long a start takes and may yet take."""

from __future__ import annotations

from cluster.observe.load_progress import LoadClock


def test_what_remains_is_told_at_the_pace_since_the_first_part() -> None:
    now = [0.0]
    clock = LoadClock("starting", lambda: now[0])
    now[0] = 3.0
    assert clock.read().elapsed_s == 3 and clock.read().remaining_s is None
    clock.note("compiling", 0, 5)
    now[0] = 23.0
    clock.note("compiling", 1, 5)  # with all that is done once
    assert clock.read().remaining_s is None
    now[0] = 25.0
    clock.note("compiling", 2, 5)
    assert clock.read().remaining_s == 6
    now[0] = 26.0
    told = clock.read(1, 2)
    assert (told.elapsed_s, told.remaining_s, told.dp_rank, told.tp_rank) == (23, 5, 1, 2)
    assert (told.aged(2).elapsed_s, told.aged(2).remaining_s) == (25, 3)
    now[0] = 60.0
    assert clock.read().remaining_s == 0
    clock.note("capturing graphs", 0, 2)
    assert clock.read().elapsed_s == 0


def test_parts_that_were_there_from_the_start_set_no_pace() -> None:
    now = [0.0]
    clock = LoadClock("starting", lambda: now[0])
    clock.note("compiling", 3, 5)
    now[0] = 10.0
    assert clock.read().remaining_s is None
    clock.note("compiling", 4, 5)
    assert clock.read().remaining_s == 10
