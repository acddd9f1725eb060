"""Admission: how many sequences, and how many bytes of requests, an ingress holds at once.

1. A request takes one place before its body is read, or is told when to come back.
2. Its body's bytes count while they are held as text.
3. Once it is parsed it takes a place for each of its sequences, and gives all back at its end.

The queue is bounded by a count and by the wait that it means: `max_queue_wait_s` at the rate at
which sequences have ended lately. A body that comes too slowly keeps its place only until another
request wants it. Nothing here does I/O; the clock is handed in.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

MAX_BODIES = 8
"""Bodies of the largest size whose bytes may be held at once, as requests or as whole answers on
their way out; more get 429."""
PATIENCE_S = 1.0
"""How long a body keeps its place, however slowly it comes."""
MIN_BODY_RATE = 16 * 1024
"""Bytes a second. After that, a body that comes more slowly loses its place to the next request
(408). A slow mobile uplink is faster."""
RATE_WINDOW_S = 30.0
"""The time over which the rate is taken at which sequences end."""
MIN_ENDS = 8
"""Sequences that must have ended while others waited before that rate counts."""
MAX_RETRY_AFTER_S = 60.0
"""The longest that a 429 tells a client to wait."""


class Overloaded(Exception):
    """No room for another request; worth another try after `retry_after_s` seconds."""

    def __init__(
        self, retry_after_s: float, message: str = "the server has no room for another request"
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Place:
    """What one request holds. Invariant: nothing after `leave`, which may be called twice."""

    def __init__(self, admission: Admission, now: float) -> None:
        self._admission = admission
        self._began_at = now
        self.num_sequences = 1
        self.num_bytes = 0
        self.on_evicted: Callable[[], None] | None = None
        """Set while the body is read: called where another request takes the place."""

    def hold(self, num_bytes: int) -> None:
        """Count bytes that have come, or that are held in their stead; raises Overloaded."""
        self._admission._hold(self, num_bytes)

    def let_go_of_bytes(self) -> None:
        """Count no bytes any more: they are token ids now, or on their way."""
        self._admission._hold(self, -self.num_bytes)

    def grow(self, num_sequences: int) -> None:
        """Take a place for each of the request's sequences; raises Overloaded."""
        self._admission._grow(self, num_sequences)

    def end_sequences(self) -> None:
        """Give back the places of sequences that have ended; their answer is on its way."""
        self._admission._end_sequences(self)

    def leave(self) -> None:
        """Give everything back."""
        self._admission._leave(self)

    def is_slow(self, now: float) -> bool:
        """Return whether the body may lose its place to another request."""
        took_s = now - self._began_at
        is_read = self.on_evicted is not None
        return is_read and took_s > PATIENCE_S and self.num_bytes < took_s * MIN_BODY_RATE


class Admission:
    """The places of one ingress.

    Invariant: `num_live` is the sum of all places' sequences, `num_bytes` that of their bytes.
    """

    def __init__(
        self,
        *,
        max_running: int,
        max_queued: int,
        max_queue_wait_s: float,
        max_body_bytes: int,
        retry_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start empty.

        Args:
            max_running: sequences that the pools run at once.
            max_queued: sequences that may wait beyond those.
            retry_after_s: seconds that a client is told to wait where no rate is known.
        """
        self.max_live = max_running + max_queued
        self.num_live = 0
        self.num_bytes = 0
        self._max_running = max_running
        self._max_queue_wait_s = max_queue_wait_s
        self._max_bytes = MAX_BODIES * max_body_bytes
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._places: dict[Place, None] = {}
        self._ends: deque[float] = deque()
        """When sequences ended while others waited, in the last `RATE_WINDOW_S`."""
        self._waiting_since: float | None = None

    @property
    def num_requests(self) -> int:
        """How many have a place, those included whose answer is on its way."""
        return len(self._places)

    def enter(self) -> Place:
        """Return a new request's place.

        Raises:
            Overloaded: there is none, or its wait would be too long.
        """
        now = self._clock()
        if self.num_live + 1 > self.max_live:
            self._evict_slow(now)
        self._check(1, now)
        place = Place(self, now)
        self._places[place] = None
        self._add(1, now)
        return place

    def expected_wait_s(self, num_more: int = 1) -> float:
        """Return how long the last of `num_more` sequences would wait; 0 where no rate is known."""
        now = self._clock()
        num_waiting = self.num_live + num_more - self._max_running
        rate = self._rate(now)
        return num_waiting / rate if num_waiting > 0 and rate else 0.0

    def _check(self, num_more: int, now: float) -> None:
        """Raise Overloaded unless so many more sequences may come."""
        if self.num_live + num_more > self.max_live:
            message = f"no room for {num_more} more beside {self.num_live} of {self.max_live}"
            raise self._overloaded(message, num_more, now)
        if (wait_s := self.expected_wait_s(num_more)) > self._max_queue_wait_s:
            message = f"wanted a wait of at most {self._max_queue_wait_s:g} s, found {wait_s:.0f} s"
            raise Overloaded(min(wait_s - self._max_queue_wait_s, MAX_RETRY_AFTER_S), message)

    def _overloaded(self, message: str, num_more: int, now: float) -> Overloaded:
        rate = self._rate(now)
        num_excess = self.num_live + num_more - self.max_live
        retry_s = num_excess / rate if rate else self._retry_after_s
        return Overloaded(min(max(retry_s, self._retry_after_s), MAX_RETRY_AFTER_S), message)

    def _evict_slow(self, now: float) -> None:
        for place in self._places:
            if place.is_slow(now) and place.on_evicted is not None:
                place.on_evicted()
                self._leave(place)
                return

    def _hold(self, place: Place, num_bytes: int) -> None:
        if place not in self._places:
            return
        if num_bytes > 0 and self.num_bytes + num_bytes > self._max_bytes:
            wanted = f"at most {self._max_bytes} bytes of requests at once"
            message = f"wanted {wanted}, found {self.num_bytes} and {num_bytes} more"
            raise Overloaded(self._retry_after_s, message)
        place.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def _grow(self, place: Place, num_sequences: int) -> None:
        now, num_more = self._clock(), num_sequences - place.num_sequences
        if num_more > 0:
            self._check(num_more, now)
        place.num_sequences = num_sequences
        self._add(num_more, now)

    def _end_sequences(self, place: Place) -> None:
        now, num_ended = self._clock(), place.num_sequences
        if self._waiting_since is not None:
            self._ends.extend([now] * num_ended)
        place.num_sequences = 0
        self._add(-num_ended, now)

    def _leave(self, place: Place) -> None:
        if place not in self._places:
            return
        del self._places[place]
        self.num_bytes -= place.num_bytes
        self._add(-place.num_sequences, self._clock())

    def _add(self, num_sequences: int, now: float) -> None:
        self.num_live += num_sequences
        if self.num_live <= self._max_running:
            self._waiting_since = None
            self._ends.clear()
        elif self._waiting_since is None:
            self._waiting_since = now

    def _rate(self, now: float) -> float:
        """Return the sequences that have ended per second while others waited; 0: not known."""
        while self._ends and self._ends[0] < now - RATE_WINDOW_S:
            self._ends.popleft()
        if self._waiting_since is None or len(self._ends) < MIN_ENDS:
            return 0.0
        took_s = min(now - self._waiting_since, RATE_WINDOW_S)
        return len(self._ends) / took_s if took_s > 0 else math.inf
