"""The ASGI application: routes to handlers, behind `RequestMiddleware`."""

from __future__ import annotations

import asyncio
from functools import partial
from importlib import metadata
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serve.arguments import texts
from serve.clients import ApiKeys
from serve.observe import page
from serve.openai import adapters, openapi, tokenizing
from serve.openai.answers import ModelCard, ModelList
from serve.openai.chat import CHAT
from serve.openai.completions import COMPLETIONS
from serve.openai.endpoint import (
    Handler,
    discard,
    guarded,
    json_response,
    require_model,
    respond,
)
from serve.openai.errors import ApiError, answer_http_exception, retry_after
from serve.openai.generation import Serving
from serve.openai.middleware import RequestMiddleware
from serve.openai.responses import RESPONSES

NO_TEXT = (
    *("/v1/embeddings", "/embeddings", "/pooling", "/classify", "/score", "/v1/score"),
    *("/rerank", "/v1/rerank", "/v2/rerank", "/v1/audio/speech", "/v1/audio/transcriptions"),
    *("/v1/images/generations", "/v1/moderations"),
)
"""Paths of OpenAI and vLLM for models of another kind."""


def build_app(serving: Serving, *, is_peer_known: bool = True, sends_id: bool = True) -> Starlette:
    """Return the API over a backend; requests get 503 until its tokenizer is loaded.
    `is_peer_known`: the scope says who has connected, and not a proxy of Ray's. `sends_id`: put
    `X-Request-Id` into answers, which no server in front does."""
    args = serving.settings.args
    handlers = Handlers(serving)
    posts: dict[str, Handler] = {
        "/v1/chat/completions": partial(respond, serving, CHAT),
        "/v1/completions": partial(respond, serving, COMPLETIONS),
        "/v1/responses": partial(respond, serving, RESPONSES),
        "/tokenize": partial(tokenizing.answer, serving, tokenizing.tokenize),
        "/detokenize": partial(tokenizing.answer, serving, tokenizing.detokenize),
        adapters.LOAD_PATH: partial(adapters.answer_load, serving),
        adapters.UNLOAD_PATH: partial(adapters.answer_unload, serving),
        **dict.fromkeys(NO_TEXT, handlers.no_text),
    }
    gets: dict[str, Handler] = {
        "/status": handlers.status,
        "/openapi.json": handlers.openapi,
        "/v1/models": handlers.models,
        "/v1/models/{name:path}": handlers.model,
        "/health": handlers.health,
        "/ready": handlers.ready,
        "/version": handlers.version,
        "/metrics": handlers.metrics,
    }
    if args.debug:
        gets |= {
            "/debug/ranks": handlers.debug_ranks,
            "/debug/ingress": handlers.debug_ingress,
        }
    routes = [
        *page.routes(),
        *(Route(path, guarded(handler), methods=["POST"]) for path, handler in posts.items()),
        *(Route(path, guarded(handler)) for path, handler in gets.items()),
    ]
    key_file = Path(args.api_keys_file) if args.api_keys_file else None
    middleware = Middleware(
        RequestMiddleware,
        serving=serving,
        keys=ApiKeys(texts(args.api_keys), key_file),
        admin_keys=ApiKeys(texts(args.admin_keys)) if texts(args.admin_keys) else None,
        admin_paths=(adapters.LOAD_PATH, adapters.UNLOAD_PATH),
        is_peer_known=is_peer_known,
        routes=[route.path for route in routes],
        sends_id=sends_id,
    )
    app = Starlette(
        routes=routes,
        middleware=[middleware],
        exception_handlers={HTTPException: answer_http_exception},
    )
    # A redirect would name the host that the proxy used, which the client may not reach.
    app.router.redirect_slashes = False
    return app


class Handlers:
    """What answers the routes that do not generate, one method each."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._openapi: tuple[tuple[str, ...], bytes] | None = None
        """The names that the model had when it was written, and the document."""

    async def openapi(self, request: Request) -> Response:
        names, settings = tuple(self._serving.models.by_name), self._serving.settings
        if self._openapi is None or self._openapi[0] != names:
            self._openapi = names, await asyncio.to_thread(openapi.document, settings, names)
        return Response(self._openapi[1], media_type="application/json")

    async def no_text(self, request: Request) -> Response:
        await discard(self._serving, request)
        wanted = f"wanted one that generates text, found {request.url.path}"
        raise ApiError(501, f"path: {wanted}; this server generates text only")

    async def models(self, request: Request) -> Response:
        names = self._serving.models.by_name
        return json_response(ModelList(data=[self._card(name) for name in names]))

    async def model(self, request: Request) -> Response:
        return json_response(self._card(request.path_params["name"]))

    def _card(self, name: str) -> ModelCard:
        return adapters.model_card(self._serving, name, require_model(self._serving, name))

    async def health(self, request: Request) -> Response:
        if failure := self._serving.backend.failure():
            raise ApiError(503, failure, retry_after_s=self._serving.settings.retry_after_s)
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
