"""Who does not hold the application's secret reaches nobody, holds nothing up and fills nothing."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from local_ranks import CREDENTIALS, HOST, Context, wait_for
from local_ranks import HANDSHAKE as OURS
from wire_structs import hello_of
from zmq.utils import z85

from cluster.config import EngineConfig
from cluster.group import links
from cluster.group.channel import PeerSockets, StepReceiver, StepSender
from cluster.group.context import RankContext
from cluster.kv.handoff import KVHolder
from cluster.kv.transport.proofs import CallIds, KVProofs, PlainHandshake
from cluster.kv.transport.server import KVServer
from cluster.rank.leader import Inbox
from cluster.wire.group_messages import LeaderHello, PeerHello
from cluster.wire.messages import PROTOCOL_VERSION, Abort, KVRenew, encode
from cluster.wire.sockets import (
    MAX_PART_BYTES,
    CurveHandshake,
    Doorbell,
    connecting_socket,
    listening_socket,
    pack,
)

ROOT = Path(__file__).resolve().parents[3]
RANK = RankContext(EngineConfig("", max_model_len=64), host=HOST, credentials=CREDENTIALS)
OTHERS = CurveHandshake(b"t" * 32)


def greeting(mechanism: bytes) -> bytes:
    """Return how ZMTP 3 opens a connection."""
    name = mechanism.ljust(20, b"\0")
    return b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + name + b"\0" * 32


def command(body: bytes) -> bytes:
    return b"\x06" + struct.pack(">Q", len(body)) + body


SPOKEN = {
    "nothing": b"",
    "noise": os.urandom(4096),
    "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "an old version": b"\x01\x00" * 200,
    "no mechanism": greeting(b"NULL") + command(b"\x05READY\x0bSocket-Type\0\0\0\x04PUSH"),
    "a password": greeting(b"PLAIN") + command(b"\x05HELLO\x04user\x04pass"),
    "a hello that is none": greeting(b"CURVE") + command(b"\x05HELLO" + os.urandom(194)),
    "an initiation ahead of it": greeting(b"CURVE") + command(b"\x08INITIATE" + b"\0" * 300),
    "a message ahead of it": greeting(b"CURVE") + b"\x00\x02hi" * 500,
    "more than memory": greeting(b"CURVE") + b"\x06" + struct.pack(">Q", 2**62),
}


@dataclass
class Listener:
    """An open socket of a rank. `serve` shows that whoever belongs there is served."""

    port: int
    serve: Callable[[], None]


@contextlib.contextmanager
def inbox(context: Context) -> Iterator[Listener]:
    made = Inbox(RANK, context, vocab_size=256)

    def serve() -> None:
        with connecting_socket(context, zmq.DEALER, OURS, max_waiting=9) as sender:
            sender.connect(made.address)
            sender.send_multipart(pack(encode(Abort(["r"])), CREDENTIALS))
            assert made.socket.poll(60_000)
            assert [message for _, message in made.take()] == [Abort(["r"])]

    yield Listener(port_of(made.address), serve)
    assert not made.socket.poll(0), "something of a stranger's arrived"
    made.close()


@contextlib.contextmanager
def kv_server(context: Context) -> Iterator[Listener]:
    pool = torch.zeros((4, 64), dtype=torch.uint8)
    holder, doorbell = KVHolder(30.0, time.monotonic), Doorbell()
    server = KVServer(holder, pool, host=HOST, credentials=CREDENTIALS, epoch=1, doorbell=doorbell)
    proofs, process = KVProofs(CREDENTIALS), encode(server.process)
    handoff_id = server.hold("r", [1], [1])

    def serve() -> None:
        handshake = PlainHandshake(proofs.password(process))
        with connecting_socket(context, zmq.DEALER, handshake, max_waiting=9) as reader:
            reader.linger = 0
            reader.connect(server.address)
            call_id, call = CallIds().next(), encode(KVRenew(handoff_id))
            proof = proofs.of_call(call_id, process, call)
            reader.send_multipart([CREDENTIALS.header, call_id, process, call, proof])
            assert reader.poll(60_000)

    yield Listener(port_of(server.address), serve)
    server.close()


@contextlib.contextmanager
def channel(context: Context) -> Iterator[Listener]:
    sender = StepSender(context, 1, host=HOST, credentials=CREDENTIALS)

    def serve() -> None:
        follower = meet(context, sender)
        sender.check()
        follower.close()

    yield Listener(port_of(sender.addresses[0].tcp), serve)
    for link in sender.links:
        link.close()


@contextlib.contextmanager
def peers(context: Context) -> Iterator[Listener]:
    common: dict[str, Any] = {"dp_size": 2, "host": HOST, "credentials": CREDENTIALS}
    first = PeerSockets(context, dp_rank=0, **common)

    def serve() -> None:
        second = PeerSockets(context, dp_rank=1, **common)
        hellos = [PeerHello(PROTOCOL_VERSION, "test", 1, "n", rank, 2, 0) for rank in range(2)]
        joining = threading.Thread(
            target=second.open, args=(first.addresses, hellos[1], lambda name: None)
        )
        joining.start()
        first.open([], hellos[0], lambda name: None)
        joining.join(timeout=60)
        first.send(b"vote")
        assert second.receive(0) == b"vote"
        second.close()

    yield Listener(port_of(first.addresses[0].tcp), serve)
    first.close()


LISTENERS = {"inbox": inbox, "kv server": kv_server, "channel": channel, "peers": peers}


@pytest.fixture
def sender(context: Context) -> Iterator[StepSender]:
    made = StepSender(context, 1, host=HOST, credentials=CREDENTIALS)
    yield made
    for link in made.links:
        link.close()


@pytest.fixture(params=LISTENERS.values(), ids=LISTENERS)
def listener(context: Context, request: pytest.FixtureRequest) -> Iterator[Listener]:
    with request.param(context) as made:
        yield made


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def dial(port: int, spoken: bytes) -> socket.socket:
    """Connect and say something; the other side may hang up before all is said."""
    end = socket.create_connection((HOST, port), timeout=10)
    with contextlib.suppress(OSError):
        end.sendall(spoken)
    return end


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- whoever connects -----------------------------------------------------------------------------


@pytest.mark.parametrize("spoken", SPOKEN.values(), ids=SPOKEN)
def test_what_a_stranger_says_is_not_heard(listener: Listener, spoken: bytes) -> None:
    """The stranger comes first, stays, and others like it come and go."""
    with dial(listener.port, spoken):
        for _ in range(3):
            dial(listener.port, spoken).close()
        listener.serve()


@pytest.mark.parametrize(
    "handshake", [None, OTHERS, PlainHandshake(b"password")], ids=["null", "curve", "plain"]
)
@pytest.mark.parametrize("kind", [zmq.PUSH, zmq.DEALER, zmq.PAIR])
def test_a_zeromq_socket_without_the_secret_is_not_let_in(
    listener: Listener, context: Context, handshake: Any, kind: int
) -> None:
    stranger = context.socket(kind)
    stranger.linger = 0
    if handshake is not None:
        handshake.offer(stranger)
    stranger.connect(f"tcp://{HOST}:{listener.port}")
    monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    with contextlib.suppress(zmq.Again):  # a pair takes nothing once it was refused
        for _ in range(20):
            stranger.send_multipart([b"x" * 100, b"y"], zmq.NOBLOCK)
    listener.serve()
    assert not monitor.poll(100)
    stranger.disable_monitor()
    monitor.close(linger=0)
    stranger.close()


def test_the_key_never_travels(context: Context, relay_to: Callable[[int], Any]) -> None:
    """Whoever listened to a whole connection has seen no key that opens another one."""
    secret_key = z85.encode(CREDENTIALS.secret)
    public_key = zmq.curve_public(secret_key)
    keys = [secret_key, public_key, CREDENTIALS.secret, z85.decode(public_key)]
    made = Inbox(RANK, context, vocab_size=256)
    abort = Abort(["what is said"])
    relay = relay_to(port_of(made.address))
    with connecting_socket(context, zmq.DEALER, OURS, max_waiting=9) as sender:
        sender.connect(f"tcp://{HOST}:{relay.port}")
        sender.send_multipart(pack(encode(abort), CREDENTIALS))
        assert made.socket.poll(60_000)
        assert [message for _, message in made.take()] == [abort]
    heard = bytes(relay.heard)
    assert b"\x08INITIATE" in heard, "the whole handshake"
    assert not any(key in heard for key in keys)
    assert b"what is said" not in heard, "nor does that"
    # Replayed, it is of no use: each connection has keys of its own.
    with dial(port_of(made.address), heard):
        assert not made.socket.poll(300)
    made.close()


@pytest.mark.parametrize("opening", [b"\x06", b"\x02", b"\x03"], ids=["command", "frame", "more"])
def test_two_hundred_strangers_fill_no_memory(listener: Listener, opening: bytes) -> None:
    """Each announces 2 GiB, or sends as much as is taken before its handshake."""
    mechanism = b"PLAIN" if listener.serve.__qualname__.startswith("kv_server") else b"CURVE"
    before = rss_bytes()
    ends = []
    for length in [2 << 30] * 100 + [MAX_PART_BYTES] * 100:
        spoken = greeting(mechanism) + opening + struct.pack(">Q", length)
        ends.append(dial(listener.port, spoken + b"x" * (MAX_PART_BYTES - 1)))
    time.sleep(0.3)
    grown = rss_bytes() - before
    for end in ends:
        end.close()
    assert grown < 40 << 20, f"{grown >> 20} MiB"
    listener.serve()


def test_a_stranger_that_says_nothing_is_hung_up_on(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cluster.wire import sockets

    monkeypatch.setattr(sockets, "HANDSHAKE_S", 0.3)
    with inbox(context) as listener:
        for spoken in (b"", greeting(b"CURVE")):
            with dial(listener.port, spoken) as end:
                began = time.monotonic()
                while end.recv(64):
                    pass
                assert 0.1 < time.monotonic() - began < 120


# --- processes of the application that are not meant ----------------------------------------------


def meet(context: Context, sender: StepSender) -> StepReceiver:
    """Let a leader and its follower find each other, over TCP."""
    address = links.LinkAddress("another", "", sender.addresses[0].tcp)
    receiver = StepReceiver(context, address, Doorbell(), credentials=CREDENTIALS)
    opening = threading.Thread(target=receiver.open, args=(hello_of(),))
    opening.start()
    ours = LeaderHello(PROTOCOL_VERSION, "test", 1, "n")
    [found] = sender.accept(ours, lambda name: None)
    opening.join(timeout=60)
    assert found == hello_of()
    return receiver


SAID: dict[str, list[bytes] | None] = {
    "nothing": None,
    "two bytes": [b"xy"],
    "nothing at all": [b""],
    "a hello of an older epoch": [encode(hello_of(nonce="m", epoch=0))],
    "a hello of another deployment": [encode(hello_of(nonce="m", config_hash="other"))],
    "a leader's hello": [encode(LeaderHello(PROTOCOL_VERSION, "test", 1, "n"))],
    "half a hello": [encode(hello_of())[:-1]],
    "megabytes": [b"x" * MAX_PART_BYTES] * 64,
}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_a_process_of_an_older_group_does_not_stand_in_a_followers_way(
    context: Context, sender: StepSender, said: list[bytes] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the secret, and was told of a port that is another leader's now."""
    old = connecting_socket(context, zmq.DEALER, OURS, max_waiting=100)
    old.linger = 0
    monitor = old.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    old.connect(sender.addresses[0].tcp)
    assert monitor.poll(60_000)  # it is there before the follower
    if said is not None:
        old.send_multipart(said)
    began = time.monotonic()
    receiver = meet(context, sender)
    assert time.monotonic() - began < 50
    old.send(b"later")
    deadline = time.monotonic() + 60
    while said != SAID["megabytes"] and "of another process" not in caplog.text:
        assert time.monotonic() < deadline
        sender.check()
        assert sender.take_reports() == []
        time.sleep(0.01)
    if said is not None and said != SAID["megabytes"]:  # which were on their way for longer
        assert "follower tp=1: wanted its hello" in caplog.text
    receiver.close()
    old.disable_monitor()
    monitor.close(linger=0)
    old.close()


def test_a_port_scan_ends_no_group(context: Context, sender: StepSender) -> None:
    receiver = meet(context, sender)
    port = port_of(sender.addresses[0].tcp)
    for spoken in SPOKEN.values():
        dial(port, spoken).close()
    time.sleep(0.2)
    sender.check()
    receiver.close()
    with pytest.raises(ConnectionError, match="follower tp=1: wanted its connection unbroken"):
        wait_for(sender.check)


def test_a_leader_that_waits_for_nobody_says_for_whom(
    sender: StepSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "HELLO_TIMEOUT_S", 0.3)
    told: list[str] = []
    wanted = r"^follower tp=1: wanted a hello in 0\.3 s, found none$"
    with dial(port_of(sender.addresses[0].tcp), b""), pytest.raises(links.FrameError, match=wanted):
        sender.accept(LeaderHello(PROTOCOL_VERSION, "test", 1, "n"), told.append)
    assert told == ["follower tp=1"]


def test_every_socket_is_made_in_one_place() -> None:
    """Where bounds and locks are put on it."""
    made = re.compile(r"\.socket\(|zmq\.Socket\(|\bSocket\(")
    found = {
        str(path.relative_to(ROOT))
        for package in ("serve", "cluster", "model", "compile")
        for path in (ROOT / package).rglob("*.py")
        for line in path.read_text().splitlines()
        if made.search(line) and "zmq.Context" not in line
    }
    assert found == {"cluster/wire/sockets.py"}


def test_a_socket_has_all_its_bounds(context: Context) -> None:
    for make in (listening_socket, connecting_socket):
        with make(context, zmq.DEALER, OURS, max_waiting=7) as made:
            assert made.sndhwm == made.rcvhwm == 7
            assert MAX_PART_BYTES < made.maxmsgsize < 2 * MAX_PART_BYTES
            assert made.handshake_ivl == 5000 and made.tcp_keepalive == 1
            assert made.mechanism == zmq.CURVE
