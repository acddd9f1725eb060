"""Handing KV over from a prefill to a decode engine: which side may free what, and when.

1. The prefill scheduler (`KVHandover.hold`) holds a sequence's blocks under a ticket with a lease
   (`TicketHolder.hold`).
2. The decode scheduler registers the ticket (`KVReader.expect`), and its reader renews the lease
   from then on.
3. Once it has allocated its own blocks, the scheduler starts the read (`KVReader.start`, which
   `KVPulls` in `cluster/kv/reads.py` decides on).
4. The reader copies, then releases the ticket. The answer tells whether the lease was alive
   throughout; only then are the bytes trusted.
5. Released, dropped and expired tickets come out of `TicketHolder.take_ended`, with several ranks
   once they have ended on each (`GroupHolder`), and the prefill scheduler frees their blocks.

If the decode side dies midway, renewals stop: `KVHolder.tick` ends the lease by the prefill side's
clock, and the blocks are freed. `serve/pools/router.py` sees the stage lost, drops the request on
both engines and prefills it again with the tokens so far.

The lease runs on the holder's clock alone, and one that ended never lives again. Nothing here does
I/O; a driver with two threads brings its own lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.wire.group_messages import ReadEnded
from cluster.wire.messages import KVCall, KVHandoff, KVRead, KVRelease, KVRenew, KVSource


@dataclass(frozen=True)
class HandoffMetadata:
    """What a prefill engine writes into its tickets, and a decode engine wants to find there."""

    sources: list[KVSource]
    """One per tensor-parallel rank, in order; on an engine that only reads, its ranks' places."""
    block_bytes: int
    layout: str
    lease_s: float

    def write(
        self,
        ticket: int,
        request_id: str,
        block_ids: list[int],
        generations: list[int],
        num_tokens: int,
    ) -> KVHandoff:
        """Return the ticket for a sequence of `num_tokens` computed tokens."""
        return KVHandoff(
            ticket=ticket,
            request_id=request_id,
            sources=self.sources,
            block_ids=block_ids,
            generations=generations,
            num_tokens=num_tokens,
            block_bytes=self.block_bytes,
            layout=self.layout,
            lease_s=self.lease_s,
        )

    def find_error(self, handoff: KVHandoff, num_tokens: int, num_blocks: int) -> str:
        """Return what makes a ticket for `num_tokens` tokens unusable here, or nothing."""
        places = [source.tp_rank for source in handoff.sources]
        for name, wanted, found in (
            ("sources", [source.tp_rank for source in self.sources], places),
            ("layout", self.layout, handoff.layout),
            ("block_bytes", self.block_bytes, handoff.block_bytes),
            ("num_tokens", num_tokens, handoff.num_tokens),
            ("block_ids", num_blocks, len(handoff.block_ids)),
            ("generations", num_blocks, len(handoff.generations)),
        ):
            if wanted != found:
                return f"handoff.{name}: wanted {wanted!r}, found {found!r}"
        if not all(source.address for source in handoff.sources):
            return "handoff.sources: wanted an address of each, found one without"
        return ""


class TicketHolder(Protocol):
    """What a prefill scheduler needs of the object that keeps its tickets."""

    def hold(self, request_id: str, block_ids: list[int], generations: list[int]) -> int:
        """Start a lease on the blocks and return its ticket."""

    def drop(self, ticket: int) -> None:
        """End a ticket whose request was aborted."""

    def take_ended(self) -> list[int]:
        """Return the tickets that ended since the last call: their blocks may be freed."""

    @property
    def num_held(self) -> int:
        """Tickets that have not ended."""


class KVReader(Protocol):
    """What a decode scheduler needs of the object that reads KV for it."""

    def expect(self, request_id: str, handoff: KVHandoff) -> None:
        """Renew the ticket's lease until the read is started or cancelled."""

    def start(
        self, request_id: str, handoff: KVHandoff, source_indices: list[int], dst_blocks: list[int]
    ) -> None:
        """Copy `handoff.block_ids[i]` for i in `source_indices` to `dst_blocks`, then release.

        Both lists may be empty: then the ticket is only released.
        """

    def cancel(self, request_id: str) -> None:
        """Stop as soon as possible and release the ticket.

        A started read still comes out of `take_finished`, when it no longer writes. One that has
        ended meanwhile is left alone.
        """

    def take_finished(self) -> list[ReadEnded]:
        """Return the started reads that ended since the last call."""


@dataclass
class _Lease:
    request_id: str
    generations: dict[int, int]
    deadline: float


class KVHolder:
    """The tickets of a prefill rank and their leases.

    Invariant: a ticket is held, or ended once and for all; each ended one comes out of
    `take_ended` exactly once, however it ended. `clock` must never go back.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self.lease_s = lease_s
        self.clock = clock
        self.num_blocks_sent = 0
        """Blocks that readers copied under leases that were alive to the end."""
        # All leases are equally long and a renewed one moves to the end: the first ends first.
        self._leases: OrderedDict[int, _Lease] = OrderedDict()
        self._ended: list[int] = []
        self.last_ticket = 0
        """The highest that was ever issued."""

    @property
    def num_held(self) -> int:
        return len(self._leases)

    def hold(self, request_id: str, block_ids: list[int], generations: list[int]) -> int:
        self.last_ticket += 1
        held = dict(zip(block_ids, generations, strict=True))
        self._leases[self.last_ticket] = _Lease(request_id, held, self.clock() + self.lease_s)
        return self.last_ticket

    def answer(self, call: KVCall, max_blocks: int) -> bool:
        """Do what a reader asks; return whether its lease was alive.

        Args:
            max_blocks: to read in one call.
        """
        match call:
            case KVRead():
                is_short = len(call.block_ids) <= max_blocks
                return is_short and self.covers(call.ticket, call.block_ids, call.generations)
            case KVRenew():
                return self.renew(call.ticket)
            case KVRelease():
                return self.release(call.ticket, call.num_blocks_read)

    def renew(self, ticket: int) -> bool:
        """Extend a lease; False if it has ended."""
        if not self.is_alive(ticket):
            return False
        self._leases[ticket].deadline = self.clock() + self.lease_s
        self._leases.move_to_end(ticket)
        return True

    def release(self, ticket: int, num_blocks_read: int) -> bool:
        """End a ticket; True if its lease was alive from hold until now."""
        if not self.is_alive(ticket):
            return False
        self._end(ticket)
        self.num_blocks_sent += num_blocks_read
        return True

    def drop(self, ticket: int) -> None:
        if ticket in self._leases:
            self._end(ticket)

    def tick(self) -> list[int]:
        """End the leases that have run out and return their tickets."""
        now = self.clock()
        expired: list[int] = []
        for ticket, lease in self._leases.items():
            if lease.deadline > now:
                break
            expired.append(ticket)
        for ticket in expired:
            self._end(ticket)
        return expired

    def take_ended(self) -> list[int]:
        ended, self._ended = self._ended, []
        return ended

    def next_deadline(self) -> float | None:
        """Return when the next lease runs out, by the clock."""
        return next((lease.deadline for lease in self._leases.values()), None)

    def is_alive(self, ticket: int) -> bool:
        """Return whether a lease has not ended, nor run out unnoticed."""
        lease = self._leases.get(ticket)
        return lease is not None and self.clock() < lease.deadline

    def covers(self, ticket: int, block_ids: list[int], generations: list[int]) -> bool:
        """Return whether a live ticket holds these blocks with these contents."""
        if not self.is_alive(ticket) or len(block_ids) != len(generations):
            return False
        held = self._leases[ticket].generations
        wanted = zip(block_ids, generations, strict=True)
        return all(held.get(block) == generation for block, generation in wanted)

    def _end(self, ticket: int) -> None:
        del self._leases[ticket]
        self._ended.append(ticket)
