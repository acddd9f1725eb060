"""Admission: how many sequences, and how many bytes of requests, an ingress holds at once.

1. A request takes one slot before its body is read, or gets a time to come back.
2. Its body's bytes count until its prompts are token ids, and found short enough for the model.
3. Once it is parsed it takes a slot for each of its sequences, and gives all back at its end.

The queue is bounded by a count and by the wait that it means: `max_queue_wait_s` at the rate at
which sequences have ended lately. Where others need room, bodies that are not complete go first:

- one that has stopped coming, or comes too slowly, no matter how much came before;
- then one of the client that holds the most, if that is more than the other would hold;
- for bytes, also one that is larger and has been coming for longer than `PATIENCE_S`, or is
  `TIMES_LARGER`, no matter who sends it: many clients may look like one (`clients.py`).

What cannot go is left to its end. Until then a client that holds more than an equal part gets no
more, while another one that holds less has been refused lately. A client that is alone may have
everything. Nothing here does I/O; the clock is handed in.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from serve.clients import Client

MAX_BODIES = 8
"""Bodies of the largest size whose bytes may be held at once, as requests or as whole answers on
their way out; more get 429."""
PATIENCE_S = 2.0
"""How long a body may pause, at its beginning or later, before it may lose its slot."""
MIN_BODY_RATE = 16 * 1024
"""Bytes a second. A body that has come more slowly for `PATIENCE_S` loses its slot to the next
request that wants it (408). A slow mobile uplink is faster."""
TIMES_LARGER = 8
"""A body that is not complete gives way to one of an eighth of its bytes, if all bytes are held."""
LACKING_S = 30.0
"""How long after a refusal for want of room those who hold more than an equal part get no more."""
MAX_LACKING = 1024
"""Clients whose refusal is remembered."""
RATE_WINDOW_S = 30.0
"""The time over which the rate is taken at which sequences end."""
MIN_ENDS = 8
"""Sequences that must have ended while others waited before that rate counts."""
MAX_RETRY_AFTER_S = 60.0
"""The longest `Retry-After` of a 429."""


class Overloaded(Exception):
    """No room for another request; worth another try after `retry_after_s` seconds."""

    def __init__(
        self, retry_after_s: float, message: str = "the server has no room for another request"
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Shares:
    """What each client holds of one thing, and who lacks some. Invariant: `total` is the sum."""

    def __init__(self) -> None:
        self.total = 0
        self._held: dict[Client, int] = {}
        """Of those that hold anything."""
        self._lacking: OrderedDict[Client, float] = OrderedDict()
        """Who was refused, holding no more than an equal part, and when; the last one last."""

    def of(self, client: Client) -> int:
        return self._held.get(client, 0)

    def add(self, client: Client, num: int) -> None:
        self.total += num
        self._held[client] = self._held.get(client, 0) + num
        if not self._held[client]:
            del self._held[client]

    def has_enough(self, client: Client, now: float) -> bool:
        """Return whether a client holds more than an equal part while another one lacks some."""
        while self._lacking and next(iter(self._lacking.values())) < now - LACKING_S:
            self._lacking.popitem(last=False)
        return any(each != client for each in self._lacking) and self._is_above(client)

    def note_refused(self, client: Client, now: float) -> None:
        if not self._is_above(client):
            self._lacking[client] = now
            self._lacking.move_to_end(client)
            if len(self._lacking) > MAX_LACKING:
                self._lacking.popitem(last=False)

    def _is_above(self, client: Client) -> bool:
        return self.of(client) * len({*self._held, *self._lacking, client}) > self.total


class AdmissionSlot:
    """What one request holds. Invariant: nothing after `leave`, which may be called twice."""

    def __init__(self, admission: Admission, client: Client, now: float) -> None:
        self._admission = admission
        self.client = client
        self.began_at = now
        self._due_at = now + PATIENCE_S
        """When more of the body has to have come."""
        self.num_sequences = 1
        self.num_bytes = 0
        self.adapter_id = 0
        """The adapter that engines keep for the request; 0: none."""
        self.on_evicted: Callable[[], None] | None = None
        """Set while the body is read: called where another request takes the slot."""

    def hold(self, num_bytes: int) -> None:
        """Count bytes that have come, or that replace them; raises Overloaded."""
        admission = self._admission
        if self not in admission._slots:
            return
        if num_bytes > 0:
            now = admission._clock()
            admission._check_bytes(self, num_bytes, now)
            # What comes earns time, of which it cannot save much.
            self._due_at = min(self._due_at + num_bytes / MIN_BODY_RATE, now + PATIENCE_S)
        self.num_bytes += num_bytes
        admission._bytes.add(self.client, num_bytes)

    def grow(self, num_sequences: int) -> None:
        """Take a slot for each of the request's sequences; raises Overloaded."""
        admission = self._admission
        if self not in admission._slots:  # taken in the moment in which its body was complete
            raise Overloaded(admission._retry_after_s)
        now, num_more = admission._clock(), num_sequences - self.num_sequences
        if num_more > 0:
            admission._check(self.client, num_more, now)
        self.num_sequences = num_sequences
        admission._add(self.client, num_more, now)

    def end_sequences(self) -> None:
        """Give back the slots of sequences that have ended; their answer is on its way."""
        admission = self._admission
        if self not in admission._slots:
            return
        now, num_ended = admission._clock(), self.num_sequences
        if admission._waiting_since is not None:
            admission._ends.extend([now] * num_ended)
        self.num_sequences = 0
        admission._add(self.client, -num_ended, now)

    def leave(self) -> None:
        admission = self._admission
        if self in admission._slots:
            del admission._slots[self]
            admission._bytes.add(self.client, -self.num_bytes)
            admission._add(self.client, -self.num_sequences, admission._clock())

    def is_slow(self, now: float) -> bool:
        """Return whether the body may lose its slot to any other request."""
        return self.on_evicted is not None and now > self._due_at


class Admission:
    """The slots of one ingress. Invariant: `num_live` is the sum of all slots' sequences,
    `num_bytes` that of their bytes. A request that has left holds nothing, no matter what is still
    done with its slot."""

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
        """Start empty. retry_after_s: the `Retry-After` where no rate is known."""
        self.max_live = max_running + max_queued
        self._sequences = Shares()
        self._bytes = Shares()
        self._max_running = max_running
        self._max_queue_wait_s = max_queue_wait_s
        self._max_bytes = MAX_BODIES * max_body_bytes
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._slots: dict[AdmissionSlot, None] = {}
        self._ends: deque[float] = deque()
        """When sequences ended while others waited, in the last `RATE_WINDOW_S`."""
        self._waiting_since: float | None = None

    @property
    def num_live(self) -> int:
        return self._sequences.total

    @property
    def num_bytes(self) -> int:
        return self._bytes.total

    @property
    def num_requests(self) -> int:
        """How many have a slot, those included whose answer is on its way."""
        return len(self._slots)

    @property
    def used_adapters(self) -> frozenset[int]:
        """By id those that requests have."""
        return frozenset(slot.adapter_id for slot in self._slots) - {0}

    def resize(self, max_running: int, max_queued: int) -> None:
        """Have another number of places from now on; nobody who has one loses it."""
        if (max_running, max_running + max_queued) == (self._max_running, self.max_live):
            return
        self._max_running, self.max_live = max_running, max_running + max_queued
        self._ends.clear()  # a rate of other engines
        is_waiting = self.num_live > max_running
        self._waiting_since = self._clock() if is_waiting else None

    def enter(self, client: Client) -> AdmissionSlot:
        """Return a new request's slot; Overloaded if its wait is too long or others have less."""
        now = self._clock()
        if self.num_live + 1 > self.max_live:
            self._evict(now, lambda slot: self._slot_may_go(slot, client, now))
        self._check(client, 1, now)
        slot = AdmissionSlot(self, client, now)
        self._slots[slot] = None
        self._add(client, 1, now)
        return slot

    def expected_wait_s(self, num_more: int = 1) -> float:
        """Return how long the last of `num_more` sequences would wait; 0 where no rate is known."""
        now = self._clock()
        num_waiting = self.num_live + num_more - self._max_running
        rate = self._rate(now)
        return num_waiting / rate if num_waiting > 0 and rate else 0.0

    def _check(self, client: Client, num_more: int, now: float) -> None:
        num_live = self.num_live
        if num_live + num_more > self._max_running and self._sequences.has_enough(client, now):
            num_held = self._sequences.of(client)
            message = f"other clients wait, and this one has {num_held} of {num_live} places"
            raise Overloaded(self._retry_after_s, message)
        if num_live + num_more > self.max_live:
            self._sequences.note_refused(client, now)
            rate = self._rate(now)
            retry_s = (num_live + num_more - self.max_live) / rate if rate else 0.0
            retry_s = min(max(retry_s, self._retry_after_s), MAX_RETRY_AFTER_S)
            message = f"no room for {num_more} more beside {num_live} of {self.max_live}"
            raise Overloaded(retry_s, message)
        if (wait_s := self.expected_wait_s(num_more)) > self._max_queue_wait_s:
            self._sequences.note_refused(client, now)
            message = f"wanted a wait of at most {self._max_queue_wait_s:g} s, found {wait_s:.0f} s"
            raise Overloaded(min(wait_s - self._max_queue_wait_s, MAX_RETRY_AFTER_S), message)

    # Who goes.

    def _evict(self, now: float, may_go: Callable[[AdmissionSlot], int]) -> bool:
        """Take a slot from a body that is not complete; return whether there was one. may_go: the
        higher, the sooner it goes; 0: not at all."""
        read = (slot for slot in self._slots if slot.on_evicted is not None)
        slot = max(read, key=lambda slot: (may_go(slot), slot.num_bytes), default=None)
        if slot is None or slot.on_evicted is None or not may_go(slot):
            return False
        slot.on_evicted()
        slot.leave()
        return True

    def _slot_may_go(self, slot: AdmissionSlot, client: Client, now: float) -> int:
        if slot.is_slow(now):
            return 2
        return int(self._sequences.of(slot.client) > self._sequences.of(client) + 1)

    def _bytes_may_go(
        self, slot: AdmissionSlot, asking: AdmissionSlot, num_bytes: int, now: float
    ) -> int:
        if slot is asking:
            return 0
        if slot.is_slow(now):
            return 3
        if self._bytes.of(slot.client) > self._bytes.of(asking.client) + num_bytes:
            return 2
        times = 1 if now - slot.began_at > PATIENCE_S else TIMES_LARGER
        return int(slot.num_bytes > times * (asking.num_bytes + num_bytes))

    # What is held.

    def _check_bytes(self, slot: AdmissionSlot, num_bytes: int, now: float) -> None:
        client, num_wanted = slot.client, self.num_bytes + num_bytes
        if 2 * num_wanted > self._max_bytes and self._bytes.has_enough(client, now):
            num_held = self._bytes.of(client)
            message = f"other clients wait, and this one has {num_held} of {self.num_bytes} bytes"
            raise Overloaded(self._retry_after_s, message)
        while self.num_bytes + num_bytes > self._max_bytes:
            if not self._evict(now, lambda each: self._bytes_may_go(each, slot, num_bytes, now)):
                self._bytes.note_refused(client, now)
                wanted = f"at most {self._max_bytes} bytes of requests at once"
                message = f"wanted {wanted}, found {self.num_bytes} and {num_bytes} more"
                raise Overloaded(self._retry_after_s, message)

    def _add(self, client: Client, num_sequences: int, now: float) -> None:
        self._sequences.add(client, num_sequences)
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
