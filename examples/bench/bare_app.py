"""A Ray Serve application that reads what it is sent and streams the same answer to every client.

What a client waits for here is Ray Serve's own part of what it waits for in Lockstep's.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cluster.observe.load_progress import keep_what_is_loaded

NUM_CHUNKS = 200
CHUNK_S = 0.02
TICK_S = 0.005
ANSWER = "42"

loop_gap_s = 0.0


async def chat(request: Request) -> Response:
    """Answer at once, or with a chunk every 20 ms for four seconds."""
    body = await request.body()
    if b'"stream":true' in body:
        return StreamingResponse(chunks(), media_type="text/event-stream")
    return JSONResponse({"choices": [{"message": {"content": ANSWER}}]})


async def chunks() -> AsyncIterator[bytes]:
    """Yield the chunks of an answer."""
    chunk = json.dumps({"choices": [{"delta": {"content": ANSWER}}]}).encode()
    for _ in range(NUM_CHUNKS):
        await asyncio.sleep(CHUNK_S)
        yield b"data: " + chunk + b"\n\n"
    yield b"data: [DONE]\n\n"


async def read(request: Request) -> Response:
    """Read a body."""
    await request.body()
    return JSONResponse({})


async def well(_: Request) -> Response:
    """Answer that the application is healthy."""
    return JSONResponse({"pools": {}})


async def watch_loop() -> None:
    """Measure for how long the loop does not turn."""
    global loop_gap_s
    while True:
        began = time.monotonic()
        await asyncio.sleep(TICK_S)
        loop_gap_s = max(loop_gap_s, time.monotonic() - began - TICK_S)


async def tell_loop_gap(_: Request) -> Response:
    """Return the longest gap since the last time that this was asked."""
    global loop_gap_s
    told, loop_gap_s = loop_gap_s, 0.0
    return JSONResponse({"loop_gap_s": told})


api = Starlette(
    routes=[
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", read, methods=["POST"]),
        Route("/health", well),
        Route("/ready", well),
        Route("/debug/ingress", tell_loop_gap),
    ]
)


@serve.deployment(max_ongoing_requests=2000)
@serve.ingress(api)
class Ingress:
    """The application's only replica."""

    def __init__(self) -> None:
        keep_what_is_loaded()
        self._watch = asyncio.get_running_loop().create_task(watch_loop())


deploy = Ingress.bind()  # type: ignore[attr-defined]
