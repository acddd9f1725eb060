"""What every HTTP request gets: an id, a count of its answer and, if it generates, a log line.

A client's `X-Request-Id` is taken if it is one; every answer has it, errors included. Ray Serve's
HTTP server gives a request without one an id, and appends it to every answer, so there it is only
read here.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.openai.errors import BadRequest
from serve.requests.records import IngressCounts, RequestRecord

logger = logging.getLogger(__name__)

HEADER = "X-Request-Id"
MAX_ID_CHARS = 128
"""Of a client's request id; a longer one gets 400."""
_ID = re.compile(rf"[A-Za-z0-9._:/+=@~-]{{1,{MAX_ID_CHARS}}}")
_RECORD = "lockstep.record"
OTHER = "other"
MAX_TRACE_CHARS = 512
"""Of `traceparent` and of `tracestate`; a longer header is taken for none."""


def new_request_id() -> str:
    """Return a random id."""
    return secrets.token_hex(16)


def record_of(request: Request) -> RequestRecord:
    """Return what is noted of a request."""
    record: RequestRecord = request.scope[_RECORD]
    return record


class Observed:
    """ASGI middleware around all others."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        counts: IngressCounts,
        routes: Iterable[str],
        on_end: Iterable[Callable[[RequestRecord], None]],
        is_traced: bool,
        sends_id: bool,
    ) -> None:
        """Observe an app.

        Args:
            routes: their paths; what follows a `{` is any text.
            on_end: called with each request that generated or was to.
            is_traced: note the trace that a client names.
            sends_id: put the id into answers, which no server in front does.
        """
        self._app = app
        self._counts = counts
        self._exact = {route for route in routes if "{" not in route}
        self._prefixes = tuple(route.partition("{")[0] for route in routes if "{" in route)
        self._on_end = tuple(on_end)
        self._is_traced = is_traced
        self._sends_id = sends_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(HEADER)
        is_bad = given is not None and not _ID.fullmatch(given)
        request_id = new_request_id() if given is None or is_bad else given
        path = self._route(scope["path"].removeprefix(scope.get("root_path", "")))
        record = RequestRecord(request_id, path)
        if self._is_traced:
            record.traceparent = _trace_header(headers, "traceparent")
            record.tracestate = _trace_header(headers, "tracestate")
        scope[_RECORD] = record

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if self._sends_id:
                    MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        async def heard() -> Message:
            try:
                return await receive()
            except Exception as error:
                # Ray's proxy drops a request whose client left, and the call for more of its body
                # fails (TaskCancelledError).
                logger.debug("a request ended while it was received", exc_info=error)
                return {"type": "http.disconnect"}

        try:
            if is_bad:
                wanted = f"1 to {MAX_ID_CHARS} letters, digits and ._:/+=@~-"
                refusal = BadRequest(f"x-request-id: wanted {wanted}, found something else")
                await refusal.response()(scope, heard, told)
            else:
                await self._app(scope, heard, told)
        finally:
            self._counts.on_response(path, record.status)
            if record.is_generating:
                for call in self._on_end:
                    call(record)

    def _route(self, path: str) -> str:
        if path in self._exact:
            return path
        found = next((prefix for prefix in self._prefixes if path.startswith(prefix)), None)
        return OTHER if found is None else found + "{}"


def _trace_header(headers: Headers, name: str) -> str:
    value = headers.get(name, "")
    return value if len(value) <= MAX_TRACE_CHARS else ""
