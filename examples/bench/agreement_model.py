"""The cost of an agreement beside a step, and, by a model, among many leaders.

    python examples/bench/agreement_model.py [--rounds 4000] [--network-us 10] [--layers 24]

1. Measured: an agreement of 2 leaders, and a decode step of one sequence on the shape of
   Qwen2.5-0.5B in bfloat16: the share of the first in the second.
2. Measured, between two processes over the sockets that leaders use: what a frame costs its sender,
   its receiver, and how long it travels; and what a rank does with a frame that stands for many
   ranks (a partial agreement: a vote's fields and 4 bytes of tokens for each rank).
3. Modelled from those: the agreement of n leaders. A network hop takes `--network-us` more.

Three topologies: *direct*, a vote from each to each, which is what leaders do; *tree*, partial
agreements go up to one rank and the agreement down, `k` children each; *doubling*, in round r each
rank exchanges partial agreements with the rank 2^r away (recursive doubling: Thakur, Rabenseifner
and Gropp, 2005). With n = 2 all three are the same exchange.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import msgspec  # noqa: E402
import numpy as np  # noqa: E402
import zmq  # noqa: E402

from cluster.group.links import ConnectLink, ListenLink  # noqa: E402
from cluster.wire.credentials import SECRET_BYTES, Credentials  # noqa: E402
from cluster.wire.group_messages import PeerHello  # noqa: E402
from cluster.wire.messages import PROTOCOL_VERSION, Wire  # noqa: E402
from cluster.wire.sockets import end_context  # noqa: E402

SIZES = (2, 4, 64, 256, 1024)
CHILDREN = (2, 4, 8, 16, 32)
BURST = 200
"""Frames that are sent before the first is received."""
CREDENTIALS = Credentials("bench", bytes(SECRET_BYTES))


class Partial(Wire, frozen=True):
    """An agreement of some of the ranks, as it would travel in a tree."""

    epoch: int
    step: int
    kind: int
    max_tokens: int
    max_seqs: int
    max_query_len: int
    has_work: bool
    draining: bool
    first_rank: int
    num_tokens: bytes
    """int32, of the ranks from `first_rank` on."""


@dataclass(frozen=True)
class Costs:
    """Microseconds."""

    send: float
    receive: float
    travel: float
    """From one process to the other, beyond sending and receiving."""
    combine: dict[int, float]
    """Decode, combine and encode a partial agreement of so many ranks."""

    def of_ranks(self, num: int) -> float:
        """Return the time of a partial agreement of `num` ranks, interpolated."""
        sizes, times = zip(*sorted(self.combine.items()), strict=True)
        return float(np.interp(num, sizes, times))


def main() -> None:
    """Print the share of a step, the constants and the model's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4000)
    parser.add_argument("--network-us", type=float, default=10.0)
    parser.add_argument("--layers", type=int, default=24)
    options = parser.parse_args()
    measured = agreements(options.rounds)
    for name, us in measured.items():
        print(f"measured, 2 leaders: {name} p50 {us:.0f} us")
    step_us = step_of_half_a_billion(options.layers)
    share = measured["agree and confirm"] / step_us
    print(f"a step of the 0.5B shape: {step_us / 1e3:.1f} ms; agreement and confirm {share:.2%}")
    costs = constants(options.rounds)
    frame = f"send {costs.send:.1f} us, receive {costs.receive:.1f}, travel {costs.travel:.1f}"
    print(f"a frame: {frame}")
    combine = ", ".join(f"{num} ranks {us:.1f} us" for num, us in costs.combine.items())
    print(f"a partial agreement: {combine}")
    print(f"{'leaders':>8}  {'direct':>9}  {'tree':>9}  {'doubling':>9}   us, modelled")
    for size in SIZES:
        tree = {k: tree_us(costs, size, k, options.network_us) for k in CHILDREN}
        best = min(tree, key=lambda k: tree[k])
        direct = direct_us(costs, size, options.network_us)
        doubling = doubling_us(costs, size, options.network_us)
        print(f"{size:8}  {direct:9.0f}  {tree[best]:9.0f}  {doubling:9.0f}   tree of {best}")


# --- the model ---------------------------------------------------------------------------------


def direct_us(costs: Costs, size: int, network_us: float) -> float:
    """Return one rank's time: it sends to and receives from each, and the last frame travels."""
    frames = (size - 1) * (costs.send + costs.receive + costs.of_ranks(1))
    return frames + costs.travel + network_us


def tree_us(costs: Costs, size: int, children: int, network_us: float) -> float:
    """Return the longest way up and down; a rank handles its children one after another."""
    hop = costs.travel + network_us
    total, below = 0.0, 1
    while below < size:
        num = min(children, math.ceil(size / below) - 1)
        below *= num + 1
        up = num * (costs.receive + costs.of_ranks(min(below, size))) + costs.send
        down = num * costs.send + costs.receive + costs.of_ranks(size)
        total += up + down + 2 * hop
    return total


def doubling_us(costs: Costs, size: int, network_us: float) -> float:
    """Return the rounds of an exchange with one other rank each."""
    total = 0.0
    for exponent in range(math.ceil(math.log2(size))):
        known = min(2**exponent, size)
        total += costs.send + costs.receive + costs.of_ranks(known) + costs.travel + network_us
    return total


# --- the constants -----------------------------------------------------------------------------


def constants(rounds: int) -> Costs:
    """Measure frames between two processes, and partial agreements in this one."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=echo, args=(theirs, rounds))
    process.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = ListenLink(context, CREDENTIALS, "dp1", None)
    ours.send(link.address)
    link.await_hello(hello_of(0), PeerHello)
    frame = encoded(8)
    there_and_back, sends, receives = [], [], []
    for _ in range(rounds):
        began = time.perf_counter()
        link.send(frame)
        link.receive()
        there_and_back.append(time.perf_counter() - began)
    for _ in range(rounds // BURST):
        began = time.perf_counter()
        for _ in range(BURST):
            link.send(frame)
        sends.append((time.perf_counter() - began) / BURST)
        ours.recv()  # all were answered, and lie in this process
        began = time.perf_counter()
        for _ in range(BURST):
            link.receive()
        receives.append((time.perf_counter() - began) / BURST)
    process.join()
    link.close()
    end_context(context, "bench")
    send, receive = (statistics.median(times) * 1e6 for times in (sends, receives))
    travel = statistics.median(there_and_back) * 1e6 / 2 - send - receive
    return Costs(send, receive, max(travel, 0.0), {n: combine_us(n) for n in (1, 64, 256, 1024)})


def echo(pipe: Connection, rounds: int) -> None:
    """Answer frame by frame, then burst by burst."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = ConnectLink(context, CREDENTIALS, "dp0", pipe.recv())
    link.greet(hello_of(1))
    link.await_hello(hello_of(1), PeerHello)

    def receive() -> bytes:
        frame = link.receive()
        if frame is None:
            raise SystemExit("dp0: wanted a frame, found none")
        return frame

    for _ in range(rounds):
        link.send(receive())
    for _ in range(rounds // BURST):
        for frame in [receive() for _ in range(BURST)]:
            link.send(frame)
        time.sleep(0.005)
        pipe.send("answered")
    time.sleep(0.5)
    link.close()
    end_context(context, "bench")


def hello_of(dp_rank: int) -> PeerHello:
    return PeerHello(PROTOCOL_VERSION, CREDENTIALS.config_hash, 0, "bench", dp_rank, 2, 0)


def encoded(num_ranks: int, first_rank: int = 0) -> bytes:
    tokens = np.full(num_ranks, 31, dtype=np.int32).tobytes()
    return msgspec.msgpack.encode(
        Partial(0, 1234567, 1, 31, 31, 1, True, False, first_rank, tokens)
    )


def combine_us(num_ranks: int) -> float:
    """Time what a rank does with a partial agreement: decode it, combine it, encode the sum."""
    frame = encoded(num_ranks, num_ranks)
    own = msgspec.msgpack.decode(encoded(num_ranks), type=Partial)
    times = []
    for _ in range(1000):
        began = time.perf_counter()
        other = msgspec.msgpack.decode(frame, type=Partial)
        if (other.epoch, other.step) != (own.epoch, own.step):
            raise AssertionError("another step")
        both = Partial(
            own.epoch,
            own.step,
            max(own.kind, other.kind),
            max(own.max_tokens, other.max_tokens),
            max(own.max_seqs, other.max_seqs),
            max(own.max_query_len, other.max_query_len),
            own.has_work or other.has_work,
            own.draining and other.draining,
            min(own.first_rank, other.first_rank),
            own.num_tokens + other.num_tokens,
        )
        msgspec.msgpack.encode(both)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


# --- beside a step -----------------------------------------------------------------------------


def agreements(rounds: int) -> dict[str, float]:
    """Return the median microseconds of an agreement of two leaders."""
    from lockstep import exchange, run_ranks

    times = run_ranks(2, exchange, rounds)[0]
    return {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}


def step_of_half_a_billion(layers: int) -> float:
    """Return the median microseconds of a decode step, batch 1, as it is served."""
    from compile_levels import runner, write_checkpoint
    from decode_bandwidth import SHAPE, our_steps

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "qwen"
        write_checkpoint(path, dict(SHAPE), layers, "bfloat16")
        fields = {"level": 0, "cudagraph_mode": "NONE"}
        options = argparse.Namespace(
            batches="1", context=128, rounds=12, turn=1, threads=1, dp_rank=0
        )
        step: Callable[[], None] = our_steps(runner(path, "bfloat16", fields, options), 1, 128)
        times = []
        for _ in range(12):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
    return statistics.median(times[2:]) * 1e6


if __name__ == "__main__":
    main()
