"""The rendezvous of a group: how its ranks find each other before any of them has loaded.

1. Each leader opens its `LeaderEndpoints`: the step channel to its followers and the ends for later
   leaders. The first leader opens a listening socket for the group's store as well.
2. Its `Rendezvous` travels to the owner, which lets all leaders know each other (`introduce`) and
   tells every rank where to go.
3. All ranks load and join process groups through the one store; then followers greet their leader
   through the channel, and leaders one another.

Opening costs milliseconds and no torch, so that all ranks import and load at the same time.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

import zmq

from cluster.group.channel import PeerSockets, StepSender
from cluster.group.context import LOOPBACK, RankContext
from cluster.group.links import LinkAddress
from cluster.wire.credentials import Credentials
from cluster.wire.group_messages import LeaderHello
from cluster.wire.messages import PROTOCOL_VERSION


@dataclass(frozen=True)
class Rendezvous:
    """What the ranks under one leader must know to find their group. `introduce` fills in the first
    leader's store and nonce, and `earlier`."""

    store_host: str
    store_port: int
    nonce: str
    """Random. Hellos show it; a process that does not know it is not of this group, though it may
    have the port of a leader that died."""
    channels: tuple[LinkAddress, ...]
    """Of tensor-parallel ranks 1, 2, ..."""
    later: tuple[LinkAddress, ...] = ()
    """Where this leader waits for those of later data-parallel ranks."""
    earlier: tuple[LinkAddress, ...] = ()
    """Where leaders of data-parallel ranks 0, 1, ... wait for this one."""

    def hello(self, credentials: Credentials, epoch: int) -> LeaderHello:
        """Return the hello of a leader with this rendezvous; the group's store starts with it."""
        return LeaderHello(PROTOCOL_VERSION, credentials.config_hash, epoch, self.nonce)

    def host_of(self, host: str) -> str:
        return LOOPBACK if self.store_host == LOOPBACK else host


def introduce(offers: Sequence[Rendezvous]) -> list[Rendezvous]:
    """Return by dp_rank what the ranks under each leader must know of what leaders opened."""
    first = offers[0]
    return [
        replace(
            offer,
            store_host=first.store_host,
            store_port=first.store_port,
            nonce=first.nonce,
            earlier=tuple(offers[rank].later[dp_rank - rank - 1] for rank in range(dp_rank)),
        )
        for dp_rank, offer in enumerate(offers)
    ]


class LeaderEndpoints:
    """A leader's open ends, within the node if all ranks are on one. Invariant: a group of one rank
    has no listener, no rendezvous, no channel and no peers."""

    def __init__(self, context: RankContext) -> None:
        self.sockets: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.channel: StepSender | None = None
        self.peers: PeerSockets | None = None
        self.listener: socket.socket | None = None
        self.rendezvous: Rendezvous | None = None
        tp_size = context.config.parallel.tensor_parallel_size
        dp_rank, dp_size = context.lockstep_place
        outside = None if context.is_on_one_node else context.host
        if tp_size > 1:
            self.channel = StepSender(
                self.sockets,
                tp_size - 1,
                host=outside,
                credentials=context.credentials,
                is_overlapped=context.config.overlap,
            )
        if dp_size > 1:
            self.peers = PeerSockets(
                self.sockets,
                dp_rank=dp_rank,
                dp_size=dp_size,
                host=outside,
                credentials=context.credentials,
            )
        if tp_size * dp_size > 1:
            host, port = outside or LOOPBACK, 0
            if dp_rank == 0:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                self.listener = socket.create_server((host, 0), family=family)
                port = self.listener.getsockname()[1]
            channels = self.channel.addresses if self.channel is not None else ()
            later = self.peers.addresses if self.peers is not None else ()
            self.rendezvous = Rendezvous(host, port, secrets.token_hex(16), tuple(channels), later)
