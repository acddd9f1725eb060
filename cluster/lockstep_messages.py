"""What the data-parallel leaders of a group say to each other.

1. Both ends of a connection open with a hello, which they compare.
2. In every step each leader sends its `Vote` (`messages.py`), then what it made of all votes.

Frames on a connection are a strict sequence, vote and confirm of one step after the other.
Everything else is an error that names who sent it.
"""

from __future__ import annotations

from cluster.messages import StepAgreement, Vote, Wire


class PeerHello(Wire, frozen=True, tag=True):
    """Opens a connection between two leaders, on both sides, when they are ready to step."""

    protocol: int
    config_hash: str
    epoch: int
    nonce: str
    dp_rank: int
    dp_size: int
    graphs: int
    """Checksum of what the rank captured: all dispatch over the same graphs."""


class StepConfirm(Wire, frozen=True, tag=True):
    """What one leader holds the step for. All are equal, or no rank runs it."""

    agreed: StepAgreement


ToPeer = PeerHello | Vote | StepConfirm
