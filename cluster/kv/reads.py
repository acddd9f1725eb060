"""The reader's side of a handoff: from a ticket to bytes that can be trusted.

A read goes through three phases:

1. *expected*: its ticket's lease is renewed until the scheduler has blocks for it;
2. *reading*: the blocks are copied, at once where the source's memory is mapped, else chunk by
   chunk in answers to `KVRead`;
3. *releasing*: the ticket is released, and the answer tells whether its lease held throughout.

This is a state machine. It sends through a `ReadTransport`, is told of answers and of time, and
blocks nowhere; a thread with sockets drives it (`cluster/kv/transport/puller.py`), or a simulator.
A malformed ticket or answer ends its read without raising.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cluster.kv.handoff import KVReadResult
from cluster.messages import KVAnswer, KVCall, KVHandoff, KVRead, KVRelease, KVRenew, KVSource

CHUNK_BYTES = 8 << 20
"""Bytes of one copy or one answer; a cancelled read stops between two of them."""
MAX_CHUNK_BLOCKS = 4096
"""In one call, which names each by an id and a generation: together less than one part of a message
may have (`wire/sockets.py`)."""
ANSWER_TIMEOUT_S = 5.0
"""A holder that is silent for so long is taken for dead: its thread does nothing but answer."""


def max_chunk_blocks(block_bytes: int) -> int:
    """Return how many blocks a reader asks for at once, and so a holder's answer has at most."""
    return min(MAX_CHUNK_BLOCKS, max(1, CHUNK_BYTES // block_bytes))


class ReadTransport(Protocol):
    """What the reads need of the world."""

    def send(self, source: KVSource, call: KVCall) -> None:
        """Send a call; the answer comes back to `KVReads.on_answer`. Raises OSError if it cannot be
        sent."""

    def is_mapped(self, source: KVSource) -> bool:
        """Whether `copy` can reach the source's blocks."""

    def copy(self, source: KVSource, source_ids: list[int], ids: list[int]) -> None:
        """Copy blocks of the source into blocks of ours; raises OSError where it is gone."""

    def write(self, ids: list[int], blocks: list[memoryview]) -> None:
        """Write the bytes of an answer into blocks of ours; raises ValueError where they do not
        fit, before anything is written."""

    def forget(self, source: KVSource) -> None:
        """Let go of a holder that is taken for dead: its memory, its connection."""


@dataclass
class _Read:
    """One request's way from ticket to bytes."""

    request_id: str
    handoff: KVHandoff
    source: KVSource
    renew_at: float
    source_indices: list[int] = field(default_factory=list)
    dst_blocks: list[int] = field(default_factory=list)
    num_read: int = 0
    num_asked: int = 0
    has_started: bool = False
    is_cancelled: bool = False
    asked_at: float = float("inf")
    """When the call was sent that is not answered yet."""
    awaited: str = ""
    """The type of that call, a renewal apart."""
    has_ticket: bool = True
    """False where another request reads the ticket: this one must not end it."""
    error: str = ""


class KVReads:
    """All reads of one rank.

    Invariant: a started read reports exactly once, after its last write.
    """

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
        self._reads: dict[str, _Read] = {}
        self._by_ticket: dict[tuple[KVSource, int], _Read] = {}
        self._heard_at: dict[KVSource, float] = {}
        """When a holder last answered a read or a release."""
        self._answered: dict[KVSource, float] = {}
        """When the latest of a holder's calls was sent that it has answered."""
        self._finished: list[KVReadResult] = []
        self.bytes_received = 0
        """Bytes copied in reads that were believed."""

    def expect(self, request_id: str, handoff: KVHandoff) -> None:
        """Keep the ticket's lease alive until the read starts or is cancelled."""
        source = handoff.sources[self._tp_rank]
        read = _Read(request_id, handoff, source, self._clock() + handoff.lease_s / 3)
        self._reads[request_id] = read
        if self._by_ticket.setdefault((source, handoff.ticket), read) is not read:
            read.has_ticket, read.renew_at = False, float("inf")
            read.error = f"kv ticket: wanted one for one request, found {handoff.ticket} for two"

    def start(self, request_id: str, source_indices: list[int], dst_blocks: list[int]) -> None:
        """Copy the blocks at these positions of the ticket into ours, then release it."""
        read = self._reads.get(request_id)
        if read is None:
            self._report(request_id, "kv ticket: wanted one that is expected, found none")
            return
        read.has_started = True
        read.source_indices, read.dst_blocks = source_indices, dst_blocks
        if read.error:
            self._release(read)
        elif self._transport.is_mapped(read.source):
            self._copy(read)
            self._release(read)
        else:
            self._ask_next(read)

    def cancel(self, request_id: str) -> None:
        """Stop and release; a read on its way stops, and reports, at its next answer."""
        read = self._reads.get(request_id)
        if read is None:
            return
        read.is_cancelled = True
        if not read.has_started:
            if read.has_ticket:
                self._send(read, KVRelease(read.handoff.ticket, 0))
            self._forget(read)

    def on_answer(self, source: KVSource, answer: KVAnswer, blocks: list[memoryview]) -> None:
        """Take a holder's answer; one to a read that is over is ignored."""
        read = self._by_ticket.get((source, answer.ticket))
        if read is None or answer.call not in (KVRenew.__name__, read.awaited):
            return
        if answer.call != KVRenew.__name__:  # which is answered whatever became of other calls
            read.awaited = ""
            self._heard_at[source] = self._clock()
            self._answered[source] = max(read.asked_at, self._answered.get(source, 0.0))
        if not answer.alive and not read.error:
            read.error = f"kv lease: ticket {answer.ticket} ended before its blocks were read"
        if answer.call == KVRead.__name__:
            self._take_chunk(read, blocks if answer.alive else [])
        elif answer.call == KVRelease.__name__:
            if not read.is_cancelled and not read.error:
                self.bytes_received += read.num_read * self._block_bytes
            self._finish(read)

    def on_tick(self) -> None:
        """Renew the leases that are due and give up on holders that are silent.

        A holder that answers others is not silent: many reads that start at once wait for one
        another's bytes, and are answered in their order. So a call is lost if a later one was
        answered.
        """
        now = self._clock()
        for read in list(self._reads.values()):
            if now >= self._answer_by(read):
                where, waited_s = read.source.address, now - read.asked_at
                read.error = f"kv source {where}: no answer for {waited_s:.0f} s"
                is_silent = now >= self._silent_at(read)
                self._finish(read)
                if is_silent:
                    self._transport.forget(read.source)
            elif now >= read.renew_at:
                read.renew_at = now + read.handoff.lease_s / 3
                self._send(read, KVRenew(read.handoff.ticket))

    def next_deadline(self) -> float | None:
        """Return when `on_tick` has something to do, by the clock."""
        times = [min(read.renew_at, self._answer_by(read)) for read in self._reads.values()]
        return min(times, default=None)

    def take_finished(self) -> list[KVReadResult]:
        """Return the started reads that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _copy(self, read: _Read) -> None:
        step = max_chunk_blocks(self._block_bytes)
        try:
            for start in range(0, len(read.dst_blocks), step):
                indices = read.source_indices[start : start + step]
                ids = [read.handoff.block_ids[i] for i in indices]
                self._transport.copy(read.source, ids, read.dst_blocks[start : start + step])
                read.num_read += len(ids)
        except (OSError, ValueError) as error:  # gone, or replaced by something else
            read.error = f"kv shared memory of process {read.source.pid}: {error}"

    def _ask_next(self, read: _Read) -> None:
        """Ask for the next chunk, or release when none is wanted any more."""
        stop = read.num_read + max_chunk_blocks(self._block_bytes)
        indices = read.source_indices[read.num_read : stop]
        if not indices or read.is_cancelled or read.error:
            self._release(read)
            return
        handoff = read.handoff
        call = KVRead(
            handoff.ticket,
            [handoff.block_ids[i] for i in indices],
            [handoff.generations[i] for i in indices],
        )
        read.num_asked = len(indices)
        self._await_answer(read, call)

    def _take_chunk(self, read: _Read, blocks: list[memoryview]) -> None:
        if not read.error and not read.is_cancelled:
            self._write(read, blocks)
        self._ask_next(read)

    def _write(self, read: _Read, blocks: list[memoryview]) -> None:
        dst = read.dst_blocks[read.num_read : read.num_read + read.num_asked]
        try:
            if len(blocks) != len(dst):
                raise ValueError(f"wanted {len(dst)} blocks, found {len(blocks)}")
            self._transport.write(dst, blocks)
            read.num_read += len(dst)
        except ValueError as error:
            read.error = f"kv answer of {read.source.address}: {error}"

    def _release(self, read: _Read) -> None:
        if not read.has_ticket:
            self._finish(read)
            return
        believed = 0 if read.error or read.is_cancelled else read.num_read
        self._await_answer(read, KVRelease(read.handoff.ticket, believed))

    def _await_answer(self, read: _Read, call: KVCall) -> None:
        read.asked_at, read.awaited = self._clock(), type(call).__name__
        if not self._send(read, call):
            self._finish(read)

    def _send(self, read: _Read, call: KVCall) -> bool:
        """Send a call; return whether there is somewhere to send it."""
        try:
            self._transport.send(read.source, call)
        except OSError as error:
            read.error = read.error or f"kv source {read.source.address}: {error}"
            return False
        return True

    def _answer_by(self, read: _Read) -> float:
        """Return when a read ends without an answer."""
        if self._answered.get(read.source, 0.0) > read.asked_at:
            return read.asked_at + ANSWER_TIMEOUT_S
        return self._silent_at(read)

    def _silent_at(self, read: _Read) -> float:
        """Return when its holder is taken for dead."""
        return max(read.asked_at, self._heard_at.get(read.source, 0.0)) + ANSWER_TIMEOUT_S

    def _finish(self, read: _Read) -> None:
        self._forget(read)
        if read.has_started:
            self._report(read.request_id, "aborted" if read.is_cancelled else read.error)

    def _forget(self, read: _Read) -> None:
        del self._reads[read.request_id]
        if read.has_ticket:
            del self._by_ticket[read.source, read.handoff.ticket]
        if all(other.source != read.source for other in self._reads.values()):
            self._heard_at.pop(read.source, None)
            self._answered.pop(read.source, None)

    def _report(self, request_id: str, error: str) -> None:
        self._finished.append(KVReadResult(request_id, ok=not error, error=error))
