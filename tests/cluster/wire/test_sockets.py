"""Contexts whose sockets do not end, which libzmq waits for without a bound."""

from __future__ import annotations

import threading
import time

import pytest
import zmq

from cluster.wire.sockets import end_context

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
    assert time.monotonic() - start < 5
    assert "leader decode: sockets have not ended in 0.05 s" in caplog.text
    let_go.set()
    while not context.closed:
        time.sleep(0.001)


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
