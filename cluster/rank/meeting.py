"""Where the ranks of a group meet before any of them has loaded.

1. The leader opens a `Meeting`: a listening socket for the group's store and the step channel.
2. Its `Rendezvous` travels to the followers in the owner's actor calls.
3. All ranks load, join the process group through the store, and the followers greet the leader
   through the channel.

The one thing to know: opening costs milliseconds and no torch, so that all ranks import and load
at the same time.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

import zmq

from cluster.config import EngineConfig
from cluster.rank.channel import ChannelAddress, NoFollowers, StepSender


@dataclass(frozen=True)
class Rendezvous:
    """What a follower must be told to find its leader."""

    store_host: str
    store_port: int
    channels: tuple[ChannelAddress, ...]
    """Of tensor-parallel ranks 1, 2, ..."""


class Meeting:
    """A leader's open ends: its sockets' context, the listener of the store, the step channel.

    Invariant: a group of one rank has no listener, no rendezvous and no followers.
    """

    def __init__(self, config: EngineConfig, *, host: str, config_hash: str, epoch: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.channel: StepSender | NoFollowers = NoFollowers()
        self.listener: socket.socket | None = None
        self.rendezvous: Rendezvous | None = None
        num_followers = config.parallel.tensor_parallel_size - 1
        if num_followers:
            channel = self.channel = StepSender(
                self.context, num_followers, host=host, config_hash=config_hash, epoch=epoch
            )
            self.listener = socket.create_server((host, 0))
            port: int = self.listener.getsockname()[1]
            self.rendezvous = Rendezvous(host, port, tuple(channel.addresses))
