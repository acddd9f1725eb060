"""What a rank tells of itself: the figures of `/ready`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankStats:
    """One rank's counters. Every field is one of `/ready`'s; sizes are bytes, counts blocks.

    Invariant: a cached block that no sequence uses counts as free.
    """

    tp_rank: int
    dp_rank: int
    pid: int
    node: str
    state: str
    """starting, loading, ready or stopped."""
    epoch: int
    step: int
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    held_tickets: int = 0
    kv_bytes_sent: int = 0
    kv_bytes_received: int = 0
    prompt_tokens_computed: int = 0
