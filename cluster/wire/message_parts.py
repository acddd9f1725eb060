"""A frame on its way: a ZeroMQ message whose parts are no longer than a socket allows.

ZeroMQ delivers all parts of a message or none, so a frame that was cut arrives whole or is lost
whole. A message to a socket that many may send to starts with the header.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.credentials import Credentials
from cluster.messages import FrameError
from cluster.wire.sockets import MAX_PART_BYTES

Part = bytes | memoryview


def split(body: bytes) -> Sequence[Part]:
    """Return a frame in parts."""
    if len(body) <= MAX_PART_BYTES:
        return (body,)
    view = memoryview(body)
    return [view[i : i + MAX_PART_BYTES] for i in range(0, len(body), MAX_PART_BYTES)]


def join(parts: Sequence[bytes], max_bytes: int) -> bytes:
    """Return the frame that came in these parts.

    Raises:
        FrameError: it is longer than `max_bytes`.
    """
    if len(parts) == 1:
        return parts[0]
    if (found := sum(map(len, parts))) > max_bytes:
        raise FrameError(f"frame: wanted at most {max_bytes} bytes, found {found}")
    return b"".join(parts)


def pack(body: bytes, credentials: Credentials) -> Sequence[Part]:
    """Return the message that brings a frame to a socket that many may send to."""
    return (credentials.header, *split(body))


def unpack(message: Sequence[bytes], credentials: Credentials, max_bytes: int) -> bytes:
    """Return the frame of a message.

    Raises:
        FrameError: it is another deployment's, or longer than `max_bytes`.
    """
    header, *parts = message
    credentials.check(header)
    if not parts:
        raise FrameError("message: wanted a header and a frame, found a header")
    return join(parts, max_bytes)
