"""What a leader says to others: plans to its followers, votes to other data-parallel leaders.

There is a link for every two of them (`links.py`). Down to a follower go plans, KV orders and
adapters to read, up go reports of what has ended. Nothing is acknowledged: a step's collectives
keep ranks within a step or two of each other. A connection that breaks ends the group, because what
was lost with it is unknown.

Sockets, and not a ring in shared memory, which would save a step some 12 us of a millisecond or
more (`examples/bench/step_channel.py`). That does not pay for a second path next to TCP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from msgspec.structs import replace

from cluster.engine.divergence import StepDigester
from cluster.group.links import ConnectLink, Context, LinkAddress, ListenLink, check_hello
from cluster.wire.credentials import Credentials
from cluster.wire.group_messages import (
    EndOfSteps,
    FollowerHello,
    FollowerReport,
    KVOrder,
    LeaderHello,
    LoadAdapter,
    PeerHello,
    StepFrame,
    StillThere,
    ToFollower,
)
from cluster.wire.messages import FrameError, StepAgreement, StepPlan, decode_from, encode
from cluster.wire.sockets import Budget, Doorbell

log = logging.getLogger("lockstep.channel")

Waiting = Callable[[str], None]

MAX_REPORTS, MAX_REPORTS_S = 256, 0.002
"""Between two steps, of all followers together; a step begins a few."""
SILENCE_TIMEOUT_S = 60.0
"""The last resort against a peer that hangs: as long as a collective waits. No step is longer."""


class StepSender:
    """The leader's side, of the step thread. Invariant: `links[i]` leads to rank tp=i + 1."""

    def __init__(
        self,
        context: Context,
        num_followers: int,
        *,
        host: str | None,
        credentials: Credentials,
        is_overlapped: bool = False,
    ) -> None:
        """Open an end for each follower; host None: all stand on this node."""
        self._digester = StepDigester(is_overlapped=is_overlapped)
        self.links = tuple(
            ListenLink(context, credentials, _name(tp_rank), host)
            for tp_rank in range(1, num_followers + 1)
        )

    @property
    def addresses(self) -> list[LinkAddress]:
        return [link.address for link in self.links]

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [link.socket for link in self.links]

    def accept(self, hello: LeaderHello, waiting: Waiting) -> list[FollowerHello]:
        """Greet every follower with `hello`; return theirs by rank."""
        hellos = []
        for tp_rank, link in enumerate(self.links, start=1):
            waiting(_name(tp_rank))
            found = link.await_hello(hello, FollowerHello)
            if found.tp_rank != tp_rank:
                raise FrameError(f"tp_rank: wanted {tp_rank}, found {found.tp_rank}")
            hellos.append(found)
        return hellos

    def send(self, plan: StepPlan, agreed: StepAgreement) -> None:
        self.tell(StepFrame(plan, agreed, self._digester.digest(plan, agreed)))

    def note_drawn(self, token_ids: list[int]) -> None:
        """Check followers two steps later for having drawn the same."""
        self._digester.note_drawn(token_ids)

    def tell(self, order: StepFrame | KVOrder | LoadAdapter) -> None:
        body = encode(order)
        for link in self.links:
            link.send(body)

    def take_reports(self) -> list[tuple[int, FollowerReport]]:
        """Return what followers have reported, with their ranks: no more than there is time for
        between two steps. What is no report is a `FrameError` that names its sender."""
        reports: list[tuple[int, FollowerReport]] = []
        budget = Budget(MAX_REPORTS, MAX_REPORTS_S)
        speaking = list(enumerate(self.links, start=1))
        while speaking:
            for tp_rank, link in list(speaking):
                if not budget.take():
                    return reports
                body = link.receive(zmq.NOBLOCK)
                if body is None:
                    speaking.remove((tp_rank, link))
                else:
                    reports.append((tp_rank, decode_from(_name(tp_rank), body, FollowerReport)))
        return reports

    def check(self) -> None:
        """Look whether a connection has broken; a `ConnectionError` names the follower. ZeroMQ
        makes a new one and does not tell what was lost with the old. A leader would wait for ever
        for a lost report, because no step, and so no collective, depends on it."""
        for tp_rank, link in enumerate(self.links, start=1):
            try:
                link.send(_STILL_THERE)
            except ConnectionError as error:
                raise ConnectionError(
                    f"{_name(tp_rank)}: wanted its connection unbroken, found it broken; "
                    "what was on its way is lost"
                ) from error

    def close(self) -> None:
        for tp_rank, link in enumerate(self.links, start=1):
            try:
                link.send(encode(EndOfSteps()))
            except ConnectionError:
                log.warning("%s: gone before the end of steps", _name(tp_rank))
            link.close()


class StepReceiver:
    def __init__(
        self,
        context: Context,
        address: LinkAddress,
        doorbell: Doorbell,
        *,
        credentials: Credentials,
    ) -> None:
        self._doorbell = doorbell
        self._link = ConnectLink(context, credentials, "leader", address)
        self._poller = zmq.Poller()
        self._poller.register(self._link.socket, zmq.POLLIN)
        self._poller.register(doorbell.fileno(), zmq.POLLIN)

    def open(self, hello: FollowerHello) -> None:
        self._link.greet(hello)
        self._link.await_hello(hello, LeaderHello)

    def receive(self) -> Any:
        """Wait for a frame or a ring of the doorbell; return the frame, or None after a ring."""
        while True:
            self._poller.poll()
            body = self._link.receive(zmq.NOBLOCK)
            if body is None:
                self._doorbell.clear()
                return None
            frame = decode_from("leader", body, ToFollower)
            if not isinstance(frame, StillThere):
                return frame

    def report(self, report: FollowerReport) -> None:
        self._link.send(encode(report))

    def close(self) -> None:
        self._link.close()


_STILL_THERE = encode(StillThere())


def _name(tp_rank: int) -> str:
    return f"follower tp={tp_rank}"


class PeerSockets:
    """One leader's ends towards other leaders. A vote goes to all of them directly, which is one
    hop; a rank that collected votes would make it two. Everything but `addresses` belongs to the
    step thread. Invariant: `addresses[i]` is where rank dp_rank + 1 + i finds this one."""

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
            rank: ListenLink(context, credentials, _leader(rank), host)
            for rank in range(dp_rank + 1, dp_size)
        }
        self._links: dict[int, ListenLink | ConnectLink] = {}
        self.addresses = tuple(link.address for link in self._later.values())

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [link.socket for link in self._links.values()]

    def open(self, earlier: Sequence[LinkAddress], hello: PeerHello, waiting: Waiting) -> None:
        """Go to the earlier ranks, greet all peers and check their answers."""
        going = {
            rank: ConnectLink(self._context, self._credentials, _leader(rank), address)
            for rank, address in enumerate(earlier)
        }
        for end in going.values():
            end.greet(hello)
        self._links = {**going, **self._later}
        # The waiting side cannot speak before the other one came: that one speaks first, and the
        # last rank, for which none waits any more, is the first to be answered.
        for rank in sorted(self._links, reverse=True):
            waiting(_leader(rank))
            link = self._links[rank]
            theirs = replace(hello, dp_rank=rank)
            found = link.await_hello(hello, PeerHello)
            check_hello(found, theirs, ("dp_rank", "dp_size", "graphs"), f"{_leader(rank)}: ")
            link.socket.rcvtimeo = int(SILENCE_TIMEOUT_S * 1000)

    def send(self, body: bytes) -> None:
        for link in self._links.values():
            link.send(body)

    def receive(self, dp_rank: int, *, is_patient: bool = True) -> bytes | None:
        """Wait for the next frame of a peer; None if there is none in `SILENCE_TIMEOUT_S`, or none
        yet if not `is_patient`."""
        return self._links[dp_rank].receive(0 if is_patient else zmq.NOBLOCK)

    def close(self) -> None:
        for link in {**self._later, **self._links}.values():
            link.close()


def _leader(dp_rank: int) -> str:
    return f"leader dp={dp_rank}"
