"""Which rank keeps a group from stepping: two clocks over what ranks say of themselves.

1. Heartbeat. Every rank is asked once a second what it does. One that has not answered for
   `SILENT_AFTER_S`, or what its owner allows, is named, followers included.
2. Step. Ranks wait for one another, so only the rank furthest behind is judged. It is stuck after
   `watchdog_s`, or five times what the longest of the ranks' steps was expected to take if that is
   more. While any rank is silent, this clock judges none.

There is no I/O and no clock here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

SILENT_AFTER_S = 3.0
"""A rank that has not answered for this long is named. It answers on a thread of its own, in
milliseconds; only a stop signal, a dead machine or swapped memory keeps Python from running for
seconds."""
STALE_AFTER_S = 1.5
"""An older answer says nothing of now: another was asked for since, and did not come."""
EXPECTED_TIMES = 5.0
"""A step may take this many times as long as expected."""


class Phase(IntEnum):
    """What a rank does, in the order of a step: a smaller one is further behind."""

    PLANNING = 0
    """A leader schedules, and has not voted."""
    AGREEING = 1
    """A leader has voted and waits for other leaders' votes."""
    WAITING = 2
    """A follower waits for its leader's plan, or a group sleeps: no rank waits for this one."""
    BUILDING = 3
    """All votes are there and inputs are built; no collective of the step has begun."""
    RUNNING = 4
    """Inside the forward, and perhaps inside a collective."""
    BOOKING = 5


ASLEEP = (Phase.PLANNING + Phase.AGREEING) / 2
"""Where a rank that sleeps stands among the phases of the step it will wake in, see `_place`."""


@dataclass(frozen=True)
class Heartbeat:
    """What a rank says of itself. `step` is the one that it does, or waits for."""

    step: int
    phase: Phase
    phase_s: float
    expected_s: float
    """How long a step of this size should take; 0 outside of a step."""
    is_asleep: bool
    """The group agreed that there is no work."""
    oldest_step: int | None = None
    """The first step that was begun and has not ended. It may be before `step` where one is planned
    while another runs; None if there is none."""


class Watchdog:
    def __init__(
        self,
        names: Sequence[str],
        *,
        watchdog_s: float,
        now: float,
        silent_s: float = SILENT_AFTER_S,
        leaders: Sequence[int] | None = None,
    ) -> None:
        """Watch the ranks with these names from `now` on; `leaders`: whose plans each waits for."""
        self._leaders = range(len(names)) if leaders is None else leaders
        self._silent_s = silent_s
        self._names = list(names)
        self._watchdog_s = watchdog_s
        self._answered_at = [now] * len(names)
        self._beats: list[Heartbeat | None] = [None] * len(names)

    def on_heartbeat(self, rank: int, beat: Heartbeat, now: float) -> None:
        self._beats[rank] = beat
        self._answered_at[rank] = now

    def on_answer(self, rank: int, silent_from: float) -> None:
        """Take an answer without a heartbeat; its rank's silence counts from then on."""
        self._answered_at[rank] = max(self._answered_at[rank], silent_from)

    def on_tick(self, now: float) -> str | None:
        """Return which rank holds the group up and why, in a line."""
        silent_s = [now - at for at in self._answered_at]
        longest = max(range(len(silent_s)), key=silent_s.__getitem__)
        if silent_s[longest] > self._silent_s:
            return f"{self._names[longest]}: no heartbeat for {silent_s[longest]:.1f} s"
        # What a silent rank does is unknown: it may be the one that the others wait for.
        return None if silent_s[longest] > STALE_AFTER_S else self._stuck(now)

    def _stuck(self, now: float) -> str | None:
        """Name the rank that is furthest behind, once it has been there for too long. One that
        waits, or sleeps, may have done so for hours: what counts then is how long another rank has
        been in its phase."""
        beats = [beat for beat in self._beats if beat is not None]
        if len(beats) < len(self._names):
            return None
        # On a tie, pick the rank that entered the phase first; the others may have been waiting
        # for it.
        ranks = range(len(beats))
        leaders = [beats[i] for i in self._leaders]
        behind = min(ranks, key=lambda i: (*_place(beats[i], leaders[i]), -beats[i].phase_s))
        beat = beats[behind]
        at_work_s = [b.phase_s for b in beats if not b.is_asleep and b.phase is not Phase.WAITING]
        stuck_s = min(beat.phase_s, max(at_work_s, default=0.0))
        expected_s = max(b.expected_s for b in beats)
        if stuck_s <= max(self._watchdog_s, EXPECTED_TIMES * expected_s):
            return None
        where = f"{beat.phase.name.lower()} for {beat.phase_s:.1f} s"
        return f"{self._names[behind]}: does not advance in step {beat.step}: {where}"


def _place(beat: Heartbeat, leader: Heartbeat) -> tuple[int, float]:
    """Return how far a rank is: a smaller one is further behind. A vote wakes every rank that
    sleeps: one that does is behind those that have voted for the next step, and ahead of one that
    plans it. A follower hears nothing of steps without work: it waits for what its leader plans
    next."""
    if beat.is_asleep:
        return beat.step + 1, ASLEEP
    if beat.phase is Phase.WAITING:
        next_with_work = leader.step + 1 if leader.is_asleep else leader.step
        if leader.oldest_step is not None:
            next_with_work = leader.oldest_step
        return max(beat.step, next_with_work), beat.phase
    return beat.step, beat.phase
