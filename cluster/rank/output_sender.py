"""A step's outputs leave as one frame per ingress, or as a few frames that are quick to decode.

The replica that submitted a request learns of its end in a frame of its own. Log-probabilities of a
long prompt are tens of megabytes: they are cut into outputs of their own, without tokens, before
the one with the token. All outputs of one request stay in one frame, which arrives whole or not at
all, and the ingress's event loop may run between any two of them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from cluster.group.context import RankContext
from cluster.wire.messages import EndedFrame, EngineOutput, FinishReason, OutputFrame, encode
from cluster.wire.sockets import CurveHandshake, connecting_socket, pack

log = logging.getLogger("lockstep.outputs")

MAX_WAITING_FRAMES = 20_000
"""For an ingress that does not read, then given up: ten seconds of a fast model's steps."""
MAX_ADDRESSES = 128
"""An ingress has one; each costs a queue and three of a context's 1,023 sockets."""
MAX_WATCHERS = 8
"""There is one: the replica that owns this rank's group."""
MAX_ENDED = 256
MAX_FRAME_BYTES = 1 << 18
MAX_OUTPUT_BYTES = 1 << 16
"""Of the log-probabilities in one output; decoding them takes a fraction of a millisecond."""
ENTRY_BYTES, CANDIDATE_BYTES = 32, 14
"""What a token's log-probability takes at most, and each of its candidates."""


class OutputSender:
    """Sends outputs to ingresses. Invariant: a running request has exactly one address here."""

    def __init__(
        self, rank: RankContext, sockets: zmq.Context[zmq.Socket[bytes]], inbox: str
    ) -> None:
        """Start without connections; who is unreachable for a whole lease is taken for dead."""
        self._rank = rank
        self._context = sockets
        self._handshake = CurveHandshake(rank.credentials.secret)
        self._inbox = inbox
        self._epoch = rank.place.epoch
        self._reply_to: dict[str, str] = {}
        self._num_requests: Counter[str] = Counter()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._watchers: list[str] = []
        self._monitors: dict[str, zmq.Socket[bytes]] = {}
        self._down_since: dict[str, float] = {}
        """Addresses that are not connected, and since when."""

    def expects(self, request_id: str) -> bool:
        return request_id in self._reply_to

    def expect(self, request_id: str, reply_to: str) -> bool:
        """Remember where a new request's tokens go; return whether that address can be had."""
        is_known = reply_to in self._num_requests
        if not is_known and len(self._num_requests) >= MAX_ADDRESSES:
            return False
        self._reply_to[request_id] = reply_to
        self._num_requests[reply_to] += 1
        return True

    def watch(self, address: str) -> None:
        """Tell `address` of every request that ends from now on."""
        if address in self._watchers:
            return
        if len(self._watchers) >= MAX_WATCHERS:
            log.error("outputs: wanted at most %d watchers, found %s", MAX_WATCHERS, address)
            return
        self._watchers.append(address)

    def send(self, outputs: list[EngineOutput]) -> list[str]:
        """Send one step's outputs; return the requests whose ingress does not read any more."""
        by_address: defaultdict[str, list[EngineOutput]] = defaultdict(list)
        ended: list[EngineOutput] = []
        for output in outputs:
            address = self._reply_to.get(output.request_id, "")
            if output.finish_reason:
                self._end(output.request_id)
                ended.append(output)
            if address:
                by_address[address].append(output)
        lost: list[str] = []
        for address, mine in by_address.items():
            if not self._put_outputs(address, mine):
                lost.extend(self._give_up(address))
        for address in self._watchers if ended else ():
            # Ends travel without their tokens: the replica only closes its accounts.
            for i in range(0, len(ended), MAX_ENDED):
                bare = [_bare(output) for output in ended[i : i + MAX_ENDED]]
                self._put(address, encode(EndedFrame(self._epoch, bare)))
        return lost

    def drop_dead_addresses(self) -> list[str]:
        """Return the requests of ingresses that have been unreachable for a whole lease."""
        now = time.monotonic()
        for address, monitor in self._monitors.items():
            while monitor.poll(0):
                event = recv_monitor_message(monitor)["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._down_since.pop(address, None)
                elif event == zmq.EVENT_DISCONNECTED:
                    self._down_since.setdefault(address, now)
        lost: list[str] = []
        for address, since in list(self._down_since.items()):
            if now - since > self._rank.config.transfer.lease_s:
                lost.extend(self._give_up(address))
        return lost

    def close(self) -> None:
        """Close all sockets; what was sent still leaves for a second."""
        for address in list(self._sockets):
            self._drop(address)

    def _end(self, request_id: str) -> None:
        address = self._reply_to.pop(request_id, None)
        if address is not None:
            self._num_requests[address] -= 1
            if not self._num_requests[address]:
                del self._num_requests[address]

    def _put_outputs(self, address: str, outputs: list[EngineOutput]) -> bool:
        frames = (
            OutputFrame(self._epoch, self._rank.engine_id, self._inbox, encoded)
            for encoded in frames_of(outputs)
        )
        return all(self._put(address, encode(frame)) for frame in frames)

    def _put(self, address: str, body: bytes) -> bool:
        try:
            socket = self._sockets.get(address) or self._connect(address)
            socket.send_multipart(pack(body, self._rank.credentials), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # full, or no address at all
            log.error("outputs: %s cannot be sent to: %s", address, error)
            return False
        return True

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        if len(self._sockets) >= MAX_ADDRESSES + MAX_WATCHERS:
            for other in list(self._sockets):
                if other not in self._num_requests and other not in self._watchers:
                    self._drop(other)
        socket = connecting_socket(
            self._context, zmq.PUSH, self._handshake, max_waiting=MAX_WAITING_FRAMES
        )
        socket.linger = 1000
        self._sockets[address] = socket
        self._down_since[address] = time.monotonic()
        # A peer counts as connected once it has shown the application's key: another process may
        # have the port by now.
        self._monitors[address] = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        socket.connect(address)
        return socket

    def _give_up(self, address: str) -> list[str]:
        log.error("outputs: %s does not read; its requests are aborted", address)
        if address in self._sockets:
            self._drop(address)
        return [request for request, to in self._reply_to.items() if to == address]

    def _drop(self, address: str) -> None:
        socket = self._sockets.pop(address)
        self._down_since.pop(address, None)
        monitor = self._monitors.pop(address)
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close()


def _bare(output: EngineOutput) -> EngineOutput:
    return msgspec.structs.replace(
        output, token_ids=[], logprobs=[], handoff=None, prompt_logprobs=[], queued_us=0
    )


def frames_of(outputs: list[EngineOutput]) -> Iterator[list[bytes]]:
    """Yield the encoded outputs of each frame, in the outputs' order."""
    frame: list[bytes] = []
    num_bytes = 0
    for output in outputs:
        encoded = [encode(piece) for piece in _pieces(output)]
        length = sum(map(len, encoded))
        if frame and num_bytes + length > MAX_FRAME_BYTES:
            yield frame
            frame, num_bytes = [], 0
        frame += encoded
        num_bytes += length
    yield frame


def _pieces(output: EngineOutput) -> list[EngineOutput]:
    entries = output.prompt_logprobs
    if not entries:
        return [output]
    size = MAX_OUTPUT_BYTES // (ENTRY_BYTES + CANDIDATE_BYTES * len(entries[0].top_token_ids))
    replace = msgspec.structs.replace
    ahead = replace(
        output,
        token_ids=[],
        logprobs=[],
        finish_reason=FinishReason.NONE,
        stop_token_id=-1,
        handoff=None,
        queued_us=0,
    )
    starts = range(0, len(entries), size)
    pieces = [replace(ahead, prompt_logprobs=entries[i : i + size]) for i in starts[:-1]]
    return [*pieces, replace(output, prompt_logprobs=entries[starts[-1] :])]
