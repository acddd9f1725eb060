"""Handing KV over from one engine to another: which side may free what, and when.

1. The scheduler that a sequence leaves (`KVHandover.hold`) holds its blocks under a handoff with a
   lease (`HandoffHolder.hold`).
2. The scheduler that goes on registers the handoff (`KVReader.expect`), and its reader renews the
   lease from then on.
3. Once it has allocated its own blocks, the scheduler starts the read (`KVReader.start`, which
   `KVPulls` in `cluster/kv/reads.py` decides on).
4. The reader copies, then releases the handoff. The answer tells whether the lease was alive
   throughout; only then are the bytes trusted.
5. Released, dropped and expired handoffs come out of `HandoffHolder.take_ended`, with several ranks
   once they have ended on each (`GroupHolder`), and the holder's scheduler frees their blocks.

If the reading side dies midway, renewals stop: `KVHolder.tick` ends the lease by the holding side's
clock, the only one that counts, and the blocks are freed. `serve/pools/router.py` prefills the
request again with the tokens so far. A lease that ended never lives again.

In a tensor-parallel group every rank holds, and reads, its own slice; a leader's `GroupHolder` and
`GroupReader` pass each order on to the followers and put the answers together. A handoff has the
same number on all ranks, and its blocks may be freed when it has ended on all of them: a reader may
still be copying from the rank whose lease runs longest. A report that was not asked for is a
`FrameError`, which ends the group. Nothing here does I/O; a driver with two threads brings its own
lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.wire.group_messages import (
    CancelRead,
    DropKV,
    ExpectKV,
    HoldKV,
    KVOrder,
    ReadEnded,
    StartRead,
)
from cluster.wire.messages import (
    FrameError,
    KVCall,
    KVHandoff,
    KVRead,
    KVRelease,
    KVRenew,
    KVSource,
)


@dataclass(frozen=True)
class HandoffMetadata:
    """What an engine writes into its handoffs, and wants to find in those that it reads."""

    sources: list[KVSource]
    """One per tensor-parallel rank, in order."""
    block_bytes: int
    kv_hash: str
    lease_s: float

    def find_error(self, handoff: KVHandoff, num_tokens: int, num_blocks: int) -> str:
        """Return what makes a handoff for `num_tokens` tokens unusable here, or nothing."""
        places = [source.tp_rank for source in handoff.sources]
        for name, wanted, found in (
            ("sources", [source.tp_rank for source in self.sources], places),
            ("kv_hash", self.kv_hash, handoff.kv_hash),
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

    def hold(self, request_id: str, block_ids: list[int], generations: list[int]) -> int: ...

    def drop(self, handoff_id: int) -> None:
        """End a handoff whose request was aborted."""

    def take_ended(self) -> list[int]:
        """Return the ids of those that ended since the last call: their blocks may be freed."""

    @property
    def num_held(self) -> int: ...


class KVReader(Protocol):
    """What a decode scheduler needs of the object that reads KV for it."""

    def expect(self, request_id: str, handoff: KVHandoff) -> None:
        """Renew the handoff's lease until the read is started or cancelled."""

    def start(
        self, request_id: str, handoff: KVHandoff, source_indices: list[int], dst_blocks: list[int]
    ) -> None:
        """Copy the blocks at `source_indices` of the handoff, if any, then release it."""

    def cancel(self, request_id: str) -> None:
        """Stop as soon as possible and release the handoff, unless it has ended; a started read
        still comes out of `take_finished`, when it no longer writes."""

    def take_finished(self) -> list[ReadEnded]: ...


@dataclass
class _Lease:
    request_id: str
    generations: dict[int, int]
    deadline: float


class KVHolder:
    """The handoffs of a prefill rank and their leases. Invariant: a handoff is held, or ended once
    and for all; each ended one comes out of `take_ended` exactly once. `clock` must never go
    back."""

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self.lease_s = lease_s
        self.clock = clock
        self.num_blocks_sent = 0
        """Blocks that readers copied under leases that were alive to the end."""
        # All leases are equally long and a renewed one moves to the end: the first ends first.
        self._leases: OrderedDict[int, _Lease] = OrderedDict()
        self._ended: list[int] = []
        self.last_handoff_id = 0

    @property
    def num_held(self) -> int:
        return len(self._leases)

    def hold(self, request_id: str, block_ids: list[int], generations: list[int]) -> int:
        self.last_handoff_id += 1
        held = dict(zip(block_ids, generations, strict=True))
        self._leases[self.last_handoff_id] = _Lease(request_id, held, self.clock() + self.lease_s)
        return self.last_handoff_id

    def answer(self, call: KVCall, max_blocks: int) -> bool:
        """Do what a reader asks, in at most `max_blocks`; return whether its lease was alive."""
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


Tell = Callable[[KVOrder], None]


class GroupHolder:
    """A prefill group's handoffs. Each comes out of `take_ended` once, when ended everywhere."""

    def __init__(self, local: HandoffHolder, num_followers: int, tell: Tell | None = None) -> None:
        self._local = local
        self._num_followers = num_followers
        self._tell = tell or (lambda order: None)
        self._num_alive: dict[int, int] = {}
        """By handoff: the ranks on which it has not ended."""
        self._ended: list[int] = []

    @property
    def num_held(self) -> int:
        return len(self._num_alive)

    def hold(self, request_id: str, block_ids: list[int], generations: list[int]) -> int:
        handoff_id = self._local.hold(request_id, block_ids, generations)
        self._num_alive[handoff_id] = 1 + self._num_followers
        self._tell(HoldKV(handoff_id, request_id, block_ids, generations))
        return handoff_id

    def drop(self, handoff_id: int) -> None:
        self._local.drop(handoff_id)
        self._tell(DropKV(handoff_id))

    def on_handoffs_ended(self, handoff_ids: list[int]) -> None:
        """Take one rank's report. Each reports a handoff once; a `FrameError` otherwise."""
        for handoff_id in handoff_ids:
            if handoff_id not in self._num_alive:
                raise FrameError(f"handoff: wanted one that is held, found the end of {handoff_id}")
            self._num_alive[handoff_id] -= 1
            if not self._num_alive[handoff_id]:
                del self._num_alive[handoff_id]
                self._ended.append(handoff_id)

    def take_ended(self) -> list[int]:
        self.on_handoffs_ended(self._local.take_ended())
        ended, self._ended = self._ended, []
        return ended


class GroupReader:
    """A decode group's reads. Each comes out of `take_finished` once, after its last write."""

    def __init__(self, local: KVReader, num_followers: int, tell: Tell | None = None) -> None:
        self._local = local
        self._num_followers = num_followers
        self._tell = tell or (lambda order: None)
        self._num_reading: dict[str, int] = {}
        """By request: the ranks whose read has not ended."""
        self._errors: dict[str, str] = {}
        self._finished: list[ReadEnded] = []

    def expect(self, request_id: str, handoff: KVHandoff) -> None:
        self._local.expect(request_id, handoff)
        self._tell(ExpectKV(request_id, handoff))

    def start(
        self, request_id: str, handoff: KVHandoff, source_indices: list[int], dst_blocks: list[int]
    ) -> None:
        self._num_reading[request_id] = 1 + self._num_followers
        self._local.start(request_id, handoff, source_indices, dst_blocks)
        self._tell(StartRead(request_id, handoff, source_indices, dst_blocks))

    def cancel(self, request_id: str) -> None:
        self._local.cancel(request_id)
        self._tell(CancelRead(request_id))

    def on_read_ended(self, request_id: str, error: str) -> None:
        """Take one rank's report. Each reports a started read once; a `FrameError` otherwise."""
        if request_id not in self._num_reading:
            raise FrameError(f"read: wanted one that was started, found the end of {request_id!r}")
        if error:
            self._errors.setdefault(request_id, error)
        self._num_reading[request_id] -= 1
        if not self._num_reading[request_id]:
            del self._num_reading[request_id]
            error = self._errors.pop(request_id, "")
            self._finished.append(ReadEnded(request_id, error))

    def take_finished(self) -> list[ReadEnded]:
        for result in self._local.take_finished():
            self.on_read_ended(result.request_id, result.error)
        finished, self._finished = self._finished, []
        return finished
