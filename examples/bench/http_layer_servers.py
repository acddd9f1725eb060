"""The two servers of `http_layer.py`: our HTTP application over an instant engine, and a bare one.

    python examples/bench/http_layer_servers.py ours PORT [--text TEXT] [--no-log] [--engines N]
    python examples/bench/http_layer_servers.py bare PORT --answers FILE

Either is one process under uvicorn. The engine of ours stands where the pools do, behind the
protocol `Backend`: each token of the same text is there at once, and all else of the loop has its
turn between two. With `--step-ms` both servers sleep for so long between two tokens of a stream.
The bare server reads a body as JSON and writes an answer, or the events of one, that our server has
given before: what is in FILE, each time made into JSON anew.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from cluster.observe.counts import Counts, Histogram, Ledger
from cluster.observe.logs import configure_logs
from cluster.observe.metrics import (
    BY_NAME,
    COUNTER,
    INGRESS,
    METRICS,
    MetricsSnapshot,
    SchedulerStats,
)
from cluster.wire.messages import EngineOutput, FinishReason, GenerateRequest
from serve.admission import Admission
from serve.config import ApiSettings
from serve.observe.request_log import RequestLog
from serve.openai.app import build_app
from serve.openai.generation import Serving
from serve.requests.records import SequenceRecord
from serve.requests.tokenizer import Tokenizer

HOST = "127.0.0.1"
TINY = Path(__file__).resolve().parents[1] / "tiny"
CHAT = "/v1/chat/completions"
MODEL = "lockstep-tiny"
MAX_MODEL_LEN = 2048
MAX_LIVE = 4096
SWITCH_INTERVAL_S = 1e-3
"""As of the ingress."""


class InstantBackend:
    """Answers each request with the tokens of one text, over and over, one after the other."""

    def __init__(self, tokenizer: Tokenizer, text: str, *, step_s: float, num_engines: int) -> None:
        """Answer at once.

        Args:
            step_s: slept between two tokens of a stream.
            num_engines: that metrics tell of, beside this process.
        """
        self._step_s = step_s
        self._token_ids = tokenizer.encode(text, add_special_tokens=False)
        self._ledger = Ledger()
        self._gauges = {
            f"decode-{i}-0": SchedulerStats(1, num_blocks=4096, num_free_blocks=2048)
            for i in range(num_engines)
        }
        for engine in self._gauges:
            self._ledger.add(engine, engine, engine_counts())

    def is_ready(self) -> bool:
        """It always is."""
        return True

    def failure(self) -> str:
        """Nothing ever is broken."""
        return ""

    async def status(self) -> tuple[int, dict[str, Any]]:
        """Return the body of /ready."""
        return 200, {"status": "ready", "pools": {}, "loading": []}

    async def figures(self) -> dict[str, Any]:
        """Return the body of /status."""
        return {}

    async def debug_ranks(self) -> dict[str, Any]:
        """Return the body of /debug/ranks."""
        return {}

    def debug_ingress(self) -> dict[str, Any]:
        """Return the body of /debug/ingress."""
        return {}

    async def metrics(self, counts: Counts) -> MetricsSnapshot:
        """Return what was counted here, and what the engines are said to have."""
        self._ledger.add(INGRESS, INGRESS, counts)
        return MetricsSnapshot(self._ledger.totals, self._gauges)

    async def generate(
        self, request: GenerateRequest, record: SequenceRecord
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield as many tokens as the request asks for, each in an output of its own."""
        record.on_attempt()
        max_tokens = request.sampling.max_tokens
        token_ids = itertools.islice(itertools.cycle(self._token_ids), max_tokens)
        for position, token_id in enumerate(token_ids):
            is_last = position == max_tokens - 1
            yield EngineOutput(
                request_id=request.request_id,
                position=position,
                token_ids=[token_id],
                logprobs=[],
                finish_reason=FinishReason.LENGTH if is_last else FinishReason.NONE,
                stop_token_id=-1,
                num_cached_tokens=0,
                handoff=None,
                error="",
                prompt_logprobs=[],
                queued_us=0 if position else 1,
            )
            await asyncio.sleep(self._step_s)


def engine_counts() -> Counts:
    """Return counts as those of an engine that has served for a while, with graphs of 64 sizes."""
    counts: Counts = {}
    for metric in METRICS:
        if metric.kind == COUNTER and not metric.labels:
            counts[metric.name,] = 123456.789
    for mode, kind in itertools.product(
        ("none", "piecewise", "full"), ("dummy", "decode", "mixed")
    ):
        counts["steps_total", mode, kind] = 123456
    for mode, size in itertools.product(("piecewise", "full"), range(8, 520, 8)):
        counts["graph_replays_total", mode, str(size)] = 123456
    histogram = Histogram("iteration_tokens_total", BY_NAME["iteration_tokens_total"].bounds)
    for size in range(1, 20_000, 7):
        histogram.observe(size)
    histogram.put_into(counts)
    return counts


def our_app(text: str, *, step_s: float, has_log: bool, num_engines: int) -> Starlette:
    """Return our application, set up as the ingress does it."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    configure_logs("text")
    tokenizer = Tokenizer.from_dir(TINY)
    tokenizer.grammars.start()
    settings = ApiSettings(served_model_name=MODEL, max_model_len=MAX_MODEL_LEN)
    admission = Admission(
        max_running=MAX_LIVE,
        max_queued=0,
        max_queue_wait_s=60,
        max_body_bytes=settings.args.max_body_bytes,
        retry_after_s=settings.retry_after_s,
    )
    backend = InstantBackend(tokenizer, text, step_s=step_s, num_engines=num_engines)
    serving = Serving(settings, backend, lambda: tokenizer, admission)
    if has_log:
        serving.on_end.append(RequestLog().write)
    return build_app(serving)


class Answers(msgspec.Struct):
    """What the bare server answers."""

    whole: dict[str, Any]
    events: list[dict[str, Any]]


def bare_app(answers: Answers, step_s: float) -> Starlette:
    """Return an application that does nothing but write these answers."""

    async def events() -> AsyncIterator[bytes]:
        for event in answers.events:
            yield b"data: " + msgspec.json.encode(event) + b"\n\n"
            await asyncio.sleep(step_s)
        yield b"data: [DONE]\n\n"

    async def chat(request: Request) -> Response:
        asked = msgspec.json.decode(await request.body())
        if asked.get("stream"):
            return StreamingResponse(events(), media_type="text/event-stream")
        body = msgspec.json.encode(answers.whole)
        return Response(body, media_type="application/json")

    return Starlette(routes=[Route(CHAT, chat, methods=["POST"])])


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("server", choices=("ours", "bare"))
    parser.add_argument("port", type=int)
    parser.add_argument("--text", default=" word", help="what the engine says, again and again")
    parser.add_argument("--step-ms", type=float, default=0.0, help="slept between two tokens")
    parser.add_argument("--no-log", action="store_true", help="no line for each request")
    parser.add_argument("--engines", type=int, default=2, help="that metrics tell of")
    parser.add_argument("--answers", type=Path, help="what the bare server answers, JSON")
    options = parser.parse_args()
    if options.server == "ours":
        step_s, has_log = options.step_ms / 1e3, not options.no_log
        app = our_app(options.text, step_s=step_s, has_log=has_log, num_engines=options.engines)
    else:
        answers = msgspec.json.decode(options.answers.read_bytes(), type=Answers)
        app = bare_app(answers, options.step_ms / 1e3)
    gc.collect()
    gc.freeze()
    uvicorn.run(app, host=HOST, port=options.port, log_level="error", access_log=False)


if __name__ == "__main__":
    main()
