"""Every ZeroMQ socket is made here, with its bounds and with the lock that keeps strangers out.

Sockets listen where any process of the network may connect, and only processes of the application
can finish a handshake:

- CURVE encrypts and authenticates everything. All processes share one key pair, made from the
  application's secret. A client's first command is encrypted to the public key, which is never
  published: without the secret a peer cannot even say hello, so no authenticator (ZAP) is needed.
- KV, whose bytes would travel at a third of the speed, has a door of its own
  (`kv/transport/proofs.py`).

ZeroMQ counts whole messages and bounds single parts: one message of endless parts from a peer that
was let in fills the memory. Of a connection that has not finished its handshake it holds one part,
and no longer than `HANDSHAKE_S`.

A frame that is longer than a part travels as a message of several (`split`, `join`), of which
ZeroMQ delivers all parts or none. A message to a socket that many may send to starts with the
header.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import zmq
from zmq.utils import z85

from cluster.wire.credentials import Credentials
from cluster.wire.messages import FrameError

MAX_PART_BYTES = 1 << 16
"""What a stranger's connection may cost. Longer frames travel in parts."""
ENVELOPE_BYTES = 64
HANDSHAKE_S = 5.0
"""From a connection to the end of its handshake: milliseconds, unless a machine swaps."""
KEEPALIVE_S, KEEPALIVE_TIMES = 10, 3
"""An idle connection between nodes is probed this often, and given up after this many failures."""
CONNECTION_ENDS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""What a monitor tells when a connection is refused or lost: what was sent may never arrive."""

S = TypeVar("S", bound=zmq.Socket[Any])
log = logging.getLogger(__name__)
END_TIMEOUT_S = 3.0
"""Longer than any socket here lingers."""
Part = bytes | memoryview


class Handshake(Protocol):
    """How the two ends of a connection find out that both belong to the application."""

    def demand(self, socket: zmq.Socket[Any]) -> None:
        """Let in only peers that can finish it. Call it before the socket is bound."""

    def offer(self, socket: zmq.Socket[Any]) -> None: ...


class CurveHandshake:
    """ZeroMQ's CURVE with one key pair for all, made from the application's secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret_key = z85.encode(secret)
        self._public_key = zmq.curve_public(self._secret_key)

    def demand(self, socket: zmq.Socket[Any]) -> None:
        socket.curve_server = True
        socket.curve_secretkey = self._secret_key

    def offer(self, socket: zmq.Socket[Any]) -> None:
        socket.curve_serverkey = socket.curve_publickey = self._public_key
        socket.curve_secretkey = self._secret_key


def listening_socket(
    context: zmq.Context[S], kind: int, handshake: Handshake, *, max_waiting: int
) -> S:
    """Return a socket to bind; so many messages wait for each peer, either way."""
    socket = _bounded(context, kind, max_waiting, MAX_PART_BYTES)
    handshake.demand(socket)
    return socket


def connecting_socket(
    context: zmq.Context[S],
    kind: int,
    handshake: Handshake,
    *,
    max_waiting: int,
    max_part_bytes: int = MAX_PART_BYTES,
) -> S:
    socket = _bounded(context, kind, max_waiting, max_part_bytes)
    handshake.offer(socket)
    return socket


def bind_tcp(socket: zmq.Socket[Any], host: str) -> str:
    """Bind to any free port of an IPv4 or IPv6 address; return the endpoint to connect to."""
    if is_ipv6 := ":" in host:
        socket.ipv6 = True
    base = f"tcp://[{host}]" if is_ipv6 else f"tcp://{host}"
    return f"{base}:{socket.bind_to_random_port(base)}"


def connect_to(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Connect to what `bind_tcp` returned on some node, or to an endpoint of this one."""
    if endpoint.startswith("tcp://["):
        socket.ipv6 = True
    socket.connect(endpoint)


def inner_socket(context: zmq.Context[S], kind: int) -> S:
    return context.socket(kind)


def _bounded(context: zmq.Context[S], kind: int, max_waiting: int, max_part_bytes: int) -> S:
    socket = context.socket(kind)
    socket.sndhwm = socket.rcvhwm = max_waiting
    socket.maxmsgsize = max_part_bytes + ENVELOPE_BYTES
    socket.handshake_ivl = int(HANDSHAKE_S * 1000)
    # Firewalls forget idle connections, and a node that is gone says nothing: what is sent would be
    # lost for the quarter of an hour until the kernel gives up.
    socket.tcp_keepalive, socket.tcp_keepalive_cnt = 1, KEEPALIVE_TIMES
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = KEEPALIVE_S
    socket.tcp_maxrt = KEEPALIVE_S * KEEPALIVE_TIMES * 1000  # of bytes that are not acknowledged
    return socket


def end_context(
    context: zmq.Context[Any],
    owner: str,
    *,
    linger: int | None = None,
    timeout_s: float = END_TIMEOUT_S,
) -> bool:
    """End `context`, closing open sockets with `linger` in ms; return whether that was done in
    time. libzmq 4.3.5 hangs about once in a thousand times when the peer closes its end in the same
    moment: what does not end in `timeout_s` is left to the end of the process."""
    ending = threading.Thread(
        target=context.destroy, args=(linger,), name=f"end of {owner}", daemon=True
    )
    ending.start()
    ending.join(timeout_s)
    if ending.is_alive():
        log.warning("%s: sockets have not ended in %g s; they are left", owner, timeout_s)
    return not ending.is_alive()


def split(body: bytes) -> Sequence[Part]:
    if len(body) <= MAX_PART_BYTES:
        return (body,)
    view = memoryview(body)
    return [view[i : i + MAX_PART_BYTES] for i in range(0, len(body), MAX_PART_BYTES)]


def join(parts: Sequence[bytes], max_bytes: int) -> bytes:
    """Return the frame that came in these parts; refuse one that is longer than `max_bytes`."""
    if len(parts) == 1:
        return parts[0]
    if (found := sum(map(len, parts))) > max_bytes:
        raise FrameError(f"frame: wanted at most {max_bytes} bytes, found {found}")
    return b"".join(parts)


def pack(body: bytes, credentials: Credentials) -> Sequence[Part]:
    """Return the message that brings a frame to a socket that many may send to."""
    return (credentials.header, *split(body))


def unpack(message: Sequence[bytes], credentials: Credentials, max_bytes: int) -> bytes:
    """Return the frame of a message; refuse another deployment's, or one that is too long."""
    header, *parts = message
    credentials.check(header)
    if not parts:
        raise FrameError("message: wanted a header and a frame, found a header")
    return join(parts, max_bytes)


class Doorbell:
    """Any thread rings, one poller wakes: readable from a ring until it is cleared."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class Budget:
    """What a receive loop may take: a number of frames, and a time from the first one on."""

    def __init__(
        self, max_frames: int, max_s: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._max_frames = max_frames
        self._max_s = max_s
        self._clock = clock
        self.renew()

    def take(self) -> bool:
        """Count a frame; return whether the budget allows it. It always allows the first."""
        self._num_frames += 1
        if self._num_frames == 1:
            self._ends_at = self._clock() + self._max_s
            return True
        return self._num_frames <= self._max_frames and self._clock() < self._ends_at

    def renew(self) -> None:
        self._num_frames = 0
        self._ends_at = 0.0


def node_id() -> str:
    """Return what two processes share exactly when one can open the other's /proc entries. The boot
    id alone is the same in two containers that do not see each other's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def link_node() -> str:
    """Return what two processes share exactly when Unix sockets connect them."""
    return f"{node_id()}/{os.readlink('/proc/self/ns/net')}"
