"""Outputs reach their ingress in one frame, and an ingress that is gone is let go."""

from __future__ import annotations

import contextlib
import socket
import threading

import msgspec
import pytest
import zmq
from local_ranks import CREDENTIALS, HANDSHAKE, Context, wait_for

from cluster.config import EngineConfig, TransferConfig
from cluster.group.context import RankContext
from cluster.rank import output_sender as output_sender_module
from cluster.rank.output_sender import MAX_OUTPUT_BYTES, OutputSender, frames_of
from cluster.wire.messages import (
    EndedFrame,
    EngineOutput,
    FinishReason,
    OutputFrame,
    TokenLogprobs,
    decode,
)
from cluster.wire.sockets import listening_socket


def output(request_id: str, finish_reason: str = "") -> EngineOutput:
    ended = EngineOutput.ended(request_id, FinishReason(finish_reason))
    return msgspec.structs.replace(ended, token_ids=[1])


def ids(frame: OutputFrame) -> list[str]:
    return [decode(data, EngineOutput).request_id for data in frame.outputs]


def make(context: Context, lease_s: float = 30.0) -> OutputSender:
    config = EngineConfig("", max_model_len=64, transfer=TransferConfig(lease_s=lease_s))
    rank = RankContext(config, credentials=CREDENTIALS, engine_id="e")
    return OutputSender(rank, context, "tcp://127.0.0.1:1")


def listen(context: Context) -> tuple[zmq.Socket[bytes], str]:
    socket = listening_socket(context, zmq.PULL, HANDSHAKE, max_waiting=1000)
    socket.rcvtimeo = 3000
    return socket, f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"


def test_a_step_is_one_frame_per_ingress_and_ends_are_told_to_watchers(context: Context) -> None:
    sender = make(context)
    (a, to_a), (b, to_b), (watcher, to_watcher) = listen(context), listen(context), listen(context)
    for request, address in (("1", to_a), ("2", to_b), ("3", to_a)):
        sender.expect(request, address)
    sender.watch(to_watcher)
    assert sender.send([output("1"), output("2", "stop"), output("3")]) == []
    frame_a = decode(a.recv_multipart()[1], OutputFrame)
    assert ids(frame_a) == ["1", "3"]
    assert frame_a.inbox == "tcp://127.0.0.1:1"
    assert ids(decode(b.recv_multipart()[1], OutputFrame)) == ["2"]
    [ended] = decode(watcher.recv_multipart()[1], EndedFrame).ended
    assert (ended.request_id, ended.finish_reason, ended.token_ids) == ("2", "stop", [])
    assert a.poll(50) == 0
    sender.close()
    for end in (a, b, watcher):
        end.close()


def test_requests_of_an_ingress_that_died_are_given_up_after_a_lease(context: Context) -> None:
    sender = make(context, lease_s=0.3)
    (a, to_a), (b, to_b) = listen(context), listen(context)
    sender.expect("1", to_a)
    sender.expect("2", to_b)
    sender.send([output("1"), output("2")])
    a.recv_multipart()
    b.recv_multipart()
    assert sender.drop_dead_addresses() == []
    a.close(linger=0)
    # And the one that lives keeps its requests.
    assert wait_for(sender.drop_dead_addresses) == ["1"]
    sender.close()
    b.close()


def test_an_address_that_is_none_loses_its_request_and_nothing_else(context: Context) -> None:
    sender = make(context)
    sender.expect("1", "nonsense")
    assert sender.send([output("1")]) == ["1"]
    sender.close()


def test_ingresses_that_are_made_up_take_no_more_than_their_sockets(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_sender_module, "MAX_ADDRESSES", 3)
    monkeypatch.setattr(output_sender_module, "MAX_WATCHERS", 2)
    sender = make(context)
    for i in range(20):
        sender.watch(f"tcp://127.0.0.1:{50_000 + i}")
    assert len(sender._watchers) == 2
    for i in range(100):
        name = f"r{i}"
        assert sender.expect(name, f"tcp://127.0.0.1:{40_000 + i}")
        sender.send([output(name, "stop")])
        assert len(sender._sockets) <= 5
    held = [sender.expect(f"s{i}", f"tcp://127.0.0.1:{40_000 + i}") for i in range(6)]
    assert held == [True] * 3 + [False] * 3
    assert sender.expect("more", "tcp://127.0.0.1:40000")  # to where others go as well
    assert sender.expects("more") and not sender.expects("s5")
    sender.send([output("s0", "stop"), output("more", "stop")])
    assert sender.expect("s5", "tcp://127.0.0.1:40005")
    sender.close()


def test_an_ingress_whose_port_is_a_strangers_is_given_up(context: Context) -> None:
    """It takes every connection, and hangs up when it hears of CURVE."""
    sender = make(context, lease_s=0.5)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        is_over = threading.Event()

        def hang_up() -> None:
            while not is_over.is_set():
                with contextlib.suppress(OSError):
                    stranger.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        sender.expect("1", f"tcp://127.0.0.1:{stranger.getsockname()[1]}")
        sender.send([output("1")])
        try:
            assert wait_for(sender.drop_dead_addresses) == ["1"]
        finally:
            is_over.set()
            stranger.shutdown(socket.SHUT_RDWR)
            thread.join(timeout=60)
    sender.close()


def test_many_ends_are_frames_that_a_pool_takes(context: Context) -> None:
    sender = make(context)
    watcher, to_watcher = listen(context)
    sender.watch(to_watcher)
    sender.send([output(str(i), "abort") for i in range(600)])
    frames = [decode(watcher.recv_multipart()[1], EndedFrame) for _ in range(3)]
    assert [len(frame.ended) for frame in frames] == [256, 256, 88]
    sender.close()
    watcher.close()


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
