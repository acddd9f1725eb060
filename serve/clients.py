"""Who asks: what shares of places, bytes, grammar time and the prefix cache go by.

A client is its API key; where none are needed it is the address that its connection comes from.
That address is known behind Ray's Python proxy, which passes on what its socket says. HAProxy, as
Ray Serve sets it up, does not: behind it clients without keys are all one. Whoever has put
proxies of their own in front names their number, `trusted_proxies`; each of them adds to
`X-Forwarded-For` where it was asked from. In any other request that header is a stranger's word.

Tokens that were found in the prefix cache are counted in `usage` and come sooner, so a client that
may find another's prompts there can guess them piece by piece. So each API key has a salt of its
own, unless `prefix_cache_sharing=all`, and a request may divide it further by `cache_salt`. A salt
is all that engines learn of either.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import time
from collections.abc import Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Annotated, Any, NewType

from msgspec import Meta

from cluster.wire.messages import SALT_BYTES
from compile.errors import FieldError
from model.fields import says

log = logging.getLogger("lockstep.keys")

Scope = MutableMapping[str, Any]
"""Of ASGI."""
Client = NewType("Client", str)
"""Equal for requests of one client. Nothing of a key can be read from it."""
UNKNOWN = Client("")
"""Everybody of whom nothing is known."""
HANDLE = Client("handle")
"""Other Ray applications."""
IPV6_PREFIX = 64
"""Bits of an address that a provider gives to one client."""
FORWARDED = b"x-forwarded-for"
LOOK_EVERY_S = 1.0
"""How often the file of keys is looked at while requests come."""
MAX_FILE_BYTES = 1 << 20
"""Size of a file of keys."""
MAX_SALT_CHARS = 1024
"""Of a request's `cache_salt`."""
CacheSalt = Annotated[
    str, Meta(min_length=1, max_length=MAX_SALT_CHARS), says(f"1 to {MAX_SALT_CHARS} characters")
]


def of_key(key: str) -> Client:
    return Client("key " + hashlib.sha256(key.encode()).hexdigest())


def of_address(scope: Scope, *, trusted_proxies: int, is_peer_known: bool) -> Client:
    """Return the client at the other end of a request's connection. is_peer_known: the scope's
    `client` is who has connected, and not a proxy of Ray's."""
    values = [value.decode("latin1") for name, value in scope["headers"] if name == FORWARDED]
    hops = [hop.strip() for hop in ",".join(values).split(",")] if values else []
    if trusted_proxies:
        return _of_host(hops[-trusted_proxies]) if len(hops) >= trusted_proxies else UNKNOWN
    peer = scope.get("client")
    if not is_peer_known or not peer:
        return UNKNOWN
    client = _of_host(peer[0])
    # uvicorn, below Ray's proxy, puts the header in the peer's place if that is this machine.
    return UNKNOWN if client in map(_of_host, hops) else client


def _of_host(host: str) -> Client:
    """Return the client at an address, which a port may follow."""
    if host.startswith("[") or host.count(":") == 1:
        host = host.rpartition("]")[0].removeprefix("[") or host.partition(":")[0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return UNKNOWN
    if isinstance(address, ipaddress.IPv4Address):
        return Client(str(address))
    if address.ipv4_mapped is not None:
        return Client(str(address.ipv4_mapped))
    return Client(str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False)))


class ApiKeys:
    """The known keys, as digests: how long comparing two takes reveals nothing about a key.
    Invariant: a file that cannot be read, or has no key, leaves the keys that were read before."""

    def __init__(
        self,
        keys: Iterable[str] = (),
        file: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with the keys given, and those of a file; FieldError if it cannot be read."""
        self._given = [_digest(key) for key in keys]
        self._file = file
        self._from_file: list[bytes] = []
        self._stamp: tuple[int, int, int] | None = None
        self._clock = clock
        self._look_at = 0.0
        if file is not None:
            self._read(file)

    def has(self, key: str) -> bool:
        if self._file is not None and self._clock() >= self._look_at:
            try:
                if self._read(self._file):
                    log.info("api_keys_file: read again, %d keys", len(self._from_file))
            except FieldError as error:
                log.error("api_keys_file: %s; the keys that were read before stay", error)
        found, is_known = _digest(key), False
        for known in (*self._given, *self._from_file):
            is_known |= hmac.compare_digest(found, known)
        return is_known

    def _read(self, file: Path) -> bool:
        self._look_at = self._clock() + LOOK_EVERY_S
        try:
            found = os.stat(file)
        except OSError as error:
            raise FieldError("api_keys_file", "a file of keys", f"{file}: {error}") from None
        stamp = found.st_mtime_ns, found.st_size, found.st_ino
        if has_changed := stamp != self._stamp:
            self._from_file = [_digest(key) for key in read_keys(file)]
            self._stamp = stamp
        return has_changed


def read_keys(file: Path) -> list[str]:
    """Return the keys in a file: one in a line, without blank lines and those that begin with #."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise FieldError("api_keys_file", "a file of keys", f"{file}: {error}") from None
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise FieldError("api_keys_file", "at least one key, one in a line", f"{file}: none")
    check_keys("api_keys_file", keys)
    return keys


def check_keys(field: str, keys: Iterable[str]) -> None:
    """Refuse keys that cannot come in a header, without repeating them in the error."""
    for number, key in enumerate(keys, start=1):
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            wanted = "keys of printable ASCII characters without spaces"
            raise FieldError(field, wanted, f"another one, number {number}")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class CacheSalts:
    """Makes the salts of requests. Invariant: equal for equal client and `cache_salt` alone. They
    are keyed by the application's secret, which all ingresses have: nobody who sees one in an
    engine can try keys against it."""

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
