"""What the data-parallel leaders of a group say to each other.

1. Both ends of a connection open with a hello, which they compare.
2. In every step each leader sends its `Vote` (`messages.py`), then what it made of all votes.

The one thing to know: frames on a connection are a strict sequence, vote and confirm of one step
after the other. Everything else is an error that names who sent it.
"""

from __future__ import annotations

from cluster.messages import StepAgreement, Vote, Wire


class PeerHello(Wire, frozen=True, tag=True):
    """Opens a connection between two leaders, on both sides, when they are ready to step."""

    protocol: int
    config_hash: str
    epoch: int
    dp_rank: int
    dp_size: int
    graphs: int
    """Checksum of what the rank captured: all dispatch over the same graphs."""


class StepShape(Wire, frozen=True):
    """What dispatch makes of an agreement: every field is identical on every rank."""

    graph_mode: int
    """0: eager, 1: graphs of pieces, 2: a whole graph."""
    num_tokens: int
    num_seqs: int
    """What steps are padded to where `is_padded`."""
    is_padded: bool
    """Every rank runs `num_tokens`; where false, each its own."""


class StepConfirm(Wire, frozen=True, tag=True):
    """What one leader holds the step for. All are equal, or nobody runs it."""

    agreed: StepAgreement
    shape: StepShape


ToPeer = PeerHello | Vote | StepConfirm
