"""`Ingress`: the deployment that takes requests, over HTTP and from handles of other Ray apps. The
shell of an `IngressCore`: what is Ray's, and the sockets to leaders."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import ray
from ray import serve as ray_serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from cluster.actors.gcs_store import application_secret
from cluster.actors.placement import num_nodes
from cluster.actors.status_board import NAMESPACE, UNORDERED_ACTOR, IngressBoard
from cluster.observe.logs import configure_logs
from cluster.wire.credentials import Credentials
from serve.config import DeployConfig, check_device, check_num_nodes
from serve.event_loop import CHUNK_COST, HAPROXY_CHUNK_COST, StreamBatcher
from serve.ingress_core import IngressCore
from serve.openai import adapters, endpoint
from serve.openai.app import build_app
from serve.openai.chat import CHAT
from serve.openai.completions import COMPLETIONS
from serve.pools.directory import Directory
from serve.pools.links import LeaderLinks
from serve.pools.quarantine import FairLock, Quarantine
from serve.pools.router import Router
from serve.serve_run import warn_of_cuts

M_MMAP_THRESHOLD = -3
"""glibc's name for it, in `malloc.h`."""
LARGE_BYTES = 1 << 20
SWITCH_INTERVAL_S = 1e-3
"""How soon a thread that parses or templates lets the event loop in; Python's default is 5 ms."""
ASK_TIMEOUT_S = 30.0
"""How long asking for the lock may take, in which its actor may have to start."""


@ray_serve.ingress()
class Ingress:
    # Ray Serve awaits constructors: sockets need the running loop.
    async def __init__(  # type: ignore[misc]
        self, config: DeployConfig, pools: Sequence[DeploymentHandle]
    ) -> None:
        """`pools` are part of the application because they are bound here; no call goes to them."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        configure_logs(config.args.log_format)
        _map_large_buffers()
        check_device(config, ray.cluster_resources().get("GPU", 0))
        check_num_nodes(config.pools[0].placement, num_nodes())
        context = ray_serve.get_replica_context()
        app_name, node = context.app_name, ray.util.get_node_ip_address()
        ingress_id = context.replica_id.unique_id
        board = IngressBoard(app_name, [pool.name for pool in config.pools], config.api.described)
        secret = await asyncio.to_thread(application_secret, app_name)
        # Ray reads it so too.
        self._is_behind_haproxy = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
        if self._is_behind_haproxy:
            warn_of_cuts(config.args.request_timeout_s)
        # Ray's own proxy is one process, and takes the chunks of all ingresses.
        is_shared = not self._is_behind_haproxy
        cost = CHUNK_COST * config.num_ingresses if is_shared else HAPROXY_CHUNK_COST
        tick = StreamBatcher(cost)
        self._links = LeaderLinks(Credentials(config.config_hash, secret))
        directory = Directory(
            {pool.name: pool.routing for pool in config.pools},
            self._links.connect,
            numerics_hash=config.numerics_hash,
            max_wait_s=config.args.max_queue_wait_s,
            max_on_decode=config.max_on_decode,
        )
        quarantine = Quarantine(ActorLock(app_name, ingress_id))
        pool = config.pools[0]
        router = Router(directory, pool.name, tick, quarantine, cache=pool.engine.cache)
        self._core = IngressCore(
            config, board, directory, router, tick, ingress_id=ingress_id, node=node, secret=secret
        )
        await self._core.start(is_first=board.is_first)

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the HTTP application; Ray Serve calls this after the constructor."""
        # HAProxy tells nobody who has connected to it; Ray's own proxy hands it on.
        app: Starlette = build_app(
            self._core.serving, is_peer_known=not self._is_behind_haproxy, sends_id=False
        )
        return app

    async def check_health(self) -> None:
        """Fail so that Serve replaces this replica."""
        self._core.check_health()

    async def __del__(self) -> None:
        await self._core.close()
        self._links.shutdown()

    async def drain(self) -> int:
        """Take no more requests; return how many are still answered by all ingresses."""
        return await self._core.drain()

    # What other Ray apps call through `serve.get_app_handle(...)`.

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer what would be posted to /v1/chat/completions."""
        return await endpoint.answer(self._core.serving, CHAT, body)

    async def stream_chat(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a chat completion; call with `options(stream=True)`."""
        async with aclosing(endpoint.stream(self._core.serving, CHAT, body)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer what would be posted to /v1/completions."""
        return await endpoint.answer(self._core.serving, COMPLETIONS, body)

    async def stream_complete(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a completion; call with `options(stream=True)`."""
        async with aclosing(endpoint.stream(self._core.serving, COMPLETIONS, body)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def load_lora_adapter(self, name: str, path: str) -> dict[str, Any]:
        """Answer what would be posted to /v1/load_lora_adapter; needs no key. RequestRefused if it
        cannot be loaded."""
        return await adapters.load_by_handle(self._core.serving, name, path)

    async def unload_lora_adapter(self, name: str) -> dict[str, Any]:
        """Answer what would be posted to /v1/unload_lora_adapter; needs no key."""
        return await adapters.unload_by_handle(self._core.serving, name)


def _map_large_buffers() -> None:
    """Let the memory of large bodies go back to the system when they are freed. Once a large buffer
    was freed, glibc takes the next ones from its heap, where anything that was allocated behind
    them keeps their memory."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's alone
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


class ActorLock:
    """The lock of all ingresses of an application: a `FairLock` in a small named actor. It is made
    when a suspect first asks for it, so most applications never have one. If it ends with the
    ingress that made it, the next one to ask makes another."""

    def __init__(self, app_name: str, ingress_id: str) -> None:
        self._actor_name = f"quarantine:{app_name}"
        self._ingress_id = ingress_id
        self._actor: Any = None

    async def take(self) -> bool:
        try:
            if self._actor is None:
                # Ray is asked for the name and answers late while it is busy with dead ranks.
                self._actor = await asyncio.to_thread(self._found)
            call = self._actor.take.remote(self._ingress_id)
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return bool(await call)
        except TimeoutError:
            return True
        except (ValueError, ray.exceptions.RayError):
            self._actor = None
            return True

    def _found(self) -> Any:
        remote = ray.remote(**UNORDERED_ACTOR)(FairLock)
        options = {"name": self._actor_name, "namespace": NAMESPACE, "get_if_exists": True}
        return remote.options(**options).remote()

    def give_back(self) -> None:
        if self._actor is not None:
            self._actor.give_back.remote(self._ingress_id)
