"""Outputs reach their ingress in one frame, and an ingress that is gone is let go."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zmq

from cluster.messages import EndedFrame, EngineOutput, OutputFrame, decode, header_bytes
from cluster.rank.contexts import end_context
from cluster.rank.outlet import Outlet


def output(request_id: str, finish_reason: str = "") -> EngineOutput:
    return EngineOutput(request_id, 0, [1], [], finish_reason, -1, 0, None, "", [])


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    end_context(made, "test", linger=0)


def make(context: zmq.Context[zmq.Socket[bytes]], lease_s: float = 30.0) -> Outlet:
    return Outlet(
        context=context,
        header=header_bytes("h"),
        engine_id="e",
        inbox="inbox",
        epoch=0,
        lease_s=lease_s,
    )


def listen(context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], str]:
    socket = context.socket(zmq.PULL)
    socket.rcvtimeo = 3000
    return socket, f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"


def test_a_step_is_one_frame_per_ingress_and_ends_are_told_to_watchers(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    outlet = make(context)
    (a, to_a), (b, to_b), (watcher, to_watcher) = listen(context), listen(context), listen(context)
    for request, address in (("1", to_a), ("2", to_b), ("3", to_a)):
        outlet.expect(request, address)
    outlet.watch(to_watcher)
    assert outlet.send([output("1"), output("2", "stop"), output("3")]) == []
    frame_a = decode(a.recv_multipart()[1], OutputFrame)
    assert [o.request_id for o in frame_a.outputs] == ["1", "3"]
    assert frame_a.inbox == "inbox"
    assert [o.request_id for o in decode(b.recv_multipart()[1], OutputFrame).outputs] == ["2"]
    [ended] = decode(watcher.recv_multipart()[1], EndedFrame).ended
    assert (ended.request_id, ended.finish_reason, ended.token_ids) == ("2", "stop", [])
    assert a.poll(50) == 0
    outlet.close()
    for socket in (a, b, watcher):
        socket.close()


def test_requests_of_an_ingress_that_died_are_given_up_after_a_lease(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    outlet = make(context, lease_s=0.3)
    (a, to_a), (b, to_b) = listen(context), listen(context)
    outlet.expect("1", to_a)
    outlet.expect("2", to_b)
    outlet.send([output("1"), output("2")])
    a.recv_multipart()
    b.recv_multipart()
    assert outlet.give_up_on_the_dead() == []
    a.close(linger=0)
    deadline = time.monotonic() + 3
    lost: list[str] = []
    while not lost and time.monotonic() < deadline:
        lost = outlet.give_up_on_the_dead()
        time.sleep(0.01)
    assert lost == ["1"]  # and the one that lives keeps its requests
    outlet.close()
    b.close()


def test_an_address_that_is_none_loses_its_request_and_nothing_else(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    outlet = make(context)
    outlet.expect("1", "nonsense")
    assert outlet.send([output("1")]) == ["1"]
    outlet.close()
