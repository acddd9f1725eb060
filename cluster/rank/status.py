"""What a rank says of itself: its counters, and what its step thread does at the moment.

Phases are for other threads to read. The step thread writes one tuple, which they read whole.
Nothing here locks, and writing costs the step less than a microsecond.

What a step should take is learned by its size: a decode step of one token costs far more than a
two-thousandth of a prefill of two thousand. A size that has not run yet takes what smaller ones
take per token.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.engine.scheduler import SchedulerStats
from cluster.engine.watchdog import Heartbeat, Phase
from cluster.rank.context import RankContext, RankPlace

KEEP = 0.9
"""Weight of what was known, when a step has told how long a token takes."""


_IN_METRICS_ALONE = ("num_preemptions", "prefix_queries", "prefix_hits")


@dataclass(frozen=True)
class RankStats:
    """One rank's figures; sizes are bytes, counts blocks.

    Invariant: a cached block that no sequence uses counts as free.
    """

    place: RankPlace
    pid: int
    node: str
    state: str
    """starting, loading, ready or stopped."""
    step: int = 0
    """The last one that the rank began. Steps in which no rank has work are not counted here:
    followers hear nothing of them."""
    scheduler: SchedulerStats = field(default_factory=SchedulerStats)
    """A follower has none: of it only `held_tickets` is told."""
    kv_bytes_sent: int = 0
    kv_bytes_received: int = 0
    compiling: bool = False
    """It serves, and its group will go over to what is being compiled."""
    compile_error: str = ""
    """Why it goes on without compiled pieces."""

    @classmethod
    def of(cls, rank: RankContext, state: str, **figures: Any) -> RankStats:
        """Return the figures of a rank of this process."""
        return cls(rank.place, os.getpid(), rank.node, state, **figures)

    def to_dict(self) -> dict[str, Any]:
        """Return what `/ready` shows of the rank, without nesting."""
        figures = asdict(self)
        nested = figures.pop("place") | figures.pop("scheduler")
        return {name: n for name, n in nested.items() if name not in _IN_METRICS_ALONE} | figures


class PhaseRecorder:
    """Where a step thread notes its phase. Invariant: one thread writes, any may read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now: tuple[int, Phase, float, float, bool, int | None]
        self._now = (0, Phase.WAITING, clock(), 0.0, True, None)
        self._token_s: dict[int, float] = {}
        """Seconds that a token takes, by the number of binary digits of the step's tokens."""
        self._in_flight: dict[int, tuple[int, float]] = {}
        """Tokens of each step that was begun and has not ended, and when it began."""
        self._last_end = 0.0
        self._expected_s = 0.0
        self.num_votes = 0
        """Votes that this leader cast."""
        self.vote_wait_s = 0.0
        """Seconds between its votes and the last ones of its peers."""

    def plan(self, step: int) -> None:
        """A leader begins a step."""
        self._enter(step, Phase.PLANNING)

    def vote(self) -> None:
        """A leader has voted."""
        self.num_votes += 1
        self._enter(self._now[0], Phase.AGREEING)

    def agree(self) -> None:
        """A leader has all votes, and waits for none any more."""
        step, _, voted_at, *_ = self._now
        self._enter(step, Phase.BUILDING)
        self.vote_wait_s += self._now[2] - voted_at

    def build(self, step: int, num_tokens: int) -> None:
        """Inputs of `num_tokens` tokens are built."""
        self._in_flight[step] = num_tokens, self._clock()
        self._expected_s = self._expect_all()
        self._enter(step, Phase.BUILDING)

    def run(self, step: int) -> None:
        """The forward of a step begins, or is waited for."""
        self._enter(step, Phase.RUNNING)

    def end_step(self, step: int, *, is_seen: bool = True) -> None:
        """The step has ended; others that were begun later may be under way.

        Args:
            is_seen: just now; else nobody looked before, perhaps for hours of sleep.
        """
        num_tokens, began = self._in_flight.pop(step)
        now = self._clock()
        # The step before it may have been under way when it began.
        seconds = now - max(began, self._last_end)
        if not is_seen:
            seconds = min(seconds, self._expect(num_tokens) or seconds)
        self.learn(num_tokens, seconds)
        self._last_end = now
        self._expected_s = self._expect_all()

    def book(self, step: int) -> None:
        """The step's results are there."""
        self._enter(step, Phase.BOOKING)

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Note how long a step of this many tokens took."""
        if not num_tokens:
            return
        size, token_s = num_tokens.bit_length(), seconds / num_tokens
        known = self._token_s.get(size, token_s)
        self._token_s[size] = KEEP * known + (1 - KEEP) * token_s

    def wait(self, step: int, *, is_asleep: bool) -> None:
        """A follower waits for the plan of `step`, or the group sleeps until it."""
        self._enter(step, Phase.WAITING, is_asleep)

    def heartbeat(self) -> Heartbeat:
        """Return what the step thread does. Any thread may call it."""
        step, phase, since, expected_s, is_asleep, oldest_step = self._now
        phase_s = self._clock() - since
        return Heartbeat(step, phase, phase_s, expected_s, is_asleep, oldest_step)

    def _enter(self, step: int, phase: Phase, is_asleep: bool = False) -> None:
        oldest_step = min(self._in_flight, default=None)
        self._now = (step, phase, self._clock(), self._expected_s, is_asleep, oldest_step)

    def _expect_all(self) -> float:
        return sum(self._expect(num_tokens) for num_tokens, _ in self._in_flight.values())

    def _expect(self, num_tokens: int) -> float:
        size = num_tokens.bit_length()
        if (token_s := self._token_s.get(size)) is not None:
            return token_s * num_tokens
        if not self._token_s:
            return 0.0
        smaller = [token_s for known, token_s in self._token_s.items() if known < size]
        if smaller:  # the least of them: a step that was held up once says nothing of others
            return min(smaller) * num_tokens
        larger = min(self._token_s)
        return self._token_s[larger] * (1 << (larger - 1))
