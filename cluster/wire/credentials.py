"""What the processes of one application show each other before anything else is trusted.

The secret is random and one for the whole application; Ray alone hands it out
(`actors/gcs_store.py`). While one deployment replaces another, processes of both hold it. Three
things decide what they may do for each other (`Hashes`); ranks of one group must agree on more, on
their whole configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from cluster.wire.messages import PROTOCOL_VERSION, FrameError, GrowingWire, decode, encode

SECRET_BYTES = 32


class Header(GrowingWire, frozen=True):
    """Opens every frame to a socket that many may send to; a link between two opens with hellos."""

    protocol: int


def can_read(protocol: int) -> bool:
    """Return whether frames of a process of this protocol version can be read, and it reads ours:
    those of the release before, and of the next one (`GrowingWire`)."""
    return abs(protocol - PROTOCOL_VERSION) <= 1


@dataclass(frozen=True)
class Hashes:
    """What engines and ingresses tell of themselves, to know what they may do for each other."""

    numerics: str
    """Of weights, tokenizer, dtype and the code that computes: a request may go on where it is
    equal, since it gets the same token ids."""
    kv: str = ""
    """Of weights, dtype, block size and layout of KV, which may be read where it is equal. An
    ingress has none."""
    protocol: int = PROTOCOL_VERSION

    def can_serve(self, numerics: str) -> bool:
        """Return whether requests of a process like this one, with these numerics, may go here."""
        return self.numerics == numerics and can_read(self.protocol)


@dataclass(frozen=True)
class Credentials:
    """A deployment and the secret of its application. Invariant: no repr shows the secret."""

    config_hash: str
    """Of all that its ranks are told: those of one group show it each other."""
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise ValueError(f"secret: wanted {SECRET_BYTES} bytes, found {len(self.secret)}")

    @cached_property
    def header(self) -> bytes:
        return encode(Header(PROTOCOL_VERSION))

    def check(self, header: bytes) -> None:
        """Refuse the header of a process whose frames cannot be read."""
        if header == self.header:
            return
        theirs: Header = decode(header, Header)
        if not can_read(theirs.protocol):
            wanted = f"{PROTOCOL_VERSION - 1} to {PROTOCOL_VERSION + 1}"
            raise FrameError(f"protocol: wanted version {wanted}, found {theirs.protocol}")
