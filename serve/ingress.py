"""`Ingress`: the deployment that takes requests, over HTTP and from handles of other Ray apps.

It is up within seconds, long before the pools are: the tokenizer loads beside it, and a request
before everything is ready gets 503 with Retry-After. Its event loop only moves frames; what grows
with a request is done in threads (`event_loop.py`), and only once it is admitted (`admission.py`).
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import ray
from ray import serve as ray_serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from cluster.actors.placement import PLACEMENT_TIMEOUT_S, free_resources, rank_bundles
from cluster.actors.rank_actor import keep_what_is_loaded
from cluster.actors.secret import application_secret
from cluster.actors.status_board import OUTDATED, create_board
from cluster.config import ConfigError
from cluster.credentials import Credentials
from cluster.messages import EngineOutput, GenerateRequest
from serve.admission import Admission
from serve.config import DeployConfig
from serve.event_loop import SharedTick
from serve.openai import direct
from serve.openai.app import build_app
from serve.openai.backend import ApiSettings
from serve.openai.chat import parse_chat_shape
from serve.openai.completions import parse_completion_shape
from serve.openai.endpoint import Serving
from serve.router import Router
from serve.tokenizer import Tokenizer
from serve.tokens import TokenSocket

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
        self, config: DeployConfig, handles: dict[str, DeploymentHandle]
    ) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        _map_large_buffers()
        self._config = config
        _check_device(config)
        self._late_at = self._complain_at = time.monotonic() + PLACEMENT_TIMEOUT_S
        self._board = self._new_board()
        app_name = ray_serve.get_replica_context().app_name
        secret = await asyncio.to_thread(application_secret, app_name)
        credentials = Credentials(config.config_hash, secret)
        self._tokens = TokenSocket(ray.util.get_node_ip_address(), credentials, SharedTick())
        self._router = Router(
            {name: _Pools(handle, config.config_hash) for name, handle in handles.items()},
            self._tokens,
        )
        self._admission = Admission(
            max_running=config.max_running,
            max_queued=config.max_queued_requests,
            max_queue_wait_s=config.max_queue_wait_s,
            max_body_bytes=config.max_body_bytes,
            retry_after_s=RETRY_AFTER_S,
        )
        self._tokenizer: Tokenizer | None = None
        settings = ApiSettings(
            served_model_name=config.served_model_name,
            max_model_len=config.max_model_len,
            max_body_bytes=config.max_body_bytes,
            request_timeout_s=config.request_timeout_s,
            max_answer_bytes=config.max_answer_bytes,
            stream_interval=config.stream_interval,
            max_sequences=min(MAX_SEQUENCES, self._admission.max_live),
            vocab_size=config.vocab_size,
            max_prompt_len=config.max_prompt_len,
            retry_after_s=RETRY_AFTER_S,
            debug=config.debug,
        )
        tick = self._tokens.tick
        self._serving = Serving(settings, self, lambda: self._tokenizer, self._admission, tick)
        self._loop_gap_s = 0.0
        self._status: dict[str, Any] = {
            "status": "loading",
            "compiling": False,
            "pools": {},
            "loading": [],
        }
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._load_tokenizer()),
            loop.create_task(self._poll_status()),
            self._tokens.task,
        ]
        if config.debug:
            self._tasks.append(loop.create_task(self._measure_loop()))

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the HTTP application; Ray Serve calls this after the constructor."""
        app: Starlette = build_app(self._serving, self._config.access)
        return app

    # What other Ray apps call through `serve.get_app_handle(...)`.

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer what would be posted to /v1/chat/completions."""
        return await direct.answer(self._serving, parse_chat_shape, body)

    async def stream_chat(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a chat completion; call with `options(stream=True)`."""
        async with aclosing(direct.stream(self._serving, parse_chat_shape, body)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer what would be posted to /v1/completions."""
        return await direct.answer(self._serving, parse_completion_shape, body)

    async def stream_complete(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a completion; call with `options(stream=True)`."""
        async with aclosing(direct.stream(self._serving, parse_completion_shape, body)) as chunks:
            async for chunk in chunks:
                yield chunk

    # The backend of the HTTP application.

    def is_ready(self) -> bool:
        """Whether a request can be served now."""
        return self._tokenizer is not None and self._status["status"] in ("ready", "degraded")

    def healthy(self) -> bool:
        """Whether this ingress works; `/ready` tells of the pools."""
        return not any(task.done() and task.exception() for task in self._tasks)

    async def status(self) -> tuple[int, dict[str, Any]]:
        """Return code and body of `/ready`, from the last poll.

        A call to the board made here would be cancelled by a client that leaves.
        """
        return (200 if self._status["status"] == "ready" else 503), self._status

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

    def debug_ingress(self) -> dict[str, Any]:
        """Return what this process holds, and its loop's longest pause since the last call."""
        gap_s, self._loop_gap_s = self._loop_gap_s, 0.0
        rss_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
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
        body = dict(await self._snapshot())
        missing = await self._missing_replicas(body["pools"])
        body["loading"] += missing
        if missing and body["status"] == "ready":
            body["status"] = "degraded"
        if self._tokenizer is None:
            body["status"] = "loading"
            body["loading"].append({"what": "tokenizer", "done": 0, "total": 1})
        self._status = body

    def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineOutput, None]:
        """Yield a request's outputs; closing the iterator aborts it."""
        return self._router.generate(request)

    async def check_health(self) -> None:
        """Fail when a background task has died, so that Serve replaces this replica."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception():
                raise RuntimeError("ingress: a background task ended") from task.exception()

    async def _snapshot(self) -> dict[str, Any]:
        """Return the board's figures; the board of an ingress that was replaced dies with it."""
        config_hash = self._config.config_hash
        try:
            return dict(await self._board.snapshot.remote(config_hash))
        except ray.exceptions.RayActorError:
            self._board = self._new_board()
            return dict(await self._board.snapshot.remote(config_hash))

    def _new_board(self) -> Any:
        app_name = ray_serve.get_replica_context().app_name
        return create_board(app_name, [pool.name for pool in self._config.pools])

    async def _missing_replicas(self, found: dict[str, Any]) -> list[dict[str, Any]]:
        """Tell of pools with fewer replicas than wanted; after a while also what they wait for."""
        missing: list[dict[str, Any]] = []
        for pool in self._config.pools:
            replicas = found.get(pool.name, {"replicas": []})["replicas"]
            placed = sum(replica["state"] != OUTDATED for replica in replicas)
            if placed == pool.replicas:
                continue
            what = f"{pool.name}: replicas"
            if time.monotonic() > self._late_at:
                wanted = rank_bundles(pool.engine, pool.num_cpus)
                free = await asyncio.to_thread(free_resources)
                what += f" not placed: each wanted {wanted}, found free {free}"
                if time.monotonic() > self._complain_at:
                    self._complain_at = time.monotonic() + PLACEMENT_TIMEOUT_S
                    log.error("%s", what)
            missing.append({"what": what, "done": placed, "total": pool.replicas})
        if not missing:
            self._late_at = time.monotonic() + PLACEMENT_TIMEOUT_S
        return missing

    async def _load_tokenizer(self) -> None:
        tokenizer = await asyncio.to_thread(Tokenizer.from_dir, Path(self._config.model_path))
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
                loading = [{"what": what, "done": 0, "total": 1}]
                self._status = {**self._status, "status": "degraded", "loading": loading}
            await asyncio.sleep(POLL_PERIOD_S)


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
        ConfigError: `device` was not given, and the cluster has GPUs.
    """
    num_gpus = ray.cluster_resources().get("GPU", 0)
    if config.is_device_guessed and num_gpus and config.pools[0].engine.device == "cpu":
        wanted = f"cpu or cuda (torch found no GPU where deploy ran, the cluster has {num_gpus:g})"
        raise ConfigError("device", wanted, "auto")


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
