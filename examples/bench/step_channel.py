"""Round trips of one step's frame between two processes: socket against shared memory.

    python examples/bench/step_channel.py [--rounds 5000] [--bytes 300]

A leader sends a frame and a follower answers with a byte. Both may sleep while they wait, as ranks
do between requests. `ipc socket` is what the step channel uses: a ZeroMQ router and dealer under
CURVE, with a doorbell in the same poll. `ring` is a frame in shared memory with a Unix socket as
doorbell; `spinning ring` never sleeps and costs a core for each rank. The last line is the socket's
time over the ring's.
"""

from __future__ import annotations

import argparse
import mmap
import os
import select
import socket
import statistics
import time
from collections.abc import Callable
from uuid import uuid4

import zmq

from cluster.wire.sockets import CurveHandshake, connecting_socket, listening_socket

Ends = tuple[Callable[[bytes], None], Callable[[], bytes]]
"""How one process sends and receives."""
RING_BYTES = 1 << 16
HEAD_BYTES = 16
"""Of a frame in shared memory: its number, then its length, a word each."""


def main() -> None:
    """Print the median and the 99th percentile of each way, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--bytes", type=int, default=300, help="of a frame; 300 is some 30 decodes")
    options = parser.parse_args()
    medians = {}
    for name, make in {
        "ipc socket": ipc_socket,
        "ring": ring,
        "spinning ring": spinning_ring,
    }.items():
        seconds = measure(make(), options.rounds, options.bytes)
        medians[name] = statistics.median(seconds)
        p99 = statistics.quantiles(seconds, n=100)[98]
        print(f"{name:14} p50 {medians[name] * 1e6:6.1f} us  p99 {p99 * 1e6:7.1f} us")
    print(f"ratio {medians['ipc socket'] / medians['ring']:.2f}")


def measure(make: Callable[[bool], Ends], rounds: int, num_bytes: int) -> list[float]:
    """Return the seconds of each round trip with a forked follower."""
    child = os.fork()
    if child == 0:
        send, receive = make(False)
        for _ in range(rounds):
            receive()
            send(b"k")
        time.sleep(0.2)  # the answer leaves before its process
        os._exit(0)
    send, receive = make(True)
    frame = os.urandom(num_bytes)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        send(frame)
        receive()
        seconds.append(time.perf_counter() - began)
    os.waitpid(child, 0)
    return seconds[rounds // 10 :]


def ipc_socket() -> Callable[[bool], Ends]:
    """Return a link between two ranks whose receiver polls it together with a doorbell."""
    address = f"ipc://@lockstep-bench-{uuid4().hex}"

    def make(is_leader: bool) -> Ends:
        handshake = CurveHandshake(b"of a benchmark, no secret at all")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        peer: list[bytes] = []
        if is_leader:
            socket = listening_socket(context, zmq.ROUTER, handshake, max_waiting=100)
            socket.bind(address)
            peer = socket.recv_multipart()[:1]
        else:
            socket = connecting_socket(context, zmq.DEALER, handshake, max_waiting=100)
            socket.connect(address)
            socket.send(b"hello")
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(os.eventfd(0), zmq.POLLIN)

        def receive() -> bytes:
            poller.poll()
            return socket.recv_multipart(zmq.NOBLOCK)[-1]

        def send(frame: bytes) -> None:
            socket.send_multipart([*peer, frame])

        return send, receive

    return make


def ring() -> Callable[[bool], Ends]:
    """Return shared memory with a Unix socket as the doorbell that ends a sleep."""
    down, up = mmap.mmap(-1, RING_BYTES), mmap.mmap(-1, RING_BYTES)
    bells = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    def make(is_leader: bool) -> Ends:
        mine, theirs = (down, up) if is_leader else (up, down)
        bell = bells[0 if is_leader else 1]
        poller = select.poll()
        poller.register(bell, select.POLLIN)
        poller.register(os.eventfd(0), select.POLLIN)
        put, take = slot_writer(mine), slot_reader(theirs)

        def send(frame: bytes) -> None:
            put(frame)
            bell.send(b"!")

        def receive() -> bytes:
            while (frame := take()) is None:
                poller.poll()
                bell.recv(64)
            return frame

        return send, receive

    return make


def spinning_ring() -> Callable[[bool], Ends]:
    """Return shared memory that both sides look at until it changes."""
    down, up = mmap.mmap(-1, RING_BYTES), mmap.mmap(-1, RING_BYTES)

    def make(is_leader: bool) -> Ends:
        mine, theirs = (down, up) if is_leader else (up, down)
        take = slot_reader(theirs)

        def receive() -> bytes:
            while (frame := take()) is None:
                os.sched_yield()
            return frame

        return slot_writer(mine), receive

    return make


def slot_writer(memory: mmap.mmap) -> Callable[[bytes], None]:
    """Return a function that puts a frame where `slot_reader` looks.

    The frame's number is stored last and as one word: x86 shows other cores all before it.
    """
    words = memoryview(memory).cast("Q")

    def put(frame: bytes) -> None:
        memory[HEAD_BYTES : HEAD_BYTES + len(frame)] = frame
        words[1] = len(frame)
        words[0] += 1

    return put


def slot_reader(memory: mmap.mmap) -> Callable[[], bytes | None]:
    """Return a function that takes the next frame, or None while there is none."""
    words = memoryview(memory).cast("Q")
    seen = 0

    def take() -> bytes | None:
        nonlocal seen
        if words[0] == seen:
            return None
        seen += 1
        return memory[HEAD_BYTES : HEAD_BYTES + words[1]]

    return take


if __name__ == "__main__":
    main()
