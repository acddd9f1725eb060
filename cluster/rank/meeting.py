"""Where the ranks of a group meet before any of them has loaded.

1. Each leader opens a `Meeting`: the step channel to its followers and the ends for later leaders.
   The first leader opens a listening socket for the group's store as well.
2. Its `Rendezvous` travels to the owner, who lets all leaders know each other (`introduce`) and
   tells every rank where to go.
3. All ranks load, join process groups through the one store, followers greet their leader through
   the channel, and leaders one another.

The one thing to know: opening costs milliseconds and no torch, so that all ranks import and load
at the same time.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

import zmq

from cluster.channel_messages import LeaderHello
from cluster.config import EngineConfig
from cluster.messages import PROTOCOL_VERSION
from cluster.rank.channel import ChannelAddress, NoFollowers, StepSender
from cluster.rank.peers import PeerSockets


@dataclass(frozen=True)
class Rendezvous:
    """What the ranks under one leader must be told to find their group.

    A leader of a later data-parallel rank opens no store: `introduce` fills in that of the first,
    and `earlier`.
    """

    store_host: str
    store_port: int
    channels: tuple[ChannelAddress, ...]
    """Of tensor-parallel ranks 1, 2, ..."""
    later: tuple[ChannelAddress, ...] = ()
    """Where this leader waits for those of later data-parallel ranks."""
    earlier: tuple[ChannelAddress, ...] = ()
    """Where leaders of data-parallel ranks 0, 1, ... wait for this one."""


def introduce(offers: Sequence[Rendezvous]) -> list[Rendezvous]:
    """Return what the ranks under each leader must be told, of what leaders opened, by dp_rank."""
    first = offers[0]
    return [
        replace(
            offer,
            store_host=first.store_host,
            store_port=first.store_port,
            earlier=tuple(offers[rank].later[dp_rank - rank - 1] for rank in range(dp_rank)),
        )
        for dp_rank, offer in enumerate(offers)
    ]


class Meeting:
    """A leader's open ends: sockets and their context, and the listener of the group's store.

    Invariant: a group of one rank has no listener, no rendezvous, no followers and no peers.
    """

    def __init__(
        self, config: EngineConfig, *, host: str, config_hash: str, epoch: int, dp_rank: int = 0
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.host = host
        self.hello = LeaderHello(PROTOCOL_VERSION, config_hash, epoch)
        self.channel: StepSender | NoFollowers = NoFollowers()
        self.peers: PeerSockets | None = None
        self.listener: socket.socket | None = None
        self.rendezvous: Rendezvous | None = None
        parallel = config.parallel
        dp_size = parallel.lockstep_size
        if parallel.tensor_parallel_size > 1:
            self.channel = StepSender(
                self.context,
                parallel.tensor_parallel_size - 1,
                host=host,
                config_hash=config_hash,
                epoch=epoch,
            )
        if dp_size > 1:
            self.peers = PeerSockets(self.context, dp_rank=dp_rank, dp_size=dp_size, host=host)
        if parallel.tensor_parallel_size * dp_size > 1:
            self.rendezvous = self._open(is_first=dp_rank == 0 or dp_size == 1)

    def _open(self, *, is_first: bool) -> Rendezvous:
        port = 0
        if is_first:
            self.listener = socket.create_server((self.host, 0))
            port = self.listener.getsockname()[1]
        channels = () if isinstance(self.channel, NoFollowers) else self.channel.addresses
        later = self.peers.addresses if self.peers is not None else ()
        return Rendezvous(self.host, port, tuple(channels), later)
