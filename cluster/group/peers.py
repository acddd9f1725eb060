"""The channel between data-parallel leaders: a link for every two of them.

A leader opens an end for each later rank before it loads, and connects to the ends that earlier
ranks have opened for it. A vote goes to all others directly, which is one hop; a rank that
collected them would make it two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import zmq
from msgspec.structs import replace

from cluster.group.links import ConnectLink, Context, LinkAddress, ListenLink, check_hello
from cluster.wire.credentials import Credentials
from cluster.wire.group_messages import PeerHello

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
            rank: ListenLink(context, credentials, _name(rank), host)
            for rank in range(dp_rank + 1, dp_size)
        }
        self._links: dict[int, ListenLink | ConnectLink] = {}
        self.addresses = tuple(link.address for link in self._later.values())

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What polls readable when a peer has voted."""
        return [link.socket for link in self._links.values()]

    def open(
        self, earlier: Sequence[LinkAddress], hello: PeerHello, waiting: Callable[[str], None]
    ) -> None:
        """Go to the earlier ranks, greet all peers and check their answers.

        Args:
            earlier: where ranks 0, 1, ... before this one wait for it.
            hello: ours.

        Raises:
            FrameError: a peer of another deployment, place or set of graphs, or none in time.
        """
        going = {
            rank: ConnectLink(self._context, self._credentials, _name(rank), address)
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
            theirs = replace(hello, dp_rank=rank)
            found = link.await_hello(hello, PeerHello)
            check_hello(found, theirs, ("dp_rank", "dp_size", "graphs"), f"{_name(rank)}: ")
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


def _name(dp_rank: int) -> str:
    return f"leader dp={dp_rank}"
