"""`KVHandover`: the sequences of one engine whose KV changes hands, as its scheduler sees them.

A sequence that goes on elsewhere keeps its blocks here under a handoff (`hold`) that ends by
itself, at the latest with its lease; only then are its blocks free (`free_ended`). The engine that
goes on with it renews the lease (`expect`) until a read fills its blocks (`start_read`). An aborted
read may go on to write: its sequence keeps its blocks until the read comes out of `take_finished`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from cluster.engine.blocks import SCRATCH, BlockManager
from cluster.engine.sequence import Sequence, SequenceStatus
from cluster.kv.handoff import HandoffHolder, HandoffMetadata, KVReader
from cluster.wire.group_messages import ReadEnded
from cluster.wire.messages import KVHandoff


class KVHandover:
    """Who holds and reads for one engine, and their sequences. `metadata` is what handoffs say that
    are written and read here; None on an engine that keeps its sequences. Of held sequences two may
    have one request id."""

    def __init__(
        self,
        blocks: BlockManager,
        metadata: HandoffMetadata | None,
        *,
        holder: HandoffHolder | None = None,
        reader: KVReader | None = None,
    ) -> None:
        self._blocks = blocks
        self._metadata = metadata
        self._holder = holder
        self._reader = reader
        self._held: dict[int, Sequence] = {}
        self._reading: dict[str, Sequence] = {}
        """Reads that were started, aborted ones included until they write no more."""

    # --- of the engine that a sequence leaves -------------------------------------------------

    @property
    def num_held(self) -> int:
        return self._holder.num_held if self._holder else 0

    @property
    def held(self) -> Iterable[Sequence]:
        """Those whose blocks stay under a handoff."""
        return self._held.values()

    @property
    def can_hold(self) -> bool:
        return self._holder is not None and self._metadata is not None

    def hold(self, seq: Sequence) -> KVHandoff:
        assert self._holder is not None and self._metadata is not None, "`can_hold`"
        seq.status = SequenceStatus.HOLDING_KV
        block_ids = seq.block_table.copy()
        generations = [self._blocks.generations[block] for block in block_ids]
        # What a sliding window has passed may not be read, and no generation vouches for it.
        first = block_ids.count(SCRATCH)
        handoff_id = self._holder.hold(seq.request_id, block_ids[first:], generations[first:])
        self._held[handoff_id] = seq
        metadata = self._metadata
        return KVHandoff(
            handoff_id=handoff_id,
            request_id=seq.request_id,
            sources=metadata.sources,
            block_ids=block_ids,
            generations=generations,
            num_tokens=seq.num_computed_tokens,
            block_bytes=metadata.block_bytes,
            kv_hash=metadata.kv_hash,
            lease_s=metadata.lease_s,
        )

    def drop(self, request_ids: Container[str]) -> None:
        for handoff_id, seq in self._held.items():
            if seq.request_id in request_ids and self._holder is not None:
                self._holder.drop(handoff_id)

    def free_ended(self) -> None:
        """Free the blocks of handoffs that ended since the last call."""
        for handoff_id in self._holder.take_ended() if self._holder is not None else ():
            seq = self._held.pop(handoff_id)
            self._blocks.free(seq)
            seq.status = SequenceStatus.FINISHED

    # --- of the engine that goes on -----------------------------------------------------------

    @property
    def num_reading(self) -> int:
        return len(self._reading)

    def is_reading(self, seq: Sequence) -> bool:
        """Return whether a read of this sequence was started: an older one may have its id."""
        return self._reading.get(seq.request_id) is seq

    def find_error(self, seq: Sequence, handoff: KVHandoff) -> str:
        """Return what keeps a new sequence's KV from being read here, or nothing."""
        if self._reader is None or self._metadata is None:
            return "handoff: wanted none on an engine without KV reader, found one"
        if seq.request_id in self._reading:
            return f"request_id: wanted a new one, found the read of {seq.request_id!r} unfinished"
        num_tokens = seq.num_tokens - 1
        num_blocks = self._blocks.num_blocks_for(num_tokens)
        error = self._metadata.find_error(handoff, num_tokens, num_blocks)
        if not error and SCRATCH in handoff.block_ids[self._blocks.first_needed(num_tokens) :]:
            error = "handoff.block_ids: wanted all blocks of the sliding window, found scratch"
        return error

    def expect(self, seq: Sequence) -> None:
        """Renew the lease of a sequence's handoff until it is read or cancelled."""
        if seq.handoff is not None and self._reader is not None:
            self._reader.expect(seq.request_id, seq.handoff)

    def cancel(self, seq: Sequence) -> None:
        """Let go of a sequence's handoff; a read that was started still ends by itself."""
        if seq.handoff is not None and self._reader is not None:
            self._reader.cancel(seq.request_id)

    def refuse(self, seq: Sequence) -> None:
        """Let go of the handoff of a sequence that was never expected, unless its id is in use."""
        if seq.request_id not in self._reading:
            self.expect(seq)
            self.cancel(seq)

    def start_read(self, seq: Sequence, handoff: KVHandoff, start: int) -> None:
        assert self._reader is not None, "a handoff was accepted"
        self._reading[seq.request_id] = seq
        source_indices = list(range(start, len(seq.block_table)))
        self._reader.start(seq.request_id, handoff, source_indices, seq.block_table[start:])

    def take_finished(self) -> Iterator[tuple[Sequence, ReadEnded]]:
        """Yield the reads that have ended since the last call: their blocks change no more."""
        for result in self._reader.take_finished() if self._reader is not None else ():
            yield self._reading.pop(result.request_id), result

    # --- of both ----------------------------------------------------------------------------

    @property
    def has_any(self) -> bool:
        """Whether a sequence is held, or may still be written to."""
        return bool(self._held or self._reading)
