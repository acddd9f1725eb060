"""The ASGI application: routes to handlers."""

from __future__ import annotations

import time
from importlib import metadata

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serve.config import AccessConfig
from serve.keys import ApiKeys
from serve.openai.access import Access
from serve.openai.chat import create_chat_completion
from serve.openai.completions import create_completion
from serve.openai.endpoint import Serving, guarded, json_response
from serve.openai.errors import Unavailable, answer_http_exception, retry_after
from serve.openai.responses import ModelCard, ModelList
from serve.openai.settings import ApiSettings

__all__ = ["ApiSettings", "build_app"]


def build_app(serving: Serving, access: AccessConfig | None = None) -> Starlette:
    """Return the API over a backend; requests get 503 until its tokenizer is loaded.

    Raises:
        ConfigError: the file of keys cannot be used.
    """
    handlers = Handlers(serving)
    debugging = [
        Route("/debug/ranks", guarded(handlers.debug_ranks)),
        Route("/debug/ingress", guarded(handlers.debug_ingress)),
    ]
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", guarded(handlers.chat), methods=["POST"]),
            Route("/v1/completions", guarded(handlers.completions), methods=["POST"]),
            Route("/v1/models", guarded(handlers.models)),
            Route("/v1/models/{name:path}", guarded(handlers.model)),
            Route("/health", guarded(handlers.health)),
            Route("/ready", guarded(handlers.ready)),
            Route("/version", guarded(handlers.version)),
            *(debugging if serving.settings.debug else ()),
        ],
        middleware=_middleware(access or AccessConfig()),
        exception_handlers={HTTPException: answer_http_exception},
    )
    # A redirect would name the host that the proxy used, which the client may not reach.
    app.router.redirect_slashes = False
    return app


def _middleware(access: AccessConfig) -> list[Middleware]:
    guard = Middleware(
        Access,
        keys=ApiKeys(access.api_keys, access.api_keys_file),
        open_paths=access.open_paths,
        allowed_hosts=access.allowed_hosts,
        allowed_origins=access.allowed_origins,
    )
    if not access.allowed_origins:
        return [guard]
    # Outermost: a browser asks whether it may, without a key.
    cors = Middleware(
        CORSMiddleware,
        allow_origins=access.allowed_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
    )
    return [cors, guard]


class Handlers:
    """One method per route."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._card = ModelCard(
            id=serving.settings.served_model_name,
            created=int(time.time()),
            max_model_len=serving.settings.max_model_len,
        )

    async def chat(self, request: Request) -> Response:
        return await create_chat_completion(self._serving, request)

    async def completions(self, request: Request) -> Response:
        return await create_completion(self._serving, request)

    async def models(self, request: Request) -> Response:
        return json_response(ModelList(data=[self._card]))

    async def model(self, request: Request) -> Response:
        self._serving.require_model(request.path_params["name"])
        return json_response(self._card)

    async def health(self, request: Request) -> Response:
        if not self._serving.backend.healthy():
            raise Unavailable(
                "the server does not work and needs a restart",
                retry_after_s=self._serving.settings.retry_after_s,
            )
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        status, body = await self._serving.backend.status()
        wait = retry_after(self._serving.settings.retry_after_s)
        return json_response(body, status, headers=wait if status == 503 else None)

    async def version(self, request: Request) -> Response:
        return json_response({"version": metadata.version("lockstep-serve")})

    async def debug_ingress(self, request: Request) -> Response:
        return json_response(self._serving.backend.debug_ingress())

    async def debug_ranks(self, request: Request) -> Response:
        return json_response(await self._serving.backend.debug_ranks())
