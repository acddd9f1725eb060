"""Agreement on a step among data-parallel leaders: the lockstep over its channel.

The rules are in `cluster/engine/lockstep.py`. What follows an agreement follows from it alone; no
rank branches on a local value around a collective. A rank without peers agrees with itself.

The channel is a link for every two leaders. A leader opens an end for each later rank before it
loads, and goes to the ends that earlier ranks have opened for it. A vote goes to all others
directly, which is one hop; a rank that collected them would make it two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import zmq

from cluster.engine.lockstep import LockstepMachine, agree
from cluster.rank.channel import Waiting
from cluster.rank.links import Context, GoingEnd, LinkAddress, WaitingEnd
from cluster.rank.step_stats import StepStats
from cluster.wire.credentials import Credentials
from cluster.wire.group_messages import PeerHello, ToPeer
from cluster.wire.messages import FrameError, StepAgreement, Vote, decode, encode
from compile.dispatch import CapturedGraphs

SILENCE_TIMEOUT_S = 60.0
"""The last resort against a peer that hangs: as long as a collective waits. No step is longer."""


class PeerSockets:
    """One leader's ends. Everything but `addresses` belongs to the step thread.

    Invariant: `addresses[i]` is where rank dp_rank + 1 + i finds this one.
    """

    def __init__(
        self,
        context: Context,
        *,
        dp_rank: int,
        dp_size: int,
        host: str | None,
        credentials: Credentials,
    ) -> None:
        """Open an end for each later rank; host None: all stand on this node."""
        self._context = context
        self._credentials = credentials
        self._later = {
            rank: WaitingEnd(context, credentials, _name(rank), host)
            for rank in range(dp_rank + 1, dp_size)
        }
        self._links: dict[int, WaitingEnd | GoingEnd] = {}
        self.addresses = tuple(link.address for link in self._later.values())

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What polls readable when a peer has voted."""
        return [link.socket for link in self._links.values()]

    def open(self, earlier: Sequence[LinkAddress], hello: PeerHello, waiting: Waiting) -> None:
        """Go to the earlier ranks, greet all peers and check their answers.

        Args:
            earlier: where ranks 0, 1, ... before this one wait for it.
            hello: ours.

        Raises:
            FrameError: a peer of another deployment, place or set of graphs, or none in time.
        """
        going = {
            rank: GoingEnd(self._context, self._credentials, _name(rank), address)
            for rank, address in enumerate(earlier)
        }
        for end in going.values():
            end.greet(hello)
        self._links = {**going, **self._later}
        # The waiting side cannot speak before the other one came: that one speaks first, and the
        # last rank, for which none waits any more, is the first to be answered.
        for rank in sorted(self._links, reverse=True):
            waiting(_name(rank))
            link = self._links[rank]
            _check_peer(rank, link.await_hello(hello, PeerHello), hello)
            link.socket.rcvtimeo = int(SILENCE_TIMEOUT_S * 1000)

    def send(self, body: bytes) -> None:
        """Send a frame to every peer.

        Raises:
            ConnectionError: a peer is gone.
        """
        for link in self._links.values():
            link.send(body)

    def receive(self, dp_rank: int) -> bytes | None:
        """Wait for the next frame of a peer; None if there is none in `SILENCE_TIMEOUT_S`."""
        return self._links[dp_rank].receive()

    def close(self) -> None:
        """Close all ends; what was sent still leaves."""
        for link in {**self._later, **self._links}.values():
            link.close()


def _check_peer(dp_rank: int, found: PeerHello, ours: PeerHello) -> None:
    """Compare a peer's hello with what it should be beside ours."""
    wanted: dict[str, Any] = {"dp_rank": dp_rank, "dp_size": ours.dp_size, "graphs": ours.graphs}
    for field, value in wanted.items():
        if getattr(found, field) != value:
            raise FrameError(
                f"{_name(dp_rank)}: {field}: wanted {value}, found {getattr(found, field)}"
            )


def _name(dp_rank: int) -> str:
    return f"leader dp={dp_rank}"


class VoteChannel(Protocol):
    """Ordered frames between this leader and each other one."""

    def send(self, body: bytes) -> None:
        """Send a frame to every peer."""

    def receive(self, dp_rank: int) -> bytes | None:
        """Wait for the next frame of a peer; None if there is none in time."""


class AloneLockstep:
    """The agreement of a group of one: its own vote."""

    def __init__(self, captured: CapturedGraphs | None = None) -> None:
        """Dispatch over what was captured; None: nothing was."""
        self._captured = captured or CapturedGraphs()

    def agree(self, vote: Vote) -> StepAgreement:
        """Return the agreement that a single vote amounts to."""
        return agree((vote,), self._captured)

    def confirm(self) -> None:
        """There are no others to ask."""

    def dispatch_over(self, captured: CapturedGraphs) -> None:
        """Choose among these graphs from the next step on."""
        self._captured = captured


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

    def dispatch_over(self, captured: CapturedGraphs) -> None:
        """Choose among these graphs from the next step on, as all ranks do."""
        self._machine.dispatch_over(captured)

    def _receive(self, dp_rank: int) -> None:
        machine = self._machine
        body = self._channel.receive(dp_rank)
        if body is None:
            machine.on_silence(machine.missing_votes or machine.missing_confirms)
            return
        try:
            frame = decode(body, ToPeer)
        except FrameError as error:
            raise FrameError(f"rank dp={dp_rank} tp=0: {error}") from error
        machine.on_frame(dp_rank, frame)
