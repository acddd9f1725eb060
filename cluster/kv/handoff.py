"""Handing KV over from a prefill to a decode engine: which side may free what, and when.

1. The prefill scheduler (`KVHandover.hold`) holds a sequence's blocks under a handoff with a lease
   (`HandoffHolder.hold`).
2. The decode scheduler registers the handoff (`KVReader.expect`), and its reader renews the lease
   from then on.
3. Once it has allocated its own blocks, the scheduler starts the read (`KVReader.start`, which
   `KVPulls` in `cluster/kv/reads.py` decides on).
4. The reader copies, then releases the handoff. The answer tells whether the lease was alive
   throughout; only then are the bytes trusted.
5. Released, dropped and expired handoffs come out of `HandoffHolder.take_ended`, with several ranks
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
    """What a prefill engine writes into its handoffs, and a decode engine wants to find there."""

    sources: list[KVSource]
    """One per tensor-parallel rank, in order; on an engine that only reads, its ranks' places."""
    block_bytes: int
    layout: str
    lease_s: float

    def write(
        self,
        handoff_id: int,
        request_id: str,
        block_ids: list[int],
        generations: list[int],
        num_tokens: int,
    ) -> KVHandoff:
        """Return the handoff for a sequence of `num_tokens` computed tokens."""
        return KVHandoff(
            handoff_id=handoff_id,
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
        """Return what makes a handoff for `num_tokens` tokens unusable here, or nothing."""
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


class HandoffHolder(Protocol):
    """What a prefill scheduler needs of the object that keeps its handoffs."""

    def hold(self, request_id: str, block_ids: list[int], generations: list[int]) -> int:
        """Start a lease on the blocks and return the handoff's id."""

    def drop(self, handoff_id: int) -> None:
        """End a handoff whose request was aborted."""

    def take_ended(self) -> list[int]:
        """Return the ids of those that ended since the last call: their blocks may be freed."""

    @property
    def num_held(self) -> int:
        """Handoffs that have not ended."""


class KVReader(Protocol):
    """What a decode scheduler needs of the object that reads KV for it."""

    def expect(self, request_id: str, handoff: KVHandoff) -> None:
        """Renew the handoff's lease until the read is started or cancelled."""

    def start(
        self, request_id: str, handoff: KVHandoff, source_indices: list[int], dst_blocks: list[int]
    ) -> None:
        """Copy `handoff.block_ids[i]` for i in `source_indices` to `dst_blocks`, then release.

        Both lists may be empty: then the handoff is only released.
        """

    def cancel(self, request_id: str) -> None:
        """Stop as soon as possible and release the handoff.

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
    """The handoffs of a prefill rank and their leases.

    Invariant: a handoff is held, or ended once and for all; each ended one comes out of
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
        self.last_handoff_id = 0
        """The highest that was ever issued."""

    @property
    def num_held(self) -> int:
        return len(self._leases)

    def hold(self, request_id: str, block_ids: list[int], generations: list[int]) -> int:
        self.last_handoff_id += 1
        held = dict(zip(block_ids, generations, strict=True))
        self._leases[self.last_handoff_id] = _Lease(request_id, held, self.clock() + self.lease_s)
        return self.last_handoff_id

    def answer(self, call: KVCall, max_blocks: int) -> bool:
        """Do what a reader asks; return whether its lease was alive.

        Args:
            max_blocks: to read in one call.
        """
        match call:
            case KVRead():
                is_short = len(call.block_ids) <= max_blocks
                return is_short and self.covers(call.handoff_id, call.block_ids, call.generations)
            case KVRenew():
                return self.renew(call.handoff_id)
            case KVRelease():
                return self.release(call.handoff_id, call.num_blocks_read)

    def renew(self, handoff_id: int) -> bool:
        """Extend a lease; False if it has ended."""
        if not self.is_alive(handoff_id):
            return False
        self._leases[handoff_id].deadline = self.clock() + self.lease_s
        self._leases.move_to_end(handoff_id)
        return True

    def release(self, handoff_id: int, num_blocks_read: int) -> bool:
        """End a handoff; True if its lease was alive from hold until now."""
        if not self.is_alive(handoff_id):
            return False
        self._end(handoff_id)
        self.num_blocks_sent += num_blocks_read
        return True

    def drop(self, handoff_id: int) -> None:
        if handoff_id in self._leases:
            self._end(handoff_id)

    def tick(self) -> list[int]:
        """End the leases that have run out and return their handoffs."""
        now = self.clock()
        expired: list[int] = []
        for handoff_id, lease in self._leases.items():
            if lease.deadline > now:
                break
            expired.append(handoff_id)
        for handoff_id in expired:
            self._end(handoff_id)
        return expired

    def take_ended(self) -> list[int]:
        ended, self._ended = self._ended, []
        return ended

    def next_deadline(self) -> float | None:
        """Return when the next lease runs out, by the clock."""
        return next((lease.deadline for lease in self._leases.values()), None)

    def is_alive(self, handoff_id: int) -> bool:
        """Return whether a lease has not ended, nor run out unnoticed."""
        lease = self._leases.get(handoff_id)
        return lease is not None and self.clock() < lease.deadline

    def covers(self, handoff_id: int, block_ids: list[int], generations: list[int]) -> bool:
        """Return whether a live handoff holds these blocks with these contents."""
        if not self.is_alive(handoff_id) or len(block_ids) != len(generations):
            return False
        held = self._leases[handoff_id].generations
        wanted = zip(block_ids, generations, strict=True)
        return all(held.get(block) == generation for block, generation in wanted)

    def _end(self, handoff_id: int) -> None:
        del self._leases[handoff_id]
        self._ended.append(handoff_id)
