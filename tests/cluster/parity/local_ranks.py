"""Ranks of this process: their configuration, groups, engines stepped by hand, leaders on threads.

And an ingress's connections, to talk to leaders wherever they run.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
from wire_structs import submit_of

from cluster.config import CacheConfig, EngineConfig, ParallelConfig, Role, SchedulerConfig
from cluster.engine.engine import Engine
from cluster.group.context import RankContext, RankPlace
from cluster.group.membership import GroupMembership
from cluster.group.rendezvous import LeaderEndpoints, Rendezvous, introduce
from cluster.rank.leader import Leader, assemble_engine
from cluster.rank.runner import ModelRunner
from cluster.wire.credentials import Credentials
from cluster.wire.messages import EngineOutput, GenerateRequest, OutputFrame, Submit, decode, encode
from cluster.wire.sockets import (
    CurveHandshake,
    connecting_socket,
    end_context,
    join,
    pack,
)
from compile.config import CompilationConfig

HOST, BLOCK_SIZE = "127.0.0.1", 4
CREDENTIALS = Credentials("test", b"s" * 32)
HANDSHAKE = CurveHandshake(CREDENTIALS.secret)
REPLICA = "r"
"""The one of each pool: engines are `role/r/dp_rank`."""
Context = zmq.Context[zmq.Socket[bytes]]


def config_of(
    path: Path,
    max_model_len: int = 64,
    *,
    num_kv_blocks: int = 40,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 32,
    role: Role = Role.MIXED,
    parallel: tuple[Any, ...] = (),
    **compilation: Any,
) -> EngineConfig:
    """Return the configuration of a rank whose blocks are small."""
    return EngineConfig(
        str(path),
        max_model_len,
        role=role,
        parallel=ParallelConfig(*parallel),
        cache=CacheConfig(BLOCK_SIZE, num_kv_blocks),
        scheduler=SchedulerConfig(max_num_seqs, max_num_batched_tokens),
        compilation=CompilationConfig(**compilation),
    )


def wait_for(found: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (result := found()):
        assert time.monotonic() < deadline, f"waited for {timeout_s} s"
        time.sleep(0.002)
    return result


# --- groups ---------------------------------------------------------------------------------------


@contextmanager
def open_endpoints(
    tp: int, dp: int, host: str = HOST, is_on_one_node: bool = False
) -> Iterator[tuple[list[LeaderEndpoints], list[Rendezvous]]]:
    """Open what the leaders of a group open, and tell each of the others."""
    config = EngineConfig("model", 64, parallel=ParallelConfig(tp, dp))
    surroundings: dict[str, Any] = {"credentials": CREDENTIALS, "is_on_one_node": is_on_one_node}
    opened = [
        LeaderEndpoints(RankContext(config, RankPlace(dp_rank), host, **surroundings))
        for dp_rank in range(dp)
    ]
    try:
        yield opened, introduce([each.rendezvous for each in opened if each.rendezvous is not None])
    finally:
        for endpoints in opened:
            if endpoints.listener is not None:
                endpoints.listener.close()
            end_context(endpoints.sockets, "test", linger=0)


def run_ranks(
    work: Callable[[GroupMembership], Any],
    *,
    tp: int = 1,
    dp: int = 1,
    host: str = HOST,
    is_on_one_node: bool = False,
    device: str = "cpu",
) -> list[Any]:
    """Join dp x tp ranks on threads, do the work on each and leave; return the results."""

    def run(rank: int) -> Any:
        dp_rank, tp_rank = divmod(rank, tp)
        where = told[dp_rank]
        group = GroupMembership.join(
            where,
            tp_rank,
            device,
            host,
            hello=where.hello(CREDENTIALS, 0),
            listener=None if tp_rank else opened[dp_rank].listener,
            dp_rank=dp_rank,
            dp_size=dp,
            shares_experts=True,
        )
        try:
            return work(group)
        finally:
            group.close()

    with (
        open_endpoints(tp, dp, host, is_on_one_node) as (opened, told),
        ThreadPoolExecutor(dp * tp) as threads,
    ):
        return list(threads.map(run, range(dp * tp)))


# --- engines --------------------------------------------------------------------------------------


def make_engine(config: EngineConfig) -> Engine:
    return assemble_engine(config, ModelRunner(RankContext(config)))


def run(engine: Engine, requests: list[GenerateRequest]) -> dict[str, list[EngineOutput]]:
    outputs: dict[str, list[EngineOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.submit(Submit(request, None))
    num_steps = 0
    while engine.has_unfinished:
        for output in engine.step():
            assert output.finish_reason in ("", "length", "stop"), output
            outputs[output.request_id].append(output)
        num_steps += 1
        assert num_steps < 5_000
    return outputs


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


# --- leaders --------------------------------------------------------------------------------------


class Ingress:
    """What an ingress opens: connections to the inboxes of leaders, over which outputs come."""

    def __init__(self) -> None:
        self._context: Context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def inbox(self, address: str) -> Callable[[bytes], None]:
        """Return what sends a frame into a leader's inbox."""
        socket = connecting_socket(self._context, zmq.DEALER, HANDSHAKE, max_waiting=100_000)
        socket.connect(address)
        self._sockets.append(socket)
        return lambda body: socket.send_multipart(pack(body, CREDENTIALS))

    def receive(self, timeout_s: float) -> list[EngineOutput]:
        """Return the outputs of the next frame; none if none comes in time."""
        ready, _, _ = zmq.select(self._sockets, [], [], timeout_s)
        if not ready:
            return []
        frame: OutputFrame = decode(join(ready[0].recv_multipart(), 1 << 20), OutputFrame)
        return [decode(data, EngineOutput) for data in frame.outputs]

    def close(self) -> None:
        end_context(self._context, "test", linger=0)


async def generate(
    inboxes: list[str], prompts: list[list[int]], num_tokens: int, pause_s: float = 0.0
) -> tuple[list[list[int]], int]:
    """Submit each prompt to its inbox; return greedy tokens, and how many were cached."""
    ingress, num_left, num_cached = Ingress(), len(prompts), 0
    tokens: list[list[int]] = [[] for _ in prompts]
    sends = {inbox: ingress.inbox(inbox) for inbox in set(inboxes)}
    try:
        for i, (inbox, prompt) in enumerate(zip(inboxes, prompts, strict=True)):
            submit = submit_of(str(i), prompt, max_tokens=num_tokens)
            sends[inbox](encode(submit))
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(600):
            while num_left:
                for output in ingress.receive(0.0):
                    assert not output.error, output
                    tokens[int(output.request_id)] += output.token_ids
                    if output.finish_reason:
                        num_left -= 1
                        num_cached += output.num_cached_tokens
                await asyncio.sleep(0.001)
    finally:
        ingress.close()
    return tokens, num_cached


class RunningLeader:
    """A leader on a thread of this process, and an ingress of its own."""

    def __init__(self, config: EngineConfig, replica: str = REPLICA) -> None:
        engine_id = f"{config.role.value}/{replica}/0"
        self.leader = Leader(RankContext(config, credentials=CREDENTIALS, engine_id=engine_id))
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.ingress = Ingress()
        self.send = self.ingress.inbox(self.leader.inbox)

    def _run(self) -> None:
        try:
            self.leader.run()
        except BaseException as error:
            self.errors.append(error)

    def close(self) -> None:
        self.leader.stop()
        self._thread.join(timeout=60)
        assert not self._thread.is_alive() and not self.errors
        self.ingress.close()
