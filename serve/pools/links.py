"""`LeaderLinks`: the connections of one ingress to leaders, over ZeroMQ.

Each is one socket, which connects once. libzmq's own threads exchange heartbeats four times a
second: a process that is killed ends its connections at once, one that is stopped or unreachable
within `SILENT_S`, and one that is busy does not.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from cluster.wire.credentials import Credentials
from cluster.wire.messages import EngineOutput, FrameError, OutputFrame, decode
from cluster.wire.sockets import CurveHandshake, connecting_socket, end_context, join, pack
from serve.event_loop import loop_budget, yield_if_over_budget
from serve.pools.directory import Connection, Leader

log = logging.getLogger("lockstep.links")

MAX_WAITING = 256
"""Frames of one leader that wait here, and frames for one; more wait where they are made."""
MAX_FRAME_BYTES = 1 << 30
"""Size of a frame: one request's outputs may hold log-probabilities of a million prompt tokens."""
HEARTBEAT_MS = 250
SILENT_S = 1.0
"""A leader whose heartbeats have not been answered for so long is lost."""
LINGER_MS = 100
_ENDS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class LeaderLinks:
    """Must be made in the event loop that uses it."""

    def __init__(self, credentials: Credentials) -> None:
        self._context = zmq.asyncio.Context()
        self._credentials = credentials
        self._handshake = CurveHandshake(credentials.secret)
        self._budget = loop_budget()
        """One for all connections: the event loop has its turn after what all have brought."""

    def connect(self, inbox: str, leader: Leader) -> Connection:
        socket = connecting_socket(
            self._context, zmq.DEALER, self._handshake, max_waiting=MAX_WAITING
        )
        socket.heartbeat_ivl = HEARTBEAT_MS
        socket.heartbeat_timeout = int(SILENT_S * 1000)
        socket.heartbeat_ttl = int(2 * SILENT_S * 1000)  # after which the leader takes us for gone
        socket.connect_timeout = int(SILENT_S * 1000)
        socket.reconnect_ivl = -1
        return _Link(socket, inbox, leader, self._credentials, self._receive)

    async def _receive(self, socket: zmq.asyncio.Socket, leader: Leader) -> None:
        while True:
            body = join(await socket.recv_multipart(), MAX_FRAME_BYTES)
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
        socket: zmq.asyncio.Socket,
        inbox: str,
        leader: Leader,
        credentials: Credentials,
        receive: Any,
    ) -> None:
        self._socket = socket
        self._credentials = credentials
        self._monitor = socket.get_monitor_socket(_ENDS)
        socket.connect(inbox)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._until_end(receive(socket, leader), leader)),
            loop.create_task(self._until_end(self._watch(), leader)),
        ]

    def send(self, body: bytes) -> None:
        if not self._socket.closed:
            self._socket.send_multipart(pack(body, self._credentials))

    def close(self) -> None:
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=LINGER_MS)

    async def _watch(self) -> None:
        await recv_monitor_message(self._monitor)
        raise ConnectionError("its connection ended")

    async def _until_end(self, work: Any, leader: Leader) -> None:
        try:
            await work
        except (FrameError, ConnectionError) as error:
            leader.on_end(str(error))
        except Exception as error:  # whatever it is, no request may hang
            log.exception("%s: its connection is given up", leader)
            leader.on_end(repr(error))
