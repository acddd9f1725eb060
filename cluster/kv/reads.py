"""The reader's side of a handoff, to bytes that can be trusted.

1. *expected*: its handoff's lease is renewed until the scheduler has blocks for it;
2. *reading*: the blocks are copied, at once if the source's memory is mapped, else chunk by
   chunk in answers to `KVRead`;
3. *releasing*: the handoff is released, and the answer tells whether its lease held throughout.

This is a state machine: a thread with sockets drives it (`cluster/kv/transport/puller.py`), or a
simulator. A malformed handoff or answer ends its read without raising.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cluster.wire.group_messages import ReadEnded
from cluster.wire.messages import KVAnswer, KVCall, KVHandoff, KVRead, KVRelease, KVRenew, KVSource

CHUNK_BYTES = 8 << 20
"""Bytes of one copy or one answer; a cancelled read stops between two of them."""
MAX_CHUNK_BLOCKS = 4096
"""In one call, which names each: together less than one part of a message may have."""
ABORTED = "aborted"
ANSWER_TIMEOUT_S = 5.0
"""A holder whose thread is silent this long is taken for dead: it does nothing but answer."""


def max_chunk_blocks(block_bytes: int) -> int:
    """Return how many blocks a reader asks for at once, and so a holder's answer has at most."""
    return min(MAX_CHUNK_BLOCKS, max(1, CHUNK_BYTES // block_bytes))


class ReadTransport(Protocol):
    """What the reads need of the world."""

    def send(self, source: KVSource, call: KVCall) -> None:
        """Send a call, answered at `KVPulls.on_answer`; raises OSError if it cannot be sent."""

    def is_mapped(self, source: KVSource) -> bool: ...

    def copy(self, source: KVSource, source_ids: list[int], ids: list[int]) -> None:
        """Copy blocks of the source into blocks of ours; raises OSError if it is gone."""

    def write(self, ids: list[int], blocks: list[memoryview]) -> None:
        """Write an answer's bytes into blocks of ours; ValueError, first: they do not fit."""

    def forget(self, source: KVSource) -> None:
        """Let go of a holder that is taken for dead: its memory, its connection. The next call to
        it makes new ones."""


@dataclass
class _Pull:
    request_id: str
    handoff: KVHandoff
    source: KVSource
    renew_at: float
    source_indices: list[int] = field(default_factory=list)
    dst_blocks: list[int] = field(default_factory=list)
    num_read: int = 0
    num_asked: int = 0
    has_started: bool = False
    started_at: float = 0.0
    is_cancelled: bool = False
    asked_at: float = float("inf")
    """When the call that is not answered yet was sent."""
    awaited: str = ""
    """The type of that call, a renewal apart."""
    is_owner: bool = True
    """False if another request already owns this handoff; this one must then not release it."""
    error: str = ""


class KVPulls:
    """All reads of one rank. Invariant: a started one reports once, after its last write."""

    def __init__(
        self,
        transport: ReadTransport,
        *,
        tp_rank: int,
        block_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._tp_rank = tp_rank
        self._block_bytes = block_bytes
        self._clock = clock
        self._pulls: dict[str, _Pull] = {}
        self._by_handoff: dict[tuple[KVSource, int], _Pull] = {}
        self._heard_at: dict[KVSource, float] = {}
        """When a holder last answered a read or a release."""
        self._answered: dict[KVSource, float] = {}
        """When the latest call that a holder has answered was sent."""
        self._finished: list[ReadEnded] = []
        self.bytes_received = 0
        self.num_reads = 0
        self.num_failed = 0
        """Reads that were not, or did not end; those that were aborted apart."""
        self.read_s = 0.0
        """Seconds of reads under a valid lease."""

    def expect(self, request_id: str, handoff: KVHandoff) -> None:
        """Keep the handoff's lease alive until the read starts or is cancelled."""
        source = handoff.sources[self._tp_rank]
        pull = _Pull(request_id, handoff, source, self._clock() + handoff.lease_s / 3)
        self._pulls[request_id] = pull
        if self._by_handoff.setdefault((source, handoff.handoff_id), pull) is not pull:
            pull.is_owner, pull.renew_at = False, float("inf")
            pull.error = (
                f"kv handoff: wanted one for one request, found {handoff.handoff_id} for two"
            )

    def start(self, request_id: str, source_indices: list[int], dst_blocks: list[int]) -> None:
        """Copy the blocks at these positions of the handoff into ours, then release it."""
        pull = self._pulls.get(request_id)
        if pull is None:
            self._report(request_id, "kv handoff: wanted one that is expected, found none")
            return
        pull.has_started, pull.started_at = True, self._clock()
        pull.source_indices, pull.dst_blocks = source_indices, dst_blocks
        if pull.error:
            self._release(pull)
        elif self._transport.is_mapped(pull.source):
            self._copy(pull)
            self._release(pull)
        else:
            self._ask_next(pull)

    def cancel(self, request_id: str) -> None:
        """Stop and release; a read on its way stops, and reports, at its next answer."""
        pull = self._pulls.get(request_id)
        if pull is None:
            return
        pull.is_cancelled = True
        if not pull.has_started:
            if pull.is_owner:
                self._send(pull, KVRelease(pull.handoff.handoff_id, 0))
            self._forget(pull)

    def on_answer(self, source: KVSource, answer: KVAnswer, blocks: list[memoryview]) -> None:
        """Take a holder's answer; one to a read that is over is ignored."""
        pull = self._by_handoff.get((source, answer.handoff_id))
        if pull is None or answer.call not in (KVRenew.__name__, pull.awaited):
            return
        if answer.call != KVRenew.__name__:  # which is answered whatever became of other calls
            pull.awaited = ""
            self._heard_at[source] = self._clock()
            self._answered[source] = max(pull.asked_at, self._answered.get(source, 0.0))
        if not answer.alive and not pull.error:
            pull.error = f"kv lease: handoff {answer.handoff_id} ended before its blocks were read"
        if answer.call == KVRead.__name__:
            self._take_chunk(pull, blocks if answer.alive else [])
        elif answer.call == KVRelease.__name__:
            if not pull.is_cancelled and not pull.error:
                self.bytes_received += pull.num_read * self._block_bytes
                self.num_reads += 1
                self.read_s += self._clock() - pull.started_at
            self._finish(pull)

    def on_lost(self, source: KVSource, why: str) -> None:
        """The connection to a holder has ended, and every call on it that was not answered."""
        for pull in list(self._pulls.values()):
            if pull.source == source and pull.awaited:
                pull.error = pull.error or f"kv source {source.address}: {why}"
                self._finish(pull)
        self._transport.forget(source)

    def on_tick(self) -> None:
        """Renew the leases that are due and give up on silent holders. Calls queue and are answered
        in order: one is lost `ANSWER_TIMEOUT_S` after it was sent if a later one has been answered;
        without that it waits while its holder is heard from."""
        now = self._clock()
        for pull in list(self._pulls.values()):
            if now >= self._answer_by(pull):
                where, waited_s = pull.source.address, now - pull.asked_at
                pull.error = f"kv source {where}: no answer for {waited_s:.0f} s"
                is_silent = now >= self._silent_at(pull)
                self._finish(pull)
                if is_silent:
                    self._transport.forget(pull.source)
            elif now >= pull.renew_at:
                pull.renew_at = now + pull.handoff.lease_s / 3
                self._send(pull, KVRenew(pull.handoff.handoff_id))

    def next_deadline(self) -> float | None:
        """Return when `on_tick` has something to do, by the clock; None: at no time yet."""
        times = (min(pull.renew_at, self._answer_by(pull)) for pull in self._pulls.values())
        soonest = min(times, default=math.inf)
        return None if math.isinf(soonest) else soonest

    def take_finished(self) -> list[ReadEnded]:
        finished, self._finished = self._finished, []
        return finished

    def _copy(self, pull: _Pull) -> None:
        step = max_chunk_blocks(self._block_bytes)
        try:
            for start in range(0, len(pull.dst_blocks), step):
                indices = pull.source_indices[start : start + step]
                ids = [pull.handoff.block_ids[i] for i in indices]
                self._transport.copy(pull.source, ids, pull.dst_blocks[start : start + step])
                pull.num_read += len(ids)
        except (OSError, ValueError) as error:  # gone, or replaced by something else
            pull.error = f"kv shared memory of process {pull.source.pid}: {error}"

    def _ask_next(self, pull: _Pull) -> None:
        stop = pull.num_read + max_chunk_blocks(self._block_bytes)
        indices = pull.source_indices[pull.num_read : stop]
        if not indices or pull.is_cancelled or pull.error:
            self._release(pull)
            return
        handoff = pull.handoff
        call = KVRead(
            handoff.handoff_id,
            [handoff.block_ids[i] for i in indices],
            [handoff.generations[i] for i in indices],
        )
        pull.num_asked = len(indices)
        self._await_answer(pull, call)

    def _take_chunk(self, pull: _Pull, blocks: list[memoryview]) -> None:
        if not pull.error and not pull.is_cancelled:
            self._write(pull, blocks)
        self._ask_next(pull)

    def _write(self, pull: _Pull, blocks: list[memoryview]) -> None:
        dst = pull.dst_blocks[pull.num_read : pull.num_read + pull.num_asked]
        try:
            if len(blocks) != len(dst):
                raise ValueError(f"wanted {len(dst)} blocks, found {len(blocks)}")
            self._transport.write(dst, blocks)
            pull.num_read += len(dst)
        except ValueError as error:
            pull.error = f"kv answer of {pull.source.address}: {error}"

    def _release(self, pull: _Pull) -> None:
        if not pull.is_owner:
            self._finish(pull)
            return
        num_valid = 0 if pull.error or pull.is_cancelled else pull.num_read
        self._await_answer(pull, KVRelease(pull.handoff.handoff_id, num_valid))

    def _await_answer(self, pull: _Pull, call: KVCall) -> None:
        pull.asked_at, pull.awaited = self._clock(), type(call).__name__
        if not self._send(pull, call):
            self._finish(pull)

    def _send(self, pull: _Pull, call: KVCall) -> bool:
        try:
            self._transport.send(pull.source, call)
        except OSError as error:
            pull.error = pull.error or f"kv source {pull.source.address}: {error}"
            return False
        return True

    def _answer_by(self, pull: _Pull) -> float:
        if self._answered.get(pull.source, 0.0) > pull.asked_at:
            return pull.asked_at + ANSWER_TIMEOUT_S
        return self._silent_at(pull)

    def _silent_at(self, pull: _Pull) -> float:
        return max(pull.asked_at, self._heard_at.get(pull.source, 0.0)) + ANSWER_TIMEOUT_S

    def _finish(self, pull: _Pull) -> None:
        self._forget(pull)
        if pull.has_started:
            self._report(pull.request_id, ABORTED if pull.is_cancelled else pull.error)

    def _forget(self, pull: _Pull) -> None:
        del self._pulls[pull.request_id]
        if pull.is_owner:
            del self._by_handoff[pull.source, pull.handoff.handoff_id]
        if all(other.source != pull.source for other in self._pulls.values()):
            self._heard_at.pop(pull.source, None)
            self._answered.pop(pull.source, None)

    def _report(self, request_id: str, error: str) -> None:
        self.num_failed += error not in ("", ABORTED)
        self._finished.append(ReadEnded(request_id, error))
