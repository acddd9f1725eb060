"""What holds of a scheduler and its blocks between any two calls; read from their private parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from cluster.engine.blocks import SCRATCH, BlockManager
from cluster.engine.scheduler import Scheduler
from cluster.engine.sequence import Sequence, SequenceStatus


def check_scheduler(scheduler: Scheduler) -> None:
    finished, handover = SequenceStatus.FINISHED, scheduler._handover
    queued = [*scheduler._waiting, *scheduler._ready, *scheduler.running]
    held, reads = handover._held.values(), handover._reading.values()
    reading = [seq for seq in reads if seq.status is not finished]
    compiling = scheduler._compiling.values()
    unfinished = sorted(seq.request_id for seq in [*queued, *reading, *compiling])
    assert unfinished == sorted(scheduler._unfinished), "a sequence is lost or queued twice"
    for seq in scheduler._waiting:
        assert not seq.block_table and not seq.num_computed_tokens, "waits with blocks"
    computed = {id(seq): seq for batch in scheduler._in_flight.values() for seq in batch}
    ended = [seq for seq in computed.values() if seq.status is finished]
    rows = [seq.row for seq in [*scheduler.running, *ended]] + scheduler._free_rows
    assert sorted(rows) == list(range(scheduler._config.max_num_seqs)), "a row is lost or shared"
    for seq in scheduler._unfinished.values():
        is_in_flight = id(seq) in computed
        assert is_in_flight == (seq.num_in_flight_tokens > 0), "in flight, or not"
        assert is_in_flight or not seq.num_pending_tokens, "nothing draws its token"
    check_blocks(scheduler.blocks, [*queued, *held, *reads, *ended])


def check_blocks(blocks: BlockManager, holders: Iterable[Sequence]) -> None:
    """Assert the invariants, given every sequence that holds blocks."""
    holders = list(holders)
    refs = Counter(chain.from_iterable(seq.block_table for seq in holders))
    num_scratch = sum(_num_scratch(blocks, seq) for seq in holders)
    assert refs.pop(SCRATCH, 0) == num_scratch, "scratch in place of a block, or kept for none"
    assert blocks._ref_counts[SCRATCH] == 0, "block 0 was handed out"
    for block in range(1, blocks.num_blocks + 1):
        found = blocks._ref_counts[block]
        assert found == refs[block], f"block {block}: {found} refs, {refs[block]} holders"
        assert (found == 0) == (block in blocks._free), f"block {block}: {found} refs, in free"
    assert len(blocks._free) + len(refs) == blocks.num_blocks, "free and held are not all"
    contents: dict[int, tuple[bytes, list[int]]] = {}
    for seq in holders:
        for i, block in enumerate(seq.block_table):
            if block == SCRATCH:
                continue
            content = seq.request.cache_salt, seq.token_ids[: (i + 1) * blocks.block_size]
            assert contents.setdefault(block, content) == content, f"block {block}: wrongly shared"
        _check_committed(blocks, seq)
    known = {digest: block for block, digest in enumerate(blocks._hashes) if digest is not None}
    assert known == blocks._cached, "hashes and cache disagree"


def _check_committed(blocks: BlockManager, seq: Sequence) -> None:
    """Assert that what the cache was offered of a sequence is there, under its digests."""
    if not blocks.enable_prefix_caching:
        return
    num_committed = seq.num_committed_blocks
    hashes, seq.block_hashes = seq.block_hashes, []
    assert blocks._hash(seq, num_committed) == hashes[:num_committed], "digests of other tokens"
    seq.block_hashes = hashes
    is_read = seq.handoff is not None and not seq.num_computed_tokens
    assert is_read or num_committed * blocks.block_size <= seq.num_confirmed_tokens, (
        "a block without KV was offered to the cache"
    )


def _num_scratch(blocks: BlockManager, seq: Sequence) -> int:
    """Return how many head entries must be scratch: all that its next token does not read."""
    # A sequence whose KV is being read has computed nothing, but will have all but one token.
    is_reading = seq.block_table and not seq.num_computed_tokens and seq.handoff is not None
    num_computed = seq.num_tokens - 1 if is_reading else seq.num_confirmed_tokens
    first = blocks.first_needed(num_computed) if seq.block_table else 0
    assert all(block == SCRATCH for block in seq.block_table[:first])
    return first
