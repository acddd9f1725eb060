"""Who asks: what shares of places, bytes and grammar time go by.

A client is its API key; where none are needed it is the address that its connection comes from.
That address is known behind Ray's Python proxy, which passes on what its socket says. HAProxy, as
Ray Serve sets it up, does not: behind it clients without keys are all one. Whoever has put
proxies of their own in front names their number, `trusted_proxies`; each of them adds to
`X-Forwarded-For` where it was asked from. In any other request that header is a stranger's word.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import MutableMapping
from typing import Any, NewType

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


def of_key(key: str) -> Client:
    """Return the client that has a key, which is known."""
    return Client("key " + hashlib.sha256(key.encode()).hexdigest())


def of_address(scope: Scope, *, trusted_proxies: int, is_peer_known: bool) -> Client:
    """Return the client at the other end of a request's connection.

    is_peer_known: the scope's `client` is who has connected, and not a proxy of Ray's.
    """
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
