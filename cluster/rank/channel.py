"""The channel that carries step plans from a leader to its tensor-parallel followers.

One ZeroMQ pair per follower: PUB/SUB would drop in silence what a slow follower has not read, a
pair keeps everything in order. Down go plans and KV orders, up go reports of ended tickets and
reads. A follower of the same node connects through a Unix socket, others over TCP. Both sides
open with protocol version, configuration hash and epoch.

The one thing to know: nothing here is acknowledged. A step's collectives are what keeps the ranks
together, so a leader is never more than a step or two ahead of who reads; and a connection that
breaks ends the group, because nobody knows what was lost with it.

Sockets, and not a ring in shared memory: `examples/bench/step_channel.py` measures a round trip of
20 us against 6 us for a ring with a doorbell (3 us spinning), so a ring would save a step some 7 us
of a millisecond or more. That does not pay for a second way beside TCP, nor for its memory order.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import zmq

from cluster.channel_messages import (
    EndOfSteps,
    FollowerHello,
    FollowerReport,
    FromFollower,
    KVOrder,
    LeaderHello,
    StepFrame,
    ToFollower,
)
from cluster.engine.lockstep import ShapeOf
from cluster.engine.step_digest import StepDigester
from cluster.lockstep_messages import PeerHello
from cluster.messages import PROTOCOL_VERSION, FrameError, StepAgreement, StepPlan, decode, encode
from cluster.rank.doorbell import Doorbell
from cluster.rank.memory import node_id
from cluster.rank.sockets import keep_alive

log = logging.getLogger("lockstep.channel")

Context = zmq.Context[zmq.Socket[bytes]]

HELLO_TIMEOUT_S = 1800.0
"""How long ranks wait for one another to load. Who dies meanwhile is noticed by the owner."""
CLOSE_LINGER_MS = 1000


@dataclass(frozen=True)
class ChannelAddress:
    """Where one follower finds its end of the channel."""

    node: str
    """Of the leader, by `channel_node`."""
    ipc: str
    tcp: str


def channel_node() -> str:
    """Return what two processes share exactly when Unix sockets connect them.

    Abstract Unix sockets belong to a network namespace.
    """
    return f"{node_id()}/{os.readlink('/proc/self/ns/net')}"


class NoFollowers:
    """The channel of a leader whose tensor-parallel group is itself alone."""

    sockets: tuple[zmq.Socket[bytes], ...] = ()

    def accept(self, shape_of: ShapeOf) -> list[FollowerHello]:
        """Wait for nobody."""
        return []

    def send(self, plan: StepPlan, agreed: StepAgreement) -> None:
        """Send nothing: there is nobody to send to."""

    def tell(self, order: KVOrder) -> None:
        """Tell nobody."""

    def take_reports(self) -> list[tuple[int, FollowerReport]]:
        """Return nothing."""
        return []

    def check(self) -> None:
        """No connection can break."""

    def close(self) -> None:
        """Nothing is open."""


class StepSender:
    """The leader's side. Everything but `addresses` belongs to the step thread.

    Invariant: `sockets[i]` leads to tensor-parallel rank i + 1.
    """

    def __init__(
        self, context: Context, num_followers: int, *, host: str, config_hash: str, epoch: int
    ) -> None:
        self._hello = LeaderHello(PROTOCOL_VERSION, config_hash, epoch)
        self._digester: StepDigester | None = None  # from `accept` on
        self._monitors: list[zmq.Socket[bytes]] = []  # likewise
        self.sockets = tuple(open_pair(context) for _ in range(num_followers))
        self.addresses = [bind_pair(socket, host) for socket in self.sockets]

    def accept(self, shape_of: ShapeOf) -> list[FollowerHello]:
        """Wait until every follower has loaded; return their hellos by rank.

        Args:
            shape_of: the leader's dispatch, which each step's digest tells of.

        Raises:
            FrameError: a follower of another deployment, or none in time.
        """
        hellos = []
        for i, socket in enumerate(self.sockets):
            if not socket.poll(int(HELLO_TIMEOUT_S * 1000)):
                raise FrameError(
                    f"follower tp={i + 1}: wanted a hello in {HELLO_TIMEOUT_S:g} s, found none"
                )
            hello = decode(socket.recv(), FromFollower)
            # Answered before it is judged: the other side can tell as well what does not fit.
            socket.send(encode(self._hello))
            check_hello(hello, self._hello)
            if hello.tp_rank != i + 1:
                raise FrameError(f"tp_rank: wanted {i + 1}, found {hello.tp_rank}")
            hellos.append(hello)
        for socket in self.sockets:
            self._monitors.append(socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))
        self._digester = StepDigester(shape_of)
        return hellos

    def send(self, plan: StepPlan, agreed: StepAgreement) -> None:
        """Hand one step to every follower."""
        assert self._digester is not None, "step channel: wanted accept() before send()"
        self._put(StepFrame(plan, agreed, self._digester.digest(plan, agreed)))

    def tell(self, order: KVOrder) -> None:
        """Hand an order to every follower, behind the steps that were sent before."""
        self._put(order)

    def take_reports(self) -> list[tuple[int, FollowerReport]]:
        """Return what followers have reported since the last call, with their ranks."""
        reports: list[tuple[int, FollowerReport]] = []
        for i, socket in enumerate(self.sockets):
            while socket.poll(0):
                reports.append((i + 1, decode(socket.recv(), FollowerReport)))
        return reports

    def check(self) -> None:
        """Look whether a connection has broken; call it now and then.

        ZeroMQ makes a new one and tells nobody what was lost with the old. A leader that waits for
        a report which was lost would wait for ever: no step, and so no collective, depends on it.

        Raises:
            ConnectionError: names the follower.
        """
        for i, monitor in enumerate(self._monitors):
            if monitor.poll(0):
                raise ConnectionError(
                    f"follower tp={i + 1}: wanted its connection unbroken, found it broken; "
                    "what was on its way is lost"
                )

    def close(self) -> None:
        """Tell the followers that no step comes any more, and close."""
        for socket, monitor in zip(self.sockets, self._monitors, strict=False):
            socket.disable_monitor()
            monitor.close(linger=0)
        for i, socket in enumerate(self.sockets):
            try:
                socket.send(encode(EndOfSteps()), zmq.NOBLOCK)
            except zmq.Again:
                log.warning("follower tp=%d: gone before the end of steps", i + 1)
            socket.close(linger=CLOSE_LINGER_MS)

    def _put(self, frame: StepFrame | KVOrder) -> None:
        body = encode(frame)
        for i, socket in enumerate(self.sockets):
            try:
                socket.send(body, zmq.NOBLOCK)
            except zmq.Again:
                # Queues have no bound, so only a peer that is gone refuses.
                raise ConnectionError(
                    f"follower tp={i + 1}: wanted an open channel, found it gone"
                ) from None


class StepReceiver:
    """A follower's side. Everything belongs to the step thread."""

    def __init__(self, context: Context, address: ChannelAddress, doorbell: Doorbell) -> None:
        self._doorbell = doorbell
        self._socket = open_pair(context)
        connect_pair(self._socket, address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(doorbell.fileno(), zmq.POLLIN)

    def open(self, hello: FollowerHello) -> None:
        """Greet the leader and check its answer.

        Raises:
            FrameError: a leader of another deployment, or none in time.
        """
        self._socket.send(encode(hello))
        if not self._socket.poll(int(HELLO_TIMEOUT_S * 1000)):
            raise FrameError(f"leader: wanted a hello in {HELLO_TIMEOUT_S:g} s, found none")
        check_hello(decode(self._socket.recv(), ToFollower), hello)

    def receive(self) -> Any:
        """Wait for a frame or a ring of the doorbell; return the frame, or None after a ring."""
        self._poller.poll()
        if self._socket.poll(0):
            return decode(self._socket.recv(), ToFollower)
        self._doorbell.clear()
        return None

    def report(self, report: FollowerReport) -> None:
        """Tell the leader what has ended here."""
        self._socket.send(encode(report))

    def close(self) -> None:
        """Close the follower's end."""
        self._socket.close(linger=CLOSE_LINGER_MS)


def check_hello(found: Any, wanted: LeaderHello | FollowerHello | PeerHello) -> None:
    """Compare the other side's hello with our own.

    Raises:
        FrameError: names what was found instead of a hello, or the field that differs.
    """
    if not isinstance(found, LeaderHello | FollowerHello | PeerHello):
        raise FrameError(f"channel: wanted a hello, found {type(found).__name__}")
    for field in ("protocol", "config_hash", "epoch"):
        ours, theirs = getattr(wanted, field), getattr(found, field)
        if ours != theirs:
            raise FrameError(f"{field}: wanted {ours}, found {theirs}")


def open_pair(context: Context) -> zmq.Socket[bytes]:
    """Return one end of a connection, whose queues have no bound."""
    socket = context.socket(zmq.PAIR)
    socket.sndhwm = socket.rcvhwm = 0
    keep_alive(socket)
    return socket


def bind_pair(socket: zmq.Socket[bytes], host: str) -> ChannelAddress:
    """Let the other end come to this one; return where it goes."""
    # An abstract name leaves no file behind, whoever is killed.
    ipc = f"ipc://@lockstep-{uuid4().hex}"
    socket.bind(ipc)
    port = socket.bind_to_random_port(f"tcp://{host}")
    return ChannelAddress(channel_node(), ipc, f"tcp://{host}:{port}")


def connect_pair(socket: zmq.Socket[bytes], address: ChannelAddress) -> None:
    """Go to the other end."""
    socket.connect(address.ipc if address.node == channel_node() else address.tcp)
