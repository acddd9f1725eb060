"""The holder's side: a thread that serves handoffs to readers."""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
from dataclasses import dataclass

import torch
import zmq

from cluster.kv.handoff import KVHolder
from cluster.kv.reads import max_chunk_blocks
from cluster.kv.transport.proofs import KVProofs, PlainHandshake, ZapAuthenticator, number_of
from cluster.kv.transport.store import BlockStore
from cluster.kv.transport.thread import KVThread
from cluster.wire.credentials import Credentials
from cluster.wire.messages import (
    FrameError,
    KVAnswer,
    KVCall,
    KVRead,
    KVRelease,
    RankProcess,
    decode,
    encode,
)
from cluster.wire.sockets import Budget, Doorbell, bind_tcp, end_context, listening_socket

log = logging.getLogger("lockstep.kv")

MAX_EARLY_CALLS = 1024
"""Kept calls for handoffs that are not held here yet. Their readers give up after seconds."""
MAX_CALLS, MAX_CALLS_S = 256, 0.05
"""Answered in one round, before leases that have run out are ended: far below what a lease is."""
MAX_WAITING = 1024
"""Calls of one reader, and answers to it. It awaits few at a time."""


@dataclass(frozen=True)
class ProvedCall:
    """A call that is the application's, and where its answer goes."""

    peer: bytes
    call_id: bytes
    proof: bytes
    call: KVCall


class KVServer:
    """A thread that serves reads, renewals and releases of handoffs: the scheduler's
    `HandoffHolder`. The step thread may call `hold`, `drop` and `take_ended` at any time.
    `doorbell` rings whenever a handoff ended and its blocks may be freed."""

    def __init__(
        self,
        holder: KVHolder,
        pool: torch.Tensor,
        *,
        host: str,
        credentials: Credentials,
        epoch: int,
        doorbell: Doorbell,
    ) -> None:
        self._holder = holder
        self.process = RankProcess(epoch, secrets.token_hex(8))
        self._process = encode(self.process)
        self._store = BlockStore(pool)
        self._max_blocks = max_chunk_blocks(self._store.block_bytes)
        self._credentials = credentials
        self._proofs = KVProofs(credentials)
        self._doorbell = doorbell
        self._lock = threading.Lock()
        self._early: list[ProvedCall] = []
        self._last_numbers: dict[int, int] = {}
        """By handoff that is held: the number of the last call for it."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        password = self._proofs.password(self._process)
        self._door = ZapAuthenticator(self._context, password)
        handshake = PlainHandshake(password)
        self._socket = listening_socket(
            self._context, zmq.ROUTER, handshake, max_waiting=MAX_WAITING
        )
        self._socket.linger = 0
        self.address = bind_tcp(self._socket, host)
        self.num_expired = 0
        self._thread = KVThread(
            "kv server",
            turn=self._turn,
            next_deadline=self._next_deadline,
            clock=holder.clock,
            doorbell=doorbell,
            at_end=self._close_sockets,
        )
        for socket in (self._socket, self._door.socket):
            self._thread.poller.register(socket, zmq.POLLIN)
        self._thread.start()

    # The scheduler's side, on the step thread.

    def hold(self, request_id: str, block_ids: list[int], generations: list[int]) -> int:
        with self._lock:
            handoff_id = self._holder.hold(request_id, block_ids, generations)
        self._thread.wake.ring()  # it may be waiting for a later deadline
        return handoff_id

    def drop(self, handoff_id: int) -> None:
        with self._lock:
            self._holder.drop(handoff_id)

    def take_ended(self) -> list[int]:
        """Return the handoffs whose blocks may be freed; `KVThreadDied` if the thread is gone."""
        self._thread.check()
        with self._lock:
            ended = self._holder.take_ended()
            for handoff_id in ended:
                self._last_numbers.pop(handoff_id, None)
            return ended

    @property
    def num_held(self) -> int:
        return self._holder.num_held

    @property
    def bytes_sent(self) -> int:
        return self._holder.num_blocks_sent * self._store.block_bytes

    def close(self) -> None:
        self._thread.close()
        end_context(self._context, "kv server", linger=0)

    # The readers' side, on the thread.

    def _close_sockets(self) -> None:
        self._door.close()
        self._socket.close()

    def _turn(self) -> None:
        budget = Budget(MAX_CALLS, MAX_CALLS_S)
        self._door.answer(budget)
        self._answer_early()
        self._answer_all(budget)
        self._expire()

    def _next_deadline(self) -> float | None:
        with self._lock:
            return self._holder.next_deadline()

    def _expire(self) -> None:
        with self._lock:
            expired = self._holder.tick()
        self.num_expired += len(expired)
        if expired:
            log.warning("kv lease: expired for %d handoffs; their blocks are freed", len(expired))
            self._doorbell.ring()

    def _answer_all(self, budget: Budget) -> None:
        while budget.take():
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._early.append(self._prove(parts))
            except FrameError as error:
                log.error("kv call: dropped: %s", error)
                continue
            self._answer_early()
            if len(self._early) > MAX_EARLY_CALLS:
                handoff_id = self._early.pop().call.handoff_id
                log.error(
                    "kv call: wanted a handoff that was issued, found %d; dropped", handoff_id
                )

    def _prove(self, parts: list[bytes]) -> ProvedCall:
        """Return the call that came; a `FrameError` if it is not the application's, or is for a
        process that had this address before."""
        if len(parts) != 6:
            raise FrameError(f"message: wanted 6 parts, found {len(parts)}")
        peer, header, call_id, called, body, proof = parts
        self._credentials.check(header)
        if not hmac.compare_digest(proof, self._proofs.of_call(call_id, called, body)):
            raise FrameError("proof: wanted this application's, found another")
        if called != self._process:
            raise FrameError("process: wanted a call to this one, found one to another")
        return ProvedCall(peer, call_id, proof, decode(body, KVCall))

    def _answer_early(self) -> None:
        """Answer the calls whose handoffs are held, in their order, and keep the others. A handoff
        may reach its reader before the leader's order to hold it reaches a follower."""
        if not self._early:
            return
        with self._lock:
            last_handoff_id = self._holder.last_handoff_id
        kept, self._early = self._early, []
        for proved in kept:
            if proved.call.handoff_id <= last_handoff_id:
                self._answer(proved)
            else:
                self._early.append(proved)

    def _answer(self, proved: ProvedCall) -> None:
        call = proved.call
        with self._lock:
            if not self._is_next(proved):
                log.error(
                    "kv call: wanted a later one for handoff %d, found a replay", call.handoff_id
                )
                return
            alive = self._holder.answer(call, self._max_blocks)
        blocks: list[memoryview] = []
        if isinstance(call, KVRead) and alive:
            # Without the lock, which the step thread takes, because copying from a GPU takes long.
            blocks = self._store.gather(call.block_ids)
        answer = encode(KVAnswer(call.handoff_id, type(call).__name__, alive))
        proof = self._proofs.of_answer(proved.proof, answer)
        # The bytes go out without a copy: they are not overwritten before the handoff ends, and
        # the reader learns at its release if that came too early.
        parts: list[bytes | memoryview] = [proved.peer, proved.call_id, answer, proof, *blocks]
        self._socket.send_multipart(parts, copy=False)
        if isinstance(call, KVRelease):
            self._doorbell.ring()

    def _is_next(self, proved: ProvedCall) -> bool:
        """Return whether a call for a handoff is later than all before. Call it with the lock."""
        handoff_id, number = proved.call.handoff_id, number_of(proved.call_id)
        if not self._holder.is_alive(handoff_id):
            return True  # nothing that is said of it changes anything
        is_next = number > self._last_numbers.get(handoff_id, 0)
        if is_next:
            self._last_numbers[handoff_id] = number
        return is_next
