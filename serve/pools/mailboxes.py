"""What engines produced, on its way to requests, and aborts, on theirs to engines.

Engines push one frame per step to the `TokenSocket`; its outputs are sorted into one mailbox per
request. A mailbox also knows which engines have sent outputs of its request, so that an abort
reaches them directly, in one frame for all requests that are aborted together.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from cluster.wire.credentials import Credentials
from cluster.wire.messages import (
    MAX_ABORTS,
    Abort,
    EngineOutput,
    FinishReason,
    FrameError,
    OutputFrame,
    TokenLogprobs,
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

log = logging.getLogger("lockstep.tokens")

MAX_WAITING = 256
"""Frames of one engine, and aborts for one, that wait here; more wait in the engine."""
MAX_FRAME_BYTES = 1 << 30
"""Size of a frame: one request's outputs may hold log-probabilities of a million prompt tokens."""
HEARD_LATELY_S = 5.0
"""An engine that has been silent for longer runs no request of this ingress."""
FORGET_AFTER_S = 600.0
"""An engine that has been silent for longer is forgotten; if it sends again, it is connected to
again."""
MAX_ENGINES = 512
"""Engines that are kept: those that sent last. Counted with each batch of aborts, and at the
latest when there are twice as many; a context has 1,023 sockets."""


class Mailbox:
    """One request's outputs that were not taken yet, in order. The first of them and every end of a
    stage can be taken at once. Others wait for the next tick, and those that only bring tokens
    become one output meanwhile."""

    def __init__(self, request_id: str, tick: StreamBatcher) -> None:
        self.request_id = request_id
        self.inboxes: list[str] = []
        """Of the engines that have sent outputs of the request in its present stage."""
        self.all_inboxes: list[str] = []
        """Of those that have sent any."""
        self.num_ends = 0
        """Stages whose last output has come."""
        self._tick = tick
        self._waiting: deque[EngineOutput] = deque()
        self._can_take = asyncio.Event()
        self._has_begun = self._is_ringing = False
        self._prompt_logprobs: list[TokenLogprobs] = []
        """Of pieces of the prompt, which come ahead of the first output."""

    def put(self, output: EngineOutput, inbox: str = "") -> None:
        if inbox and inbox not in self.inboxes:
            self.inboxes.append(inbox)
            self.all_inboxes.append(inbox)
        if output.finish_reason == FinishReason.HANDOFF:
            self.inboxes.clear()
        if output.prompt_logprobs and not output.token_ids and not output.finish_reason:
            self._prompt_logprobs += output.prompt_logprobs
            return
        if self._prompt_logprobs:
            ahead, self._prompt_logprobs = self._prompt_logprobs, []
            together = ahead + output.prompt_logprobs
            output = msgspec.structs.replace(output, prompt_logprobs=together)
        self.num_ends += bool(output.finish_reason)
        if self._waiting and _continues(self._waiting[-1], output):
            output = _together(self._waiting.pop(), output)
        self._waiting.append(output)
        if output.finish_reason or not self._has_begun:
            self._has_begun = True
            self._can_take.set()
        elif not self._is_ringing and not self._can_take.is_set():
            self._is_ringing = True
            self._tick.call(self._ring)

    async def get(self) -> EngineOutput:
        await self._can_take.wait()
        output = self._waiting.popleft()
        if not self._waiting:
            self._can_take.clear()
        return output

    def _ring(self) -> None:
        self._is_ringing = False
        if self._waiting:
            self._can_take.set()


def _continues(before: EngineOutput, output: EngineOutput) -> bool:
    only_tokens = not (before.finish_reason or output.finish_reason or output.prompt_logprobs)
    return only_tokens and output.position == before.position + len(before.token_ids)


def _together(before: EngineOutput, output: EngineOutput) -> EngineOutput:
    token_ids = [*before.token_ids, *output.token_ids]
    logprobs = [*before.logprobs, *output.logprobs]
    return msgspec.structs.replace(before, token_ids=token_ids, logprobs=logprobs)


class EngineLinks(Protocol):
    """What carries frames between engines and this ingress. An engine that cannot be reached is
    told nothing; `forget` closes the way to one that is gone. `caught_up` returns when all that has
    come by now is in its mailbox."""

    def send_aborts(self, inbox: str, request_ids: list[str]) -> None: ...
    def forget(self, inbox: str) -> None: ...
    async def caught_up(self) -> None: ...


class TokenMailboxes:
    """The mailboxes of one ingress, and the engines that fill them. Belongs to its event loop."""

    def __init__(self, address: str, links: EngineLinks, tick: StreamBatcher) -> None:
        """Start without any. `address`: where engines send outputs."""
        self.address = address
        self.tick = tick
        self._links = links
        self._mailboxes: dict[str, Mailbox] = {}
        self._aborts: defaultdict[str, list[str]] = defaultdict(list)
        self._heard_at: dict[str, float] = {}
        """By inbox of an engine's newest epoch."""
        self._newest: dict[str, tuple[int, str]] = {}
        """By engine: its newest epoch and that one's inbox."""

    def open(self, request_id: str) -> Mailbox:
        mailbox = self._mailboxes[request_id] = Mailbox(request_id, self.tick)
        return mailbox

    def close(self, mailbox: Mailbox) -> None:
        """Drop the mailbox; what still arrives for it is dropped too, and its engine told so."""
        self._mailboxes.pop(mailbox.request_id, None)

    def engines_of(self, mailbox: Mailbox) -> list[str]:
        """Return the engines that have sent outputs for a mailbox, by their names."""
        names = {inbox: engine for engine, (_, inbox) in self._newest.items()}
        return [names[inbox] for inbox in mailbox.all_inboxes if inbox in names]

    async def caught_up(self) -> None:
        """Return when all that has come by now is in its mailbox, though the loop is busy."""
        await self._links.caught_up()

    def abort(self, mailbox: Mailbox) -> None:
        """Tell every engine that may have the request to drop it. Those are the engines that have
        sent outputs of it in its present stage. Before there are any, it may be on its way to any
        engine: all that have sent lately remember the abort."""
        inboxes = [inbox for inbox in mailbox.inboxes if inbox in self._heard_at]
        if not inboxes:
            now = asyncio.get_running_loop().time()
            inboxes = [i for i, at in self._heard_at.items() if now - at < HEARD_LATELY_S]
        for inbox in inboxes:
            self._abort_at(inbox, mailbox.request_id)

    def _abort_at(self, inbox: str, request_id: str) -> None:
        if not self._aborts:
            asyncio.get_running_loop().call_soon(self._send_aborts)
        self._aborts[inbox].append(request_id)

    def _send_aborts(self) -> None:
        self._forget_the_silent()
        aborts, self._aborts = self._aborts, defaultdict(list)
        for inbox, request_ids in aborts.items():
            self._links.send_aborts(inbox, request_ids)

    def _forget_the_silent(self) -> None:
        now = asyncio.get_running_loop().time()
        latest_first = sorted(self._heard_at.items(), key=lambda heard: -heard[1])
        for place, (inbox, at) in enumerate(latest_first):
            if place >= MAX_ENGINES or now - at > FORGET_AFTER_S:
                self._forget(inbox)
        self._newest = {
            engine: newest for engine, newest in self._newest.items() if newest[1] in self._heard_at
        }

    def _forget(self, inbox: str) -> None:
        self._heard_at.pop(inbox, None)
        self._aborts.pop(inbox, None)
        self._links.forget(inbox)

    def begin_frame(self, engine_id: str, epoch: int, inbox: str) -> None:
        """Note where an engine is; FrameError: this was sent before it was rebuilt."""
        newest, old_inbox = self._newest.get(engine_id, (epoch, inbox))
        if epoch < newest:
            raise FrameError(f"{engine_id}: epoch: wanted {newest}, found {epoch}")
        self._newest[engine_id] = (epoch, inbox)
        if epoch > newest:
            self._forget(old_inbox)

    def deliver(self, inbox: str, output: EngineOutput) -> None:
        """Put an output of the engine with this inbox into its mailbox."""
        self._heard_at[inbox] = asyncio.get_running_loop().time()
        if len(self._heard_at) > 2 * MAX_ENGINES:
            self._forget_the_silent()
        mailbox = self._mailboxes.get(output.request_id)
        if mailbox is not None:
            mailbox.put(output, inbox)
        elif output.finish_reason in (FinishReason.NONE, FinishReason.HANDOFF):
            # Aborted before this engine was known, which still runs it or holds its KV.
            self._abort_at(inbox, output.request_id)


class TokenSocket:
    """Receives frames of all engines; `EngineLinks` of its `mailboxes`. Must be created inside the
    event loop that uses it. `task` ends only with an error: without it no output arrives."""

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
