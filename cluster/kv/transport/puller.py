"""The reader's side: a thread that drives `KVPulls` over sockets and mapped memory."""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

import torch
import zmq

from cluster.kv.reads import KVPulls
from cluster.kv.transport.proofs import CallIds, KVProofs, PlainHandshake
from cluster.kv.transport.store import BlockStore
from cluster.kv.transport.thread import KVThread
from cluster.wire.credentials import Credentials
from cluster.wire.group_messages import ReadEnded
from cluster.wire.messages import FrameError, KVAnswer, KVCall, KVHandoff, KVSource, decode, encode
from cluster.wire.shared_memory import open_shared
from cluster.wire.sockets import (
    CONNECTION_ENDS,
    MAX_PART_BYTES,
    Doorbell,
    connect_to,
    connecting_socket,
    node_id,
)

log = logging.getLogger("lockstep.kv")

T = TypeVar("T")

IDLE_S = 600.0
"""After this long without a read nothing is kept open; longer than any read takes."""
MAX_HOLDERS = 128
"""One for each prefill rank that this one reads from; the one used least recently gives way."""
MAX_OPEN_CALLS = 4096
"""To one holder: a renewal that is never answered is forgotten at some point."""
MAX_ANSWERS = 64
"""Of one holder in one round, not counting those with blocks, which are taken one at a time."""
MAX_WAITING = 10_000
"""Calls to a holder that is gone. Nothing may wait for it, so any more are lost."""


class KVPuller:
    """A scheduler's `KVReader`, on a thread of its own; `doorbell` rings when a read has ended."""

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
        self.reads = KVPulls(
            self._transport,
            tp_rank=tp_rank,
            block_bytes=self._transport.store.block_bytes,
            clock=clock,
        )
        self._doorbell = doorbell
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._finished: SimpleQueue[ReadEnded] = SimpleQueue()
        self._thread = KVThread(
            "kv puller",
            turn=self._turn,
            next_deadline=self.reads.next_deadline,
            clock=clock,
            doorbell=doorbell,
            at_end=self._transport.close,
        )
        self._transport.poller = self._thread.poller
        self._thread.start()

    # The scheduler's side, on the step thread.

    def expect(self, request_id: str, handoff: KVHandoff) -> None:
        self._post(lambda: self.reads.expect(request_id, handoff))

    def start(
        self, request_id: str, handoff: KVHandoff, source_indices: list[int], dst_blocks: list[int]
    ) -> None:
        self._post(lambda: self.reads.start(request_id, source_indices, dst_blocks))

    def cancel(self, request_id: str) -> None:
        self._post(lambda: self.reads.cancel(request_id))

    def take_finished(self) -> list[ReadEnded]:
        """Return the reads that ended since the last call; `KVThreadDied` if the thread is gone."""
        self._thread.check()
        return _drain(self._finished)

    def close(self) -> None:
        self._thread.close()

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._thread.wake.ring()

    # The thread.

    def _turn(self) -> None:
        for command in _drain(self._commands):
            command()
        for source, answer, blocks in self._transport.receive():
            self.reads.on_answer(source, answer, blocks)
        for source, why in self._transport.take_lost():
            self.reads.on_lost(source, why)
        self.reads.on_tick()
        for result in self.reads.take_finished():
            self._finished.put(result)
            self._doorbell.ring()


class _Transport:
    """The `ReadTransport` of sockets and shared memory. Used by the puller's thread alone."""

    poller: zmq.Poller
    """The thread's, set before it starts."""

    def __init__(
        self,
        pool: torch.Tensor,
        transport: str,
        context: zmq.Context[zmq.Socket[bytes]],
        credentials: Credentials,
    ) -> None:
        self.store = BlockStore(pool)
        self._transport = transport
        self._context = context
        self._credentials = credentials
        self._node = node_id()
        self._ids = CallIds()
        self._holders: OrderedDict[KVSource, _Holder] = OrderedDict()
        """By source, whose process never comes again; the last used at the end."""
        self._lost: list[tuple[KVSource, str]] = []

    def send(self, source: KVSource, call: KVCall) -> None:
        self._holder(source).send(call)

    def receive(self) -> list[tuple[KVSource, KVAnswer, list[memoryview]]]:
        """Return the answers that have come, with the blocks they carry. Of each source up to the
        first with blocks: the others stay in its socket until these are written, so a source whose
        answers have come never seems silent."""
        answers: list[tuple[KVSource, KVAnswer, list[memoryview]]] = []
        for source, holder in list(self._holders.items()):
            try:
                answers += (new := [(source, *answered) for answered in holder.receive()])
                if not new and holder.has_ended:
                    self._lost.append((source, "the connection ended"))
            except FrameError as error:
                # That process is not the one that issued the handoff.
                log.error("kv answer from %s: %s; it is heard no more", source.address, error)
                self._lost.append((source, str(error)))
        return answers

    def take_lost(self) -> list[tuple[KVSource, str]]:
        """Return the sources whose connections were found to have ended, and why."""
        lost, self._lost = self._lost, []
        return lost

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

    def write(self, ids: list[int], blocks: list[memoryview]) -> None:
        self.store.scatter(ids, blocks)

    def forget(self, source: KVSource) -> None:
        if (holder := self._holders.pop(source, None)) is not None:
            self.poller.unregister(holder.socket)
            self.poller.unregister(holder.monitor)
            holder.close(linger=0)

    def close(self) -> None:
        for holder in self._holders.values():
            holder.close()

    def _may_map(self, source: KVSource) -> bool:
        """Return whether a source's memory is not closed to us, as that of another user is."""
        try:
            if self._holder(source).is_private:
                return False
            self._map(source)
        except PermissionError as error:
            log.warning("kv.transport: tcp to %s, not shm: %s", source.address, error)
            self._holder(source).is_private = True
            return False
        except (OSError, ValueError):  # gone: `copy` says so
            pass
        return True

    def _map(self, source: KVSource) -> BlockStore:
        holder = self._holder(source)
        if holder.memory is None:
            memory = open_shared(source.pid, source.shm_fd)
            holder.memory = BlockStore.of_memory(memory, self.store.block_bytes)
        return holder.memory

    def _holder(self, source: KVSource) -> _Holder:
        """Return the connection to a holder, or a new one; OSError: it has no such address."""
        holder = self._holders.get(source)
        if holder is None:
            self._forget_the_gone()
            if len(self._holders) >= MAX_HOLDERS:
                self.forget(next(iter(self._holders)))
            holder = self._holders[source] = _Holder(
                self._context,
                source,
                credentials=self._credentials,
                ids=self._ids,
                block_bytes=self.store.block_bytes,
            )
            self.poller.register(holder.socket, zmq.POLLIN)
            self.poller.register(holder.monitor, zmq.POLLIN)
        self._holders.move_to_end(source)
        holder.used_at = time.monotonic()
        return holder

    def _forget_the_gone(self) -> None:
        """Let go of processes that ended: a mapping keeps all of a dead one's KV in memory. Those
        on other nodes go when nothing was read for long."""
        idle_since = time.monotonic() - IDLE_S
        for source, holder in list(self._holders.items()):
            is_mapped = holder.memory is not None
            is_gone = is_mapped and not os.path.exists(f"/proc/{source.pid}/fd/{source.shm_fd}")
            if is_gone or holder.used_at < idle_since:
                self.forget(source)


class _Holder:
    """A connection to one holder, calls without an answer, and memory that is mapped."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        source: KVSource,
        *,
        credentials: Credentials,
        ids: CallIds,
        block_bytes: int,
    ) -> None:
        """Connect; OSError: there is no such address. `ids` are of all this reader's calls."""
        self.memory: BlockStore | None = None
        self.is_private = False
        """It is on this node, but its memory may not be looked into."""
        self.used_at = 0.0
        self._header = credentials.header
        self._process = encode(source.process)
        self._proofs = KVProofs(credentials)
        self._ids = ids
        self._open: OrderedDict[bytes, tuple[KVCall, bytes]] = OrderedDict()
        self.socket = connecting_socket(
            context,
            zmq.DEALER,
            PlainHandshake(self._proofs.password(self._process)),
            max_waiting=MAX_WAITING,
            max_part_bytes=max(block_bytes, MAX_PART_BYTES),
        )
        self.socket.linger = 1000
        self.monitor = self.socket.get_monitor_socket(CONNECTION_ENDS)
        try:
            connect_to(self.socket, source.address)
        except zmq.ZMQError as error:
            self.close(linger=0)
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
        """Return answers up to the first with blocks; FrameError: something else has come."""
        answers: list[tuple[KVAnswer, list[memoryview]]] = []
        while len(answers) < MAX_ANSWERS and self.socket.poll(0):
            answers.append(self._read(self.socket.recv_multipart(copy=False)))
            if answers[-1][1]:
                break
        return answers

    @property
    def has_ended(self) -> bool:
        """Whether the connection was refused, or has ended since it was made."""
        return bool(self.monitor.poll(0))

    def close(self, linger: int | None = None) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger)

    def _read(self, frames: list[zmq.Frame]) -> tuple[KVAnswer, list[memoryview]]:
        if len(frames) < 3:
            raise FrameError(f"message: wanted 3 parts or more, found {len(frames)}")
        call_id, body, proof = (frame.bytes for frame in frames[:3])
        call, call_proof = self._open.pop(call_id, (None, b""))
        if call is None:
            raise FrameError("call: wanted one that is not answered, found another")
        if not hmac.compare_digest(proof, self._proofs.of_answer(call_proof, body)):
            raise FrameError("proof: wanted this application's, found another")
        answer: KVAnswer = decode(body, KVAnswer)
        wanted, found = (call.handoff_id, type(call).__name__), (answer.handoff_id, answer.call)
        if found != wanted:
            raise FrameError(f"answer: wanted one to {wanted}, found one to {found}")
        return answer, [frame.buffer for frame in frames[3:]]


def _drain(queue: SimpleQueue[T]) -> list[T]:
    items: list[T] = []
    while not queue.empty():
        items.append(queue.get())
    return items
