"""The token socket: frames of engines, of strangers, and of whoever sends too many."""

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

from cluster.rank.output_sender import MAX_OUTPUT_BYTES, frames_of
from cluster.wire.credentials import Credentials
from cluster.wire.messages import (
    Abort,
    EngineOutput,
    FinishReason,
    OutputFrame,
    TokenLogprobs,
    decode,
    encode,
)
from cluster.wire.sockets import CurveHandshake, Part, connecting_socket, listening_socket, pack
from serve.event_loop import StreamBatcher
from serve.pools.mailboxes import TokenSocket

CREDENTIALS = Credentials("same", b"s" * 32)
HANDSHAKE = CurveHandshake(CREDENTIALS.secret)
NOBODY = "tcp://127.0.0.1:9"


def frame(
    position: int = 0, finish_reason: str = "", *, epoch: int = 0, inbox: str = NOBODY
) -> Sequence[Part]:
    """Return an engine's frame with one token of request r."""
    ended = EngineOutput.ended("r", FinishReason(finish_reason), position=position)
    output = encode(msgspec.structs.replace(ended, token_ids=[5]))
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
        async with asyncio.timeout(5):
            assert [(await mailbox.get()).position for _ in range(2)] == [0, 7]
    assert "dropped a frame: mixed/a/0: epoch: wanted 2, found 1" in caplog.text


async def test_caught_up_is_when_all_that_came_is_in_its_mailbox() -> None:
    async with token_socket() as (tokens, engine):
        mailbox = tokens.mailboxes.open("r")
        async with asyncio.timeout(5):
            await tokens.caught_up()  # at once where nothing has come
            engine.send_multipart(frame(finish_reason="handoff"))
            await mailbox.get()  # from here on the engine is connected
        for num, num_ends in ((1, 2), (200, 202)):
            for _ in range(num):
                engine.send_multipart(frame(finish_reason="handoff"))
            time.sleep(1)  # all of them come while the loop has other things to do
            async with asyncio.timeout(5):
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
                    async with asyncio.timeout(5):
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
            async with asyncio.timeout(10):
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
                async with asyncio.timeout(5):
                    assert (await mailbox.get()).position == 0
