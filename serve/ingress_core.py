"""`IngressCore`: what takes requests and answers them, without Ray and without sockets.

It is up within seconds, long before the pools are: the tokenizer loads beside it, and a request
before everything is ready gets 503 with Retry-After. There may be several ingresses: each has its
share of the places and streams of its own, and all have one view of the pools, that of the status
board. An ingress's event loop only moves frames; what grows with a request is done in threads
(`event_loop.py`), and only once it is admitted (`admission.py`).
"""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from cluster.actors.reports import BoardSilent, IngressReport
from cluster.observe.counts import Counts
from cluster.observe.load_progress import LoadProgress, keep_what_is_loaded
from cluster.observe.metrics import MetricsSnapshot
from cluster.wire.messages import EngineOutput, GenerateRequest
from serve.adapter_loading import AdapterBoard, AdapterLoading
from serve.admission import Admission
from serve.config import RETRY_AFTER_S, DeployConfig
from serve.event_loop import StreamBatcher
from serve.observe.request_log import RequestLog
from serve.observe.tracing import Tracing, otlp_exporter
from serve.openai.errors import ApiError
from serve.openai.generation import Serving
from serve.pools.directory import Directory
from serve.pools.router import Router
from serve.readiness import Readiness, StartLog, log, scaled
from serve.requests.records import SequenceRecord
from serve.requests.tokenizer import Tokenizer

POLL_PERIOD_S = 0.25
"""How often the ingress reads the status board."""
REFRESH_TIMEOUT_S = 3.0
"""How long one reading of it may take."""
WATCHED_S = 5.0
"""How long after a look at `/status` figures for the next one are still fetched."""
LOOP_TICK_S = 0.005
"""How often the event loop's pauses are measured."""


class Board(AdapterBoard, Protocol):
    """The status board and the cluster; what is asked of them raises BoardSilent. `is_new`: it may
    not have heard of all yet. `poll` tells of this ingress, and returns what is known of all."""

    @property
    def is_new(self) -> bool: ...
    async def poll(self, report: IngressReport) -> dict[str, Any]: ...
    async def metrics(self, ingress_id: str, counts: Counts) -> MetricsSnapshot: ...
    async def free_resources(self) -> dict[str, float]: ...
    async def debug_ranks(self) -> dict[str, Any]: ...


class IngressCore:
    """The backend of the HTTP application: tokenizer, admission, router and readiness."""

    def __init__(
        self,
        config: DeployConfig,
        board: Board,
        directory: Directory,
        router: Router,
        tick: StreamBatcher,
        *,
        ingress_id: str,
        node: str,
        secret: bytes,
    ) -> None:
        """Build everything; `start` begins. `tick`: which the outputs of the router wait for."""
        self._config = config
        self._board = board
        self._directory = directory
        self._router = router
        self._id = ingress_id
        self._node = node
        self._tokenizer: Tokenizer | None = None
        self._tick = tick
        self._readiness = Readiness(config, ingress_id, time.monotonic())
        self._start_log = StartLog(self._say)
        self._loop_gap_s = 0.0
        self._watched_at = -math.inf
        self._figures: dict[str, Any] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        args = config.args
        max_running, max_queued = config.ingress_share(config.pools[-1].replicas)
        self._admission = Admission(
            max_running=max_running,
            max_queued=max_queued,
            max_queue_wait_s=args.max_queue_wait_s,
            max_body_bytes=args.max_body_bytes,
            retry_after_s=RETRY_AFTER_S,
        )
        self.serving = Serving(
            config.api, self, lambda: self._tokenizer, self._admission, tick, secret
        )
        """What the HTTP application and calls by handle are built over."""
        if config.pools[0].engine.max_loras:
            self.serving.loading = AdapterLoading(
                config.pools[0].engine, config.numerics_hash, self.serving.models, board, directory
            )
        if args.log_requests == "on":
            self.serving.on_end.append(RequestLog().write)
        self._tracing: Tracing | None = None
        if args.otlp_traces_endpoint:
            self._tracing = Tracing(otlp_exporter(args.otlp_traces_endpoint), ingress_id)
            self.serving.on_end.append(self._tracing.write)
            self.serving.is_traced = True

    async def start(self, *, is_first: bool) -> None:
        """Load and read the board from now on, and return when requests may be sent here. Where
        other ingresses answer meanwhile, this one loads first: Serve sends requests once it is
        there, and those of an earlier configuration answer until its engines drain."""
        loop = asyncio.get_running_loop()
        loading = loop.create_task(self._load_tokenizer())
        self._tasks += [loading, loop.create_task(self._poll())]
        if self._config.args.debug:
            self._tasks.append(loop.create_task(self._measure_loop()))
        if is_first:
            return
        with suppress(BoardSilent, TimeoutError):
            await self._refresh()
            if self._readiness.is_anyone_ready or self._directory.is_replacing:
                await loading
                await self._refresh()
        while self._directory.is_replacing:
            await asyncio.sleep(POLL_PERIOD_S)

    def check_health(self) -> None:
        """Raise if a background task has died, so that Serve replaces this replica."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception():
                raise RuntimeError("ingress: a background task ended") from task.exception()

    async def close(self) -> None:
        """Send the last traces, and end the processes that compile grammars."""
        if self._tokenizer is not None:
            await asyncio.to_thread(self._tokenizer.grammars.close)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        self._directory.close()

    async def drain(self) -> int:
        """Take no more requests; return how many are still answered, here and by other ingresses.
        Each call reaches one of them, any, so it is made again until all have ended."""
        self._readiness.drain()
        return self._admission.num_requests + self._readiness.num_live_elsewhere

    # The `Backend` of the HTTP application.

    def generate(
        self, request: GenerateRequest, record: SequenceRecord
    ) -> AsyncGenerator[EngineOutput, None]:
        return self._router.generate(request, record)

    def is_ready(self) -> bool:
        """Return whether requests are taken. Once all pools have served, one that no engine can
        take waits for the next that can."""
        return self._directory.has_served and self._readiness.takes_requests

    def failure(self) -> str:
        """Return what is broken: this ingress, or a pool; `/ready` tells of the rest."""
        if any(task.done() and task.exception() for task in self._tasks):
            return "ingress: a background task ended; it needs a restart"
        return self._readiness.failure()

    async def status(self) -> tuple[int, dict[str, Any]]:
        """Return code and body of `/ready`, from the last poll: a client may leave meanwhile."""
        body = self._readiness.body
        return (200 if body["status"] == "ready" else 503), body

    async def figures(self) -> dict[str, Any]:
        """Return the body of `/status`, from the last poll: for its caller no call is made. Totals
        are asked for only while somebody looks, so the first look sees none."""
        self._watched_at = time.monotonic()
        return {
            **self._readiness.body,
            "model": self._config.api.served_model_name,
            "needs_key": self._config.args.needs_key,
            "num_live": self._admission.num_live + self._readiness.num_live_elsewhere,
            "max_live": self._admission.max_live * self._config.num_ingresses,
            "figures": self._figures,
        }

    async def metrics(self, counts: Counts) -> MetricsSnapshot:
        """Tell the board what was counted here, and return what all have."""
        try:
            return await self._board.metrics(self._id, counts)
        except BoardSilent as error:
            message = f"status board: wanted its figures, found {error}"
            raise ApiError(503, message, retry_after_s=RETRY_AFTER_S) from error

    async def debug_ranks(self) -> dict[str, Any]:
        return await self._board.debug_ranks()

    def debug_ingress(self) -> dict[str, Any]:
        """Return what this process holds, and its loop's longest pause since the last call."""
        gap_s, self._loop_gap_s = self._loop_gap_s, 0.0
        rss_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "id": self._id,
            "loop_gap_s": gap_s,
            "tick_s": self._tick.period_s,
            "num_live": self._admission.num_live,
            "num_bytes": self._admission.num_bytes,
            "rss_bytes": rss_pages * mmap.PAGESIZE,
        }

    async def _measure_loop(self) -> None:
        """Note how late the loop comes back to a task that sleeps."""
        while True:
            asleep_at = time.monotonic()
            await asyncio.sleep(LOOP_TICK_S)
            gap_s = time.monotonic() - asleep_at - LOOP_TICK_S
            self._loop_gap_s = max(self._loop_gap_s, gap_s)

    async def _load_tokenizer(self) -> None:
        def load() -> Tokenizer:
            tokenizer = Tokenizer.from_dir(Path(self._config.model_path))
            tokenizer.grammars.start()
            return tokenizer

        tokenizer = await asyncio.to_thread(load)
        keep_what_is_loaded()
        self._tokenizer = tokenizer
        self._readiness.has_tokenizer = True

    async def _poll(self) -> None:
        while True:
            with suppress(BoardSilent, TimeoutError):
                await self._refresh()
            self._readiness.see_silence(time.monotonic())
            await asyncio.sleep(POLL_PERIOD_S)

    async def _refresh(self) -> None:
        """Tell the board of this ingress, and see what it knows of all; TimeoutError if that takes
        too long."""
        # In Python 3.11 `wait_for` loses a cancellation that comes together with the result.
        async with asyncio.timeout(REFRESH_TIMEOUT_S):
            await self._see(await self._board.poll(self._report()))

    async def _see(self, body: dict[str, Any]) -> None:
        """Take what the board knows of all."""
        figures, leaders = body.pop("figures"), body.pop("leaders")
        self._directory.see(leaders)
        adapters = body.pop("adapters", None)  # a board of a release before has none
        if adapters is not None and self.serving.loading is not None:
            self.serving.models.see(adapters)
        is_late = self._readiness.are_pools_late(body, time.monotonic())
        free = await self._board.free_resources() if is_late else {}
        before = self._readiness.body
        is_news = self._readiness.see(body, free, time.monotonic(), is_board_new=self._board.is_new)
        if is_news:
            self._figures = figures
            self._admission.resize(*self._config.ingress_share(self._readiness.num_live))
            for line in scaled(before, self._readiness.body):
                self._say(line)
            self._start_log.see(self._readiness.body)

    def _report(self) -> IngressReport:
        now = time.monotonic()
        loading = LoadProgress("tokenizer", 0, 1, self._readiness.elapsed_s(now))
        return IngressReport(
            ingress_id=self._id,
            pid=os.getpid(),
            node=self._node,
            numerics_hash=self._config.numerics_hash,
            loading=(loading,) if self._tokenizer is None else (),
            num_live=self._admission.num_live,
            is_watched=now - self._watched_at < WATCHED_S,
            counts=self.serving.counts.counts(),
            known_prefixes=self._directory.known_prefixes,
            adapters_revision=self.serving.models.revision if self.serving.loading else None,
            used_adapters=self._admission.used_adapters,
        )

    def _say(self, line: str) -> None:
        if self._readiness.speaks:
            log.info(line)
