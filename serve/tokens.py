"""The ingress's token socket: where engines send what they produced.

Engines connect and push one frame per step; the socket sorts the outputs into one mailbox per
request. A mailbox also knows which engines have spoken for its request, so that an abort reaches
them directly, in one frame for all requests that are aborted together.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque

import zmq
import zmq.asyncio

from cluster.messages import (
    Abort,
    EngineOutput,
    FrameError,
    OutputFrame,
    check_header,
    decode,
    encode,
)
from cluster.rank.contexts import end_context
from cluster.rank.sockets import keep_alive

log = logging.getLogger("lockstep.tokens")


HEARD_LATELY_S = 5.0
"""An engine that has been silent for longer runs nothing of this ingress."""
FORGET_AFTER_S = 600.0
"""One that has been silent for longer is gone, or is connected to again when it speaks."""


class Mailbox:
    """One request's outputs that nobody has taken yet, in order."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.inboxes: list[str] = []
        self.num_ends = 0
        """Stages whose last output has come."""
        self._waiting: deque[EngineOutput] = deque()
        self._event = asyncio.Event()

    def put(self, output: EngineOutput, inbox: str = "") -> None:
        """Add an output; `inbox` is the engine's address."""
        if inbox and inbox not in self.inboxes:
            self.inboxes.append(inbox)
        self.num_ends += bool(output.finish_reason)
        self._waiting.append(output)
        self._event.set()

    async def get(self) -> EngineOutput:
        """Return the next output, waiting for it."""
        while not self._waiting:
            self._event.clear()
            await self._event.wait()
        return self._waiting.popleft()


class TokenSocket:
    """Receives frames of all engines and hands their outputs to mailboxes.

    Must be created inside the event loop that uses it. `task` ends only with an error: without it
    no output arrives.
    """

    def __init__(self, host: str, header: bytes) -> None:
        self._context = zmq.asyncio.Context()
        self._header = header
        self._socket = self._context.socket(zmq.PULL)
        self._socket.rcvhwm = 0
        keep_alive(self._socket)
        self.address = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"
        self._mailboxes: dict[str, Mailbox] = {}
        self._aborts: defaultdict[str, list[str]] = defaultdict(list)
        self._engines: dict[str, zmq.asyncio.Socket] = {}
        self._heard_at: dict[str, float] = {}
        """By inbox of an engine's newest epoch."""
        self._newest: dict[str, tuple[int, str]] = {}
        """By engine: its newest epoch and that one's inbox."""
        self.task = asyncio.get_running_loop().create_task(self._receive())

    def open(self, request_id: str) -> Mailbox:
        """Return a new mailbox for a request."""
        mailbox = self._mailboxes[request_id] = Mailbox(request_id)
        return mailbox

    def close(self, mailbox: Mailbox) -> None:
        """Drop the mailbox; what still arrives for it is dropped too, and its engine told so."""
        self._mailboxes.pop(mailbox.request_id, None)

    def abort(self, mailbox: Mailbox) -> None:
        """Tell every engine that may have the request to drop it.

        Those that have spoken for it, and those that have spoken lately for any: it may be on its
        way to one of them, which then remembers the abort.
        """
        now = asyncio.get_running_loop().time()
        spoken = [inbox for inbox in mailbox.inboxes if inbox in self._heard_at]
        lately = [inbox for inbox, at in self._heard_at.items() if now - at < HEARD_LATELY_S]
        for inbox in dict.fromkeys([*spoken, *lately]):
            self._abort_at(inbox, mailbox.request_id)

    def _abort_at(self, inbox: str, request_id: str) -> None:
        if not self._aborts:
            asyncio.get_running_loop().call_soon(self._send_aborts)
        self._aborts[inbox].append(request_id)

    def shutdown(self) -> None:
        """Stop receiving and close all sockets."""
        self.task.cancel()
        for socket in (self._socket, *self._engines.values()):
            socket.close(linger=100)
        end_context(self._context, "tokens")

    def _send_aborts(self) -> None:
        aborts, self._aborts = self._aborts, defaultdict(list)
        for inbox, request_ids in aborts.items():
            try:
                socket = self._engines.get(inbox) or self._connect(inbox)
                socket.send_multipart([self._header, encode(Abort(request_ids))])
            except zmq.ZMQError as error:  # the other engines hear of theirs
                log.error("tokens: %s cannot be told of aborts: %s", inbox, error)

    def _connect(self, inbox: str) -> zmq.asyncio.Socket:
        self._forget_the_silent()
        socket = self._context.socket(zmq.PUSH)
        keep_alive(socket)
        socket.connect(inbox)
        self._engines[inbox] = socket
        return socket

    def _forget_the_silent(self) -> None:
        """Let go of engines that have not spoken for long: those of replaced replicas never do."""
        now = asyncio.get_running_loop().time()
        for inbox in [i for i, at in self._heard_at.items() if now - at > FORGET_AFTER_S]:
            self._forget(inbox)
        self._newest = {
            engine: newest for engine, newest in self._newest.items() if newest[1] in self._heard_at
        }

    def _forget(self, inbox: str) -> None:
        self._heard_at.pop(inbox, None)
        self._aborts.pop(inbox, None)
        if (socket := self._engines.pop(inbox, None)) is not None:
            socket.close(linger=0)

    async def _receive(self) -> None:
        while True:
            parts = await self._socket.recv_multipart()
            try:
                header, body = parts
                check_header(header, self._header)
                frame: OutputFrame = decode(body, OutputFrame)
                self._check_epoch(frame)
                self._deliver(frame)
            except (FrameError, ValueError) as error:
                log.error("tokens: dropped a frame: %s", error)

    def _check_epoch(self, frame: OutputFrame) -> None:
        """Refuse what an engine sent before it was rebuilt; forget where it was."""
        newest, inbox = self._newest.get(frame.engine_id, (frame.epoch, frame.inbox))
        if frame.epoch < newest:
            raise FrameError(f"{frame.engine_id}: epoch: wanted {newest}, found {frame.epoch}")
        self._newest[frame.engine_id] = (frame.epoch, frame.inbox)
        if frame.epoch > newest:
            self._forget(inbox)

    def _deliver(self, frame: OutputFrame) -> None:
        self._heard_at[frame.inbox] = asyncio.get_running_loop().time()
        for output in frame.outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is not None:
                mailbox.put(output, frame.inbox)
            elif output.finish_reason in ("", "handoff"):
                # Aborted before this engine was heard of. It goes on, or holds KV, for nobody.
                self._abort_at(frame.inbox, output.request_id)
