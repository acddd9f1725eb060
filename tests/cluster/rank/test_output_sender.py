"""Outputs go back to the ingress that asked, a frame a step, and one that is gone is let go."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq
from local_ranks import HANDSHAKE, Context, wait_for

from cluster.rank.output_sender import MAX_OUTPUT_BYTES, OutputSender, frames_of
from cluster.wire.messages import (
    GIVEN_UP,
    EngineOutput,
    FinishReason,
    OutputFrame,
    TokenLogprobs,
    decode,
)
from cluster.wire.sockets import connecting_socket, listening_socket

Connect = Callable[..., tuple[zmq.Socket[bytes], bytes]]


def output(request_id: str, finish_reason: str = "") -> EngineOutput:
    ended = EngineOutput.ended(request_id, FinishReason(finish_reason))
    return msgspec.structs.replace(ended, token_ids=[1])


def received(end: zmq.Socket[bytes]) -> list[EngineOutput]:
    """Return the outputs of the next frame."""
    frame: OutputFrame = decode(b"".join(end.recv_multipart()), OutputFrame)
    return [decode(data, EngineOutput) for data in frame.outputs]


def ids(end: zmq.Socket[bytes]) -> list[str]:
    return [each.request_id for each in received(end)]


@pytest.fixture
def inbox(context: Context) -> Iterator[zmq.Socket[bytes]]:
    """Where ingresses connect to; of one that does not read, ten frames wait here."""
    socket = listening_socket(context, zmq.ROUTER, HANDSHAKE, max_waiting=10)
    socket.router_mandatory = True
    socket.linger = 0
    yield socket
    socket.close()


@pytest.fixture
def connect(context: Context, inbox: zmq.Socket[bytes]) -> Iterator[Connect]:
    """Return what connects an ingress; it returns the ingress's end, and its name here."""
    port = inbox.bind_to_random_port("tcp://127.0.0.1")
    ends: list[zmq.Socket[bytes]] = []

    def connected(max_waiting: int = 1000) -> tuple[zmq.Socket[bytes], bytes]:
        end = connecting_socket(context, zmq.DEALER, HANDSHAKE, max_waiting=max_waiting)
        end.rcvtimeo, end.linger = 3000, 0
        end.connect(f"tcp://127.0.0.1:{port}")
        end.send(b"")
        ends.append(end)
        peer, _ = inbox.recv_multipart()
        return end, peer

    yield connected
    for end in ends:
        end.close()


def test_a_step_is_one_frame_for_each_ingress(inbox: zmq.Socket[bytes], connect: Connect) -> None:
    sender = OutputSender(inbox)
    (a, to_a), (b, to_b) = connect(), connect()
    for request, peer in (("1", to_a), ("2", to_b), ("3", to_a)):
        sender.expect(request, peer)
    outputs = [output("1"), output("2", "stop"), output("3"), output("nobody's", "abort")]
    assert sender.send(outputs) == []
    assert (ids(a), ids(b)) == (["1", "3"], ["2"])
    assert not a.poll(50) and not b.poll(0)
    assert [sender.expects(each) for each in ("1", "2", "3")] == [True, False, True]


def test_requests_of_an_ingress_that_has_gone_are_given_up_at_its_next_output(
    inbox: zmq.Socket[bytes], connect: Connect
) -> None:
    """All of them; and the one that lives keeps its own."""
    sender = OutputSender(inbox)
    (a, to_a), (b, to_b) = connect(), connect()
    for request, peer in (("1", to_a), ("2", to_b), ("3", to_a)):
        sender.expect(request, peer)
    assert sender.send([output("1"), output("2")]) == []
    a.close()
    assert sorted(wait_for(lambda: sender.send([output("1")]))) == ["1", "3"]
    # The engine ends them, and nothing is left.
    assert sender.send([output("1", "abort"), output("3", "abort"), output("2", "stop")]) == []
    assert not sender._peers and not sender._given_up
    assert ids(b) == ["2"] and ids(b) == ["2"]


def test_an_ingress_that_does_not_read_is_given_up_and_learns_so_if_it_reads_again(
    inbox: zmq.Socket[bytes], connect: Connect
) -> None:
    """What ended meanwhile would never end there; and others lose nothing."""
    sender = OutputSender(inbox)
    (deaf, to_deaf), (b, to_b) = connect(max_waiting=1), connect()
    for request, peer in (("ends", to_deaf), ("goes on", to_deaf), ("2", to_b)):
        sender.expect(request, peer)
    long = msgspec.structs.replace(output("goes on"), token_ids=[1] * 60_000)
    while not (lost := sender.send([long])):
        pass
    assert sorted(lost) == ["ends", "goes on"]
    sender.send([output("ends", "stop"), output("2")])
    assert sender.send([output("goes on", "abort")]) == []
    assert ids(b) == ["2"] and not sender.expects("ends")
    found: bytes | None = None
    while found != GIVEN_UP:  # until it reads, each step tries again to tell it
        sender.send([])
        if deaf.poll(20):
            found = b"".join(deaf.recv_multipart())
    assert not sender._given_up


def test_what_is_long_leaves_in_pieces_and_what_is_short_together() -> None:
    entry = TokenLogprobs(-1.0, 1, [7] * 20, [-1.0] * 20)
    long = msgspec.structs.replace(output("long", "handoff"), prompt_logprobs=[entry] * 5000)
    frames = list(frames_of([output("1"), output("2"), long, output("3")]))
    assert [len(frame) for frame in frames] == [2, len(frames[1]), 1]
    pieces = [decode(data, EngineOutput) for data in frames[1]]
    assert [e for piece in pieces for e in piece.prompt_logprobs] == [entry] * 5000
    assert all(len(data) <= MAX_OUTPUT_BYTES + 200 for data in frames[1])
    assert {(p.request_id, p.position) for p in pieces} == {("long", 0)}
    assert [(p.token_ids, p.finish_reason) for p in pieces[:-1]] == [([], "")] * (len(pieces) - 1)
    assert (pieces[-1].token_ids, pieces[-1].finish_reason) == ([1], "handoff")
