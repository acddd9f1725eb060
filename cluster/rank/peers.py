"""The sockets between the data-parallel leaders of a group: one ZeroMQ pair for every two.

A leader opens an end for each later rank before it loads, and goes to the ends that earlier ranks
have opened for it; over a Unix socket on a node, over TCP between nodes. All open with protocol
version, configuration hash and epoch, when they are ready to step.

The one thing to know: a vote goes to all others directly. That is one hop, where a rank that
collected them would make it two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

from cluster.lockstep_messages import PeerHello, ToPeer
from cluster.messages import FrameError, decode, encode
from cluster.rank.channel import (
    CLOSE_LINGER_MS,
    HELLO_TIMEOUT_S,
    ChannelAddress,
    Context,
    bind_pair,
    check_hello,
    connect_pair,
    open_pair,
)

SILENCE_TIMEOUT_S = 60.0
"""The last resort against a peer that hangs: as long as a collective waits. No step is longer."""


class PeerSockets:
    """One leader's ends. Everything but `addresses` belongs to the step thread.

    Invariant: `addresses[i]` is where rank dp_rank + 1 + i finds this one.
    """

    def __init__(self, context: Context, *, dp_rank: int, dp_size: int, host: str) -> None:
        self._dp_rank = dp_rank
        self._sockets = {rank: open_pair(context) for rank in range(dp_size) if rank != dp_rank}
        later = range(dp_rank + 1, dp_size)
        self.addresses = tuple(bind_pair(self._sockets[rank], host) for rank in later)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What polls readable when a peer has voted."""
        return list(self._sockets.values())

    def open(self, earlier: Sequence[ChannelAddress], hello: PeerHello) -> None:
        """Go to the earlier ranks, greet all peers and check their answers.

        Args:
            earlier: where ranks 0, 1, ... before this one wait for it.

        Raises:
            FrameError: a peer of another deployment, place or set of graphs, or none in time.
        """
        for rank, address in enumerate(earlier):
            connect_pair(self._sockets[rank], address)
            self._sockets[rank].send(encode(hello))
        # An open end has nobody to send to before the other side came: that one speaks first.
        for rank in sorted(self._sockets, reverse=True):
            found = self._receive_hello(rank)
            if rank > self._dp_rank:
                # Answered before it is judged: the other side can tell as well what does not fit.
                self._sockets[rank].send(encode(hello))
            _check_peer(rank, found, hello)
            self._sockets[rank].rcvtimeo = int(SILENCE_TIMEOUT_S * 1000)

    def send(self, body: bytes) -> None:
        """Send a frame to every peer.

        Raises:
            ConnectionError: a peer is gone.
        """
        for rank, socket in self._sockets.items():
            try:
                socket.send(body, zmq.NOBLOCK)
            except zmq.Again:
                # Queues have no bound, so only a peer that is gone refuses.
                raise ConnectionError(
                    f"leader dp={rank}: wanted an open connection, found it gone"
                ) from None

    def receive(self, dp_rank: int) -> bytes | None:
        """Wait for the next frame of a peer; None if there is none in `SILENCE_TIMEOUT_S`."""
        try:
            return self._sockets[dp_rank].recv()
        except zmq.Again:
            return None

    def close(self) -> None:
        """Close all ends; what was sent still leaves."""
        for socket in self._sockets.values():
            socket.close(linger=CLOSE_LINGER_MS)

    def _receive_hello(self, dp_rank: int) -> Any:
        socket = self._sockets[dp_rank]
        if not socket.poll(int(HELLO_TIMEOUT_S * 1000)):
            raise FrameError(
                f"leader dp={dp_rank}: wanted a hello in {HELLO_TIMEOUT_S:g} s, found none"
            )
        return decode(socket.recv(), ToPeer)


def _check_peer(dp_rank: int, found: Any, ours: PeerHello) -> None:
    """Compare a peer's hello with what it should be beside ours."""
    check_hello(found, ours)
    wanted = {"dp_rank": dp_rank, "dp_size": ours.dp_size, "graphs": ours.graphs}
    for field, value in wanted.items():
        if getattr(found, field) != value:
            raise FrameError(
                f"leader dp={dp_rank}: {field}: wanted {value}, found {getattr(found, field)}"
            )
