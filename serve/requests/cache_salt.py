"""Who shares the prefix cache: what begins alike and has the same salt.

Tokens that were found in the cache are counted in `usage` and come sooner, so a client that may
find another's prompts there can guess them piece by piece. So each API key has a salt of its own,
unless `prefix_cache_sharing=all`, and a request may divide it further by `cache_salt`.

A salt is all that engines learn of the key and of `cache_salt`. It is keyed by the application's
secret, which all ingresses have: nobody who sees one in an engine can try keys against it.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

from msgspec import Meta

from cluster.wire.messages import SALT_BYTES
from model.fields import says
from serve.clients import Client

MAX_SALT_CHARS = 1024
"""Of a request's `cache_salt`."""

CacheSalt = Annotated[
    str, Meta(min_length=1, max_length=MAX_SALT_CHARS), says(f"1 to {MAX_SALT_CHARS} characters")
]


class CacheSalts:
    """Makes the salts of requests. Invariant: equal for equal client and `cache_salt` alone."""

    def __init__(self, secret: bytes = b"", *, is_per_key: bool = False) -> None:
        """Use a secret of at most 64 bytes. `is_per_key`: clients have keys, and salts differ."""
        self._secret = secret
        self._is_per_key = is_per_key

    def of(self, client: Client, cache_salt: str | None) -> bytes:
        """Return the salt of a request; empty if nothing divides it from others."""
        owner = client if self._is_per_key else ""
        if not owner and cache_salt is None:
            return b""
        # The length says where the client ends: no two pairs make one text.
        content = f"{len(owner)}:{owner}{cache_salt or ''}".encode()
        return hashlib.blake2b(content, digest_size=SALT_BYTES, key=self._secret).digest()
