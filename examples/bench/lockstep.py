"""The cost of lockstep: agreement among leaders against a gloo all-reduce, and waking up.

    python examples/bench/lockstep.py [--ranks 2 4] [--rounds 4000] [--wakes 200]

Each rank is a process. `agree` is one exchange of votes over the sockets that leaders use,
`agree and confirm` adds the second frame that a step waits for after its inputs are built, and
`gloo all-reduce` sums one int64 vector as long as a vote. All three take turns in blocks, in the
same processes, one call after the other. `wake` is the time from a request's submission to a
sleeping group until the last of its leaders has sent its first vote; its leaders serve the bundled
model. Times are of rank 0, in microseconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from cluster.config import EngineConfig, ParallelConfig
from cluster.engine.compile_switch import CompileSwitch
from cluster.engine.lockstep import JoinedLockstep, LockstepMachine
from cluster.engine.step_stats import StepStats
from cluster.group.context import RankContext, RankPlace
from cluster.group.rendezvous import LeaderEndpoints, introduce
from cluster.wire.credentials import Credentials
from cluster.wire.group_messages import PeerHello
from cluster.wire.messages import (
    PROTOCOL_VERSION,
    GenerateRequest,
    Sampling,
    StepKind,
    Submit,
    Vote,
    encode,
)
from cluster.wire.sockets import CurveHandshake, connecting_socket, end_context, pack
from compile.config import CUDAGraphMode
from compile.dispatch import CapturedGraphs

CREDENTIALS = Credentials("bench", b"of a benchmark, no secret at all")
BLOCK = 200
"""Rounds of one kind before the next kind has its turn."""


def main() -> None:
    """Print median and 99th percentile of each kind, by the number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=4000)
    parser.add_argument("--wakes", type=int, default=200)
    options = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, {os.getloadavg()[0]:.1f} load")
    for size in options.ranks:
        times = run_ranks(size, exchange, options.rounds)[0]
        for name, seconds in times.items():
            report(size, name, seconds)
        ratio = statistics.median(times["agree"]) / statistics.median(times["gloo all-reduce"])
        print(f"{size} ranks  agree over gloo {ratio:.2f}")
        report(size, "wake", wake(size, options.wakes))


def report(size: int, name: str, seconds: list[float]) -> None:
    """Print one line."""
    p50, p99 = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
    print(f"{size} ranks  {name:18} p50 {p50 * 1e6:7.1f} us  p99 {p99 * 1e6:8.1f} us")


def run_ranks(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Do the work in a process per rank, which meet first; return the results by rank."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(size)]
    config = EngineConfig(
        str(Path(__file__).resolve().parents[1] / "tiny"),
        256,
        parallel=ParallelConfig(1, data_parallel_size=size),
    )
    processes = [
        spawn.Process(target=work, args=(config, rank, pipe[1], *arguments))
        for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for (ours, _), told in zip(pipes, introduce([p[0].recv() for p in pipes]), strict=True):
        ours.send(told)
    if work is serve:
        return [processes, [pipe[0] for pipe in pipes]]
    results = [pipe[0].recv() for pipe in pipes]
    for process in processes:
        process.join()
    return results


# --- one exchange --------------------------------------------------------------------------------


def exchange(config: EngineConfig, rank: int, pipe: Connection, rounds: int) -> None:
    """Time votes and all-reduces with the other ranks."""
    import torch
    import torch.distributed as dist

    size = config.parallel.data_parallel_size
    context = RankContext(config, RankPlace(rank), credentials=CREDENTIALS)
    endpoints = LeaderEndpoints(context)
    pipe.send(endpoints.rendezvous)
    told = pipe.recv()
    assert endpoints.peers is not None
    hello = PeerHello(PROTOCOL_VERSION, "bench", 0, told.nonce, rank, size, 0)
    endpoints.peers.open(told.earlier, hello, lambda name: None)

    captured = CapturedGraphs(CUDAGraphMode.FULL, batch_sizes=(64,))
    machine = LockstepMachine(dp_rank=rank, dp_size=size, epoch=0, switch=CompileSwitch(captured))
    lockstep = JoinedLockstep(machine, endpoints.peers, StepStats(time.monotonic))
    listen_fd = endpoints.listener.detach() if endpoints.listener is not None else None
    store = dist.TCPStore(
        told.store_host, told.store_port, size, rank == 0, master_listen_fd=listen_fd
    )
    group = dist.ProcessGroupGloo(store, rank, size)
    vector = torch.zeros(9, dtype=torch.int64)
    times: dict[str, list[float]] = {"agree": [], "agree and confirm": [], "gloo all-reduce": []}
    step = 0
    for _ in range(rounds // BLOCK):
        for _ in range(BLOCK):
            step += 1
            vote = Vote(0, step, StepKind.DECODE, 30 + rank, 30 + rank, 1, True, False, 0, False)
            began = time.perf_counter()
            lockstep.agree(vote)
            agreed = time.perf_counter()
            lockstep.wait_for_peers()
            times["agree"].append(agreed - began)
            times["agree and confirm"].append(time.perf_counter() - began)
        for _ in range(BLOCK):
            began = time.perf_counter()
            dist.all_reduce(vector, group=group)
            times["gloo all-reduce"].append(time.perf_counter() - began)
    pipe.send({name: seconds[BLOCK:] for name, seconds in times.items()})
    time.sleep(0.5)  # the store ends with rank 0
    endpoints.peers.close()
    end_context(endpoints.sockets, "bench")


# --- waking up -----------------------------------------------------------------------------------


class TimedChannel:
    """The peers of a leader, with the moment of the first frame since it was asked."""

    def __init__(self, peers: Any) -> None:
        self._peers = peers
        self.receive = peers.receive
        self.first = 0.0

    def send(self, body: bytes) -> None:
        """Send to every peer."""
        self._peers.send(body)
        self.first = self.first or time.monotonic()


def serve(config: EngineConfig, rank: int, pipe: Connection) -> None:
    """Lead; tell when the first vote was sent, whenever asked."""
    import threading

    from cluster.rank.leader import Leader

    context = RankContext(config, RankPlace(rank), credentials=CREDENTIALS)
    endpoints = LeaderEndpoints(context)
    pipe.send(endpoints.rendezvous)
    leader = Leader(context, endpoints, pipe.recv())
    channel = TimedChannel(endpoints.peers)
    leader.engine.lockstep._channel = channel  # type: ignore[attr-defined]
    pipe.send(leader.inbox)

    def answer() -> None:
        while pipe.recv() == "first":
            pipe.send(channel.first)
            channel.first = 0.0
        leader.stop()

    threading.Thread(target=answer, daemon=True).start()
    leader.run()


def wake(size: int, num_wakes: int) -> list[float]:
    """Return the seconds from a submission to the first vote of the last rank."""
    processes, pipes = run_ranks(size, serve)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    handshake = CurveHandshake(CREDENTIALS.secret)
    inbox = connecting_socket(context, zmq.DEALER, handshake, max_waiting=1000)
    inbox.connect([pipe.recv() for pipe in pipes][-1])
    sampling = Sampling(0.0, 0, 1.0, 0.0, 0, 1, (), -1, -1, None, None)
    seconds = []
    for i in range(num_wakes + 10):
        time.sleep(0.05)  # all sleep
        first_votes(pipes)
        request = GenerateRequest(str(i), [1, 2, 3], [], sampling, b"")
        frame = encode(Submit(request, None))
        began = time.monotonic()
        inbox.send_multipart(pack(frame, CREDENTIALS))
        inbox.recv_multipart()
        firsts = first_votes(pipes)
        if min(firsts) >= began:  # else a leader has just looked around by itself
            seconds.append(max(firsts) - began)
    for pipe in pipes:
        pipe.send("stop")
    for process in processes:
        process.join()
    end_context(context, "bench", linger=0)
    return seconds[10:]


def first_votes(pipes: list[Connection]) -> list[float]:
    """Return when each leader sent its first frame since the last call."""
    for pipe in pipes:
        pipe.send("first")
    return [pipe.recv() for pipe in pipes]


if __name__ == "__main__":
    main()
