"""What is altered, replayed or meant for somebody else is believed by neither side of a KV read."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import zmq
from local_ranks import CREDENTIALS as OURS
from local_ranks import HOST, Context, wait_for

from cluster.kv import reads as kv_reads
from cluster.kv.handoff import KVHolder
from cluster.kv.transport import puller as puller_module
from cluster.kv.transport.proofs import CallIds, KVProofs, PlainHandshake, ZapAuthenticator
from cluster.kv.transport.puller import KVPuller
from cluster.kv.transport.server import KVServer
from cluster.wire.credentials import Credentials
from cluster.wire.group_messages import ReadEnded
from cluster.wire.messages import (
    KVAnswer,
    KVCall,
    KVHandoff,
    KVRead,
    KVRelease,
    KVRenew,
    KVSource,
    RankProcess,
    decode,
    encode,
)
from cluster.wire.sockets import Budget, Doorbell, connecting_socket, end_context, listening_socket

OTHERS = Credentials("test", b"t" * 32)
BLOCK_BYTES = 512


def pool() -> torch.Tensor:
    return torch.zeros((10, BLOCK_BYTES), dtype=torch.uint8)


# --- a holder, and a reader that is not one -------------------------------------------------------


@dataclass
class Reader:
    """A process that knows a holder's password, with the calls that it makes up."""

    server: KVServer
    socket: zmq.Socket[bytes]
    ids: CallIds = field(default_factory=CallIds)

    def parts(
        self, call: KVCall, credentials: Credentials = OURS, process: RankProcess | None = None
    ) -> list[bytes]:
        called = encode(process or self.server.process)
        call_id, body = self.ids.next(), encode(call)
        proof = KVProofs(credentials).of_call(call_id, called, body)
        return [credentials.header, call_id, called, body, proof]

    def send(self, parts: list[bytes]) -> None:
        self.socket.send_multipart(parts)

    def answer(self, timeout_ms: int = 3000) -> KVAnswer | None:
        if not self.socket.poll(timeout_ms):
            return None
        _, body, *_ = self.socket.recv_multipart()
        return decode(body, KVAnswer)


@pytest.fixture
def reader(context: Context) -> Iterator[Reader]:
    doorbell = Doorbell()
    holder = KVHolder(30.0, time.monotonic)
    server = KVServer(holder, pool(), host=HOST, credentials=OURS, epoch=1, doorbell=doorbell)
    handshake = PlainHandshake(KVProofs(OURS).password(encode(server.process)))
    socket = connecting_socket(context, zmq.DEALER, handshake, max_waiting=1000)
    socket.connect(server.address)
    yield Reader(server, socket)
    server.close()


def test_a_call_that_was_altered_changes_nothing(reader: Reader) -> None:
    handoff_id = reader.server.hold("r", [4], [7])
    good = reader.parts(KVRelease(handoff_id, 1))
    for place, other in (
        (1, CallIds().next()),
        (2, encode(RankProcess(1, "another"))),
        (3, encode(KVRelease(handoff_id, 0))),
        (4, b"\0" * 32),
        (4, b""),
    ):
        reader.send([*good[:place], other, *good[place + 1 :]])
    reader.send(good[:-1])
    reader.send([*good, b""])
    assert reader.answer(300) is None
    assert reader.server.num_held == 1
    reader.send(good)
    assert reader.answer() == KVAnswer(handoff_id, "KVRelease", True)


@pytest.mark.parametrize(
    ("credentials", "nonce"), [(OTHERS, ""), (OURS, "0123456789abcdef")], ids=["secret", "process"]
)
def test_a_call_under_another_secret_or_to_another_process_changes_nothing(
    reader: Reader, credentials: Credentials, nonce: str
) -> None:
    """Whoever has a dead holder's port by now may get its readers' calls; the numbers are ours."""
    handoff_id, mine = reader.server.hold("r", [4], [7]), reader.server.process
    process = RankProcess(mine.epoch, nonce or mine.nonce)
    reader.send(reader.parts(KVRelease(handoff_id, 1), credentials, process))
    assert reader.answer(300) is None
    assert reader.server.num_held == 1


def test_a_call_is_good_for_once(reader: Reader, caplog: pytest.LogCaptureFixture) -> None:
    """A recorded renewal would hold blocks for ever, whose reader has died."""
    handoff_id = reader.server.hold("r", [4], [7])
    calls = [reader.parts(KVRenew(handoff_id)), reader.parts(KVRead(handoff_id, [4], [7]))]
    for call in calls:
        reader.send(call)
        answer = reader.answer()
        assert answer is not None and answer.alive
    deadline = reader.server._holder.next_deadline()
    for call in calls:
        reader.send(call)
    assert reader.answer(300) is None
    assert caplog.text.count("found a replay") == 2
    assert reader.server._holder.next_deadline() == deadline
    release = reader.parts(KVRelease(handoff_id, 1))
    reader.send(release)
    assert reader.answer() == KVAnswer(handoff_id, "KVRelease", True)
    assert reader.server.take_ended() == [handoff_id]
    reader.send(release)
    assert reader.answer() == KVAnswer(handoff_id, "KVRelease", False)
    assert reader.server.take_ended() == []
    assert reader.server._last_numbers == {}


def test_absurd_calls_of_a_reader_are_answered_and_nothing_else(reader: Reader) -> None:
    handoff_id = reader.server.hold("r", [4, 5], [7, 7])
    many = kv_reads.max_chunk_blocks(BLOCK_BYTES) + 1
    for call in (
        KVRead(handoff_id, [4], []),
        KVRead(handoff_id, [9], [7]),
        KVRead(handoff_id, [4], [6]),
        KVRead(handoff_id, [2**31 - 1], [0]),
        KVRead(0, [4], [7]),
        KVRead(handoff_id, [4] * many, [7] * many),  # gigabytes for a few bytes
    ):
        reader.send(reader.parts(call))
        answer = reader.answer()
        assert answer is not None and not answer.alive
    reader.send(reader.parts(KVRead(handoff_id, [4, 5, 5], [7, 7, 7])))
    assert reader.answer() == KVAnswer(handoff_id, "KVRead", True)


def test_a_call_that_overtakes_its_order_to_hold_stays_ahead_of_later_ones(reader: Reader) -> None:
    """Else it would be taken for a replay when its handoff is held."""
    first = reader.server.hold("r", [1], [7])
    reader.send(reader.parts(KVRead(first + 1, [4], [7])))
    reader.send(reader.parts(KVRenew(first)))
    assert reader.answer() == KVAnswer(first, "KVRenew", True)  # the read is kept by now
    with reader.server._lock:
        reader.server._holder.hold("r", [4], [7])  # as `hold`, and the thread has not heard of it
    reader.send(reader.parts(KVRenew(first + 1)))
    assert [reader.answer(), reader.answer()] == [
        KVAnswer(first + 1, "KVRead", True),
        KVAnswer(first + 1, "KVRenew", True),
    ]


def test_a_lease_ends_in_time_whatever_is_sent(reader: Reader) -> None:
    """Two-byte messages of a process that was let in, as fast as it can."""
    reader.server._holder.lease_s = 0.5
    is_over = threading.Event()

    def flood() -> None:
        while not is_over.is_set():
            try:
                reader.socket.send_multipart([b"x", b"y"], zmq.NOBLOCK)
                time.sleep(0)
            except zmq.Again:
                time.sleep(0.001)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        time.sleep(0.2)
        began = time.monotonic()
        handoff_id = reader.server.hold("r", [4], [7])
        while reader.server.num_held and time.monotonic() < began + 60:
            time.sleep(0.01)
        took = time.monotonic() - began
    finally:
        is_over.set()
        thread.join(timeout=60)
    assert reader.server.take_ended() == [handoff_id]
    assert 0.4 < took < 60


# --- a reader, and a holder that is not one -------------------------------------------------------


class Holder:
    """Whoever listens where a handoff says: it has the door's password, and answers as scripted."""

    def __init__(self, context: Context, script: Script) -> None:
        self.process = RankProcess(1, "holder")
        password = KVProofs(OURS).password(encode(self.process))
        self._door = ZapAuthenticator(context, password)
        self.socket = listening_socket(
            context, zmq.ROUTER, PlainHandshake(password), max_waiting=1000
        )
        self.address = f"tcp://{HOST}:{self.socket.bind_to_random_port(f'tcp://{HOST}')}"
        self._script = script
        self._is_over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def answer(
        self,
        parts: list[bytes],
        *,
        alive: bool = True,
        blocks: tuple[bytes, ...] = (),
        credentials: Credentials = OURS,
        **changed: Any,
    ) -> None:
        """Answer a call; `changed` are fields of the answer."""
        peer, _, call_id, _, body, proof = parts
        call: KVCall = decode(body, KVCall)
        fields = {
            "handoff_id": call.handoff_id,
            "call": type(call).__name__,
            "alive": alive,
            **changed,
        }
        answer = encode(KVAnswer(**fields))
        mine = KVProofs(credentials).of_answer(proof, answer)
        self.socket.send_multipart([peer, call_id, answer, mine, *blocks])

    def close(self) -> None:
        self._is_over = True
        self._thread.join(timeout=60)

    def _run(self) -> None:
        while not self._is_over:
            self._door.answer(Budget(100, 1.0))
            if self.socket.poll(5):
                self._script(self, self.socket.recv_multipart())
        self.socket.close(linger=0)
        self._door.close()


@contextlib.contextmanager
def holding(script: Script) -> Iterator[Holder]:
    """Run a holder in a context of its own, which has one authenticator."""
    context: Context = zmq.Context()
    holder = Holder(context, script)
    try:
        yield holder
    finally:
        holder.close()
        end_context(context, "holder", linger=0)


BLOCK = b"k" * BLOCK_BYTES


Script = Callable[[Holder, list[bytes]], None]


def answering(*blocks: bytes, **changed: Any) -> Script:
    """Answer a read with these blocks; `changed` as of `Holder.answer`."""

    def script(holder: Holder, parts: list[bytes]) -> None:
        is_read = isinstance(decode(parts[4], KVCall), KVRead)
        holder.answer(parts, blocks=blocks if is_read else (), **changed)

    return script


honest = answering(BLOCK)


def altered(holder: Holder, parts: list[bytes]) -> None:
    peer, _, call_id, _, body, proof = parts
    call: KVCall = decode(body, KVCall)
    kind = type(call).__name__
    mine = KVProofs(OURS).of_answer(proof, encode(KVAnswer(call.handoff_id, kind, False)))
    better = encode(KVAnswer(call.handoff_id, kind, True))
    holder.socket.send_multipart([peer, call_id, better, mine, BLOCK])


def without_a_proof(holder: Holder, parts: list[bytes]) -> None:
    holder.socket.send_multipart([parts[0], parts[2]])


def garbage(holder: Holder, parts: list[bytes]) -> None:
    holder.socket.send_multipart([parts[0], parts[2], b"\xc1" * 9, b"\0" * 32, BLOCK])


FORGED = "proof: wanted this application's, found another"


@dataclass
class Target:
    """A reader's pool, and one read into block 3 of it."""

    context: Context
    puller: KVPuller
    pool: torch.Tensor

    def read(self, holder: Holder, handoff_id: int = 1) -> ReadEnded:
        source = KVSource(0, "elsewhere", 0, -1, holder.address, holder.process)
        handoff = KVHandoff(handoff_id, "r", [source], [4], [7], 4, BLOCK_BYTES, "kv", 30.0)
        self.puller.expect("r", handoff)
        self.puller.start("r", handoff, [0], [3])
        return wait_for(self.puller.take_finished)[0]


@pytest.fixture
def target(context: Context) -> Iterator[Target]:
    mine = pool()
    puller = KVPuller(
        mine, tp_rank=0, transport="tcp", context=context, credentials=OURS, doorbell=Doorbell()
    )
    yield Target(context, puller, mine)
    puller.close()


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (answering(BLOCK, credentials=OTHERS), FORGED),
        (altered, FORGED),
        (without_a_proof, "message: wanted 3 parts or more, found 1"),
        (garbage, FORGED),
        (answering(BLOCK, handoff_id=99), "wanted one to (1, 'KVRead'), found one to (99, 'KV"),
        (answering(BLOCK, call="KVRelease"), "wanted one to (1, 'KVRead'), found one to (1, 'KVR"),
        (answering(BLOCK, BLOCK), "wanted 1 blocks, found 2"),
        (answering(), "wanted 1 blocks, found 0"),
        (answering(BLOCK[1:]), f"wanted blocks of {BLOCK_BYTES} bytes, found [{BLOCK_BYTES - 1}]"),
    ],
)
def test_an_answer_that_cannot_be_right_ends_the_read_and_not_the_rank(
    target: Target, script: Script, error: str
) -> None:
    with holding(script) as bad, holding(honest) as good:
        result = target.read(bad)
        assert not result.ok and error in result.error
        assert not target.pool.any()
        assert target.read(good) == ReadEnded("r", "")
        assert bytes(target.pool[3].numpy()) == BLOCK


def test_an_answer_is_good_for_one_call(target: Target) -> None:
    """Replayed for a later read of the same block, it would bring what was there before."""
    recorded: list[list[bytes]] = []

    def replaying(holder: Holder, parts: list[bytes]) -> None:
        call = decode(parts[4], KVCall)
        if isinstance(call, KVRead) and recorded:
            old = recorded[0]
            holder.answer([parts[0], *old[1:]], blocks=(b"o" * BLOCK_BYTES,))
            return
        recorded.append(parts)
        honest(holder, parts)

    with holding(replaying) as holder:
        assert target.read(holder).ok
        target.pool.zero_()
        result = target.read(holder, handoff_id=2)
        assert not result.ok and "call: wanted one that is not answered" in result.error
        assert not target.pool.any()


def test_holders_that_are_made_up_take_no_more_than_their_sockets(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context has 1,023 sockets, and a rank whose thread lacks one ends."""
    monkeypatch.setattr(puller_module, "MAX_HOLDERS", 5)
    holders = target.puller._transport._holders
    with socket.create_server((HOST, 0), backlog=128) as silent:
        address = f"tcp://{HOST}:{silent.getsockname()[1]}"
        for i in range(40):
            source = KVSource(0, "elsewhere", 0, -1, address, RankProcess(i, ""))
            handoff = KVHandoff(1, f"r{i}", [source], [4], [7], 4, BLOCK_BYTES, "kv", 0.03)
            target.puller.expect(f"r{i}", handoff)
        wait_for(lambda: len(holders) >= 5)
        time.sleep(0.2)  # each is to be renewed a few times
        assert len(holders) <= 5
    for i in range(40):
        target.puller.cancel(f"r{i}")
    with holding(honest) as holder:
        assert target.read(holder).ok
