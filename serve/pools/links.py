"""`LeaderLinks`: the connections of one ingress to leaders, over ZeroMQ.

Each is two sockets that connect once, and ends with either. Frames go over one. Over the other,
libzmq's own threads exchange heartbeats four times a second: a process that is killed ends its
connections at once, one that is stopped or unreachable within `SILENT_S`, and one that is busy does
not. Heartbeats need a socket of their own, since they wait behind frames that nobody takes: as many
submissions as an inbox holds, sent during one long step, would silence a leader.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from cluster.wire.credentials import Credentials
from cluster.wire.messages import GIVEN_UP, EngineOutput, FrameError, OutputFrame, decode
from cluster.wire.sockets import (
    CONNECTION_ENDS,
    CurveHandshake,
    connect_to,
    connecting_socket,
    end_context,
    join,
    pack,
)
from serve.event_loop import loop_budget, yield_if_over_budget
from serve.pools.directory import ConnectedLeader, Connection

log = logging.getLogger("lockstep.links")

MAX_WAITING = 256
"""Frames of one leader that wait here, and frames for one; more wait where they are made."""
MAX_FRAME_BYTES = 1 << 30
"""Size of a frame: one request's outputs may hold log-probabilities of a million prompt tokens."""
HEARTBEAT_MS = 250
SILENT_S = 1.0
"""A leader whose heartbeats have not been answered for so long is lost."""
LINGER_MS = 100
MAX_SOCKETS = 4096
"""Of the context; a connection takes six, with the monitors of its two."""


class LeaderLinks:
    """Must be made in the event loop that uses it."""

    def __init__(self, credentials: Credentials) -> None:
        self._context = zmq.asyncio.Context()
        self._context.max_sockets = MAX_SOCKETS
        self._credentials = credentials
        self._handshake = CurveHandshake(credentials.secret)
        self._budget = loop_budget()
        """One for all connections: the event loop has its turn after what all have brought."""

    def connect(self, inbox: str, leader: ConnectedLeader) -> Connection:
        frames, pulse = self._socket(), self._socket()
        pulse.heartbeat_ivl = HEARTBEAT_MS
        pulse.heartbeat_timeout = int(SILENT_S * 1000)
        return _Link(frames, pulse, inbox, leader, self._credentials, self._receive)

    def _socket(self) -> zmq.asyncio.Socket:
        socket = connecting_socket(
            self._context, zmq.DEALER, self._handshake, max_waiting=MAX_WAITING
        )
        socket.connect_timeout = int(SILENT_S * 1000)
        socket.reconnect_ivl = -1
        socket.linger = LINGER_MS  # from the start: ZeroMQ may end a broken connection before us
        return socket

    async def _receive(self, socket: zmq.asyncio.Socket, leader: ConnectedLeader) -> None:
        while True:
            body = join(await socket.recv_multipart(), MAX_FRAME_BYTES)
            if body == GIVEN_UP:
                raise ConnectionError("it ended the connection, since nobody read here")
            frame: OutputFrame = decode(body, OutputFrame)
            leader.on_welcome()
            for output in frame.outputs:
                leader.deliver(decode(output, EngineOutput))
                await yield_if_over_budget(self._budget)
            await yield_if_over_budget(self._budget)

    def shutdown(self) -> None:
        """End the connections that their leaders have not closed."""
        end_context(self._context, "links", linger=LINGER_MS)


class _Link:
    def __init__(
        self,
        frames: zmq.asyncio.Socket,
        pulse: zmq.asyncio.Socket,
        inbox: str,
        leader: ConnectedLeader,
        credentials: Credentials,
        receive: Callable[[zmq.asyncio.Socket, ConnectedLeader], Coroutine[Any, Any, None]],
    ) -> None:
        self._frames = frames
        self._credentials = credentials
        self._monitors = {
            socket: socket.get_monitor_socket(CONNECTION_ENDS) for socket in (frames, pulse)
        }
        for socket in self._monitors:
            connect_to(socket, inbox)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._until_end(work, leader))
            for work in (
                partial(receive, frames, leader),
                *(partial(_until_disconnected, each) for each in self._monitors.values()),
            )
        ]

    def send(self, body: bytes) -> None:
        if not self._frames.closed:
            self._frames.send_multipart(pack(body, self._credentials))

    def close(self) -> None:
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if not self._frames.closed:
            for socket, monitor in self._monitors.items():
                socket.disable_monitor()
                monitor.close(linger=0)
                socket.close()

    async def _until_end(
        self, work: Callable[[], Coroutine[Any, Any, None]], leader: ConnectedLeader
    ) -> None:
        try:
            await work()
        except (FrameError, ConnectionError) as error:
            leader.on_end(str(error))
        except Exception as error:  # whatever it is, no request may hang
            log.exception("%s: its connection is given up", leader)
            leader.on_end(repr(error))


async def _until_disconnected(monitor: zmq.asyncio.Socket) -> None:
    await recv_monitor_message(monitor)
    raise ConnectionError("its connection ended")
