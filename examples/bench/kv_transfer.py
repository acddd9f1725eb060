"""The cost of proving KV reads over TCP, between two processes.

    python examples/bench/kv_transfer.py [--repeats 15] [--blocks 64] [--reads 1 4]

One process holds, one reads, through the loopback: a real `KVServer` and `KVPuller` for each way.

- `no proofs` sends the same messages without proving or checking anything.
- `proofs` is what ranks do: keyed BLAKE2b of every call and every answer, not of the blocks.
- `proofs of blocks` hashes the blocks as well, on both sides.
- `CURVE` has ZeroMQ encrypt and authenticate all of it.

The ways take turns within each repeat. Printed are the medians in GB/s, and their ratio to that
without proofs, by the number of reads that are under way at once.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch
import zmq

from cluster.kv.handoff import KVHolder
from cluster.kv.transport import puller, server
from cluster.kv.transport.proofs import KVProofs
from cluster.kv.transport.puller import KVPuller
from cluster.kv.transport.server import KVServer
from cluster.kv.transport.store import BlockStore
from cluster.wire.credentials import Credentials
from cluster.wire.messages import KVHandoff, KVSource
from cluster.wire.sockets import Budget, CurveHandshake, Doorbell, inner_socket

HOST = "127.0.0.1"
CREDENTIALS = Credentials("bench", b"of a benchmark, no secret at all")
WAYS = ("no proofs", "proofs", "proofs of blocks", "CURVE")
LEASE_S = 60.0


def main() -> None:
    """Print a line for each way and number of reads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=64, help="of each read")
    parser.add_argument("--block-kib", type=int, default=1024)
    parser.add_argument("--reads", type=int, nargs="+", default=[1, 4], help="at once")
    options = parser.parse_args()
    shape = options.blocks * max(options.reads), options.block_kib << 10
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    holder = spawn.Process(target=hold, args=(theirs, shape), daemon=True)
    holder.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    readers = {way: Reader(way, ours, context, shape) for way in WAYS}
    print(f"{len(os.sched_getaffinity(0))} cores, {os.getloadavg()[0]:.1f} load")
    for num_reads in options.reads:
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.repeats):
            for way in WAYS:
                seconds[way].append(readers[way].read(num_reads, options.blocks))
        num_bytes = num_reads * options.blocks * shape[1]
        rates = {way: num_bytes / statistics.median(s) / 1e9 for way, s in seconds.items()}
        for way, rate in rates.items():
            ratio = rate / rates["no proofs"]
            print(f"{num_reads} at once  {way:17} {rate:5.2f} GB/s  ratio {ratio:.2f}")
    ours.send(None)
    holder.join(timeout=5)


# --- the ways -------------------------------------------------------------------------------------


class NoProofs(KVProofs):
    """Proves nothing and accepts everything."""

    def of_call(self, call_id: bytes, process: bytes, call: bytes) -> bytes:
        """Return nothing."""
        return b""

    def of_answer(self, call_proof: bytes, answer: bytes) -> bytes:
        """Return nothing."""
        return b""


class NoDoorkeeper:
    """In place of the authenticator that CURVE does not need."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], password: bytes) -> None:
        self.socket = inner_socket(context, zmq.REP)

    def answer(self, budget: Budget) -> None:
        """There is no handshake to answer."""

    def close(self) -> None:
        """Nothing was open."""
        self.socket.close(linger=0)


@contextmanager
def going(way: str) -> Iterator[None]:
    """Let servers and connections be made in this way."""
    curve = CurveHandshake(CREDENTIALS.secret)
    with ExitStack() as patches:
        for module in (server, puller):
            if way in ("no proofs", "CURVE"):
                patches.enter_context(patch.object(module, "KVProofs", NoProofs))
            if way == "CURVE":
                patches.enter_context(patch.object(module, "PlainHandshake", lambda _: curve))
        if way == "CURVE":
            patches.enter_context(patch.object(server, "ZapAuthenticator", NoDoorkeeper))
        yield


def hash_blocks(store: BlockStore) -> None:
    """Let a store hash what it reads and writes, as a proof of it would."""
    gather, scatter = store.gather, store.scatter

    def digest(blocks: list[memoryview]) -> None:
        proof = hashlib.blake2b(key=CREDENTIALS.secret)
        for block in blocks:
            proof.update(block)
        proof.digest()

    def hashed_gather(ids: list[int]) -> list[memoryview]:
        blocks = gather(ids)
        digest(blocks)
        return blocks

    def hashed_scatter(ids: list[int], blocks: list[memoryview]) -> None:
        digest(blocks)
        scatter(ids, blocks)

    store.gather, store.scatter = hashed_gather, hashed_scatter  # type: ignore[method-assign]


# --- the two processes ----------------------------------------------------------------------------


def hold(pipe: Connection, shape: tuple[int, int]) -> None:
    """Hold blocks under as many handoffs as are asked for."""
    pool = torch.randint(0, 255, (shape[0] + 1, shape[1]), dtype=torch.uint8)
    servers: dict[str, KVServer] = {}
    for way in WAYS:
        with going(way):
            servers[way] = KVServer(
                KVHolder(LEASE_S, time.monotonic),
                pool,
                host=HOST,
                credentials=CREDENTIALS,
                epoch=0,
                doorbell=Doorbell(),
            )
        if way == "proofs of blocks":
            hash_blocks(servers[way]._store)
    while (asked := pipe.recv()) is not None:
        way, first, num_blocks = asked
        blocks = list(range(first, first + num_blocks))
        handoff_id = servers[way].hold("r", blocks, [0] * num_blocks)
        servers[way].take_ended()
        source = KVSource(0, "elsewhere", 0, -1, servers[way].address, servers[way].process)
        pipe.send(
            KVHandoff(
                handoff_id,
                "r",
                [source],
                blocks,
                [0] * num_blocks,
                num_blocks,
                shape[1],
                "kv",
                LEASE_S,
            )
        )


class Reader:
    """One way's reader, which has read once before it is timed."""

    def __init__(
        self,
        way: str,
        pipe: Connection,
        context: zmq.Context[zmq.Socket[bytes]],
        shape: tuple[int, int],
    ) -> None:
        self._way, self._pipe = way, pipe
        self._doorbell = Doorbell()
        with going(way):
            self._puller = KVPuller(
                torch.zeros((shape[0] + 1, shape[1]), dtype=torch.uint8),
                tp_rank=0,
                transport="tcp",
                context=context,
                credentials=CREDENTIALS,
                doorbell=self._doorbell,
            )
            if way == "proofs of blocks":
                hash_blocks(self._puller._transport.store)
            self.read(1, 1)

    def read(self, num_reads: int, num_blocks: int) -> float:
        """Return the seconds that so many reads take together."""
        handoffs: list[Any] = []
        for i in range(num_reads):
            self._pipe.send((self._way, 1 + i * num_blocks, num_blocks))
            handoffs.append(self._pipe.recv())
        poller = zmq.Poller()
        poller.register(self._doorbell.fileno(), zmq.POLLIN)
        began = time.perf_counter()
        for i, handoff in enumerate(handoffs):
            self._puller.expect(str(i), handoff)
            self._puller.start(str(i), handoff, list(range(num_blocks)), handoff.block_ids)
        num_left = num_reads
        while num_left:
            poller.poll()
            self._doorbell.clear()
            for result in self._puller.take_finished():
                assert result.ok, result.error
                num_left -= 1
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
