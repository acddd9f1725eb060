"""Artifacts among ranks that do not share a disk: one compiles a piece, the others fetch it.

The one thing to know: ranks of one node find each other's artifacts as files, and a lock lets one
of them compile. An exchange is asked by whoever holds that lock, so by one rank of a node and
piece; who carries the bytes is the caller's affair.
"""

from __future__ import annotations

from typing import Protocol


class ArtifactExchange(Protocol):
    """Gives each piece's artifact to all that want it. Keys name what is computed, and for what."""

    def claim(self, key: str) -> bytes | None:
        """Return what another rank compiled, waiting for it; None where this one is to compile.

        Who gets None publishes in the end, whatever happens.
        """

    def publish(self, key: str, data: bytes | None) -> None:
        """Hand out what was compiled; None where there is nothing to be had."""
