"""The inbox: where requests, aborts and watchers for one leader arrive.

Whatever comes in, nothing here raises. A frame is a message, or a submission that cannot be one
but says where it came from is answered, or it is dropped with a line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from cluster.credentials import Credentials
from cluster.messages import FrameError, Inbound, asker_of, decode
from cluster.wire.budget import Budget
from cluster.wire.message_parts import unpack
from cluster.wire.sockets import CurveHandshake, listening_socket

log = logging.getLogger("lockstep.leader")

MAX_FRAMES, MAX_S = 256, 0.002
"""Taken at a step's border, while all ranks wait: as long as a short step. What is left is taken
at the next border; some hundred thousand submissions a second are more than any engine runs."""
MAX_WAITING = 64
"""Frames of one sender, which may be long; what it has beyond waits in its own process."""


@dataclass(frozen=True)
class BadSubmit:
    """A submission that does not hold what one holds, and whose end is waited for."""

    request_id: str
    reply_to: str
    error: str


class Inbox:
    """Belongs to the step thread. `socket` polls readable while frames wait."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        credentials: Credentials,
        *,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self._credentials = credentials
        self._max_bytes = max_submit_bytes(max_model_len, vocab_size)
        handshake = CurveHandshake(credentials.secret)
        self.socket = listening_socket(context, zmq.PULL, handshake, max_waiting=MAX_WAITING)
        self.address = f"tcp://{host}:{self.socket.bind_to_random_port(f'tcp://{host}')}"

    def take(self) -> Iterator[Inbound | BadSubmit]:
        """Yield what waits, as much as a step's border has time for."""
        budget = Budget(MAX_FRAMES, MAX_S)
        while budget.take():
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._read(parts)
            if message is not None:
                yield message

    def _read(self, parts: list[bytes]) -> Inbound | BadSubmit | None:
        try:
            body = unpack(parts, self._credentials, self._max_bytes)
        except FrameError as error:
            log.error("inbox: dropped a frame: %s", error)
            return None
        try:
            message: Inbound = decode(body, Inbound)
        except FrameError as error:
            log.error("inbox: refused a frame: %s", error)
            asker = asker_of(body)
            return None if asker is None else BadSubmit(*asker, str(error))
        return message

    def close(self) -> None:
        """Close the socket."""
        self.socket.close(linger=0)


def max_submit_bytes(max_model_len: int, vocab_size: int) -> int:
    """Return how long a submission may be.

    A token takes up to 5 bytes, and as much again in its block's id and in that one's generation
    where a handed over sequence has blocks of one token. A bit for each token of the vocabulary
    may allow it. The rest is for biases, stop tokens and the ranks that hold the KV.
    """
    return (256 << 10) + vocab_size // 8 + 16 * max_model_len
