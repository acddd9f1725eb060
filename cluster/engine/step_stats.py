"""`StepStats`: what a rank notes of its steps, for its watchdog, its metrics and its errors.

Nothing here locks, and writing costs the step less than a microsecond a note; other threads read
plain numbers. What a step should take is learned by its size: a decode step of one token costs far
more than a two-thousandth of a prefill of two thousand.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgspec

from cluster.engine.watchdog import Heartbeat, Phase
from cluster.observe.counts import Counts, Histogram
from cluster.observe.metrics import BY_NAME
from cluster.wire.messages import StepAgreement, StepKind, StepPlan
from compile.config import CUDAGraphMode

KEEP = 0.9
"""Weight of what was known, when a step has shown how long a token takes."""
KEEP_MIXED = 0.5
"""The same of steps with prompts, whose sizes follow from it: a few of them get used to a load."""
NUM_LOGGED_STEPS = 1000
NUM_TOLD_STEPS = 8
"""Of the log in an error: those that lead to it."""
_KINDS = {StepKind.NOTHING: "dummy", StepKind.DECODE: "decode", StepKind.MIXED: "mixed"}


class StepStats:
    """What a rank's step thread notes of its steps. Invariant: one thread writes, any may read."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._now: tuple[int, Phase, float, bool, dict[int, int]]
        """Step, phase and since when; whether the group sleeps; tokens of the steps in flight."""
        self._now = (0, Phase.WAITING, clock(), True, {})
        self._token_s: dict[int, float] = {}
        """Seconds that a token takes, by the number of binary digits of the step's tokens."""
        self._mixed_token_s = 0.0
        """The same in steps with prompts, of whatever size; 0 before the first."""
        self._in_flight: dict[int, tuple[int, float]] = {}
        """Tokens of each step that was begun and has not ended, and when it began."""
        self._kinds: dict[int, StepKind] = {}
        """Of those whose forward has begun."""
        self._last_end = 0.0
        self.num_votes = 0
        self.vote_wait_s = 0.0
        self.last_step = 0
        """The number of the last one that was begun; the same on all ranks that step together."""
        self._log: deque[StepAgreement] = deque(maxlen=NUM_LOGGED_STEPS)
        self._steps: Counter[tuple[int, StepKind]] = Counter()
        self._replays: Counter[tuple[int, int]] = Counter()
        """By mode and tokens, of those that replayed something."""
        self._replay_padding: Counter[tuple[int, int]] = Counter()
        """What of these tokens was padding."""
        self._seconds: dict[StepKind, float] = {}
        self._num_tokens = 0
        self._num_padding = 0
        self._tokens_of_step = Histogram(
            "iteration_tokens_total", BY_NAME["iteration_tokens_total"].bounds
        )

    def plan(self, step: int) -> None:
        self._enter(step, Phase.PLANNING)

    def vote(self) -> None:
        self.num_votes += 1
        self._enter(self._now[0], Phase.AGREEING)

    def agree(self) -> None:
        step, _, voted_at, *_ = self._now
        self._enter(step, Phase.BUILDING)
        self.vote_wait_s += self._now[2] - voted_at

    def build(self, step: int, num_tokens: int) -> None:
        self._in_flight[step] = num_tokens, self._clock()
        self._enter(step, Phase.BUILDING)

    def begin(self, plan: StepPlan, agreed: StepAgreement, num_padding: int) -> None:
        """Log and count a step of this rank's plan, whose forward begins."""
        self._log.append(agreed)
        self.last_step = agreed.step
        num_tokens, kind = plan.num_tokens, StepKind.NOTHING
        if num_tokens:
            kind = StepKind.DECODE if plan.is_decode else StepKind.MIXED
        self._kinds[agreed.step] = kind
        self._steps[agreed.mode, kind] += 1
        if agreed.mode:
            graph = agreed.mode, agreed.batch.num_tokens
            self._replays[graph] += 1
            self._replay_padding[graph] += num_padding
        self._num_tokens += num_tokens
        self._num_padding += num_padding
        self._enter(agreed.step, Phase.RUNNING)
        if num_tokens:
            self._tokens_of_step.observe(num_tokens)

    def run(self, step: int) -> None:
        self._enter(step, Phase.RUNNING)

    def end_step(self, step: int, *, is_seen: bool = True) -> None:
        """Book a step that has ended; not `is_seen`: perhaps hours ago, before the group slept."""
        num_tokens, began = self._in_flight.pop(step)
        now = self._clock()
        # The step before it may have been under way when it began.
        seconds = now - max(began, self._last_end)
        if not is_seen:
            seconds = min(seconds, self._expect(num_tokens) or seconds)
        self.learn(num_tokens, seconds)
        if (kind := self._kinds.pop(step, None)) is not None:
            self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds
            if kind == StepKind.MIXED:
                self._learn_mixed(seconds / num_tokens)
        self._last_end = now
        self._enter(step, Phase.BOOKING)

    def learn(self, num_tokens: int, seconds: float) -> None:
        learn_seconds(self._token_s, num_tokens, seconds)

    def tokens_within(self, seconds: float) -> int:
        """Return how many tokens, decodes included, a step with prompts may have if it is to take
        so long; 0 before the first such step.

        Sizes follow from the steps before, and settle. The larger a step, the more tokens share the
        time of its decodes, so one that took too little is followed by a larger one, up to the only
        size that takes `seconds`.
        """
        return int(seconds / self._mixed_token_s) if self._mixed_token_s else 0

    def _learn_mixed(self, token_s: float) -> None:
        known_s = self._mixed_token_s or token_s
        self._mixed_token_s = KEEP_MIXED * known_s + (1 - KEEP_MIXED) * token_s

    def token_s(self) -> dict[int, float]:
        """Return how long a token took, by the number of binary digits of its step's tokens; sizes
        that never ran are missing."""
        return dict(self._token_s)

    def wait(self, step: int, *, is_asleep: bool) -> None:
        """A follower waits for the plan of `step`, or the group sleeps until it."""
        self._enter(step, Phase.WAITING, is_asleep)

    def heartbeat(self) -> Heartbeat:
        step, phase, since, is_asleep, in_flight = self._now
        phase_s = self._clock() - since
        expected_s = sum(self._expect(num_tokens) for num_tokens in in_flight.values())
        oldest_step = min(in_flight, default=None)
        return Heartbeat(step, phase, phase_s, expected_s, is_asleep, oldest_step)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the last steps as plain data, oldest first, one value a field."""
        return [_as_dict(agreed) for agreed in list(self._log)]

    def tail(self) -> tuple[str, ...]:
        return tuple(map(_line, self.as_dicts()[-NUM_TOLD_STEPS:]))

    def counts(self) -> Counts:
        counts: Counts = {
            ("votes_total",): self.num_votes,
            ("dp_wait_seconds_total",): self.vote_wait_s,
            ("scheduled_tokens_total",): self._num_tokens,
            ("padding_tokens_total",): self._num_padding,
        }
        for (mode, kind), times in [*self._steps.items()]:
            counts["steps_total", _mode(mode), _KINDS[kind]] = times
        for kind, seconds in [*self._seconds.items()]:
            counts["step_seconds_total", _KINDS[kind]] = seconds
        for (mode, size), times in [*self._replays.items()]:
            counts["graph_replays_total", _mode(mode), str(size)] = times
        for (mode, size), num_tokens in [*self._replay_padding.items()]:
            counts["graph_padding_tokens_total", _mode(mode), str(size)] = num_tokens
        self._tokens_of_step.put_into(counts)
        return counts

    def _enter(self, step: int, phase: Phase, is_asleep: bool = False) -> None:
        in_flight = {begun: num_tokens for begun, (num_tokens, _) in self._in_flight.items()}
        self._now = (step, phase, self._clock(), is_asleep, in_flight)

    def _expect(self, num_tokens: int) -> float:
        size = num_tokens.bit_length()
        if (token_s := self._token_s.get(size)) is not None:
            return token_s * num_tokens
        known_s = dict(self._token_s)  # the step thread may add a size meanwhile
        if not known_s:
            return 0.0
        smaller = [token_s for known, token_s in known_s.items() if known < size]
        if smaller:  # the least of them: a step that was held up once says nothing of others
            return min(smaller) * num_tokens
        larger = min(known_s)
        return known_s[larger] * (1 << (larger - 1))


def learn_seconds(token_s: dict[int, float], num_tokens: int, seconds: float) -> None:
    """Note how long so many tokens took together: `token_s` has the seconds of one, by the number
    of binary digits of theirs."""
    if not num_tokens:
        return
    size, each_s = num_tokens.bit_length(), seconds / num_tokens
    token_s[size] = KEEP * token_s.get(size, each_s) + (1 - KEEP) * each_s


def _as_dict(agreed: StepAgreement) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in msgspec.structs.asdict(agreed).items():
        if name == "batch":
            fields |= {"graph_bs": value.num_seqs or 0, "num_tokens": value.num_tokens}
        else:
            fields[name] = value
    return fields


def _line(fields: dict[str, Any]) -> str:
    head = f"ran epoch {fields.pop('epoch')} step {fields.pop('step')}:"
    return " ".join([head, *(f"{name}={value}" for name, value in fields.items())])


def _mode(mode: int) -> str:
    return CUDAGraphMode(mode).name.lower()
