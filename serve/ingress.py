"""`Ingress`: the deployment that takes requests, over HTTP and from handles of other Ray apps.

It is up within seconds, long before the pools are: the tokenizer loads beside it, and a request
before everything is ready gets 503 with Retry-After. There may be several: each has its share of
the places and streams of its own, and all have one view of the pools, that of the status board.
An ingress's event loop only moves frames; what grows with a request is done in threads
(`event_loop.py`), and only once it is admitted (`admission.py`).
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import mmap
import os
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray import serve as ray_serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from cluster.actors.load_progress import LoadProgress
from cluster.actors.placement import PLACEMENT_TIMEOUT_S, free_resources, rank_bundles
from cluster.actors.rank_actor import keep_what_is_loaded
from cluster.actors.secret import application_secret
from cluster.actors.status_board import (
    LOST_AFTER_S,
    OUTDATED,
    IngressReport,
    create_board,
    has_board,
)
from cluster.observe.counts import Counts
from cluster.observe.logs import configure_logs
from cluster.observe.metrics import Described, MetricsSnapshot
from cluster.wire.credentials import Credentials
from cluster.wire.messages import EngineOutput, GenerateRequest
from compile.errors import FieldError
from serve.admission import Admission
from serve.config import DeployConfig
from serve.event_loop import CHUNK_COST, HAPROXY_CHUNK_COST, StreamBatcher
from serve.observe.request_log import RequestLog
from serve.observe.start_progress import StartLog
from serve.observe.tracing import Tracing, otlp_exporter
from serve.openai import direct
from serve.openai.app import build_app
from serve.openai.backend import ApiSettings
from serve.openai.chat import parse_chat
from serve.openai.completions import parse_completion
from serve.openai.endpoint import Serving
from serve.openai.errors import ApiError
from serve.pools.mailboxes import TokenSocket
from serve.pools.quarantine import SharedDock
from serve.pools.router import Router
from serve.requests.cache_salt import CacheSalts
from serve.requests.records import SequenceRecord
from serve.requests.tokenizer import Tokenizer

log = logging.getLogger("lockstep.ingress")

MAX_SEQUENCES = 1024
"""Sequences of one request (prompts times `n`), or as many as may be alive if those are fewer;
more get 400."""
POLL_PERIOD_S = 0.25
"""How often the ingress reads the status board."""
POLL_TIMEOUT_S = 3.0
"""How long one reading of it may take."""
STALE_S = 5.0
"""A report that is older no longer counts."""
RETRY_AFTER_S = 2
"""What a client is told to wait by Ray's proxy or while the pools load, and at least where no place
is free."""
DEBUG_TIMEOUT_S = 3.0
"""How long ranks have to answer `/debug/ranks`."""
WATCHED_S = 5.0
"""How long after a look at `/status` figures for the next one are still fetched."""
LOOP_TICK_S = 0.005
"""How often the event loop's pauses are measured."""
M_MMAP_THRESHOLD = -3
"""glibc's name for it, in `malloc.h`."""
LARGE_BYTES = 1 << 20
SWITCH_INTERVAL_S = 1e-3
"""How soon a thread that parses or templates lets the event loop in; Python's default is 5 ms."""


class _Pools:
    """Deployment handles as the router wants them."""

    def __init__(self, handle: DeploymentHandle, config_hash: str) -> None:
        self._handle = handle
        self._config_hash = config_hash

    def generate(self, request_id: str, frame: bytes) -> Any:
        return self._handle.generate.remote(request_id, frame, self._config_hash)


@ray_serve.ingress()
class Ingress:
    """The HTTP application, its tokenizer, the token socket and the router."""

    # Ray Serve awaits constructors: sockets need the running loop.
    async def __init__(  # type: ignore[misc]
        self,
        config: DeployConfig,
        handles: dict[str, DeploymentHandle],
    ) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        configure_logs(config.args.log_format)
        _map_large_buffers()
        self._config = config
        _check_device(config)
        self._late_at = self._complain_at = time.monotonic() + PLACEMENT_TIMEOUT_S
        context = ray_serve.get_replica_context()
        app_name = context.app_name
        self._id = context.replica_id.unique_id
        has_company = has_board(app_name)
        self._board = self._new_board()
        self._board_lost_at = -math.inf
        secret = await asyncio.to_thread(application_secret, app_name)
        credentials = Credentials(config.config_hash, secret)
        # Ray reads it so too.
        self._is_behind_haproxy = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
        # Ray's own proxy is one process, and takes the chunks of all ingresses.
        is_shared = not self._is_behind_haproxy
        cost = CHUNK_COST * config.num_ingresses if is_shared else HAPROXY_CHUNK_COST
        tick = StreamBatcher(cost)
        self._tokens = TokenSocket(ray.util.get_node_ip_address(), credentials, tick)
        self._router = Router(
            {name: _Pools(handle, config.config_hash) for name, handle in handles.items()},
            self._tokens,
            SharedDock(self._take_turn, self._give_turn_back),
        )
        max_running, max_queued = config.ingress_share
        self._admission = Admission(
            max_running=max_running,
            max_queued=max_queued,
            max_queue_wait_s=config.args.max_queue_wait_s,
            max_body_bytes=config.args.max_body_bytes,
            retry_after_s=RETRY_AFTER_S,
        )
        self._tokenizer: Tokenizer | None = None
        settings = ApiSettings(
            served_model_name=config.served_model_name,
            other_model_names=config.served_model_names[1:],
            max_model_len=config.max_model_len,
            args=config.args,
            max_sequences=min(MAX_SEQUENCES, self._admission.max_live),
            vocab_size=config.vocab_size,
            max_prompt_len=config.max_prompt_len,
            retry_after_s=RETRY_AFTER_S,
            cache_info=config.cache_info,
        )
        self._told: Counts = {}
        """What the board was told last; empty if it was made anew."""
        salts = CacheSalts(secret, is_per_key=config.access.divides_prefix_cache)
        self._serving = Serving(
            settings, self, lambda: self._tokenizer, self._admission, tick, salts
        )
        if config.args.log_requests == "on":
            self._serving.on_end.append(RequestLog().write)
        self._tracing: Tracing | None = None
        if config.args.otlp_traces_endpoint:
            self._tracing = Tracing(otlp_exporter(config.args.otlp_traces_endpoint), self._id)
            self._serving.on_end.append(self._tracing.write)
            self._serving.is_traced = True
        self._is_draining = False
        self._loop_gap_s = 0.0
        self._complete_at = time.monotonic()
        """When all replicas and the tokenizer were there last; before that, the start."""
        self._start_log = StartLog(self._say)
        self._watched_at = -math.inf
        self._figures: dict[str, Any] | None = None
        self._status: dict[str, Any] = {
            "status": "loading",
            "compiling": False,
            "pools": {},
            "ingresses": [],
            "loading": [],
        }
        loop = asyncio.get_running_loop()
        loading = loop.create_task(self._load_tokenizer())
        self._tasks = [
            loading,
            loop.create_task(self._poll_status()),
            self._tokens.task,
        ]
        if config.args.debug:
            self._tasks.append(loop.create_task(self._measure_loop()))
        if has_company:
            await self._join(loading)

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the HTTP application; Ray Serve calls this after the constructor."""
        # HAProxy tells nobody who has connected to it; Ray's own proxy hands it on.
        app: Starlette = build_app(
            self._serving,
            self._config.access,
            is_peer_known=not self._is_behind_haproxy,
            sends_id=False,
        )
        return app

    # What other Ray apps call through `serve.get_app_handle(...)`.

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer what would be posted to /v1/chat/completions."""
        return await direct.answer(self._serving, parse_chat, body)

    async def stream_chat(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a chat completion; call with `options(stream=True)`."""
        async with aclosing(direct.stream(self._serving, parse_chat, body)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer what would be posted to /v1/completions."""
        return await direct.answer(self._serving, parse_completion, body)

    async def stream_complete(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a completion; call with `options(stream=True)`."""
        async with aclosing(direct.stream(self._serving, parse_completion, body)) as chunks:
            async for chunk in chunks:
                yield chunk

    # The backend of the HTTP application.

    def is_ready(self) -> bool:
        """Whether a request can be served now."""
        is_loaded = self._tokenizer is not None and not self._is_draining
        return is_loaded and self._status["status"] in ("ready", "degraded")

    def failure(self) -> str:
        """Return what is broken: this ingress, or a pool that hangs or is gone; `/ready` tells of
        the rest.

        A pool hangs if none of its replicas serves, and the watchdog called a step of one stuck.
        """
        if any(task.done() and task.exception() for task in self._tasks):
            return "ingress: a background task ended; it needs a restart"
        pools = self._status["pools"].items()
        found = (f"{name} pool: {error}" for name, pool in pools if (error := _why_down(pool)))
        return next(found, "")

    async def status(self) -> tuple[int, dict[str, Any]]:
        """Return code and body of `/ready`, from the last poll.

        A call to the board made here would be cancelled by a client that leaves.
        """
        return (200 if self._status["status"] == "ready" else 503), self._status

    async def drain(self) -> int:
        """Take no more requests; return how many are still answered, here and by other ingresses.

        Each call reaches one of them, any, so it is made again until all have ended.
        """
        self._is_draining = True
        self._status = {**self._status, "status": "draining"}
        return self._admission.num_requests + self._num_live() - self._admission.num_live

    async def debug_ranks(self) -> dict[str, Any]:
        """Return what every rank has compiled, captured, replayed and agreed on.

        A rank that does not answer in `DEBUG_TIMEOUT_S` has an `error` instead.
        """
        found = await self._board.actors.remote()
        pools = {}
        for pool, replicas in found.items():
            asked = [(name, await _debug_of(actors)) for name, actors in replicas.items()]
            pools[pool] = {"replicas": [{"id": name, "ranks": ranks} for name, ranks in asked]}
        return {"pools": pools}

    async def figures(self) -> dict[str, Any]:
        """Return the body of `/status`, from the last poll: for its caller no call is made.

        Totals are asked for only while somebody looks, so the first look sees none.
        """
        self._watched_at = time.monotonic()
        return {
            **self._status,
            "model": self._config.served_model_name,
            "needs_key": self._config.access.needs_key,
            "num_live": self._num_live(),
            "max_live": self._admission.max_live * self._config.num_ingresses,
            "figures": self._figures,
        }

    def debug_ingress(self) -> dict[str, Any]:
        """Return what this process holds, and its loop's longest pause since the last call."""
        gap_s, self._loop_gap_s = self._loop_gap_s, 0.0
        rss_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "id": self._id,
            "loop_gap_s": gap_s,
            "tick_s": self._tokens.tick.period_s,
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

    async def _refresh(self) -> None:
        body = await self._poll()
        figures = body.pop("figures")
        missing = await self._missing_replicas(body)
        is_board_new = time.monotonic() - self._board_lost_at < LOST_AFTER_S
        if missing and is_board_new and self._status["status"] != "loading":
            return  # it has not heard of all yet, and nothing here has changed
        body["loading"] += missing
        states = {ingress["state"] for ingress in body["ingresses"]}
        if "ready" not in states:
            body["status"] = "loading"
        elif body["status"] == "ready" and (missing or "loading" in states):
            body["status"] = "degraded"
        if self._is_draining:
            body["status"] = "draining"
        self._status, self._figures = body, figures
        self._start_log.see(body)

    async def _join(self, loading: asyncio.Task[None]) -> None:
        """Load first where others answer meanwhile: Serve sends requests once this is there."""
        with suppress(ray.exceptions.RayError, ValueError, TimeoutError):
            await asyncio.wait_for(self._refresh(), POLL_TIMEOUT_S)
            if any(ingress["state"] == "ready" for ingress in self._status["ingresses"]):
                await loading
                await asyncio.wait_for(self._refresh(), POLL_TIMEOUT_S)

    def _speaks(self) -> bool:
        """Whether what concerns all is logged here: by the first that came."""
        ingresses = self._status["ingresses"]
        return not ingresses or ingresses[0]["id"] == self._id

    def _say(self, line: str) -> None:
        if self._speaks():
            log.info(line)

    def _num_live(self) -> int:
        """Return the sequences that all ingresses have admitted."""
        others: list[int] = [
            ingress["num_live"]
            for ingress in self._status["ingresses"]
            if ingress["id"] != self._id
        ]
        return self._admission.num_live + sum(others)

    async def _take_turn(self) -> bool:
        """Return whether a suspect of this ingress may be tried; if nobody can be asked, it may."""
        try:
            call = self._board.take_turn.remote(self._id)
            return bool(await asyncio.wait_for(call, POLL_TIMEOUT_S))
        except (TimeoutError, ValueError, ray.exceptions.RayError):
            return True

    def _give_turn_back(self) -> None:
        self._board.give_turn_back.remote(self._id)

    def generate(
        self, request: GenerateRequest, record: SequenceRecord
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield a request's outputs; closing the iterator aborts it."""
        return self._router.generate(request, record)

    async def metrics(self, counts: Counts) -> MetricsSnapshot:
        """Tell the board what was counted here, and return what all have.

        While there is no board, nothing is told that could be less than before.
        """
        try:
            return await self._board_metrics(counts)
        except ray.exceptions.RayActorError:
            self._replace_board()
        except (TimeoutError, ValueError, ray.exceptions.RayError) as error:
            raise _no_figures(error) from error
        try:
            return await self._board_metrics(counts)
        except (TimeoutError, ValueError, ray.exceptions.RayError) as error:
            raise _no_figures(error) from error

    async def _board_metrics(self, counts: Counts) -> MetricsSnapshot:
        call = self._board.metrics.remote(self._id, counts)
        snapshot: MetricsSnapshot = await asyncio.wait_for(call, POLL_TIMEOUT_S)
        return snapshot

    async def check_health(self) -> None:
        """Fail when a background task has died, so that Serve replaces this replica."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception():
                raise RuntimeError("ingress: a background task ended") from task.exception()

    async def __del__(self) -> None:
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    async def _poll(self) -> dict[str, Any]:
        """Tell the board of this ingress, and return what it knows of all."""
        try:
            return await self._poll_board()
        except ray.exceptions.RayActorError:
            self._replace_board()
            return await self._poll_board()

    async def _poll_board(self) -> dict[str, Any]:
        counts = self._serving.counts.counts()
        elapsed_s = time.monotonic() - self._complete_at
        is_loading = self._tokenizer is None
        report = IngressReport(
            ingress_id=self._id,
            pid=os.getpid(),
            node=ray.util.get_node_ip_address(),
            config_hash=self._config.config_hash,
            loading=(LoadProgress("tokenizer", 0, 1, elapsed_s),) if is_loading else (),
            num_live=self._admission.num_live,
            is_watched=time.monotonic() - self._watched_at < WATCHED_S,
            counts=counts if counts != self._told else None,
        )
        body = dict(await self._board.poll.remote(report))
        self._told = counts
        return body

    def _replace_board(self) -> None:
        """Make another board in place of one that died, or of one whose ingress did."""
        self._board_lost_at = time.monotonic()
        self._told = {}
        self._board = self._new_board()

    def _new_board(self) -> Any:
        app_name = ray_serve.get_replica_context().app_name
        config = self._config
        described = Described(config.served_model_name, config.max_model_len, config.cache_info)
        return create_board(app_name, [pool.name for pool in config.pools], described)

    async def _missing_replicas(self, found: dict[str, Any]) -> list[dict[str, Any]]:
        """Tell of what has fewer replicas than wanted; after a while also what they wait for."""
        missing: list[dict[str, Any]] = []
        if (there := len(found["ingresses"])) < (wanted := self._config.num_ingresses):
            missing.append(self._awaited("ingress: replicas", there, wanted))
        for pool in self._config.pools:
            replicas = found["pools"].get(pool.name, {"replicas": []})["replicas"]
            placed = sum(replica["state"] != OUTDATED for replica in replicas)
            if placed >= pool.replicas:
                continue
            what = f"{pool.name}: replicas"
            if time.monotonic() > self._late_at:
                bundles = rank_bundles(pool.engine, pool.num_cpus)
                free = await asyncio.to_thread(free_resources)
                what += f" not placed: each wanted {bundles}, found free {free}"
                if time.monotonic() > self._complain_at and self._speaks():
                    self._complain_at = time.monotonic() + PLACEMENT_TIMEOUT_S
                    log.error("%s", what)
            missing.append(self._awaited(what, placed, pool.replicas, pool=pool.name))
        if not missing and self._tokenizer is not None:
            self._complete_at = time.monotonic()
        if not missing:
            self._late_at = time.monotonic() + PLACEMENT_TIMEOUT_S
        return missing

    def _awaited(
        self, what: str, done: int = 0, total: int = 1, pool: str | None = None
    ) -> dict[str, Any]:
        """Return an entry of `loading` for what no rank does, since all there was."""
        elapsed_s = time.monotonic() - self._complete_at
        progress = LoadProgress(what, done, total, elapsed_s)
        return {**asdict(progress), "pool": pool, "replica": None}

    async def _load_tokenizer(self) -> None:
        def load() -> Tokenizer:
            tokenizer = Tokenizer.from_dir(Path(self._config.model_path))
            tokenizer.grammars.start()
            return tokenizer

        tokenizer = await asyncio.to_thread(load)
        keep_what_is_loaded()
        self._tokenizer = tokenizer

    async def _poll_status(self) -> None:
        asked_well_at = time.monotonic()
        while True:
            # A board that dies while another is made raises ValueError, not a RayError.
            with suppress(ray.exceptions.RayError, ValueError, TimeoutError):
                await asyncio.wait_for(self._refresh(), POLL_TIMEOUT_S)
                asked_well_at = time.monotonic()
            silent_s = time.monotonic() - asked_well_at
            if silent_s > STALE_S and self._status["status"] == "ready":
                what = f"status board: wanted an answer, found none for {STALE_S:g} s"
                loading = [self._awaited(what)]
                self._status = {**self._status, "status": "degraded", "loading": loading}
            await asyncio.sleep(POLL_PERIOD_S)


def _no_figures(error: Exception) -> ApiError:
    message = f"status board: wanted its figures, found {type(error).__name__}"
    return ApiError(503, message, retry_after_s=RETRY_AFTER_S)


def _why_down(pool: dict[str, Any]) -> str:
    """Return why a pool serves nobody and will not do so by itself soon; empty if it does."""
    replicas = [replica for replica in pool["replicas"] if replica["state"] != OUTDATED]
    if any(replica["state"] == "ready" for replica in replicas):
        return ""
    down = [each for each in replicas if each["state"] == "failed" or each.get("stuck")]
    return str(down[0].get("error") or "no rank serves") if down else ""


def _map_large_buffers() -> None:
    """Let the memory of large bodies go back to the system when they are freed.

    Once a large buffer was freed, glibc takes the next ones from its heap, where anything that was
    allocated behind them keeps their memory.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's alone
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def _check_device(config: DeployConfig) -> None:
    """Refuse to serve on CPUs because the machine that deploys is the one without a GPU.

    Raises:
        FieldError: `device` was not given, and the cluster has GPUs.
    """
    num_gpus = ray.cluster_resources().get("GPU", 0)
    if config.args.device == "auto" and num_gpus and config.pools[0].engine.device == "cpu":
        wanted = f"cpu or cuda (torch found no GPU where deploy ran, the cluster has {num_gpus:g})"
        raise FieldError("device", wanted, "auto")


async def _debug_of(actors: list[Any]) -> list[dict[str, Any]]:
    """Ask all ranks of a replica at once."""

    async def ask(actor: Any) -> dict[str, Any]:
        try:
            call = actor.debug.options(concurrency_group="ctl").remote()
            return dict(await asyncio.wait_for(call, DEBUG_TIMEOUT_S))
        except TimeoutError:
            return {"error": f"wanted an answer in {DEBUG_TIMEOUT_S:g} s, found none"}
        except ray.exceptions.RayError as error:
            return {"error": str(error).splitlines()[0]}

    return list(await asyncio.gather(*map(ask, actors)))
