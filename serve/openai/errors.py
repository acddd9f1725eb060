"""The errors of a request, as its client reads them.

    ApiError
    ├── BadRequest        400  invalid_request_error      a field, named by `param`
    ├── Unauthorized      401  invalid_request_error      no key, or an unknown one
    ├── Forbidden         403  invalid_request_error      a web page of another origin
    ├── NotFound          404  not_found_error            path or model
    ├── MethodNotAllowed  405  invalid_request_error
    ├── SlowBody          408  timeout_error              the client sends its request too slowly
    ├── BodyTooLarge      413  invalid_request_error
    ├── TooManyRequests   429  rate_limit_error           no room; has Retry-After
    ├── InternalError     500  server_error
    ├── NotBuilt          501  not_implemented_error      needs another kind of model
    ├── Unavailable       503  service_unavailable_error  not now; has Retry-After
    └── TimedOut          504  timeout_error              not finished in time

All have one JSON shape: `{"error": {"message", "type", "param", "code"}}`, `code` the status.
"""

from __future__ import annotations

import logging
import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from compile.errors import FieldError
from serve.admission import Overloaded
from serve.requests.grammar_process import GrammarProcessLost
from serve.requests.tokenizer import ChatTemplateError

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000
"""Characters of an error's message, which may quote what the client sent."""


class ApiError(Exception):
    """An error with its HTTP status and OpenAI type; the message is for the client."""

    status = 500
    type = "server_error"

    def __init__(
        self, message: str, *, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[:MAX_MESSAGE_CHARS] + "…"
        super().__init__(message)
        self.message = message
        self.param = param
        self.headers = headers or {}

    def body(self) -> bytes:
        """Return the JSON body."""
        fields = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.status,
        }
        return msgspec.json.encode({"error": fields})

    def response(self) -> Response:
        """Return the whole HTTP answer."""
        return Response(
            self.body(), self.status, headers=self.headers, media_type="application/json"
        )


class BadRequest(ApiError):
    status = 400
    type = "invalid_request_error"


class Unauthorized(ApiError):
    status = 401
    type = "invalid_request_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"WWW-Authenticate": "Bearer"})


class Forbidden(ApiError):
    status = 403
    type = "invalid_request_error"


class NotFound(ApiError):
    status = 404
    type = "not_found_error"


class MethodNotAllowed(ApiError):
    status = 405
    type = "invalid_request_error"


class SlowBody(ApiError):
    status = 408
    type = "timeout_error"


class BodyTooLarge(ApiError):
    status = 413
    type = "invalid_request_error"


class TooManyRequests(ApiError):
    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, headers=retry_after(retry_after_s))


class InternalError(ApiError):
    status = 500
    type = "server_error"


class NotBuilt(ApiError):
    status = 501
    type = "not_implemented_error"


class Unavailable(ApiError):
    status = 503
    type = "service_unavailable_error"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, headers=retry_after(retry_after_s))


class TimedOut(ApiError):
    status = 504
    type = "timeout_error"


def retry_after(seconds: float) -> dict[str, str]:
    """Return the header, which counts whole seconds."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def as_api_error(error: Exception) -> ApiError:
    """Return the error that the client reads; an unforeseen one is logged."""
    match error:
        case ApiError():
            return error
        case FieldError():
            return BadRequest(str(error), param=error.field)
        case ChatTemplateError():
            return BadRequest(str(error), param="messages")
        case Overloaded():
            return TooManyRequests(str(error), retry_after_s=error.retry_after_s)
        case GrammarProcessLost():
            return Unavailable(str(error), retry_after_s=error.retry_after_s)
        case TimeoutError():
            return TimedOut("the request did not finish in time")
        case _:
            logger.error("a request failed", exc_info=error)
            return InternalError(f"internal error: {type(error).__name__}")


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Give Starlette's own refusals (unknown path, wrong method) the API's shape."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    path = request.url.path
    if error.status_code == 404:
        return NotFound(f"path: found none at {path}", headers=headers).response()
    if error.status_code == 405:
        wanted = headers.get("Allow", "another method")
        message = f"method: wanted {wanted} for {path}, found {request.method}"
        return MethodNotAllowed(message, headers=headers).response()
    return BadRequest(str(error.detail), headers=headers).response()
