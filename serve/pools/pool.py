"""`Pool`: the Serve deployment class of prefill, decode and mixed pools.

A replica owns one rank group: it sits in bundle 0 of its placement group, the ranks in the
bundles after it. It loads in its constructor, so that Serve reports its true state. Tokens never
pass through here: a request's call only stays open until its engine is done with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from typing import Any

import ray
import zmq
import zmq.asyncio
from ray import serve as ray_serve

from cluster.actors.failed_starts import FailedStart, FailedStarts
from cluster.actors.load_progress import LoadProgress
from cluster.actors.rank_group import GroupReport, RankDied, RankGroup, place_in_group
from cluster.actors.secret import application_secret
from cluster.actors.status_board import BoardClient, ReplicaReport
from cluster.observe.logs import configure_logs
from cluster.wire.credentials import Credentials
from cluster.wire.messages import (
    Abort,
    EndedFrame,
    EngineOutput,
    FrameError,
    Submit,
    Watch,
    decode,
    encode,
)
from cluster.wire.sockets import CurveHandshake, connecting_socket, listening_socket, pack
from serve.config import PoolConfig
from serve.event_loop import frames, loop_budget
from serve.pools.router import PoolUnavailable
from serve.pools.routing import LeaderRouter, Routing

log = logging.getLogger("lockstep.pool")

MAX_FAILED_STARTS = 3
"""Failed starts of a rank group in a row after which its replica fails: the cause is more than the
death of a rank."""
HOLD_S = 5.0
"""How long a request waits in a replica that cannot run it, mostly while ranks are being rebuilt.
If it were refused at once, this replica would have the fewest open calls, and Serve would send it
the next request although another one is healthy."""
STUCK_AFTER_S = 3.0
"""A group whose ranks have not all answered for so long is reported as stuck."""
REPORT_PERIOD_S = 0.25
"""How often a replica reports to the status board; each time costs a few milliseconds of processor
time. Figures of `/ready` are at most three quarters of a second old."""
MAX_WAITING = 10_000
"""Frames in the queue to one leader, and in the one from it. The ingress bounds submissions; what
ends beyond that waits in the leader."""
MAX_ENDED_BYTES = 4 << 20
"""Size of a frame with ends: a few hundred of them, with an error each."""


class Pool:
    """One replica of a pool: a rank group and its open requests."""

    # Ray Serve awaits constructors: this one returns when the ranks are ready.
    async def __init__(  # type: ignore[misc]
        self, pool: PoolConfig, config_hash: str
    ) -> None:
        context = ray_serve.get_replica_context()
        configure_logs(pool.engine.log_format)
        self._pool = pool
        self._replica_id = context.replica_id.unique_id
        self._board = BoardClient(context.app_name)
        self._state, self._error, self._is_ready = "loading", "", asyncio.Event()
        # A ticket that comes with a request must still be alive when the request goes on.
        self._hold_s = hold_s(pool.engine.transfer.lease_s)
        secret = await asyncio.to_thread(application_secret, context.app_name)
        self._credentials = Credentials(config_hash, secret)
        self._handshake = CurveHandshake(secret)
        self._open: dict[str, asyncio.Future[EngineOutput]] = {}
        self._restarts: Counter[str] = Counter()
        """By the rank that a group's end was blamed on."""
        self._is_stuck = False
        """Whether the watchdog ended the last group that ended."""
        num_leaders = pool.engine.parallel.data_parallel_size
        self._router = LeaderRouter(pool.routing, num_leaders)
        self._zmq = zmq.asyncio.Context()
        self._tasks: list[asyncio.Task[None]] = []
        self._leaders: list[zmq.asyncio.Socket] = []
        placement_group = ray.util.get_current_placement_group()
        assert placement_group is not None, "pool: wanted a placement group, found none"
        self._placement_group, self._config_hash = placement_group, config_hash
        self._failed_starts = FailedStarts(config_hash)
        self._group = self._new_group(epoch=0)
        self._spawn(self._report())
        try:
            await self._refuse_what_fails()
            await self._group.start()
        except RankDied as error:
            self._group.kill()
            await self._fail(str(error), error.verdict)
            await asyncio.sleep(2 * REPORT_PERIOD_S)  # the reason reaches `/ready`
            raise
        host = ray.util.get_node_ip_address()
        self._ends = listening_socket(self._zmq, zmq.PULL, self._handshake, max_waiting=MAX_WAITING)
        self._ends_address = f"tcp://{host}:{self._ends.bind_to_random_port(f'tcp://{host}')}"
        await self._connect()
        self._spawn(self._receive_ends())
        self._spawn(self._watch_group())
        self._serve()

    async def generate(self, request_id: str, frame: bytes, config_hash: str) -> str:
        """Submit a request and return its finish reason when its engine is done with it.

        Cancelling the call aborts the request.

        Args:
            config_hash: of the caller's deployment. While one replaces another, replicas of both
                are called, and what one's engine produced the other's ingress drops.

        Raises:
            PoolUnavailable: the ranks are being rebuilt, and `hold_s` was not enough; or the caller
                is of another deployment.
            RankDied: the group ended.
        """
        if config_hash != self._config_hash:
            await asyncio.sleep(self._hold_s)
            raise PoolUnavailable(f"config_hash: wanted {self._config_hash}, found {config_hash}")
        if not self._is_ready.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_ready.wait(), self._hold_s)
        if not self._is_ready.is_set():
            raise PoolUnavailable(
                f"wanted a ready rank group, found it {self._state}: {self._error}"
            )
        num_tokens = _num_tokens(frame) if self._router.routing is Routing.LEAST_TOKENS else 0
        router = self._router  # a rebuilt group has another one
        dp_rank = router.take(num_tokens)
        leader = self._leaders[dp_rank]
        ended = self._open[request_id] = asyncio.get_running_loop().create_future()
        try:
            await leader.send_multipart(pack(frame, self._credentials))
            output: EngineOutput = await ended
            return output.finish_reason
        except asyncio.CancelledError:
            if not leader.closed:
                leader.send_multipart(pack(encode(Abort([request_id])), self._credentials))
            raise
        finally:
            router.give_back(dp_rank, num_tokens)
            self._open.pop(request_id, None)

    async def check_health(self) -> None:
        """Fail when the rank group is gone or unwatched, so that Serve replaces this replica."""
        if self._state == "failed":
            raise RankDied(self._error)
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def __del__(self) -> None:
        self._enter("stopping")
        await self._group.stop()
        self._board.remove(self._pool.name, self._replica_id)
        for task in self._tasks:
            task.cancel()

    async def _connect(self) -> None:
        """Open the sockets to the group's leaders, and tell them where their ends are awaited."""
        for leader in self._leaders:
            leader.close(linger=0)
        self._leaders = []
        for inbox in self._group.inboxes:
            leader = connecting_socket(
                self._zmq, zmq.PUSH, self._handshake, max_waiting=MAX_WAITING
            )
            leader.connect(inbox)
            watch = encode(Watch(self._ends_address))
            await leader.send_multipart(pack(watch, self._credentials))
            self._leaders.append(leader)

    async def _receive_ends(self) -> None:
        bodies = frames(self._ends, self._credentials, loop_budget(), max_bytes=MAX_ENDED_BYTES)
        async for body in bodies:
            try:
                frame: EndedFrame = decode(body, EndedFrame)
            except FrameError as error:
                log.error("pool: dropped a frame: %s", error)
                continue
            for output in frame.ended:
                future = self._open.get(output.request_id)
                if future is not None and not future.done():
                    future.set_result(output)

    def _new_group(self, epoch: int) -> RankGroup:
        return RankGroup(
            self._pool.engine,
            self._placement_group,
            first_bundle=1,
            engine_id=f"{self._pool.name}/{self._replica_id}",
            credentials=self._credentials,
            epoch=epoch,
        )

    async def _watch_group(self) -> None:
        """Rebuild the group under a new epoch whenever it ends, until that fails too often."""
        num_failures = 0
        reason = await self._group.wait_for_end()
        while not self._is_stopping():
            self._is_stuck = self._group.is_named_by_watchdog
            self._restarts[place_in_group(reason)] += 1
            if self._group.verdict:
                await self._fail(reason, self._group.verdict)
                return
            self._lose("restarting", reason)
            self._group = self._new_group(self._group.epoch + 1)
            try:
                await self._group.start()
            except RankDied as error:
                num_failures += 1
                reason = str(error)
                if error.verdict or num_failures == MAX_FAILED_STARTS:
                    await self._fail(reason, error.verdict)
                    return
                continue
            if self._is_stopping():
                await self._group.stop()
                return
            await self._connect()
            self._router = LeaderRouter(self._pool.routing, len(self._leaders))
            log.warning("%s pool: serves again, epoch %d", self._pool.name, self._group.epoch)
            self._serve()
            num_failures = 0
            reason = await self._group.wait_for_end()

    def _is_stopping(self) -> bool:
        return self._state == "stopping"

    def _enter(self, state: str, error: str = "") -> None:
        """Enter a state; if it is ready, let in the requests that wait for ranks."""
        self._state, self._error = state, error
        if state == "ready":
            self._is_ready.set()
        else:
            self._is_ready.clear()

    def _serve(self) -> None:
        """Enter the ready state. Nothing here waits for Ray, which may be slow just then."""
        self._enter("ready")
        self._spawn(asyncio.to_thread(self._failed_starts.recover, self._pool.name))

    async def _refuse_what_fails(self) -> None:
        """Raise RankDied if the replica in whose place this one is found that none can start."""
        failed = await asyncio.to_thread(self._failed_starts.of, self._pool.name)
        if failed is not None and failed.is_final:
            raise RankDied(failed.reason, failed.reason)

    async def _fail(self, reason: str, verdict: str) -> None:
        """Enter the failed state, in which Serve replaces this replica.

        Args:
            verdict: why the one in its place would fail as well; empty if it might not.
        """
        self._lose("failed", reason)
        failed = FailedStart(verdict or reason, is_final=bool(verdict))
        await asyncio.to_thread(self._failed_starts.note, self._pool.name, failed)

    def _lose(self, state: str, reason: str) -> None:
        """Report the restart and end all open calls, whose requests the router submits again."""
        log.error("%s pool: %s", self._pool.name, reason)
        self._enter(state, reason)
        for future in self._open.values():
            if not future.done():
                future.set_exception(RankDied(reason))

    async def _report(self) -> None:
        """Push this replica's figures to the board for as long as it lives."""
        reported, group, state = self._group, GroupReport([], []), self._state
        clock = asyncio.get_running_loop().time
        answered_at = entered_at = clock()
        while True:
            if self._group is not reported:  # the ranks of the one before are dead
                reported, group = self._group, GroupReport([], [])
                answered_at = clock()
            with suppress(TimeoutError, ray.exceptions.RayError):
                group = await reported.report()
                answered_at = clock()
            # Loading imports torch, which keeps a rank from answering for seconds.
            if not group.ranks and self._state in ("loading", "restarting"):
                group = GroupReport([], [_starting(reported)])
            is_stuck = self._state == "ready" and clock() - answered_at > STUCK_AFTER_S
            # A pool that is ready before its ranks say so would seem to compile nothing.
            have_told = bool(group.ranks) and all(rank.state == "ready" for rank in group.ranks)
            told = state
            if is_stuck:
                state = "stuck"
            elif self._state != "ready" or have_told:
                state = self._state
            if state != told:
                entered_at = clock()
            name, replica_id = self._pool.name, self._replica_id
            report = ReplicaReport(
                name,
                replica_id,
                state,
                group.aged(clock() - answered_at),
                error=self._error,
                config_hash=self._config_hash,
                is_stuck=self._is_stuck and state != "ready",
                in_state_s=clock() - entered_at,
                counts={("rank_restarts_total", rank): n for rank, n in self._restarts.items()},
            )
            await self._board.push(report, self._group.actors)
            await asyncio.sleep(REPORT_PERIOD_S)

    def _spawn(self, coroutine: Any) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(coroutine))


def _starting(group: RankGroup) -> LoadProgress:
    """Tell of ranks that have not said a word yet: their processes start, and import torch."""
    return LoadProgress("starting ranks", 0, max(1, len(group.actors)))


def hold_s(lease_s: float) -> float:
    """Return how long a request is held: a small part of the lease of the KV that it may need."""
    return min(HOLD_S, lease_s / 10)


def _num_tokens(frame: bytes) -> int:
    request = decode(frame, Submit).request
    return len(request.prompt_token_ids) + len(request.output_token_ids)
