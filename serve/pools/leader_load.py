"""What one leader has to do and has cached, as far as an ingress knows: what the leader has
reported, and what was submitted here since.

A report is up to three quarters of a second old when it comes, and names no requests. So what
leaves the queue here counts for a while as if it still needed its blocks, and what a report says is
queued is taken to be ours up to the most that was queued here lately, and the rest to be others'.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.actors.reports import LeaderReport
from cluster.engine.prefix_index import Prefix, PrefixIndex
from cluster.wire.messages import GenerateRequest, KVHandoff
from serve.pools.chooser import Offer

REPORT_AGE = 3
"""So many reports of a leader that are yet to come may be older than what happens now: they come
four times a second, and take up to three quarters of a second."""
MAX_EXPECTED = 1024
"""Blocks of a prompt that are expected to be cached before a report says so: a longer one would
hold up the event loop for milliseconds."""
MAX_SETTLING = 1024
"""Requests of a leader that may be in no report yet."""
STALE_REPORTS = 40
"""So many reports after it last had something to do, ten seconds, what a leader measured is old."""


@dataclass(frozen=True)
class Stage:
    """A request as one engine gets it: a stage of its way."""

    request: GenerateRequest
    handoff: KVHandoff | None
    block_size: int
    """Tokens of a KV block."""
    prefixes: Sequence[Prefix] = ()
    """Of its prompt's blocks, as far as an engine may have them cached; of none with a handoff."""

    @property
    def expected(self) -> Sequence[Prefix]:
        """What the engine will have cached, as far as that is followed."""
        return self.prefixes[:MAX_EXPECTED]

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.request.output_token_ids)

    @property
    def max_outputs(self) -> int:
        return self.request.sampling.max_tokens - len(self.request.output_token_ids)

    def num_blocks(self, uncached_tokens: int) -> int:
        """Return the blocks that it needs until it has its next token, beside those cached."""
        num_new = self.num_tokens if self.handoff is not None else uncached_tokens
        return num_new // self.block_size + 1


@dataclass(frozen=True)
class QueuedStage:
    """A stage that was submitted here. Its numbers are what was known then."""

    stage: Stage
    uncached_tokens: int
    """To be computed."""
    reported_tokens: int
    """As the leader counts them while the request waits: cached ones as well."""
    num_blocks: int


class LeaderLoad:
    """Invariant: the sums are those of the stages in `queued`, and of blocks and expected prefixes
    also of those in `_settling`."""

    def __init__(self, report: LeaderReport) -> None:
        """Begin with a leader's first report, and with nothing submitted."""
        self._report = report
        self.num_tokens = 0
        """Of what runs here, as it came."""
        self.queued_tokens = 0
        """That are to be computed before a new request, those of other ingresses included."""
        self._num_running = 0
        self._num_others = 0
        self.queued: dict[str, QueuedStage] = {}
        """By request id: what had no output yet."""
        self._settling: deque[tuple[int, QueuedStage]] = deque()
        """What left the queue and may be in no report yet, with the last one's number."""
        self._num_reports = 0
        self._busy_until = 0
        """The number of the last report at which it had something to do."""
        self._reported_tokens = 0
        """Of what is queued, as the leader counts them."""
        self._peaks: deque[int] = deque([0], REPORT_AGE)
        """The most that these were between two reports, newest last."""
        self._num_blocks = 0
        self._others_tokens = 0
        self._prefixes = PrefixIndex()
        """Cached there, as it has reported."""
        self._expected: Counter[Prefix] = Counter()
        """Cached there before the next request is computed."""

    @property
    def num_requests(self) -> int:
        """Those of this ingress as they are now, and those of others as the board said last."""
        return self._num_running + self._num_others

    @property
    def known_prefixes(self) -> tuple[int, int]:
        """The leader's epoch, and the number of changes in its prefix cache that are known."""
        return self._report.epoch, self._prefixes.number

    def see(self, report: LeaderReport) -> None:
        self._report = report
        if report.prefixes is not None:
            self._prefixes.apply(report.prefixes)
        num_unfinished = report.load.num_running + report.load.num_waiting
        self._num_others = max(0, num_unfinished - self._num_running)
        # What was queued here when the leader reported is not known: at most as much as lately.
        others_tokens = max(0, report.load.num_queued_tokens - max(self._peaks))
        self.queued_tokens += others_tokens - self._others_tokens
        self._others_tokens = others_tokens
        self._peaks.append(self._reported_tokens)
        self._num_reports += 1
        if self.num_requests:
            self._busy_until = self._num_reports
        while self._settling and self._settling[0][0] <= self._num_reports - REPORT_AGE:
            self._settle()

    def offer(self, stage: Stage) -> Offer:
        """Return what is known for choosing."""
        load, uncached_tokens = self._report.load, self._num_uncached(stage)
        num_free = load.num_free_blocks - self._num_blocks
        num_missing = max(0, stage.num_blocks(uncached_tokens) - num_free)
        return Offer(
            self._report.engine_id,
            num_requests=self.num_requests,
            num_tokens=self.num_tokens,
            queued_tokens=self.queued_tokens,
            uncached_tokens=uncached_tokens,
            token_s=self._report.token_s,
            used_blocks=load.num_blocks - max(0, num_free),
            # Those of a leader that was not asked for its load yet are unknown.
            missing_blocks=num_missing if load.num_blocks else 0,
            is_old=self._num_reports - self._busy_until > STALE_REPORTS,
        )

    def _num_uncached(self, stage: Stage) -> int:
        if stage.handoff is not None:
            return 1
        # A cache evicts the tail of a sequence before its head.
        num_cached = bisect_left(stage.prefixes, True, key=lambda each: not self._has(each))
        return stage.num_tokens - num_cached * stage.block_size

    def _has(self, prefix: Prefix) -> bool:
        return prefix in self._prefixes or prefix in self._expected

    def begin(self, stage: Stage) -> None:
        """Count a stage that is submitted."""
        uncached_tokens = self._num_uncached(stage)
        reported_tokens = stage.num_tokens if stage.handoff is None else 0
        num_blocks = stage.num_blocks(uncached_tokens)
        queued = QueuedStage(stage, uncached_tokens, reported_tokens, num_blocks)
        self.queued[stage.request.request_id] = queued
        self._busy_until = self._num_reports
        self._num_running += 1
        self.num_tokens += stage.num_tokens
        self.queued_tokens += uncached_tokens
        self._reported_tokens += reported_tokens
        self._num_blocks += num_blocks
        self._expected.update(stage.expected)
        self._peaks[-1] = max(self._peaks[-1], self._reported_tokens)

    def on_output(self, request_id: str) -> bool:
        """Note that a request has an output, or has ended; return whether it is the first one."""
        queued = self.queued.pop(request_id, None)
        if queued is None:
            return False
        self.queued_tokens -= queued.uncached_tokens
        self._reported_tokens -= queued.reported_tokens
        self._settling.append((self._num_reports, queued))
        if len(self._settling) > MAX_SETTLING:
            self._settle()
        return True

    def end(self, stage: Stage) -> None:
        """Count a stage no more."""
        self.on_output(stage.request.request_id)
        self._num_running -= 1
        self.num_tokens -= stage.num_tokens

    def _settle(self) -> None:
        """Take the oldest of what left the queue as reported."""
        _, queued = self._settling.popleft()
        self._num_blocks -= queued.num_blocks
        for prefix in queued.stage.expected:
            self._expected[prefix] -= 1
            if not self._expected[prefix]:
                del self._expected[prefix]
