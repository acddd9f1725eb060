"""Sequences that were prefilled here, whose blocks stay under a ticket until a reader has them.

Their requests have had their last output. A ticket ends by itself, at the latest with its lease,
and only then its blocks are free.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from cluster.engine.blocks import SCRATCH, BlockManager
from cluster.engine.sequence import Sequence, SequenceStatus
from cluster.kv.handoff import HandoffMetadata, Holder
from cluster.messages import KVHandoff


class HeldSequences:
    """The sequences of one engine that are held, by ticket.

    Invariant: without `holder` and `metadata` there are none. Request ids may occur twice.
    """

    def __init__(
        self, blocks: BlockManager, holder: Holder | None, metadata: HandoffMetadata | None
    ) -> None:
        self._blocks = blocks
        self._holder = holder
        self._metadata = metadata
        self._by_ticket: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._by_ticket)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_ticket.values())

    @property
    def num_tickets(self) -> int:
        """Tickets that have not ended."""
        return self._holder.num_held if self._holder else 0

    def hold(self, seq: Sequence) -> KVHandoff:
        """Put a computed sequence's blocks under a ticket and return it."""
        assert self._holder is not None and self._metadata is not None
        seq.status = SequenceStatus.HOLDING_KV
        block_ids = seq.block_table.copy()
        generations = [self._blocks.generations[block] for block in block_ids]
        # What a sliding window has passed may not be read, and no generation vouches for it.
        first = block_ids.count(SCRATCH)
        ticket = self._holder.hold(seq.request_id, block_ids[first:], generations[first:])
        self._by_ticket[ticket] = seq
        return self._metadata.write(
            ticket, seq.request_id, block_ids, generations, seq.num_computed_tokens
        )

    def drop(self, request_ids: Container[str]) -> None:
        """End the tickets of these requests."""
        for ticket, seq in self._by_ticket.items():
            if seq.request_id in request_ids and self._holder is not None:
                self._holder.drop(ticket)

    def free_ended(self) -> None:
        """Free the blocks of tickets that ended since the last call."""
        if self._holder is None:
            return
        for ticket in self._holder.take_ended():
            seq = self._by_ticket.pop(ticket)
            self._blocks.free(seq)
            seq.status = SequenceStatus.FINISHED
