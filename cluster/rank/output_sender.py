"""A step's outputs leave as one frame per ingress, or as a few frames that are quick to decode.

They go back over the connection that brought the request. Log-probabilities of a long prompt are
tens of megabytes: they are cut into outputs of their own, without tokens, before the one with the
token. All outputs of one request stay in one frame, which arrives whole or not at all, and the
ingress's event loop may run between any two of them.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator

import msgspec
import zmq

from cluster.wire.messages import GIVEN_UP, EngineOutput, FinishReason, OutputFrame, encode
from cluster.wire.sockets import split

log = logging.getLogger("lockstep.outputs")

MAX_FRAME_BYTES = 1 << 18
MAX_OUTPUT_BYTES = 1 << 16
"""Of the log-probabilities in one output; decoding them takes a fraction of a millisecond."""
ENTRY_BYTES, CANDIDATE_BYTES = 32, 14
"""What a token's log-probability takes at most, and each of its candidates."""


class OutputSender:
    """Sends outputs to ingresses. Invariant: a request that has not ended has one peer here."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        """Send over the inbox's own socket, which knows its peers."""
        self._socket = socket
        self._peers: dict[str, bytes] = {}
        """By request id."""
        self._given_up: set[bytes] = set()
        """Peers that did not read and have not been told yet that they are sent nothing more."""

    def expects(self, request_id: str) -> bool:
        return request_id in self._peers

    def expect(self, request_id: str, peer: bytes) -> None:
        """Remember where a new request's tokens go."""
        self._peers[request_id] = peer

    def send(self, outputs: list[EngineOutput]) -> list[str]:
        """Send one step's outputs; return the requests of ingresses that cannot be sent to: their
        connection has ended, or they do not read. One that reads again learns that it ended."""
        by_peer: defaultdict[bytes, list[EngineOutput]] = defaultdict(list)
        for output in outputs:
            peer = self._peers.get(output.request_id, b"")
            if output.finish_reason:
                self._peers.pop(output.request_id, None)
            if peer:
                by_peer[peer].append(output)
        lost: list[str] = []
        for peer, mine in by_peer.items():
            if not self._put(peer, mine):
                lost += [request_id for request_id, to in self._peers.items() if to == peer]
        for request_id in lost:
            del self._peers[request_id]
        for peer in [*self._given_up]:
            try:
                self._socket.send_multipart((peer, GIVEN_UP), zmq.NOBLOCK)
            except zmq.Again:
                continue
            except zmq.ZMQError:
                pass  # it has left
            self._given_up.remove(peer)
        return lost

    def _put(self, peer: bytes, outputs: list[EngineOutput]) -> bool:
        try:
            for encoded in frames_of(outputs):
                frame = split(encode(OutputFrame(encoded)))
                self._socket.send_multipart((peer, *frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.error("outputs: an ingress cannot be sent to, its requests end: %s", error)
            if isinstance(error, zmq.Again):
                self._given_up.add(peer)
            return False
        return True


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
