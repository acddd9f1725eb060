"""`Pool`: the Serve deployment class of prefill, decode and mixed pools, a shell of `PoolCore`. A
replica owns one rank group: it sits in bundle 0 of its placement group, the ranks in the bundles
after it. It loads in its constructor, so that Serve reports its true state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import ray
import zmq
import zmq.asyncio
from ray import serve as ray_serve

from cluster.actors.gcs_store import FailedStart, FailedStarts, application_secret
from cluster.actors.rank_group import RankGroup
from cluster.actors.ray_ranks import RayRank, create_group
from cluster.actors.reports import ReplicaReport
from cluster.actors.status_board import ReplicaBoard
from cluster.observe.logs import configure_logs
from cluster.wire.credentials import Credentials
from cluster.wire.messages import Abort, EndedFrame, FrameError, Watch, decode, encode
from cluster.wire.sockets import CurveHandshake, connecting_socket, listening_socket, pack
from serve.config import PoolConfig
from serve.event_loop import frames, loop_budget
from serve.pools.pool_core import LeaderLink, PoolCore, hold_s

log = logging.getLogger("lockstep.pool")

MAX_WAITING = 10_000
"""Frames in the queue to one leader, and in the one from it. The ingress bounds submissions; what
ends beyond that waits in the leader."""
MAX_ENDED_BYTES = 4 << 20
"""Size of a frame with ends: a few hundred of them, with an error each."""


class Pool:
    # Ray Serve awaits constructors: this one returns when the ranks are ready.
    async def __init__(  # type: ignore[misc]
        self, pool: PoolConfig, config_hash: str
    ) -> None:
        context = ray_serve.get_replica_context()
        configure_logs(pool.engine.log_format)
        self._pool = pool
        self._replica_id = context.replica_id.unique_id
        self._board = ReplicaBoard(context.app_name)
        self._failed_starts = FailedStarts(config_hash)
        secret = await asyncio.to_thread(application_secret, context.app_name)
        self._credentials = Credentials(config_hash, secret)
        self._handshake = CurveHandshake(secret)
        self._zmq = zmq.asyncio.Context()
        self._links: list[_LeaderSocket] = []
        self._ends = listening_socket(self._zmq, zmq.PULL, self._handshake, max_waiting=MAX_WAITING)
        host = ray.util.get_node_ip_address()
        self._ends_address = f"tcp://{host}:{self._ends.bind_to_random_port(f'tcp://{host}')}"
        self._core = PoolCore(
            pool.name,
            self._replica_id,
            config_hash,
            self,
            routing=pool.routing,
            # A handoff that comes with a request must still be alive when the request goes on.
            hold_s=hold_s(pool.engine.transfer.lease_s),
        )
        self._core.spawn(self._core.report())
        self._core.spawn(self._receive_ends())
        await self._core.start()

    # What Serve calls.

    async def generate(self, request_id: str, frame: bytes, config_hash: str) -> str:
        return await self._core.generate(request_id, frame, config_hash)

    async def check_health(self) -> None:
        self._core.check_health()

    async def __del__(self) -> None:
        await self._core.stop()
        self._board.remove(self._pool.name, self._replica_id)

    # What the core calls (`PoolShell`).

    def new_group(self, epoch: int) -> RankGroup:
        placement_group = ray.util.get_current_placement_group()
        assert placement_group is not None, "pool: wanted a placement group, found none"
        return create_group(
            self._pool.engine,
            placement_group,
            first_bundle=1,
            engine_id=f"{self._pool.name}/{self._replica_id}",
            credentials=self._credentials,
            epoch=epoch,
        )

    async def connect(self, inboxes: Sequence[str]) -> Sequence[LeaderLink]:
        """Open the sockets to leaders, and tell them where their ends are awaited."""
        for link in self._links:
            link.close()
        self._links = []
        for inbox in inboxes:
            socket = connecting_socket(
                self._zmq, zmq.PUSH, self._handshake, max_waiting=MAX_WAITING
            )
            socket.connect(inbox)
            link = _LeaderSocket(socket, self._credentials)
            await link.submit(encode(Watch(self._ends_address)))
            self._links.append(link)
        return self._links

    async def push(self, report: ReplicaReport, group: RankGroup) -> None:
        actors = [handle.actor for handle in group.handles if isinstance(handle, RayRank)]
        await self._board.push(report, actors)

    async def final_failure(self) -> str:
        failed = await asyncio.to_thread(self._failed_starts.of, self._pool.name)
        return failed.reason if failed is not None and failed.is_final else ""

    async def note_failure(self, reason: str, is_final: bool) -> None:
        failed = FailedStart(reason, is_final)
        await asyncio.to_thread(self._failed_starts.note, self._pool.name, failed)

    async def note_recovery(self) -> None:
        await asyncio.to_thread(self._failed_starts.recover, self._pool.name)

    async def _receive_ends(self) -> None:
        bodies = frames(self._ends, self._credentials, loop_budget(), max_bytes=MAX_ENDED_BYTES)
        async for body in bodies:
            try:
                frame: EndedFrame = decode(body, EndedFrame)
            except FrameError as error:
                log.error("pool: dropped a frame: %s", error)
            else:
                self._core.on_ended(frame.ended)


class _LeaderSocket:
    def __init__(self, socket: zmq.asyncio.Socket, credentials: Credentials) -> None:
        self._socket = socket
        self._credentials = credentials

    async def submit(self, frame: bytes) -> None:
        await self._socket.send_multipart(pack(frame, self._credentials))

    def abort(self, request_id: str) -> None:
        if not self._socket.closed:
            self._socket.send_multipart(pack(encode(Abort([request_id])), self._credentials))

    def close(self) -> None:
        self._socket.close(linger=0)
