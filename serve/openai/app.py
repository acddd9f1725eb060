"""The ASGI application: routes to handlers, behind a guard of who may ask.

Requests need a bearer key or, where no keys are set, may be any but those of foreign web pages. A
browser lets any page send requests to an address that its user can reach, and a page whose name was
made to resolve to this machine (DNS rebinding) may even read the answers. So without keys a request
has to name this server by an address or by a name that no public DNS has, or by one of
`allowed_hosts`; and a request of a page has to come from this server's own, or from one of
`allowed_origins`, for which CORS is on.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import time
from collections.abc import Iterable
from importlib import metadata

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from serve import clients
from serve.config import AccessConfig
from serve.keys import ApiKeys
from serve.observe import page
from serve.openai import openapi, tokenizing
from serve.openai.chat import parse_chat_shape
from serve.openai.completions import parse_completion_shape
from serve.openai.endpoint import Serving, guarded, json_response, respond
from serve.openai.errors import (
    ApiError,
    Forbidden,
    NotBuilt,
    Unauthorized,
    Unavailable,
    answer_http_exception,
    retry_after,
)
from serve.openai.observed import HEADER, Observed
from serve.openai.responses import ModelCard, ModelList
from serve.openai.responses_api import parse_responses_shape

ANY = "*"
NO_TEXT = (
    *("/v1/embeddings", "/embeddings", "/pooling", "/classify", "/score", "/v1/score"),
    *("/rerank", "/v1/rerank", "/v2/rerank", "/v1/audio/speech", "/v1/audio/transcriptions"),
    *("/v1/images/generations", "/v1/moderations"),
)
"""Paths of OpenAI and vLLM for models of another kind."""
ONLY_TEXT = "this server generates text only"
PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".svc", ".lan", ".home.arpa")
"""Ends of names that cannot be registered in public DNS."""


def build_app(
    serving: Serving,
    access: AccessConfig | None = None,
    *,
    is_peer_known: bool = True,
    sends_id: bool = True,
) -> Starlette:
    """Return the API over a backend; requests get 503 until its tokenizer is loaded.

    Args:
        is_peer_known: a request's scope tells who has connected, and not a proxy of Ray's.
        sends_id: put `X-Request-Id` into answers, which no server in front does.

    Raises:
        FieldError: the file of keys cannot be used.
    """
    handlers = Handlers(serving)
    debugging = [
        Route("/debug/ranks", guarded(handlers.debug_ranks)),
        Route("/debug/ingress", guarded(handlers.debug_ingress)),
    ]
    routes = [
        *page.routes(),
        Route("/status", guarded(handlers.status)),
        Route("/v1/chat/completions", guarded(handlers.chat), methods=["POST"]),
        Route("/v1/completions", guarded(handlers.completions), methods=["POST"]),
        Route("/v1/responses", guarded(handlers.responses), methods=["POST"]),
        *(Route(path, guarded(handlers.no_text), methods=["POST"]) for path in NO_TEXT),
        Route("/tokenize", guarded(handlers.tokenize), methods=["POST"]),
        Route("/detokenize", guarded(handlers.detokenize), methods=["POST"]),
        Route("/openapi.json", guarded(handlers.openapi)),
        Route("/v1/models", guarded(handlers.models)),
        Route("/v1/models/{name:path}", guarded(handlers.model)),
        Route("/health", guarded(handlers.health)),
        Route("/ready", guarded(handlers.ready)),
        Route("/version", guarded(handlers.version)),
        Route("/metrics", guarded(handlers.metrics)),
        *(debugging if serving.settings.args.debug else ()),
    ]
    observed = Middleware(
        Observed,
        counts=serving.counts,
        routes=[route.path for route in routes],
        on_end=serving.on_end,
        is_traced=serving.is_traced,
        sends_id=sends_id,
    )
    app = Starlette(
        routes=routes,
        middleware=[observed, *_middleware(access or AccessConfig(), is_peer_known)],
        exception_handlers={HTTPException: answer_http_exception},
    )
    # A redirect would name the host that the proxy used, which the client may not reach.
    app.router.redirect_slashes = False
    return app


def _middleware(access: AccessConfig, is_peer_known: bool) -> list[Middleware]:
    guard = Middleware(
        Access,
        keys=ApiKeys(access.api_keys, access.api_keys_file),
        open_paths=access.open_paths,
        allowed_hosts=access.allowed_hosts,
        allowed_origins=access.allowed_origins,
        trusted_proxies=access.trusted_proxies,
        is_peer_known=is_peer_known,
    )
    if not access.allowed_origins:
        return [guard]
    # Outermost: a browser asks whether it may, without a key.
    cors = Middleware(
        CORSMiddleware,
        allow_origins=access.allowed_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[HEADER],
    )
    return [cors, guard]


class Handlers:
    """One method per route."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._openapi: bytes | None = None
        settings, created = serving.settings, int(time.time())
        self._cards = {
            name: ModelCard(id=name, created=created, max_model_len=settings.max_model_len)
            for name in settings.model_names
        }

    async def chat(self, request: Request) -> Response:
        return await respond(self._serving, request, parse_chat_shape)

    async def completions(self, request: Request) -> Response:
        return await respond(self._serving, request, parse_completion_shape)

    async def tokenize(self, request: Request) -> Response:
        return await tokenizing.answer(self._serving, request, tokenizing.tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await tokenizing.answer(self._serving, request, tokenizing.detokenize)

    async def openapi(self, request: Request) -> Response:
        if self._openapi is None:
            self._openapi = await asyncio.to_thread(openapi.document, self._serving.settings)
        return Response(self._openapi, media_type="application/json")

    async def responses(self, request: Request) -> Response:
        return await respond(self._serving, request, parse_responses_shape)

    async def no_text(self, request: Request) -> Response:
        await self._serving.bodies.discard(request)
        path = request.url.path
        raise NotBuilt(f"path: wanted one that generates text, found {path}; {ONLY_TEXT}")

    async def models(self, request: Request) -> Response:
        return json_response(ModelList(data=[*self._cards.values()]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._serving.require_model(name)
        return json_response(self._cards[name])

    async def health(self, request: Request) -> Response:
        if failure := self._serving.backend.failure():
            raise Unavailable(failure, retry_after_s=self._serving.settings.retry_after_s)
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        status, body = await self._serving.backend.status()
        wait = retry_after(self._serving.settings.retry_after_s)
        return json_response(body, status, headers=wait if status == 503 else None)

    async def status(self, request: Request) -> Response:
        return json_response(await self._serving.backend.figures(), headers=page.HEADERS)

    async def version(self, request: Request) -> Response:
        return json_response({"version": metadata.version("lockstep-serve")})

    async def metrics(self, request: Request) -> Response:
        accept = request.headers.get("accept", "")
        text, content_type = await self._serving.scrapes.scrape(accept)
        return Response(text, media_type=None, headers={"Content-Type": content_type})

    async def debug_ingress(self, request: Request) -> Response:
        return json_response(self._serving.backend.debug_ingress())

    async def debug_ranks(self, request: Request) -> Response:
        return json_response(await self._serving.backend.debug_ranks())


class Access:
    """ASGI middleware that answers 401 or 403, or notes who asks and lets a request through."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        open_paths: Iterable[str],
        allowed_hosts: Iterable[str],
        allowed_origins: Iterable[str],
        trusted_proxies: int,
        is_peer_known: bool,
    ) -> None:
        """Guard an app.

        Args:
            open_paths: need no key.
            allowed_hosts, allowed_origins: beside those that are always right; * allows all.
            trusted_proxies, is_peer_known: as of `clients.of_address`.
        """
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)
        self._allowed_hosts = frozenset(host.lower() for host in allowed_hosts)
        self._allowed_origins = frozenset(origin.lower() for origin in allowed_origins)
        self._address_of = functools.partial(
            clients.of_address, trusted_proxies=trusted_proxies, is_peer_known=is_peer_known
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            await refusal.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Return why a request may not ask; None: it may, and who asks is noted."""
        headers = Headers(scope=scope)
        clients.set_client(scope, self._address_of(scope))
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
        clients.set_client(scope, clients.of_key(key.strip()))
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


@functools.lru_cache(maxsize=64)  # clients choose the names, and how long they are
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
