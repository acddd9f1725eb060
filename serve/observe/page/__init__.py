"""The status page: one HTML, one style sheet and one script, which read `/status` once a second.

The page loads nothing from elsewhere, and its policy lets it do nothing else. Names and texts that
come from outside, such as a model's answer, are put in as text. The files are open even where
clients need keys: they hold nothing of the application, and the chat asks for a key.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
"""By route the file and its type."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def routes() -> list[Route]:
    return [Route(path, _answers(name, kind)) for path, (name, kind) in FILES.items()]


def _answers(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    content = resources.files(__name__).joinpath(name).read_bytes()

    async def answer(request: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return answer
