"""The ingress's token socket: where engines send what they produced, and its ways to them."""

from __future__ import annotations

import asyncio
import logging

import zmq
import zmq.asyncio

from cluster.wire.credentials import Credentials
from cluster.wire.messages import (
    MAX_ABORTS,
    Abort,
    EngineOutput,
    FrameError,
    OutputFrame,
    decode,
    encode,
)
from cluster.wire.sockets import (
    CurveHandshake,
    connecting_socket,
    end_context,
    listening_socket,
    pack,
)
from serve.event_loop import StreamBatcher, frames, has_waiting, loop_budget, yield_if_over_budget
from serve.pools.mailboxes import TokenMailboxes

log = logging.getLogger("lockstep.tokens")

MAX_WAITING = 256
"""Frames of one engine, and aborts for one, that wait here; more wait in the engine."""
MAX_FRAME_BYTES = 1 << 30
"""Size of a frame: one request's outputs may hold log-probabilities of a million prompt tokens."""


class TokenSocket:
    """Receives frames of all engines; `EngineLinks` of its `mailboxes`.

    Must be created inside the event loop that uses it. `task` ends only with an error: without it
    no output arrives.
    """

    def __init__(self, host: str, credentials: Credentials, tick: StreamBatcher) -> None:
        self._context = zmq.asyncio.Context()
        self._credentials = credentials
        self._handshake = CurveHandshake(credentials.secret)
        self._socket = listening_socket(
            self._context, zmq.PULL, self._handshake, max_waiting=MAX_WAITING
        )
        address = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"
        self.mailboxes = TokenMailboxes(address, self, tick)
        self._engines: dict[str, zmq.asyncio.Socket] = {}
        self._is_empty = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._receive())

    def send_aborts(self, inbox: str, request_ids: list[str]) -> None:
        try:
            socket = self._engines.get(inbox) or self._connect(inbox)
            for i in range(0, len(request_ids), MAX_ABORTS):
                body = encode(Abort(request_ids[i : i + MAX_ABORTS]))
                socket.send_multipart(pack(body, self._credentials))
        except zmq.ZMQError as error:  # the other engines hear of theirs
            log.error("tokens: %s cannot be told of aborts: %s", inbox, error)

    def _connect(self, inbox: str) -> zmq.asyncio.Socket:
        socket = connecting_socket(
            self._context, zmq.PUSH, self._handshake, max_waiting=MAX_WAITING
        )
        socket.connect(inbox)
        self._engines[inbox] = socket
        return socket

    def forget(self, inbox: str) -> None:
        if (socket := self._engines.pop(inbox, None)) is not None:
            socket.close(linger=0)

    async def caught_up(self) -> None:
        await asyncio.sleep(0)  # for one that was received and not dealt with
        if has_waiting(self._socket):
            self._is_empty.clear()
        await self._is_empty.wait()

    def shutdown(self) -> None:
        """Stop receiving and close all sockets."""
        self.task.cancel()
        for socket in (self._socket, *self._engines.values()):
            socket.close(linger=100)
        end_context(self._context, "tokens")

    async def _receive(self) -> None:
        budget = loop_budget()
        bodies = frames(
            self._socket,
            self._credentials,
            budget,
            max_bytes=MAX_FRAME_BYTES,
            is_empty=self._is_empty,
        )
        async for body in bodies:
            try:
                frame: OutputFrame = decode(body, OutputFrame)
                self.mailboxes.begin_frame(frame.engine_id, frame.epoch, frame.inbox)
                for output in frame.outputs:
                    self.mailboxes.deliver(frame.inbox, decode(output, EngineOutput))
                    await yield_if_over_budget(budget)
            except FrameError as error:
                log.error("tokens: dropped a frame: %s", error)
