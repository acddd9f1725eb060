"""Mailboxes: whose outputs reach one, where aborts go, and what is taken from one; the token socket
before them: frames of engines, of strangers, and of whoever sends too many."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from cluster.rank.output_sender import MAX_OUTPUT_BYTES, frames_of
from cluster.wire.credentials import Credentials
from cluster.wire.messages import (
    Abort,
    EngineOutput,
    FinishReason,
    FrameError,
    OutputFrame,
    TokenLogprobs,
    decode,
    encode,
)
from cluster.wire.sockets import CurveHandshake, Part, connecting_socket, listening_socket, pack
from serve.event_loop import StreamBatcher
from serve.pools import mailboxes as mailboxes_module
from serve.pools.mailboxes import Mailbox, TokenMailboxes, TokenSocket

CREDENTIALS = Credentials("same", b"s" * 32)
HANDSHAKE = CurveHandshake(CREDENTIALS.secret)
NOBODY = "tcp://127.0.0.1:9"


def output_of(
    position: int, token_ids: list[int], finish_reason: str = "", request_id: str = "r"
) -> EngineOutput:
    ended = EngineOutput.ended(request_id, FinishReason(finish_reason), position=position)
    return msgspec.structs.replace(ended, token_ids=token_ids)


class Links:
    """Notes what engines are told, and which of them are forgotten."""

    def __init__(self) -> None:
        self.mailboxes = TokenMailboxes("tcp://10.0.0.1:1", self, StreamBatcher())
        self.told: dict[str, list[str]] = {}
        self.forgotten: list[str] = []

    def send_aborts(self, inbox: str, request_ids: list[str]) -> None:
        self.told[inbox] = request_ids

    def forget(self, inbox: str) -> None:
        self.forgotten.append(inbox)

    async def caught_up(self) -> None:
        """Nothing waits."""

    def receive(
        self, inbox: str, *outputs: EngineOutput, epoch: int = 0, engine: str | None = None
    ) -> None:
        """Take a frame of an engine."""
        self.mailboxes.begin_frame(engine or f"mixed/{inbox}/0", epoch, inbox)
        for output in outputs:
            self.mailboxes.deliver(inbox, output)

    async def told_now(self) -> dict[str, list[str]]:
        """Return which requests engines were told to drop since this was last called."""
        await asyncio.sleep(0)
        told, self.told = self.told, {}
        return told


async def test_outputs_of_an_old_epoch_are_refused_by_name() -> None:
    """Its address is forgotten: it may be another's by now."""
    links = Links()
    mailbox = links.mailboxes.open("r")
    links.receive("old", output_of(0, [5]), epoch=1, engine="mixed/a/0")
    links.receive("new", output_of(1, [6]), epoch=2, engine="mixed/a/0")
    with pytest.raises(FrameError, match="mixed/a/0: epoch: wanted 2, found 1"):
        links.receive("old", output_of(2, [7]), epoch=1, engine="mixed/a/0")
    links.receive("other", output_of(2, [9]), epoch=0)
    assert (await mailbox.get()).token_ids == [5, 6, 9]
    assert links.forgotten == ["old"]
    links.mailboxes.abort(mailbox)
    assert await links.told_now() == {"new": ["r"], "other": ["r"]}


async def test_an_abort_goes_to_the_engine_of_the_present_stage_alone() -> None:
    """Before that one has spoken, to all that it may be on its way to."""
    links = Links()
    mailbox = links.mailboxes.open("r")
    links.receive("a", output_of(0, [5]))
    links.receive("b", output_of(1, [5], "handoff"))
    links.mailboxes.abort(mailbox)
    assert await links.told_now() == {"a": ["r"], "b": ["r"]}
    links.receive("c", output_of(2, [5]))
    links.mailboxes.abort(mailbox)
    assert await links.told_now() == {"c": ["r"]}
    assert links.mailboxes.engines_of(mailbox) == [f"mixed/{inbox}/0" for inbox in "abc"]


@pytest.mark.parametrize(
    ("finish_reason", "wanted"), [("", {"a": ["r"]}), ("handoff", {"a": ["r"]}), ("stop", {})]
)
async def test_an_engine_that_works_for_nobody_is_told_so(
    finish_reason: str, wanted: dict[str, list[str]]
) -> None:
    """It had been silent for long, so the abort of a client that left at once did not reach it."""
    links = Links()
    mailbox = links.mailboxes.open("r")
    links.mailboxes.close(mailbox)
    links.mailboxes.abort(mailbox)
    links.receive("a", output_of(0, [5], finish_reason))
    assert await links.told_now() == wanted


async def test_engines_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of replaced replicas have other names, so that no epoch tells of their end."""
    monkeypatch.setattr(mailboxes_module, "FORGET_AFTER_S", 0.1)
    monkeypatch.setattr(mailboxes_module, "MAX_ENGINES", 4)
    links = Links()
    links.receive("gone", output_of(0, [5], "stop"))
    await asyncio.sleep(0.2)
    links.receive("alive", output_of(0, [5], "stop"))
    links.mailboxes.abort(links.mailboxes.open("q"))  # nobody has spoken for it
    assert await links.told_now() == {"alive": ["q"]}
    assert links.forgotten == ["gone"]
    for i in range(100):
        links.receive(f"made up {i}", output_of(0, [5], "stop"))
    links.mailboxes.abort(links.mailboxes.open("q"))
    assert len(await links.told_now()) <= 9


def scored_output(position: int, token_ids: list[int], finish_reason: str = "") -> EngineOutput:
    logprobs = [TokenLogprobs(-1.0, 1, [], []) for _ in token_ids]
    output = output_of(position, token_ids, finish_reason)
    return msgspec.structs.replace(output, logprobs=logprobs)


@given(
    pieces=st.lists(st.integers(1, 3), min_size=1, max_size=30),
    pauses=st.lists(st.integers(0, 3), min_size=30, max_size=30),
    num_streams=st.sampled_from([0, 5, 40]),
    gap_at=st.none() | st.integers(1, 29),
)
def test_whatever_comes_between_two_ticks_is_taken_in_order_and_once(
    pieces: list[int], pauses: list[int], num_streams: int, gap_at: int | None
) -> None:
    """An output that does not continue the one before it stays by itself, so a gap still shows."""

    async def run() -> list[EngineOutput]:
        tick = StreamBatcher()
        tick.num_streams = num_streams
        mailbox, taken = Mailbox("r", tick), list[EngineOutput]()

        async def take() -> None:
            while not taken or not taken[-1].finish_reason:
                taken.append(await mailbox.get())

        async with asyncio.timeout(60):
            taking = asyncio.create_task(take())
            position = 0
            for index, (size, pause) in enumerate(zip(pieces, pauses, strict=False)):
                position += index == gap_at
                mailbox.put(scored_output(position, list(range(position, position + size))))
                position += size
                for _ in range(pause):
                    await asyncio.sleep(0)
            mailbox.put(scored_output(position, [], "stop"))
            await taking
        return taken

    *found, last = asyncio.run(run())
    assert last.finish_reason == "stop"
    for output in found:
        assert output.token_ids == [output.position + i for i in range(len(output.token_ids))]
        assert len(output.logprobs) == len(output.token_ids)
    starts_behind_gap = sum(pieces[:gap_at]) + 1 if gap_at and gap_at < len(pieces) else None
    if starts_behind_gap is not None:
        assert starts_behind_gap in [output.position for output in found]
    wanted = [
        t + (starts_behind_gap is not None and t >= starts_behind_gap - 1)
        for t in range(sum(pieces))
    ]
    assert [token for output in found for token in output.token_ids] == wanted


async def test_a_mailbox_gives_its_first_output_and_its_ends_at_once_and_others_at_the_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rings: list[Callable[[], None]] = []
    tick = StreamBatcher()
    monkeypatch.setattr(tick, "call", rings.append)
    mailbox = Mailbox("r", tick)

    async def taken() -> list[list[int]]:
        """Take all that there is now."""
        found: list[list[int]] = []
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(0):
                    found.append((await mailbox.get()).token_ids)
        return found

    mailbox.put(scored_output(0, [0]))
    assert await taken() == [[0]] and not rings
    for position in range(1, 4):
        mailbox.put(scored_output(position, [position]))
    assert await taken() == []
    rings.pop()()
    assert await taken() == [[1, 2, 3]]
    mailbox.put(scored_output(4, [4]))
    mailbox.put(scored_output(5, [], "handoff"))
    assert await taken() == [[4], []]
    rings.pop()()  # the tick that was asked for finds nothing
    mailbox.put(scored_output(5, [5]))
    assert await taken() == []
    mailbox.put(scored_output(6, [6], "stop"))
    assert await taken() == [[5], [6]]


# --- through a socket ---


def frame(
    position: int = 0, finish_reason: str = "", *, epoch: int = 0, inbox: str = NOBODY
) -> Sequence[Part]:
    """Return an engine's frame with one token of request r."""
    output = encode(output_of(position, [5], finish_reason))
    return pack(encode(OutputFrame(epoch, "mixed/a/0", inbox, [output])), CREDENTIALS)


@asynccontextmanager
async def token_socket() -> AsyncIterator[tuple[TokenSocket, zmq.Socket[bytes]]]:
    """Open a token socket, and an engine's end that leads to it."""
    tokens = TokenSocket("127.0.0.1", CREDENTIALS, StreamBatcher())
    with (
        zmq.Context() as context,
        connecting_socket(context, zmq.PUSH, HANDSHAKE, max_waiting=1000) as engine,
    ):
        engine.linger = 0
        engine.connect(tokens.mailboxes.address)
        try:
            yield tokens, engine
        finally:
            tokens.shutdown()
            await asyncio.gather(tokens.task, return_exceptions=True)


async def test_a_frame_that_is_refused_is_logged_and_the_next_one_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with token_socket() as (tokens, engine):
        mailbox = tokens.mailboxes.open("r")
        for position, epoch in ((0, 2), (1, 1), (7, 2)):
            engine.send_multipart(frame(position, epoch=epoch))
        async with asyncio.timeout(60):
            assert [(await mailbox.get()).position for _ in range(2)] == [0, 7]
    assert "dropped a frame: mixed/a/0: epoch: wanted 2, found 1" in caplog.text


async def test_caught_up_is_when_all_that_came_is_in_its_mailbox() -> None:
    async with token_socket() as (tokens, engine):
        mailbox = tokens.mailboxes.open("r")
        async with asyncio.timeout(60):
            await tokens.caught_up()  # at once where nothing has come
            engine.send_multipart(frame(finish_reason="handoff"))
            await mailbox.get()  # from here on the engine is connected
        for num, num_ends in ((1, 2), (200, 202)):
            for _ in range(num):
                engine.send_multipart(frame(finish_reason="handoff"))
            time.sleep(1)  # all of them come while the loop has other things to do
            async with asyncio.timeout(60):
                await tokens.caught_up()
            assert mailbox.num_ends == num_ends


async def test_aborts_of_many_reach_an_engine_in_frames_that_it_takes_and_others_hold_nothing_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        zmq.Context() as context,
        listening_socket(context, zmq.PULL, HANDSHAKE, max_waiting=1000) as end,
    ):
        inbox = f"tcp://127.0.0.1:{end.bind_to_random_port('tcp://127.0.0.1')}"
        async with token_socket() as (tokens, _):
            tokens.send_aborts("", ["r"])
            tokens.send_aborts(inbox, [f"r{i}" for i in range(2500)])
            for size in (1024, 1024, 452):
                assert await asyncio.to_thread(end.poll, 5000)
                assert len(decode(end.recv_multipart()[1], Abort).request_ids) == size
    assert "cannot be told of aborts: Invalid argument" in caplog.text


async def longest_gap(until: asyncio.Event) -> tuple[float, float]:
    """Return the longest time without a turn of the event loop, and all; of the thread's own."""
    longest, began = 0.0, time.thread_time()
    last = began
    while not until.is_set():
        await asyncio.sleep(0.001)
        now = time.thread_time()
        longest, last = max(longest, now - last), now
    return longest, last - began


def assert_loop_turns(main: Callable[[], Coroutine[Any, Any, tuple[float, float]]]) -> None:
    """Run what returns its longest gap and all its time; a machine may pause once."""
    gc.disable()  # whose own pause depends on all that the tests before have left
    try:
        for _ in range(5):  # what holds the loop up does so each time
            gap, total = asyncio.run(main())
            if gap < max(0.03, total * 2 / 3):
                return
        raise AssertionError(f"longest gap {gap:.3f} of {total:.3f} s")
    finally:
        gc.enable()


FLOODS: dict[str, Callable[[], Sequence[Part]]] = {
    "two bytes": lambda: [b"x", b"y"],
    "another deployment's": lambda: pack(b"", Credentials("other", b"s" * 32)),
    "outputs of nobody": lambda: frame(finish_reason="stop"),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_flood_leaves_the_loop_its_time(
    flood: Callable[[], Sequence[Part]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a process that has the secret; tokens of others arrive meanwhile."""
    monkeypatch.setattr(logging.getLogger("lockstep.receiving"), "disabled", True)
    is_over = threading.Event()

    def send(address: str) -> None:
        with (
            zmq.Context() as context,
            connecting_socket(context, zmq.PUSH, HANDSHAKE, max_waiting=1000) as end,
        ):
            end.linger, end.sndtimeo = 0, 100
            end.connect(address)
            parts = flood()
            while not is_over.is_set():
                with contextlib.suppress(zmq.Again):
                    end.send_multipart(parts)

    async def main() -> tuple[float, float]:
        is_over.clear()
        async with token_socket() as (tokens, engine):
            thread = threading.Thread(target=send, args=(tokens.mailboxes.address,))
            thread.start()
            try:
                await asyncio.sleep(0.2)
                done = asyncio.Event()
                gap = asyncio.create_task(longest_gap(done))
                mailbox, num_tokens = tokens.mailboxes.open("r"), 0
                ends_at = time.monotonic() + 0.7
                while time.monotonic() < ends_at:
                    engine.send_multipart(frame())
                    async with asyncio.timeout(60):
                        await mailbox.get()
                    num_tokens += 1
                done.set()
                assert num_tokens > 3
                return await gap
            finally:
                is_over.set()
                thread.join()

    assert_loop_turns(main)


def test_a_long_prompts_logprobs_arrive_as_one_output_and_hold_nothing_up() -> None:
    """Tens of megabytes beside one token, were the prompt six times as long."""
    entries = [TokenLogprobs(-float(i), 1, [i] * 20, [-1.5] * 20) for i in range(20_000)]
    whole = msgspec.structs.replace(
        EngineOutput.ended("r", FinishReason.STOP),
        token_ids=[5],
        num_cached_tokens=3,
        prompt_logprobs=entries,
    )
    [encoded] = frames_of([whole])
    assert max(map(len, encoded)) <= MAX_OUTPUT_BYTES + 100 and len(encoded) > 90
    body = encode(OutputFrame(0, "mixed/a/0", NOBODY, encoded))

    async def main() -> tuple[float, float]:
        async with token_socket() as (tokens, engine):
            done = asyncio.Event()
            gap = asyncio.create_task(longest_gap(done))
            mailbox = tokens.mailboxes.open("r")
            await asyncio.to_thread(engine.send_multipart, pack(body, CREDENTIALS))
            async with asyncio.timeout(60):
                found = await mailbox.get()
            done.set()
            assert mailbox.num_ends == 1 and found == whole
            return await gap

    assert_loop_turns(main)


@pytest.mark.parametrize(
    "spoken", [b"xy" * 999, b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48]
)
async def test_a_stranger_reaches_no_mailbox(spoken: bytes) -> None:
    async with token_socket() as (tokens, engine):
        port = int(tokens.mailboxes.address.rpartition(":")[2])
        mailbox = tokens.mailboxes.open("r")
        with zmq.Context() as context, context.socket(zmq.PUSH) as other:
            other.linger = 0
            other.connect(tokens.mailboxes.address)
            other.send_multipart(frame(6))
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(spoken)
                engine.send_multipart(frame())
                async with asyncio.timeout(60):
                    assert (await mailbox.get()).position == 0
