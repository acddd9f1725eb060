"""What the processes of one application show each other before anything else is trusted.

The secret is random and one for the whole application; Ray alone hands it out
(`actors/gcs_store.py`). While one deployment replaces another, processes of both hold it; they tell
each other apart by the configuration hash in the header of every frame.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from cluster.wire.messages import PROTOCOL_VERSION, FrameError, Wire, decode, encode

SECRET_BYTES = 32


class Header(Wire, frozen=True):
    """Opens every frame to a socket that many may send to; a link between two opens with hellos."""

    protocol: int
    config_hash: str


@dataclass(frozen=True)
class Credentials:
    """A deployment and the secret of its application. Invariant: no repr shows the secret."""

    config_hash: str
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise ValueError(f"secret: wanted {SECRET_BYTES} bytes, found {len(self.secret)}")

    @cached_property
    def header(self) -> bytes:
        return encode(Header(PROTOCOL_VERSION, self.config_hash))

    def check(self, header: bytes) -> None:
        """Refuse a header of another protocol version or configuration hash by that name."""
        if header == self.header:
            return
        theirs: Header = decode(header, Header)
        if theirs.protocol != PROTOCOL_VERSION:
            wanted, found = PROTOCOL_VERSION, theirs.protocol
            raise FrameError(f"protocol: wanted version {wanted}, found {found}")
        wanted_hash, found_hash = self.config_hash, theirs.config_hash
        raise FrameError(f"config_hash: wanted {wanted_hash}, found {found_hash}")
