"""What happens to every HTTP request before its handler: an id, a record, and who may ask.

A client's `X-Request-Id` is taken if it is one; every answer has it, errors included. Ray Serve's
HTTP server gives a request without one an id, and appends it to every answer, so there it is only
read here.

What administers (`admin_paths`) needs a bearer key of its own, whatever else is open. All other
requests need a bearer key or, where no keys are set, may be any but those of foreign web pages. A
browser lets any page send requests to an address that its user can reach, and a page whose name was
made to resolve to this machine (DNS rebinding) may even read the answers. So without keys a request
has to name this server by an address or by a name that no public DNS has, or by one of
`allowed_hosts`; and a request of a page has to come from this server's own, or from one of
`allowed_origins`, for which CORS is on.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import secrets
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve import clients
from serve.arguments import texts
from serve.clients import ApiKeys
from serve.openai.errors import ApiError
from serve.openai.generation import Serving
from serve.requests.records import RequestRecord

HEADER = "X-Request-Id"
MAX_ID_CHARS = 128
"""Of a client's request id; a longer one gets 400."""
_ID = re.compile(rf"[A-Za-z0-9._:/+=@~-]{{1,{MAX_ID_CHARS}}}")
OTHER = "other"
MAX_TRACE_CHARS = 512
"""Of `traceparent` and of `tracestate`; a longer header is taken for none."""
ANY = "*"
PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".svc", ".lan", ".home.arpa")
"""Ends of names that cannot be registered in public DNS."""


class RequestMiddleware:
    """ASGI middleware: records every request, and answers those that may not ask (401, 403)."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        serving: Serving,
        keys: ApiKeys,
        admin_keys: ApiKeys | None,
        admin_paths: Iterable[str],
        is_peer_known: bool,
        routes: Iterable[str],
        sends_id: bool,
    ) -> None:
        """Stand in front of an app (`build_app`). In `routes` what follows a `{` is any text."""
        self._app = app
        self._guarded: ASGIApp = self._guard
        args = serving.settings.args
        if origins := texts(args.allowed_origins):
            # Outside of the guard: a browser asks whether it may, without a key.
            self._guarded = CORSMiddleware(
                self._guard,
                allow_origins=origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=[HEADER],
            )
        self._needs_key = args.needs_key
        self._keys = keys
        self._admin_keys = admin_keys
        self._admin_paths = frozenset(admin_paths)
        self._open_paths = frozenset(texts(args.open_paths))
        self._allowed_hosts = frozenset(host.lower() for host in texts(args.allowed_hosts))
        self._allowed_origins = frozenset(origin.lower() for origin in origins)
        self._trusted_proxies = args.trusted_proxies
        self._is_peer_known = is_peer_known
        self._serving = serving
        self._exact = {route for route in routes if "{" not in route}
        self._prefixes = tuple(route.partition("{")[0] for route in routes if "{" in route)
        self._sends_id = sends_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(HEADER)
        is_bad = given is not None and not _ID.fullmatch(given)
        request_id = secrets.token_hex(16) if given is None or is_bad else given
        record = RequestRecord(request_id, self._route(_path_of(scope)))
        scope.setdefault("state", {})["record"] = record
        for name in ("traceparent", "tracestate") if self._serving.is_traced else ():
            value = headers.get(name, "")
            setattr(record, name, value if len(value) <= MAX_TRACE_CHARS else "")

        async def record_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if self._sends_id:
                    MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        try:
            app = self._guarded
            if is_bad:
                wanted = f"1 to {MAX_ID_CHARS} letters, digits and ._:/+=@~-"
                message = f"x-request-id: wanted {wanted}, found something else"
                app = ApiError(400, message).response()
            await app(scope, receive, record_status)
        finally:
            self._serving.counts.on_response(record.path, record.status)
            for call in self._serving.on_end if record.is_generating else ():
                call(record)

    async def _guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        await (self._app if refusal is None else refusal.response())(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Return why a request may not ask; None: it may, and who asks is noted."""
        headers = Headers(scope=scope)
        record: RequestRecord = scope["state"]["record"]
        if self._admin_keys is not None and _path_of(scope) in self._admin_paths:
            return self._admin_refusal(headers, record, self._admin_keys)
        if not self._needs_key:
            refusal = self._page_refusal(headers)
            if refusal is not None:
                return refusal
        elif _path_of(scope) not in self._open_paths:
            key = _bearer_key(headers)
            if not key:
                return _unauthorized("a header «Bearer KEY», found none")
            if not self._keys.has(key):
                return _unauthorized("a key that is known, found another one")
            record.client = clients.of_key(key)
            return None
        record.client = clients.of_address(
            scope, trusted_proxies=self._trusted_proxies, is_peer_known=self._is_peer_known
        )
        return None

    def _admin_refusal(
        self, headers: Headers, record: RequestRecord, admin_keys: ApiKeys
    ) -> ApiError | None:
        """Return the same of a request that administers."""
        key = _bearer_key(headers)
        if not key:
            return _unauthorized("a header «Bearer KEY» with one of admin_keys, found none")
        if not admin_keys.has(key):
            if self._keys.has(key):
                return ApiError(
                    403, "authorization: wanted one of admin_keys, found a client's key"
                )
            return _unauthorized("one of admin_keys, found another one")
        record.client = clients.of_key(key)
        return None

    def _page_refusal(self, headers: Headers) -> ApiError | None:
        host = headers.get("host", "").lower()
        # An IPv6 address has colons of its own, within brackets.
        name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
        if not (is_local_name(name) or self._allowed_hosts & {ANY, host, name}):
            wanted = "an address, a name that only a private network has, or one of allowed_hosts"
            return ApiError(403, f"host: wanted {wanted}, found {host}")
        origin = headers.get("origin", "").lower()
        if not origin or self._allowed_origins & {ANY, origin}:
            return None
        if origin in (f"http://{host}", f"https://{host}"):
            return None
        wanted = "a page of this server or of one of allowed_origins"
        return ApiError(403, f"origin: wanted {wanted}, found {origin}")

    def _route(self, path: str) -> str:
        if path in self._exact:
            return path
        found = next((prefix for prefix in self._prefixes if path.startswith(prefix)), None)
        return OTHER if found is None else found + "{}"


def _bearer_key(headers: Headers) -> str:
    """Return the key that a request shows; empty without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _unauthorized(wanted: str) -> ApiError:
    message = f"authorization: wanted {wanted}"
    return ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})


@functools.lru_cache(maxsize=64)  # clients choose the names, and how long they are
def is_local_name(name: str) -> bool:
    """Return whether a host is an address, or a name that cannot be had in public DNS."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        # A request of HTTP/1.0 names no host, and browsers send none of those.
        return "." not in name.rstrip(".") or name.rstrip(".").endswith(PRIVATE_SUFFIXES)
    return True


def _path_of(scope: Scope) -> str:
    """Return the path below the address at which Ray Serve puts the application."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
