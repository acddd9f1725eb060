"""Agreement on a step among data-parallel leaders: the lockstep over its channel.

The rules are in `cluster/engine/lockstep.py`. What follows an agreement follows from it alone; no
rank branches on a local value around a collective.

It rests on `PeerSockets` (`cluster/group/peers.py`), or on a simulated channel.
"""

from __future__ import annotations

from typing import Protocol

from cluster.engine.lockstep import LockstepMachine
from cluster.rank.step_stats import StepStats
from cluster.wire.group_messages import ToPeer
from cluster.wire.messages import StepAgreement, Vote, decode_from, encode


class VoteChannel(Protocol):
    """Ordered frames between this leader and each other one."""

    def send(self, body: bytes) -> None:
        """Send a frame to every peer."""

    def receive(self, dp_rank: int) -> bytes | None:
        """Wait for the next frame of a peer; None if there is none in time."""


class JoinedLockstep:
    """The agreement of several leaders. Belongs to the step thread."""

    def __init__(
        self, machine: LockstepMachine, channel: VoteChannel, stats: StepStats | None = None
    ) -> None:
        """Drive `machine` over `channel`; `stats` notes when this rank and when all voted."""
        self._machine = machine
        self._channel = channel
        self._stats = stats or StepStats()

    def agree(self, vote: Vote) -> StepAgreement:
        """Exchange votes and return what they amount to: the same value on every rank.

        Raises:
            StepDivergence: a peer is in another step; names rank, step and field.
            PeersSilent: a peer has not voted in time; names it.
        """
        machine = self._machine
        self._channel.send(encode(machine.vote(vote)))
        self._stats.vote()
        for rank in machine.peers:
            while machine.lacks_vote(rank):
                self._receive(rank)
        confirm = machine.conclude()
        self._stats.agree()
        self._channel.send(encode(confirm))
        return confirm.agreed

    def confirm(self) -> None:
        """Wait until every rank holds the step for what this one does.

        Call it once per agreement, before the first collective that follows from it.

        Raises:
            StepDivergence: a peer agreed on something else; names rank, step and field.
            PeersSilent: a peer has not confirmed in time; names it.
        """
        machine = self._machine
        for rank in machine.peers:
            while machine.lacks_confirm(rank):
                self._receive(rank)

    def _receive(self, dp_rank: int) -> None:
        machine = self._machine
        body = self._channel.receive(dp_rank)
        if body is None:
            machine.on_silence(machine.missing_votes or machine.missing_confirms)
            return
        machine.on_frame(dp_rank, decode_from(f"rank dp={dp_rank} tp=0", body, ToPeer))
