"""The reader's side: a thread that drives `KVReads` over sockets and mapped memory."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

import torch
import zmq

from cluster.engine.handoff import KVReadResult
from cluster.engine.kv_reads import KVReads
from cluster.messages import (
    FrameError,
    KVAnswer,
    KVCall,
    KVHandoff,
    KVSource,
    decode,
    encode,
)
from cluster.rank.doorbell import Doorbell
from cluster.rank.kv_transfer.store import BlockStore, KVThreadDied
from cluster.rank.memory import node_id, open_shared
from cluster.rank.sockets import keep_alive

log = logging.getLogger("lockstep.kv")

T = TypeVar("T")

IDLE_S = 600.0
"""After so long without a read nothing is kept open; longer than any read takes."""


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
        header: bytes,
        doorbell: Doorbell,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = _Transport(pool, transport, context, header)
        self._reads = KVReads(
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
        """Keep the ticket's lease alive until the read starts or is cancelled."""
        self._post(lambda: self._reads.expect(request_id, handoff))

    def start(
        self,
        request_id: str,
        handoff: KVHandoff,
        source_indices: list[int],
        dst_blocks: list[int],
    ) -> None:
        """Copy `handoff.block_ids[i]` for each source index into `dst_blocks`, then release."""
        self._post(lambda: self._reads.start(request_id, source_indices, dst_blocks))

    def cancel(self, request_id: str) -> None:
        """Stop and release; a read that was started still reports when it no longer writes."""
        self._post(lambda: self._reads.cancel(request_id))

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
        """Bytes copied in reads that were believed."""
        return self._reads.bytes_received

    def close(self) -> None:
        """Stop the thread and close its sockets."""
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
        poller, reads = self._transport.poller, self._reads
        poller.register(self._wake.fileno(), zmq.POLLIN)
        while not self._is_closed:
            poller.poll(self._timeout_ms())
            self._wake.clear()
            for command in _drain(self._commands):
                command()
            for source, answer, blocks in self._transport.receive():
                reads.on_answer(source, answer, blocks)
            reads.on_tick()
            for result in reads.take_finished():
                self._finished.put(result)
                self._doorbell.ring()

    def _timeout_ms(self) -> int:
        deadline = self._reads.next_deadline()
        return -1 if deadline is None else max(0, int((deadline - self._clock()) * 1000) + 1)


class _Transport:
    """The `ReadTransport` of sockets and shared memory. Used by the puller's thread alone."""

    def __init__(
        self,
        pool: torch.Tensor,
        transport: str,
        context: zmq.Context[zmq.Socket[bytes]],
        header: bytes,
    ) -> None:
        self.store = BlockStore(pool)
        self.poller = zmq.Poller()
        self._transport = transport
        self._context = context
        self._header = header
        self._node = node_id()
        # By source: address, pid and descriptor come again, its process does not.
        self._sockets: dict[KVSource, zmq.Socket[bytes]] = {}
        self._mapped: dict[KVSource, BlockStore] = {}
        self._used_at: dict[KVSource, float] = {}
        self._closed: set[KVSource] = set()
        """On this node, but their memory may not be looked into."""

    def send(self, source: KVSource, call: KVCall) -> None:
        socket = self._sockets.get(source)
        if socket is None:
            self._forget_the_gone()
            socket = self._sockets[source] = self._context.socket(zmq.DEALER)
            socket.linger = 1000
            keep_alive(socket)
            socket.sndhwm = 0  # to a holder that is gone nothing leaves, and nobody may wait for it
            socket.connect(source.address)
            self.poller.register(socket, zmq.POLLIN)
        self._used_at[source] = time.monotonic()
        socket.send_multipart([self._header, encode(source.process), encode(call)])

    def receive(self) -> list[tuple[KVSource, KVAnswer, list[memoryview]]]:
        """Return the answers that have come, with the blocks they carry.

        Of each source up to the first with blocks; the others stay in its socket until these are
        written: however long that takes, no source seems silent whose answers have come.
        """
        answers: list[tuple[KVSource, KVAnswer, list[memoryview]]] = []
        for source, socket in list(self._sockets.items()):
            blocks: list[memoryview] = []
            while not blocks and socket.poll(0):
                frames = socket.recv_multipart(copy=False)
                try:
                    answer: KVAnswer = decode(frames[0].buffer, KVAnswer)
                except FrameError as error:  # the read ends by its time-out
                    log.error("kv answer from %s: dropped: %s", source.address, error)
                    continue
                blocks = [frame.buffer for frame in frames[1:]]
                answers.append((source, answer, blocks))
        return answers

    def is_mapped(self, source: KVSource) -> bool:
        if self._transport == "tcp" or not self.store.is_on_host:
            return False
        # Asked for by name, shared memory is an error where there is none, not a slow success.
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
        """Tell whether a source's memory is not closed to us, as that of another user is."""
        if source in self._closed:
            return False
        try:
            self._map(source)
        except PermissionError as error:
            log.warning("kv.transport: tcp to %s, not shm: %s", source.address, error)
            self._closed.add(source)
            return False
        except (OSError, ValueError):  # gone: `copy` says so
            pass
        return True

    def _map(self, source: KVSource) -> BlockStore:
        mapped = self._mapped.get(source)
        if mapped is None:
            self._forget_the_gone()
            memory = open_shared(source.pid, source.shm_fd)
            mapped = BlockStore.of_memory(memory, self.store.block_bytes)
            self._mapped[source] = mapped
        return mapped

    def _forget_the_gone(self) -> None:
        """Let go of processes that ended: a mapping keeps all of a dead one's KV in memory.

        Of those on other nodes nobody knows; they are let go of when nothing was read for long.
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
        socket = self._sockets.pop(source, None)
        if socket is not None:
            self.poller.unregister(socket)
            socket.close(linger=0)

    def write(self, ids: list[int], blocks: list[memoryview]) -> None:
        self.store.scatter(ids, blocks)

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close()


def _drain(queue: SimpleQueue[T]) -> list[T]:
    items: list[T] = []
    while not queue.empty():
        items.append(queue.get())
    return items
