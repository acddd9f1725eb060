"""What a leader takes between two steps, and what it makes of what does not fit."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from local_ranks import CREDENTIALS, HANDSHAKE, Context
from wire_structs import submit_of

from cluster.config import EngineConfig
from cluster.group.context import RankContext, RankPlace
from cluster.rank import leader
from cluster.rank.leader import MAX_INBOX_FRAMES, BadSubmit, Inbox, max_submit_bytes
from cluster.wire.credentials import Header
from cluster.wire.messages import PROTOCOL_VERSION, Abort, Hello, OutputFrame, decode, encode
from cluster.wire.sockets import MAX_PART_BYTES, Budget, connecting_socket, join, pack, split

ENGINE_ID = "mixed/r/0"
Ends = tuple[Inbox, zmq.Socket[bytes]]


@pytest.fixture
def ends(context: Context) -> Iterator[Ends]:
    config = EngineConfig("", max_model_len=131_072)
    rank = RankContext(config, RankPlace(epoch=2), credentials=CREDENTIALS, engine_id=ENGINE_ID)
    inbox = Inbox(rank, context, vocab_size=256)
    sender = connecting_socket(context, zmq.DEALER, HANDSHAKE, max_waiting=100_000)
    sender.connect(inbox.address)
    yield inbox, sender
    inbox.close()


def take_all(inbox: Inbox, num: int) -> list[list[Any]]:
    """Return what was taken between two steps each, until it is so much."""
    batches: list[list[Any]] = []
    deadline = time.monotonic() + 60
    while sum(map(len, batches)) < num and time.monotonic() < deadline:
        if inbox.socket.poll(100):
            batches.append([message for _, message in inbox.take()])
    return batches


def test_a_border_takes_no_more_than_its_share(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox, sender = ends
    monkeypatch.setattr(leader, "MAX_INBOX_S", 1000.0)
    for i in range(3 * MAX_INBOX_FRAMES):
        sender.send_multipart(pack(encode(Abort([str(i)])), CREDENTIALS))
    time.sleep(1.0)  # all have come
    batches = take_all(inbox, 3 * MAX_INBOX_FRAMES)
    assert max(map(len, batches)) <= MAX_INBOX_FRAMES
    assert [a.request_ids for batch in batches for a in batch] == [
        [str(i)] for i in range(3 * MAX_INBOX_FRAMES)
    ]


def test_a_border_takes_no_longer_than_its_share(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox, sender = ends
    monkeypatch.setattr(leader, "MAX_INBOX_S", 0.0)
    for _ in range(5):
        sender.send_multipart(pack(encode(Abort(["r"])), CREDENTIALS))
    time.sleep(0.2)
    assert [len(batch) for batch in take_all(inbox, 5)] == [1] * 5


def test_a_budget_allows_the_first_whatever_has_passed() -> None:
    now = 0.0
    budget = Budget(3, 1.0, lambda: now)
    now = 9.0
    assert [budget.take() for _ in range(5)] == [True, True, True, False, False]
    budget.renew()
    assert budget.take()
    now = 10.0
    assert not budget.take()


def test_the_longest_submission_arrives_whole(ends: Ends) -> None:
    inbox, sender = ends
    submit = submit_of("r", [100_000] * 131_071)
    body = encode(submit)
    assert 9 * MAX_PART_BYTES < len(body) < max_submit_bytes(131_072, 256)
    sender.send_multipart(pack(body, CREDENTIALS))
    assert take_all(inbox, 1) == [[submit]]


@pytest.mark.parametrize("length", [0, 1, MAX_PART_BYTES, MAX_PART_BYTES + 1, 5 * MAX_PART_BYTES])
def test_parts_are_the_frame(length: int) -> None:
    body = bytes(i % 251 for i in range(length))
    parts = [bytes(part) for part in split(body)]
    assert max(map(len, parts)) <= MAX_PART_BYTES
    assert join(parts, length) == body


def test_a_bad_submission_is_answered_and_all_else_is_dropped(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    inbox, sender = ends
    bad, abort = submit_of("r", [-5]), encode(Abort(["other"]))
    other = encode(Header(PROTOCOL_VERSION - 2))
    with caplog.at_level(logging.ERROR):
        for message in (
            [b"xy"],
            [b"x", b"y"],
            [CREDENTIALS.header],
            [CREDENTIALS.header, abort, abort],
            [other, abort],
            pack(b"\x91" * 60_000, CREDENTIALS),
            [CREDENTIALS.header, *[b"z" * MAX_PART_BYTES] * 70],
            pack(encode(bad), CREDENTIALS),
            [encode(Header(PROTOCOL_VERSION - 1)), abort],  # while a release replaces another
        ):
            sender.send_multipart(message)
        [refused, found] = [m for batch in take_all(inbox, 2) for m in batch]
    assert found == Abort(["other"])
    assert isinstance(refused, BadSubmit) and refused.request_id == "r"
    assert "Expected `int` >= 0 - at `$[1][1][0]`" in refused.error
    assert f"protocol: wanted version {PROTOCOL_VERSION - 1} to " in caplog.text
    assert f"frame: wanted at most {max_submit_bytes(131_072, 256)} bytes" in caplog.text


@pytest.mark.parametrize(
    ("hello", "is_answered"),
    [
        (Hello(ENGINE_ID, 2), True),
        (Hello(ENGINE_ID, 1), False),
        (Hello("mixed/other/0", 2), False),
    ],
)
def test_a_leader_answers_who_means_it_and_nobody_else(
    ends: Ends, hello: Hello, is_answered: bool
) -> None:
    """Over the connection over which it was asked."""
    inbox, sender = ends
    sender.send_multipart(pack(encode(hello), CREDENTIALS))
    assert inbox.socket.poll(60_000)
    assert not list(inbox.take())
    assert bool(sender.poll(3000 if is_answered else 200)) == is_answered
    if is_answered:
        assert decode(sender.recv(), OutputFrame) == OutputFrame([])


def test_messages_come_with_the_ingress_that_sent_them(ends: Ends, context: Context) -> None:
    inbox, sender = ends
    with connecting_socket(context, zmq.DEALER, HANDSHAKE, max_waiting=9) as other:
        other.connect(inbox.address)
        peers = []
        for end in (sender, other, sender):
            end.send_multipart(pack(encode(Abort(["r"])), CREDENTIALS))
            assert inbox.socket.poll(60_000)
            peers += [peer for peer, _ in inbox.take()]
    assert peers[0] == peers[2] != peers[1]
