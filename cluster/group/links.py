"""Connections between two ranks of a group: one waits, the other goes there.

1. The waiting side opens its end before it loads; the owner tells the other where that is, and the
   nonce of the rendezvous.
2. When both have loaded, the side that goes there says hello, and the other answers.
3. Both compare hellos with what they know. From then on frames arrive in order, and a connection
   that breaks is noticed by the waiting side, because what was lost is unknown.

Any process of the application may connect to an open end, for example one of an older epoch. A
hello without the nonce is logged and gets no answer; with it, whatever else differs ends the group
by name. So the waiting side has a ROUTER, which hears all of them and drops what others send: a
PAIR would belong to whatever connects first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar
from uuid import uuid4

import zmq

from cluster.wire.credentials import Credentials
from cluster.wire.group_messages import FollowerHello, LeaderHello, PeerHello
from cluster.wire.messages import FrameError, decode, encode
from cluster.wire.sockets import (
    CurveHandshake,
    bind_tcp,
    connect_to,
    connecting_socket,
    join,
    link_node,
    listening_socket,
    split,
)

log = logging.getLogger("lockstep.link")

Context = zmq.Context[zmq.Socket[bytes]]
Hello = LeaderHello | FollowerHello | PeerHello
H = TypeVar("H", LeaderHello, FollowerHello, PeerHello)

HELLO_TIMEOUT_S = 60.0
"""How long ranks wait for one another's hello, once all of them have loaded."""
HELLO_PERIOD_S = 2.0
"""A hello is said again until it is answered: it is lost with a connection that breaks."""
MAX_WAITING = 10_000
"""Frames for a rank that does not read: one that is this far behind is gone or stuck."""
MAX_FRAME_BYTES = 1 << 30
"""Members are trusted; this only keeps a mistake from filling the memory."""
MAX_HELLO_BYTES = 1 << 16
CLOSE_LINGER_MS = 1000
MEMBERSHIP = ("protocol", "config_hash", "epoch")


@dataclass(frozen=True)
class LinkAddress:
    node: str
    ipc: str
    tcp: str
    """Empty if all ranks stand on one node."""


class ListenLink:
    """The end that the other rank connects to. Invariant: from `await_hello` on, all that is sent
    and received is the peer's."""

    def __init__(
        self, context: Context, credentials: Credentials, name: str, host: str | None
    ) -> None:
        """Open the end for the rank `name`; host None if it stands on this node."""
        handshake = CurveHandshake(credentials.secret)
        socket = listening_socket(context, zmq.ROUTER, handshake, max_waiting=MAX_WAITING)
        socket.router_mandatory = True  # a peer that is gone is an error, and no silence
        # An abstract name leaves no file behind, whichever process is killed.
        ipc = f"ipc://@lockstep-{uuid4().hex}"
        socket.bind(ipc)
        tcp = "" if host is None else bind_tcp(socket, host)
        self.address = LinkAddress(link_node(), ipc, tcp)
        self.socket = socket
        self._name = name
        self._peer = b""
        self._greeting = b""

    def await_hello(self, ours: Hello, kind: type[H]) -> H:
        """Answer the hello of the rank and return it; a `FrameError` if it does not fit or come."""
        deadline = time.monotonic() + HELLO_TIMEOUT_S
        while (left_s := deadline - time.monotonic()) > 0:
            if not self.socket.poll(int(left_s * 1000) + 1):
                break
            sender, *parts = self.socket.recv_multipart()
            if (found := _hello_in(parts, ours, kind, self._name)) is None:
                continue
            self._peer, self._greeting = sender, b"".join(parts)
            # Answered before it is judged, so that the other side can tell what does not fit too.
            self.send(encode(ours))
            check_hello(found, ours)
            return found
        raise _no_hello(self._name)

    def send(self, body: bytes) -> None:
        """Send a frame; a `ConnectionError` names a rank that is gone."""
        try:
            self.socket.send_multipart([self._peer, *split(body)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # no such peer, or it is far behind
            raise _gone(self._name) from error

    def receive(self, flags: int = 0) -> bytes | None:
        """Return the next frame; None if there is none, or none before the socket's time-out."""
        while True:
            try:
                sender, *parts = self.socket.recv_multipart(flags)
            except zmq.Again:
                return None
            if sender != self._peer:
                log.warning("%s: dropped a frame of another process", self._name)
                continue
            body = join(parts, MAX_FRAME_BYTES)
            if body != self._greeting:  # which was said again before it was answered
                return body

    def close(self) -> None:
        self.socket.close(linger=CLOSE_LINGER_MS)


class ConnectLink:
    def __init__(
        self, context: Context, credentials: Credentials, name: str, address: LinkAddress
    ) -> None:
        """Connect to the rank `name`; a `ConnectionError` if only its own node can."""
        where = address.ipc if address.node == link_node() else address.tcp
        if not where:
            raise ConnectionError(f"{name}: wanted it on this node, found it on {address.node}")
        handshake = CurveHandshake(credentials.secret)
        self.socket = connecting_socket(context, zmq.DEALER, handshake, max_waiting=MAX_WAITING)
        connect_to(self.socket, where)
        self._name = name

    def greet(self, ours: Hello) -> None:
        self.send(encode(ours))

    def await_hello(self, ours: Hello, kind: type[H]) -> H:
        """Wait for the answer to `greet` and return it; arguments as of the other end's."""
        deadline = time.monotonic() + HELLO_TIMEOUT_S
        while time.monotonic() < deadline:
            if not self.socket.poll(int(HELLO_PERIOD_S * 1000)):
                self.greet(ours)
                continue
            parts = self.socket.recv_multipart()
            if (found := _hello_in(parts, ours, kind, self._name)) is not None:
                check_hello(found, ours)
                return found
        raise _no_hello(self._name)

    def send(self, body: bytes) -> None:
        """Send a frame; a `ConnectionError` if too many wait for the rank."""
        try:
            self.socket.send_multipart(split(body), zmq.NOBLOCK)
        except zmq.Again as error:
            raise _gone(self._name) from error

    def receive(self, flags: int = 0) -> bytes | None:
        try:
            return join(self.socket.recv_multipart(flags), MAX_FRAME_BYTES)
        except zmq.Again:
            return None

    def close(self) -> None:
        self.socket.close(linger=CLOSE_LINGER_MS)


def check_hello(
    found: Hello, wanted: Hello, fields: Sequence[str] = MEMBERSHIP, of: str = ""
) -> None:
    """Compare a member's hello with what it must say; an error names the field that differs."""
    for field in fields:
        ours, theirs = getattr(wanted, field), getattr(found, field)
        if ours != theirs:
            raise FrameError(f"{of}{field}: wanted {ours}, found {theirs}")


def _hello_in(parts: list[bytes], ours: Hello, kind: type[H], name: str) -> H | None:
    """Return the hello that came; None if it is none, or another group's."""
    try:
        found: H = decode(join(parts, MAX_HELLO_BYTES), kind)
    except FrameError as error:
        log.warning("%s: wanted its hello; %s", name, error)
        return None
    if found.nonce != ours.nonce:
        log.warning("%s: wanted its hello, found one of another group", name)
        return None
    return found


def _no_hello(name: str) -> FrameError:
    return FrameError(f"{name}: wanted a hello in {HELLO_TIMEOUT_S:g} s, found none")


def _gone(name: str) -> ConnectionError:
    return ConnectionError(f"{name}: wanted an open channel, found it gone")
