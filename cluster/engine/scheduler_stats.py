"""What a scheduler tells of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerStats:
    """Gauges and counters of one scheduler."""

    num_running: int
    num_waiting: int
    """Waiting for a row or for KV."""
    held_tickets: int
    num_blocks: int
    num_free_blocks: int
    prompt_tokens_computed: int
    """Prompt positions computed here, again after a pre-emption included."""
    num_preemptions: int
    prefix_queries: int
    """Tokens looked up in the prefix cache."""
    prefix_hits: int
    """Tokens found there."""
