"""What the ranks of a group say to each other. Both ends of every connection open with a hello.

A leader sends its followers each step's plan, and between steps what to do to slices of KV and
which adapter to read. A follower reports which of its handoffs and reads have ended, which adapter
it has, and once that it has loaded what was compiled. Data-parallel leaders send each other, in
every step, a `Vote` (`messages.py`) and then what they made of all votes. Everything else is an
error that names the sender.
"""

from __future__ import annotations

from cluster.wire.messages import (
    KVHandoff,
    KVSource,
    LoraAdapter,
    StepAgreement,
    StepPlan,
    Vote,
    Wire,
)


class _Hello(Wire, frozen=True):
    protocol: int
    config_hash: str
    epoch: int
    nonce: str


class LeaderHello(_Hello, frozen=True, tag=True): ...


class StepDigest(Wire, frozen=True):
    """What a rank makes of a step: equal on all that run it together. Lists are checksums."""

    previous_step: int
    epoch: int
    step: int
    num_seqs: int
    num_tokens: int
    num_decodes: int
    num_drafting: int
    agreement: int
    rows: int
    num_computed: int
    num_new: int
    output_index: int
    token_ids: int
    prompt_targets: int
    known_token_ids: int
    row_state: int
    """Of every admission and block of a row since the first step."""
    drawn: int
    """Of every token drawn up to the last step but one, where followers draw along; else 0."""


class StepFrame(Wire, frozen=True, tag=True):
    """Run this step, if your digest of it is the leader's."""

    plan: StepPlan
    agreed: StepAgreement
    digest: StepDigest


class HoldKV(Wire, frozen=True, tag=True):
    """Hold your slice of these blocks as the handoff of this id."""

    handoff_id: int
    request_id: str
    block_ids: list[int]
    generations: list[int]


class DropKV(Wire, frozen=True, tag=True):
    """End a handoff whose request was aborted."""

    handoff_id: int


class ExpectKV(Wire, frozen=True, tag=True):
    """Renew the lease of your slice of this handoff."""

    request_id: str
    handoff: KVHandoff


class StartRead(Wire, frozen=True, tag=True):
    """Read your slice of these blocks of an expected handoff into blocks of yours."""

    request_id: str
    handoff: KVHandoff
    source_indices: list[int]
    dst_blocks: list[int]


class CancelRead(Wire, frozen=True, tag=True):
    """Stop the read, or the expectation, and release the handoff."""

    request_id: str


class LoadAdapter(Wire, frozen=True, tag=True):
    """Read your slices of an adapter into a slot that no token has."""

    slot: int
    adapter: LoraAdapter


class EndOfSteps(Wire, frozen=True, tag=True): ...


class StillThere(Wire, frozen=True, tag=True):
    """Asks nothing; that it can be sent shows that the connection stands."""


KVOrder = HoldKV | DropKV | ExpectKV | StartRead | CancelRead
ToFollower = LeaderHello | StepFrame | KVOrder | LoadAdapter | StillThere | EndOfSteps


class FollowerHello(_Hello, frozen=True, tag=True):
    """Opens the channel on the follower's side, when it is ready to step."""

    tp_rank: int
    num_blocks: int
    layout: str
    source: KVSource
    graphs: int
    """Checksum of what the rank captured: it replays what its leader agreed on with others."""


class HandoffsEnded(Wire, frozen=True, tag=True):
    handoff_ids: list[int]


class ReadEnded(Wire, frozen=True, tag=True):
    """A started read has ended on a rank, or on all of a group, and writes no more."""

    request_id: str
    error: str
    """Empty if all blocks were copied and the lease was alive until the release."""

    @property
    def ok(self) -> bool:
        return not self.error


class AdapterLoaded(Wire, frozen=True, tag=True):
    """A rank has read its slices of an adapter, or could not."""

    id: int
    error: str
    """Empty if its slot holds the adapter now."""


class PiecesLoaded(Wire, frozen=True, tag=True):
    """The follower has loaded what was compiled while it served. It says so once."""


FollowerReport = HandoffsEnded | ReadEnded | AdapterLoaded | PiecesLoaded


class PeerHello(_Hello, frozen=True, tag=True):
    """Opens a connection between two leaders, on both sides, when they are ready to step."""

    dp_rank: int
    dp_size: int
    graphs: int
    """Checksum of what the rank captured: all dispatch over the same graphs."""


class StepConfirm(Wire, frozen=True, tag=True):
    """What one leader made of all votes. All confirms are equal, or no rank runs the step."""

    agreed: StepAgreement


ToPeer = PeerHello | Vote | StepConfirm
