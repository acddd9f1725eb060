"""The errors of a request, as its client reads them. All have one JSON shape: `{"error":
{"message", "type", "param", "code"}}`, `code` the status. What is wrong with a field is a
`FieldError` until it gets here: 400, with the field as `param`."""

from __future__ import annotations

import logging
import math
from typing import NamedTuple

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from compile.errors import FieldError
from serve.admission import Overloaded
from serve.config import RETRY_AFTER_S
from serve.pools.directory import NoLeader
from serve.requests.choice import GenerationError
from serve.requests.grammar_process import GrammarProcessLost
from serve.requests.tokenizer import ChatTemplateError

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000
"""Characters of an error's message, which may quote what the client sent."""


class Status(NamedTuple):
    """What the errors of one HTTP status have in common."""

    type: str
    """As OpenAI's."""
    meaning: str


_REQUEST, _TIMEOUT = "invalid_request_error", "timeout_error"
STATUSES = {
    400: Status(_REQUEST, "The request cannot be answered; `param` names the field."),
    401: Status(_REQUEST, "A key is needed, or another one."),
    403: Status(_REQUEST, "A web page of another origin, or a key that may not do this."),
    404: Status("not_found_error", "There is no such path, model or adapter."),
    405: Status(_REQUEST, "The path does not take this method."),
    408: Status(_TIMEOUT, "The body came too slowly."),
    413: Status(_REQUEST, "The body is too large."),
    429: Status("rate_limit_error", "There is no room; Retry-After says when there may be."),
    500: Status("server_error", "The server failed."),
    501: Status(
        "not_implemented_error",
        "The endpoint needs another kind of model: this server generates text only.",
    ),
    503: Status(
        "service_unavailable_error",
        "The model is not ready; Retry-After says when to ask again.",
    ),
    504: Status(_TIMEOUT, "The answer was not finished in time."),
}


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every error."""

    error: ErrorDetail


class ApiError(Exception):
    """An error with its HTTP status; the message is for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[:MAX_MESSAGE_CHARS] + "…"
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers or {}
        if retry_after_s is not None:
            self.headers |= retry_after(retry_after_s)

    def body(self) -> bytes:
        kind = STATUSES[self.status].type
        found = ErrorBody(ErrorDetail(self.message, kind, self.param, self.status))
        return msgspec.json.encode(found)

    def response(self) -> Response:
        return Response(
            self.body(), self.status, headers=self.headers, media_type="application/json"
        )


def retry_after(seconds: float) -> dict[str, str]:
    """Return the header, which counts whole seconds."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def as_api_error(error: Exception) -> ApiError:
    """Return the error that the client reads; an unforeseen one is logged."""
    match error:
        case ApiError():
            return error
        case FieldError():
            return ApiError(400, str(error), param=error.field)
        case ChatTemplateError():
            return ApiError(400, str(error), param="messages")
        case Overloaded():
            return ApiError(429, str(error), retry_after_s=error.retry_after_s)
        case GenerationError():
            return ApiError(500, f"generating failed: {error}")
        case NoLeader():
            return ApiError(503, str(error), retry_after_s=RETRY_AFTER_S)
        case GrammarProcessLost():
            return ApiError(503, str(error), retry_after_s=error.retry_after_s)
        case TimeoutError():
            return ApiError(504, "the request did not finish in time")
        case _:
            logger.error("a request failed", exc_info=error)
            return ApiError(500, f"internal error: {type(error).__name__}")


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Give Starlette's own refusals (unknown path, wrong method) the API's shape."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    path = request.url.path
    if error.status_code == 404:
        return ApiError(404, f"path: found none at {path}", headers=headers).response()
    if error.status_code == 405:
        wanted = headers.get("Allow", "another method")
        message = f"method: wanted {wanted} for {path}, found {request.method}"
        return ApiError(405, message, headers=headers).response()
    return ApiError(400, str(error.detail), headers=headers).response()
