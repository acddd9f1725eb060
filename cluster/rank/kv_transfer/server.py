"""The holder's side: a thread that serves tickets to readers."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Sequence

import torch
import zmq

from cluster.engine.handoff import KVHolder
from cluster.messages import (
    FrameError,
    KVAnswer,
    KVCall,
    KVRead,
    KVRelease,
    KVRenew,
    RankProcess,
    check_header,
    decode,
    encode,
)
from cluster.rank.doorbell import Doorbell
from cluster.rank.kv_transfer.store import BlockStore, KVThreadDied

log = logging.getLogger("lockstep.kv")


MAX_EARLY_CALLS = 1024
"""Calls for tickets that are not held here yet. Their readers give up after seconds."""


class KVServer:
    """The holder's side: a thread that serves reads, renewals and releases of tickets.

    It is the scheduler's `Holder`: `hold`, `drop` and `take_ended` may be called from the step
    thread at any time. `doorbell` rings whenever a ticket ended and its blocks may be freed.
    """

    def __init__(
        self,
        holder: KVHolder,
        pool: torch.Tensor,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        header: bytes,
        epoch: int,
        doorbell: Doorbell,
    ) -> None:
        self._holder = holder
        self.process = RankProcess(epoch, secrets.token_hex(8))
        self._store = BlockStore(pool)
        self._header = header
        self._doorbell = doorbell
        self._lock = threading.Lock()
        self._early: list[tuple[bytes, KVCall]] = []
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.sndhwm = 0  # an answer is never dropped; readers await few at a time
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"
        self._wake = Doorbell()
        self._is_closed = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="kv-server", daemon=True)
        self._thread.start()

    # The scheduler's side, on the step thread.

    def hold(self, request_id: str, block_ids: list[int], generations: list[int]) -> int:
        """Start a lease and return its ticket."""
        with self._lock:
            ticket = self._holder.hold(request_id, block_ids, generations)
        self._wake.ring()  # the thread may be waiting for a later deadline
        return ticket

    def drop(self, ticket: int) -> None:
        """End a ticket: its request was aborted."""
        with self._lock:
            self._holder.drop(ticket)

    def take_ended(self) -> list[int]:
        """Return the tickets whose blocks may be freed.

        Raises:
            KVThreadDied: the thread is gone; without it no ticket would ever end.
        """
        if self._failure is not None:
            raise KVThreadDied("kv server", self._failure) from self._failure
        with self._lock:
            return self._holder.take_ended()

    @property
    def num_held(self) -> int:
        """Tickets that are alive."""
        return self._holder.num_held

    @property
    def bytes_sent(self) -> int:
        """Bytes that readers copied under a lease that was alive to the end."""
        return self._holder.num_blocks_sent * self._store.block_bytes

    def close(self) -> None:
        """Stop the thread and close the socket."""
        self._is_closed = True
        self._wake.ring()
        self._thread.join(timeout=2)

    # The readers' side, on the thread.

    def _serve(self) -> None:
        try:
            self._loop()
        except Exception as error:
            self._failure = error
            self._doorbell.ring()
        self._socket.close()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake.fileno(), zmq.POLLIN)
        while not self._is_closed:
            poller.poll(self._timeout_ms())
            self._wake.clear()
            self._answer_early()
            self._answer_all()
            self._expire()

    def _timeout_ms(self) -> int:
        with self._lock:
            deadline = self._holder.next_deadline()
            now = self._holder.clock()
        return -1 if deadline is None else max(0, int((deadline - now) * 1000) + 1)

    def _expire(self) -> None:
        with self._lock:
            expired = self._holder.tick()
        if expired:
            log.warning("kv lease: expired for %d tickets; their blocks are freed", len(expired))
            self._doorbell.ring()

    def _answer_all(self) -> None:
        while True:
            try:
                peer, header, process, body = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                log.error("kv frame: wanted 4 parts, found another number; dropped")
                continue
            try:
                check_header(header, self._header)
                called, call = decode(process, RankProcess), decode(body, KVCall)
            except FrameError as error:
                log.error("kv frame: dropped: %s", error)
                continue
            if called == self.process:
                self._take(peer, call)
            else:
                self._refuse(peer, called, call)

    def _refuse(self, peer: bytes, called: RankProcess, call: KVCall) -> None:
        """Answer a call to a process that had this address before: its tickets died with it."""
        wanted = f"rank: wanted epoch {self.process.epoch}"
        log.error("kv call: %s, found a call for epoch %d of another process", wanted, called.epoch)
        self._send(peer, call, alive=False)

    def _take(self, peer: bytes, call: KVCall) -> None:
        """Answer a call, or keep it until its ticket is held.

        A ticket may reach its reader before the leader's order to hold it reaches a follower.
        """
        with self._lock:
            is_early = call.ticket > self._holder.last_ticket
        if not is_early:
            self._answer(peer, call)
        elif len(self._early) < MAX_EARLY_CALLS:
            self._early.append((peer, call))
        else:
            log.error("kv call: wanted a ticket that was issued, found %d; dropped", call.ticket)

    def _answer_early(self) -> None:
        early, self._early = self._early, []
        for peer, call in early:
            self._take(peer, call)

    def _answer(self, peer: bytes, call: KVCall) -> None:
        blocks: list[memoryview] = []
        with self._lock:
            match call:
                case KVRead():
                    alive = self._holder.covers(call.ticket, call.block_ids, call.generations)
                case KVRenew():
                    alive = self._holder.renew(call.ticket)
                case KVRelease():
                    alive = self._holder.release(call.ticket, call.num_blocks_read)
        if isinstance(call, KVRead) and alive:
            # Without the lock, which the step thread takes: to copy from a GPU takes a while.
            blocks = self._store.gather(call.block_ids)
        self._send(peer, call, alive=alive, blocks=blocks)
        if isinstance(call, KVRelease):
            self._doorbell.ring()

    def _send(
        self, peer: bytes, call: KVCall, *, alive: bool, blocks: Sequence[memoryview] = ()
    ) -> None:
        answer = encode(KVAnswer(call.ticket, type(call).__name__, alive))
        # The bytes go out without a copy: they are not overwritten before the ticket ends, and
        # the reader learns at its release if that came too early.
        self._socket.send_multipart([peer, answer, *blocks], copy=False)
