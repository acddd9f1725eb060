"""Access: requests with a bearer key or, where no keys are set, any but those of foreign web pages.

A browser lets any page send requests to an address that its user can reach, and a page whose name
was made to resolve to this machine (DNS rebinding) may even read the answers. So without keys a
request has to name this server by an address or by a name that no public DNS has, or by one of
`allowed_hosts`; and a request of a page has to come from this server's own, or from one of
`allowed_origins`, for which CORS is on.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.keys import ApiKeys
from serve.openai.errors import ApiError, Forbidden, Unauthorized

ANY = "*"
PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".svc", ".lan", ".home.arpa")
"""Ends of names that cannot be registered in public DNS."""


class Access:
    """ASGI middleware that lets a request through or answers 401 or 403."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        open_paths: Iterable[str],
        allowed_hosts: Iterable[str],
        allowed_origins: Iterable[str],
    ) -> None:
        """Guard an app.

        Args:
            open_paths: need no key.
            allowed_hosts, allowed_origins: beside those that are always right; * allows all.
        """
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)
        self._allowed_hosts = frozenset(host.lower() for host in allowed_hosts)
        self._allowed_origins = frozenset(origin.lower() for origin in allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            await refusal.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if not self._keys.are_wanted:
            return self._page_refusal(headers)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in self._open_paths:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            return Unauthorized("authorization: wanted a header «Bearer KEY», found none")
        if not self._keys.has(key.strip()):
            return Unauthorized("authorization: wanted a key that is known, found another one")
        return None

    def _page_refusal(self, headers: Headers) -> ApiError | None:
        host = headers.get("host", "").lower()
        if not (is_local_name(_name_of(host)) or self._allows_host(host)):
            wanted = "an address, a name that only a private network has, or one of allowed_hosts"
            return Forbidden(f"host: wanted {wanted}, found {host}")
        origin = headers.get("origin", "").lower()
        if not origin or origin in self._allowed_origins or ANY in self._allowed_origins:
            return None
        if origin in (f"http://{host}", f"https://{host}"):
            return None
        wanted = "a page of this server or of one of allowed_origins"
        return Forbidden(f"origin: wanted {wanted}, found {origin}")

    def _allows_host(self, host: str) -> bool:
        return bool(self._allowed_hosts & {ANY, host, _name_of(host)})


def is_local_name(name: str) -> bool:
    """Return whether a host is an address, or a name that cannot be had in public DNS."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        # A request of HTTP/1.0 names no host, and browsers send none of those.
        return "." not in name.rstrip(".") or name.rstrip(".").endswith(PRIVATE_SUFFIXES)
    return True


def _name_of(host: str) -> str:
    """Return a host without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
