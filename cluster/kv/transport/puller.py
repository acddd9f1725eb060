"""The reader's side: a thread that drives `KVPulls` over sockets and mapped memory."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

import torch
import zmq

from cluster.kv.handoff import KVReadResult
from cluster.kv.reads import KVPulls
from cluster.kv.transport.memory import open_shared
from cluster.kv.transport.proofs import CallIds, KVProofs, PlainHandshake, is_equal
from cluster.kv.transport.store import BlockStore, KVThreadDied
from cluster.observe.counts import Counts
from cluster.wire.credentials import Credentials
from cluster.wire.messages import (
    FrameError,
    KVAnswer,
    KVCall,
    KVHandoff,
    KVSource,
    decode,
    encode,
)
from cluster.wire.node import node_id
from cluster.wire.polling import Doorbell
from cluster.wire.sockets import MAX_PART_BYTES, connecting_socket

log = logging.getLogger("lockstep.kv")

T = TypeVar("T")

IDLE_S = 600.0
"""After this long without a read nothing is kept open; longer than any read takes."""
MAX_CONNECTIONS = 128
"""Holders to be connected to, and as many whose memory is mapped: one for each prefill rank that
this one reads from. Beyond that the one that was called least recently gives way."""
MAX_OPEN_CALLS = 4096
"""To one holder: a renewal that is never answered is forgotten at some point."""
MAX_ANSWERS = 64
"""Of one holder in one round, not counting those with blocks, which are taken one at a time."""
MAX_WAITING = 10_000
"""Calls to a holder that is gone. Nothing may wait for it, so any more are lost."""


class KVPuller:
    """A scheduler's `KVReader`: what it asks for is done by a thread of its own.

    `doorbell` rings whenever `take_finished` has something.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        *,
        tp_rank: int,
        transport: str,
        context: zmq.Context[zmq.Socket[bytes]],
        credentials: Credentials,
        doorbell: Doorbell,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = _Transport(pool, transport, context, credentials)
        self._pulls = KVPulls(
            self._transport,
            tp_rank=tp_rank,
            block_bytes=self._transport.store.block_bytes,
            clock=clock,
        )
        self._doorbell = doorbell
        self._clock = clock
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._finished: SimpleQueue[KVReadResult] = SimpleQueue()
        self._wake = Doorbell()
        self._is_closed = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kv-puller", daemon=True)
        self._thread.start()

    # The scheduler's side, on the step thread.

    def expect(self, request_id: str, handoff: KVHandoff) -> None:
        self._post(lambda: self._pulls.expect(request_id, handoff))

    def start(
        self,
        request_id: str,
        handoff: KVHandoff,
        source_indices: list[int],
        dst_blocks: list[int],
    ) -> None:
        self._post(lambda: self._pulls.start(request_id, source_indices, dst_blocks))

    def cancel(self, request_id: str) -> None:
        self._post(lambda: self._pulls.cancel(request_id))

    def take_finished(self) -> list[KVReadResult]:
        """Return the reads that ended since the last call.

        Raises:
            KVThreadDied: the thread is gone; without it every request would wait for ever.
        """
        if self._failure is not None:
            raise KVThreadDied("kv puller", self._failure) from self._failure
        return _drain(self._finished)

    @property
    def bytes_received(self) -> int:
        return self._pulls.bytes_received

    def counts(self) -> Counts:
        """Return what was counted of all reads. Any thread may call it."""
        pulls = self._pulls
        return {
            ("kv_transfer_received_bytes_total",): pulls.bytes_received,
            ("kv_transfers_total",): pulls.num_reads,
            ("kv_transfer_failures_total",): pulls.num_failed,
            ("kv_transfer_seconds_total",): pulls.read_s,
        }

    def close(self) -> None:
        self._is_closed = True
        self._wake.ring()
        self._thread.join(timeout=2)

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._wake.ring()

    # The thread.

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            self._failure = error
            self._doorbell.ring()
        self._transport.close()

    def _loop(self) -> None:
        poller, pulls = self._transport.poller, self._pulls
        poller.register(self._wake.fileno(), zmq.POLLIN)
        while not self._is_closed:
            poller.poll(self._timeout_ms())
            self._wake.clear()
            for command in _drain(self._commands):
                command()
            for source, answer, blocks in self._transport.receive():
                pulls.on_answer(source, answer, blocks)
            pulls.on_tick()
            for result in pulls.take_finished():
                self._finished.put(result)
                self._doorbell.ring()

    def _timeout_ms(self) -> int:
        deadline = self._pulls.next_deadline()
        return -1 if deadline is None else max(0, int((deadline - self._clock()) * 1000) + 1)


class _Transport:
    """The `ReadTransport` of sockets and shared memory. Used by the puller's thread alone."""

    def __init__(
        self,
        pool: torch.Tensor,
        transport: str,
        context: zmq.Context[zmq.Socket[bytes]],
        credentials: Credentials,
    ) -> None:
        self.store = BlockStore(pool)
        self.poller = zmq.Poller()
        self._transport = transport
        self._context = context
        self._credentials = credentials
        self._node = node_id()
        self._ids = CallIds()
        # By source: address, pid and descriptor come again, its process does not.
        self._connections: dict[KVSource, _Connection] = {}
        self._mapped: dict[KVSource, BlockStore] = {}
        self._used_at: dict[KVSource, float] = {}
        self._closed: set[KVSource] = set()
        """On this node, but their memory may not be looked into."""

    def send(self, source: KVSource, call: KVCall) -> None:
        connection = self._connections.get(source)
        if connection is None:
            self._forget_the_gone()
            if len(self._connections) >= MAX_CONNECTIONS:
                self.forget(min(self._connections, key=lambda known: self._used_at.get(known, 0.0)))
            connection = self._connections[source] = _Connection(
                self._context,
                source,
                credentials=self._credentials,
                ids=self._ids,
                block_bytes=self.store.block_bytes,
            )
            self.poller.register(connection.socket, zmq.POLLIN)
        self._used_at[source] = time.monotonic()
        connection.send(call)

    def receive(self) -> list[tuple[KVSource, KVAnswer, list[memoryview]]]:
        """Return the answers that have come, with the blocks they carry.

        Of each source up to the first with blocks. The others stay in its socket until these are
        written, so a source whose answers have come never seems silent, however long that takes.
        """
        answers: list[tuple[KVSource, KVAnswer, list[memoryview]]] = []
        for source, connection in list(self._connections.items()):
            try:
                answers += [(source, *answered) for answered in connection.receive()]
            except FrameError as error:
                # That process is not the one that issued the ticket; its reads end by time-out.
                log.error("kv answer from %s: %s; it is heard no more", source.address, error)
                self.forget(source)
        return answers

    def is_mapped(self, source: KVSource) -> bool:
        if self._transport == "tcp" or not self.store.is_on_host:
            return False
        # If shared memory was asked for by name, having none is an error, not a slow success.
        if self._transport == "shm":
            return True
        is_near = source.shm_fd >= 0 and source.boot_id == self._node
        return is_near and self._may_map(source)

    def copy(self, source: KVSource, source_ids: list[int], ids: list[int]) -> None:
        if source.boot_id != self._node:
            raise OSError("kv.transport: wanted shm on one node, found another node")
        mapped = self._map(source)
        if ids:
            self.store.copy_from(mapped, source_ids, ids)

    def _may_map(self, source: KVSource) -> bool:
        """Return whether a source's memory is not closed to us, as that of another user is."""
        if source in self._closed:
            return False
        try:
            self._map(source)
        except PermissionError as error:
            log.warning("kv.transport: tcp to %s, not shm: %s", source.address, error)
            if len(self._closed) >= MAX_CONNECTIONS:
                self._closed.clear()
            self._closed.add(source)
            return False
        except (OSError, ValueError):  # gone: `copy` says so
            pass
        return True

    def _map(self, source: KVSource) -> BlockStore:
        mapped = self._mapped.get(source)
        if mapped is None:
            self._forget_the_gone()
            if len(self._mapped) >= MAX_CONNECTIONS:  # each has a descriptor
                del self._mapped[next(iter(self._mapped))]
            memory = open_shared(source.pid, source.shm_fd)
            mapped = BlockStore.of_memory(memory, self.store.block_bytes)
            self._mapped[source] = mapped
        return mapped

    def _forget_the_gone(self) -> None:
        """Let go of processes that ended: a mapping keeps all of a dead one's KV in memory.

        Nothing is known of those on other nodes, so they go when nothing was read for long.
        """
        idle_since = time.monotonic() - IDLE_S
        for source in list(self._mapped):
            if not os.path.exists(f"/proc/{source.pid}/fd/{source.shm_fd}"):
                self.forget(source)
        for source, used_at in list(self._used_at.items()):
            if used_at < idle_since:
                self.forget(source)

    def forget(self, source: KVSource) -> None:
        self._mapped.pop(source, None)
        self._used_at.pop(source, None)
        self._closed.discard(source)
        connection = self._connections.pop(source, None)
        if connection is not None:
            self.poller.unregister(connection.socket)
            connection.socket.close(linger=0)

    def write(self, ids: list[int], blocks: list[memoryview]) -> None:
        self.store.scatter(ids, blocks)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.socket.close()


class _Connection:
    """The connection to one holder, with the calls that it has not answered."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        source: KVSource,
        *,
        credentials: Credentials,
        ids: CallIds,
        block_bytes: int,
    ) -> None:
        """Connect.

        Args:
            ids: of this reader's calls, whatever connection they take.

        Raises:
            OSError: there is no such address.
        """
        self._header = credentials.header
        self._process = encode(source.process)
        self._proofs = KVProofs(credentials)
        self._ids = ids
        self._open: OrderedDict[bytes, tuple[KVCall, bytes]] = OrderedDict()
        """By the calls' ids, with their proofs."""
        self.socket = connecting_socket(
            context,
            zmq.DEALER,
            PlainHandshake(self._proofs.password(self._process)),
            max_waiting=MAX_WAITING,
            max_part_bytes=max(block_bytes, MAX_PART_BYTES),
        )
        self.socket.linger = 1000
        try:
            self.socket.connect(source.address)
        except zmq.ZMQError as error:
            self.socket.close(linger=0)
            raise OSError(f"wanted an address to connect to: {error}") from error

    def send(self, call: KVCall) -> None:
        call_id, body = self._ids.next(), encode(call)
        proof = self._proofs.of_call(call_id, self._process, body)
        self._open[call_id] = call, proof
        if len(self._open) > MAX_OPEN_CALLS:
            self._open.popitem(last=False)
        parts = [self._header, call_id, self._process, body, proof]
        with suppress(zmq.Again):  # the holder is gone: its reads end by their time-outs
            self.socket.send_multipart(parts, zmq.NOBLOCK)

    def receive(self) -> list[tuple[KVAnswer, list[memoryview]]]:
        """Return the answers that have come, up to the first with blocks.

        Raises:
            FrameError: something else has come.
        """
        answers: list[tuple[KVAnswer, list[memoryview]]] = []
        while len(answers) < MAX_ANSWERS and self.socket.poll(0):
            answers.append(self._read(self.socket.recv_multipart(copy=False)))
            if answers[-1][1]:
                break
        return answers

    def _read(self, frames: list[zmq.Frame]) -> tuple[KVAnswer, list[memoryview]]:
        if len(frames) < 3:
            raise FrameError(f"message: wanted 3 parts or more, found {len(frames)}")
        call_id, body, proof = (frame.bytes for frame in frames[:3])
        call, call_proof = self._open.pop(call_id, (None, b""))
        if call is None:
            raise FrameError("call: wanted one that is not answered, found another")
        if not is_equal(proof, self._proofs.of_answer(call_proof, body)):
            raise FrameError("proof: wanted this application's, found another")
        answer: KVAnswer = decode(body, KVAnswer)
        wanted, found = (call.ticket, type(call).__name__), (answer.ticket, answer.call)
        if found != wanted:
            raise FrameError(f"answer: wanted one to {wanted}, found one to {found}")
        return answer, [frame.buffer for frame in frames[3:]]


def _drain(queue: SimpleQueue[T]) -> list[T]:
    items: list[T] = []
    while not queue.empty():
        items.append(queue.get())
    return items
