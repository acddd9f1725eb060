"""Who is named when a group does not step."""

from __future__ import annotations

import re

import hypothesis.strategies as st
import pytest
from hypothesis import given
from wire_structs import plan_of

from cluster.engine.lockstep import agree
from cluster.engine.step_stats import StepStats
from cluster.engine.watchdog import SILENT_AFTER_S, Heartbeat, Phase, Watchdog
from compile.dispatch import CapturedGraphs

NAMES = ["rank dp=0 tp=0 epoch=3", "rank dp=0 tp=1 epoch=3", "rank dp=1 tp=0 epoch=3"]
PLANNING, AGREEING, WAITING = Phase.PLANNING, Phase.AGREEING, Phase.WAITING
RUNNING, BOOKING = Phase.RUNNING, Phase.BOOKING


def beat(
    step: int,
    phase: Phase,
    phase_s: float,
    *,
    expected_s: float = 0.0,
    is_asleep: bool = False,
    oldest_step: int | None = None,
) -> Heartbeat:
    return Heartbeat(step, phase, phase_s, expected_s, is_asleep, oldest_step)


def verdict(*beats: Heartbeat, watchdog_s: float = 10.0) -> str | None:
    watchdog = Watchdog(NAMES[: len(beats)], watchdog_s=watchdog_s, now=0.0)
    for rank, each in enumerate(beats):
        watchdog.on_heartbeat(rank, each, 1.0)
    return watchdog.on_tick(1.5)


@pytest.mark.feature("P09")
def test_a_rank_that_does_not_answer_is_named_followers_included() -> None:
    watchdog = Watchdog(NAMES, watchdog_s=10, now=0.0)
    for now in (1.0, 2.0, 3.0, 4.0):
        for rank in (0, 2):
            watchdog.on_heartbeat(rank, beat(7, RUNNING, 0.1), now)
        named = watchdog.on_tick(now)
        if now <= SILENT_AFTER_S:
            assert named is None
    assert named == "rank dp=0 tp=1 epoch=3: no heartbeat for 4.0 s"


@pytest.mark.feature("P09")
def test_while_a_rank_is_silent_nobody_is_taken_for_stuck() -> None:
    """Stopped in a collective, it was there last: its old answer makes the other look guilty."""
    watchdog = Watchdog(NAMES[:2], watchdog_s=3, now=0.0, silent_s=10)
    watchdog.on_heartbeat(1, beat(7, RUNNING, 0.1), 0.5)
    for now in range(1, 11):
        watchdog.on_heartbeat(0, beat(7, RUNNING, now), float(now))
        assert watchdog.on_tick(now + 0.4) is None
    watchdog.on_heartbeat(0, beat(7, RUNNING, 11.0), 11.0)
    assert watchdog.on_tick(11.0) == "rank dp=0 tp=1 epoch=3: no heartbeat for 10.5 s"
    # One that answers again is judged, and so are the others.
    watchdog.on_heartbeat(1, beat(7, RUNNING, 10.6), 11.1)
    named = watchdog.on_tick(11.2)
    assert named == "rank dp=0 tp=0 epoch=3: does not advance in step 7: running for 11.0 s"


def test_a_rank_that_is_expected_to_speak_later_is_judged_from_its_first_answer_on() -> None:
    watchdog = Watchdog(NAMES[:2], watchdog_s=10, now=100.0)
    watchdog.on_heartbeat(1, beat(0, WAITING, 0, is_asleep=True), 2.0)
    assert watchdog.on_tick(5.0) is None
    assert watchdog.on_tick(5.5) == "rank dp=0 tp=1 epoch=3: no heartbeat for 3.5 s"
    watchdog.on_heartbeat(1, beat(0, WAITING, 0, is_asleep=True), 102.0)
    assert watchdog.on_tick(103.5) == "rank dp=0 tp=0 epoch=3: no heartbeat for 3.5 s"


@pytest.mark.feature("P09")
def test_a_rank_that_answers_without_a_heartbeat_yet_is_silent_from_a_later_time_on() -> None:
    watchdog = Watchdog(NAMES[:2], watchdog_s=10, now=120.0, silent_s=30.0)
    for now in range(0, 1000, 10):
        watchdog.on_heartbeat(0, beat(0, WAITING, 0, is_asleep=True), now)
        watchdog.on_answer(1, now + 120.0)
        assert watchdog.on_tick(now + 1.0) is None
    for now in range(1000, 1140, 10):
        watchdog.on_heartbeat(0, beat(0, WAITING, 0, is_asleep=True), now)
        assert watchdog.on_tick(now) is None
    watchdog.on_heartbeat(0, beat(0, WAITING, 0, is_asleep=True), 1141.0)
    assert watchdog.on_tick(1141.0) == "rank dp=0 tp=1 epoch=3: no heartbeat for 31.0 s"


@pytest.mark.feature("P09")
@pytest.mark.parametrize(
    ("beats", "named"),
    [
        # The follower never came into the collective that its leader is in.
        ([beat(5, RUNNING, 11), beat(5, WAITING, 11.2)], "tp=1 epoch=3: .* step 5: waiting for 11"),
        # The leader does not plan: its follower waits for it, and so does the other leader.
        ([beat(5, PLANNING, 11), beat(5, WAITING, 11)], "dp=0 tp=0 epoch=3: .* planning for 11"),
        # A leader stands in the step that the other one wants to leave.
        (
            [beat(6, PLANNING, 11), beat(6, WAITING, 11), beat(5, RUNNING, 11.5)],
            "dp=1 tp=0 epoch=3: .* step 5: running",
        ),
        # A leader has not voted: the others wait for its vote, whoever came there first.
        ([beat(6, AGREEING, 11), beat(6, PLANNING, 10.9)], "tp=1 epoch=3: .* step 6: planning for"),
        # A leader plans the step that the others, which sleep, would wake for.
        (
            [beat(5, WAITING, 60, is_asleep=True), beat(6, PLANNING, 11)],
            "tp=1 epoch=3: .* step 6: planning for 11",
        ),
        # A leader that sleeps although its peer has voted.
        (
            [beat(6, AGREEING, 11), beat(6, WAITING, 11), beat(5, WAITING, 40, is_asleep=True)],
            "dp=1 tp=0 epoch=3: .* step 5: waiting for 40",
        ),
        # Both are in the collective: who came first waits for the other, or both for a device.
        ([beat(5, RUNNING, 12), beat(5, RUNNING, 11)], "dp=0 tp=0 epoch=3"),
    ],
)
def test_of_a_group_that_does_not_advance_the_rank_furthest_behind_is_named(
    beats: list[Heartbeat], named: str
) -> None:
    found = verdict(*beats)
    assert found is not None
    assert re.search(f"^rank .*{named}", found), found


OLD, AHEAD = beat(5, WAITING, 60), beat(8, AGREEING, 11, oldest_step=7)


@pytest.mark.parametrize(
    ("leader", "follower", "peer", "named"),
    [
        # The follower ran nothing since step 4: 5 and 6 had no work.
        (beat(7, PLANNING, 11), OLD, beat(7, AGREEING, 11), "dp=0 tp=0"),
        (beat(7, AGREEING, 10), OLD, beat(7, AGREEING, 11), "dp=1 tp=0"),
        (beat(6, WAITING, 40, is_asleep=True), OLD, beat(7, AGREEING, 11), "dp=0 tp=0"),
        (beat(7, RUNNING, 11), OLD, beat(7, RUNNING, 11), "dp=0 tp=1"),
        # Steps overlap: all of them wait for step 7, of which the follower has not heard.
        (AHEAD, OLD, beat(7, RUNNING, 11, oldest_step=7), "dp=0 tp=1"),
        # The follower has begun step 7, and waits for the one that its leader is planning.
        (AHEAD, beat(8, WAITING, 11, oldest_step=7), beat(7, RUNNING, 11, oldest_step=7), "dp=1"),
    ],
)
def test_a_follower_is_behind_once_its_leader_runs_and_not_before(
    leader: Heartbeat, follower: Heartbeat, peer: Heartbeat, named: str
) -> None:
    names = [f"rank dp={dp} tp={tp} epoch=3" for dp, tp in ((0, 0), (0, 1), (1, 0))]
    watchdog = Watchdog(names, watchdog_s=10.0, now=0.0, leaders=[0, 0, 2])
    for rank, each in enumerate((leader, follower, peer)):
        watchdog.on_heartbeat(rank, each, 1.0)
    found = watchdog.on_tick(1.5)
    assert found is not None
    assert re.match(f"rank {named}.* epoch=3: does not advance", found), found


def test_nobody_is_named_who_has_time_left_or_nothing_to_do() -> None:
    assert verdict(beat(5, RUNNING, 9.9), beat(5, WAITING, 100)) is None
    assert verdict(beat(5, WAITING, 1e6, is_asleep=True)) is None
    # Steps of so many tokens take long: five times as long as they did is the bound.
    assert verdict(beat(5, RUNNING, 49, expected_s=10)) is None
    assert verdict(beat(5, RUNNING, 51, expected_s=10)) is not None
    # Whoever waits for a long step is not behind, and has as much time as that step.
    assert verdict(beat(6, AGREEING, 30), beat(5, RUNNING, 30, expected_s=20)) is None
    assert verdict(beat(5, RUNNING, 30), beat(5, RUNNING, 29, expected_s=20)) is None
    # It ends, and the next one begins: nobody waits for the past.
    assert verdict(beat(6, AGREEING, 30), beat(5, BOOKING, 0.1)) is None
    assert verdict(beat(6, AGREEING, 30), beat(6, PLANNING, 0.1)) is None
    assert verdict(beat(5, RUNNING, 0.1), beat(5, WAITING, 300)) is None
    # A rank that has not told anything yet is not judged by the second clock.
    watchdog = Watchdog(NAMES, watchdog_s=1, now=0.0)
    watchdog.on_heartbeat(0, beat(1, RUNNING, 2), 1.0)
    assert watchdog.on_tick(1.0) is None


@given(st.lists(st.floats(0.01, 0.9), min_size=1, max_size=60), st.integers(1, 3))
def test_ranks_that_answer_and_advance_are_never_named(waits: list[float], num_ranks: int) -> None:
    now, watchdog = 0.0, Watchdog(NAMES[:num_ranks], watchdog_s=1.0, now=0.0)
    for step, wait in enumerate(waits):
        now += wait
        for rank in range(num_ranks):
            watchdog.on_heartbeat(rank, beat(step, RUNNING, wait), now)
        assert watchdog.on_tick(now) is None


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_pulse_tells_the_phase_its_age_and_what_the_step_should_take() -> None:
    clock = Clock()
    phases = StepStats(clock)
    assert phases.heartbeat() == beat(0, WAITING, 0, is_asleep=True)
    phases.plan(1)
    clock.now = 0.5
    assert phases.heartbeat() == beat(1, PLANNING, 0.5)
    phases.vote()
    assert phases.heartbeat() == beat(1, AGREEING, 0)
    phases.build(1, 10)
    clock.now = 1.5
    phases.run(1)
    assert phases.heartbeat() == beat(1, RUNNING, 0, oldest_step=1)
    clock.now = 2.5
    phases.end_step(1)
    assert phases.heartbeat().phase is Phase.BOOKING
    phases.build(2, 40)  # ten tokens took two seconds
    phases.run(2)
    assert phases.heartbeat() == beat(2, RUNNING, 0, expected_s=8.0, oldest_step=2)
    phases.end_step(2)
    phases.wait(3, is_asleep=False)
    assert phases.heartbeat() == beat(3, WAITING, 0)


def test_a_step_that_was_begun_behind_another_is_timed_from_that_ones_end() -> None:
    clock = Clock()
    phases = StepStats(clock)
    phases.learn(8, 0.8)
    phases.build(1, 8)
    phases.build(2, 1)
    assert phases.heartbeat().expected_s == pytest.approx(0.8 + 0.8)  # both must end
    clock.now = 0.8
    phases.end_step(1)
    assert phases.heartbeat().expected_s == pytest.approx(0.8)
    phases.build(3, 8)
    clock.now = 1.0
    phases.end_step(2)
    clock.now = 1.8
    phases.end_step(3)
    assert phases.heartbeat().expected_s == 0
    assert took(phases, clock, 8, 0.8) == pytest.approx(0.8)
    assert took(phases, clock, 1, 0.2) == pytest.approx(0.2)


def test_a_step_whose_end_nobody_saw_is_not_taken_for_a_long_one() -> None:
    clock = Clock()
    phases = StepStats(clock)
    phases.learn(8, 0.8)
    for step, seconds in ((1, 3600.0), (2, 0.4)):
        phases.build(step, 8)
        clock.now += seconds
        phases.end_step(step, is_seen=False)
    assert took(phases, clock, 8, 0.8) == pytest.approx(0.8 * 0.9 + 0.4 * 0.1)


def took(phases: StepStats, clock: Clock, num_tokens: int, seconds: float) -> float:
    """Run a step; return what it was expected to take."""
    phases.build(1, num_tokens)
    expected_s = phases.heartbeat().expected_s
    clock.now += seconds
    phases.end_step(1)
    return expected_s


def test_what_a_step_should_take_is_learned_by_its_size() -> None:
    clock = Clock()
    phases = StepStats(clock)
    assert took(phases, clock, 0, 0.0) == 0
    phases.learn(8, 0.4)
    assert took(phases, clock, 2048, 60.0) == pytest.approx(2048 * 0.05)  # nothing larger is known
    assert took(phases, clock, 1, 0.3) == pytest.approx(0.4)  # as much as eight tokens
    for _ in range(200):
        took(phases, clock, 1, 0.3)
    # Decodes, whose tokens cost more, tell nothing of prefills, and the other way round.
    assert took(phases, clock, 2048, 60.0) == pytest.approx(60.0)
    assert took(phases, clock, 3000, 90.0) == pytest.approx(60.0 * 3000 / 2048)
    assert took(phases, clock, 1, 0.3) == pytest.approx(0.3)
    assert took(phases, clock, 512, 1.0) == pytest.approx(512 * 0.05)


def test_a_step_that_was_held_up_says_nothing_of_larger_ones() -> None:
    clock = Clock()
    phases = StepStats(clock)
    phases.learn(8, 0.4)
    took(phases, clock, 1, 30.0)
    took(phases, clock, 40, 80.0)
    assert took(phases, clock, 2048, 60.0) == pytest.approx(2048 * 0.05)


@given(
    rows=st.integers(1, 200),
    times=st.floats(1.0, 20.0),
    prompt_token_s=st.floats(1e-5, 0.01),
    max_step_s=st.floats(0.005, 0.5),
    held_up=st.floats(1.0, 1000.0),
)
def test_steps_with_prompts_get_the_size_that_takes_as_long_as_they_may(
    rows: int, times: float, prompt_token_s: float, max_step_s: float, held_up: float
) -> None:
    """Soon, from any size, and again after one step was held up. A decode takes so many times as
    long as a token of a prompt."""
    stats, least, most = StepStats(clock := Clock()), rows + 32, rows + 2048
    decode_s = 1e-3 + rows * times * prompt_token_s
    least_s, most_s = (decode_s + prompt_token_s * (size - rows) for size in (least, most))
    assert stats.tokens_within(max_step_s) == 0, "nothing is known"
    for step in range(1, 122):
        num_tokens = min(most, max(stats.tokens_within(max_step_s), least))
        plan = plan_of([1] * rows + [num_tokens - rows], step=step)
        stats.build(step, num_tokens)
        stats.begin(plan, agree((plan.vote(),), CapturedGraphs()), 0)
        took_s = decode_s + prompt_token_s * (num_tokens - rows)
        clock.now += took_s * (held_up if step == 60 else 1.0)
        stats.end_step(step)
        if step in (59, 121):
            assert took_s == pytest.approx(min(most_s, max(max_step_s, least_s)), rel=0.05)
