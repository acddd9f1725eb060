"""Endpoints by number, and contexts whose sockets do not end, which libzmq waits for without a
bound."""

from __future__ import annotations

import ipaddress
import threading
import time

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from cluster.wire.messages import Address
from cluster.wire.sockets import bind_tcp, connect_to, end_context

Context = zmq.Context[zmq.Socket[bytes]]


def test_what_does_not_end_is_named_and_left(caplog: pytest.LogCaptureFixture) -> None:
    class Unending(Context):
        """As libzmq sometimes is; `let_go` ends it."""

        def destroy(self, linger: int | None = None) -> None:
            let_go.wait()
            super().destroy(linger)

    let_go = threading.Event()
    context = Unending()
    start = time.monotonic()
    assert not end_context(context, "leader decode", timeout_s=0.05)
    assert time.monotonic() - start < 60
    assert "leader decode: sockets have not ended in 0.05 s" in caplog.text
    let_go.set()
    while not context.closed:
        time.sleep(0.001)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_endpoint_has_the_address_of_its_node(host: str) -> None:
    context: Context = zmq.Context()
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    endpoint = bind_tcp(receiver, host)
    assert msgspec.convert(endpoint, Address) == endpoint
    connect_to(sender, endpoint)
    sender.send(b"here")
    assert receiver.recv() == b"here"
    end_context(context, "both", linger=0)


@given(st.ip_addresses())
def test_every_address_by_number_is_one(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    for text in (str(ip), ip.exploded):
        host = text if ip.version == 4 else f"[{text}]"
        msgspec.convert(f"tcp://{host}:1", Address)


@given(st.text("0123456789abcdefg:.", max_size=40))
def test_nothing_else_is_an_address(text: str) -> None:
    """A name would be looked up."""
    try:
        is_known = ipaddress.ip_address(text).version == 6 and "." not in text
    except ValueError:
        is_known = False
    if not is_known:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(f"tcp://[{text}]:1", Address)


def test_what_was_sent_still_leaves() -> None:
    ours: Context = zmq.Context()
    theirs: Context = zmq.Context()
    receiver = theirs.socket(zmq.PULL)
    port = receiver.bind_to_random_port("tcp://127.0.0.1")
    sender = ours.socket(zmq.PUSH)
    sender.connect(f"tcp://127.0.0.1:{port}")
    sender.send(b"last words")
    assert end_context(ours, "sender", linger=1000)
    assert sender.closed
    assert ours.closed
    assert receiver.recv() == b"last words"
    end_context(theirs, "receiver", linger=0)
