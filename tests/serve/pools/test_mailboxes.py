"""The token socket: whose outputs reach a mailbox, and whose are refused."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
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
    OutputFrame,
    TokenLogprobs,
    decode,
    encode,
)
from cluster.wire.sockets import CurveHandshake, Part, connecting_socket, listening_socket, pack
from serve.event_loop import StreamBatcher
from serve.pools import mailboxes as tokens_module
from serve.pools.mailboxes import Mailbox, TokenSocket

CREDENTIALS = Credentials("same", b"s" * 32)
HANDSHAKE = CurveHandshake(CREDENTIALS.secret)


def output_of(position: int, token_ids: list[int], finish_reason: str = "") -> EngineOutput:
    ended = EngineOutput.ended("r", FinishReason(finish_reason), position=position)
    return msgspec.structs.replace(ended, token_ids=token_ids)


def frame(
    epoch: int, inbox: str, token: int, engine_id: str = "mixed/a/0", finish_reason: str = ""
) -> bytes:
    output = output_of(0, [token], finish_reason)
    return encode(OutputFrame(epoch, engine_id, inbox, [encode(output)]))


def message(body: bytes) -> Sequence[Part]:
    return pack(body, CREDENTIALS)


def receiver(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    return listening_socket(context, zmq.PULL, HANDSHAKE, max_waiting=1000)


@asynccontextmanager
async def token_socket() -> AsyncIterator[tuple[TokenSocket, zmq.Socket[bytes]]]:
    """Open a token socket, and an engine's end that leads to it."""
    tokens = TokenSocket("127.0.0.1", CREDENTIALS, StreamBatcher())
    with (
        zmq.Context() as context,
        connecting_socket(context, zmq.PUSH, HANDSHAKE, max_waiting=1000) as engine,
    ):
        engine.linger = 0
        engine.connect(tokens.address)
        try:
            yield tokens, engine
        finally:
            tokens.shutdown()
            await asyncio.gather(tokens.task, return_exceptions=True)


def test_outputs_of_an_old_epoch_are_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> list[int]:
        async with token_socket() as (tokens, engine):
            mailbox = tokens.open("r")
            for epoch, token in ((1, 5), (2, 6), (1, 7), (2, 8)):
                engine.send_multipart(
                    pack(frame(epoch, f"tcp://127.0.0.1:{epoch}", token), CREDENTIALS)
                )
            engine.send_multipart(message(frame(0, "tcp://127.0.0.1:9", 9, "mixed/b/0")))
            async with asyncio.timeout(5):
                return [(await mailbox.get()).token_ids[0] for _ in range(4)]

    assert asyncio.run(main()) == [5, 6, 8, 9]
    assert "mixed/a/0: epoch: wanted 2, found 1" in caplog.text


def test_caught_up_is_when_all_that_came_is_in_its_mailbox() -> None:
    async def main() -> list[int]:
        async with token_socket() as (tokens, engine):
            mailbox = tokens.open("r")
            async with asyncio.timeout(5):
                await tokens.caught_up()  # at once where nothing has come
                engine.send_multipart(message(frame(0, "tcp://127.0.0.1:9", 5)))
                await mailbox.get()  # from here on the engine is connected
            found = []
            for num in (1, 200):
                for _ in range(num):
                    engine.send_multipart(message(frame(0, "tcp://127.0.0.1:9", 5)))
                time.sleep(1)  # all of them come while the loop has other things to do
                async with asyncio.timeout(5):
                    await tokens.caught_up()
                found.append(len(mailbox._waiting))
            return found

    assert asyncio.run(main()) == [1, 201]


def test_aborts_go_to_the_newest_epoch_of_an_engine_alone() -> None:
    """An old one's address may be another's by now."""

    async def main() -> tuple[list[str], int]:
        context = zmq.Context()
        with context, receiver(context) as old, receiver(context) as new:
            async with token_socket() as (tokens, engine):
                ends = (old, new)
                ports = [end.bind_to_random_port("tcp://127.0.0.1") for end in ends]
                mailbox = tokens.open("r")
                for epoch, port in enumerate(ports):
                    engine.send_multipart(
                        pack(frame(epoch, f"tcp://127.0.0.1:{port}", 5), CREDENTIALS)
                    )
                    async with asyncio.timeout(5):
                        await mailbox.get()
                tokens.abort(mailbox)
                await asyncio.sleep(0)
                assert await asyncio.to_thread(new.poll, 5000)
                found = decode(new.recv_multipart()[1], Abort).request_ids
                return found, old.poll(200)

    assert asyncio.run(main()) == (["r"], 0)


def test_an_abort_goes_to_the_engine_of_the_present_stage_alone() -> None:
    """Before that one has spoken, to all that it may be on its way to."""

    async def main() -> tuple[list[bool], list[bool]]:
        with ExitStack() as open_ends:
            context = open_ends.enter_context(zmq.Context())
            ends = [open_ends.enter_context(receiver(context)) for _ in range(3)]
            ports = [end.bind_to_random_port("tcp://127.0.0.1") for end in ends]
            async with token_socket() as (tokens, engine):
                mailbox = tokens.open("r")
                for i, reason in ((0, ""), (1, "handoff")):
                    inbox = f"tcp://127.0.0.1:{ports[i]}"
                    engine.send_multipart(message(frame(0, inbox, 5, f"mixed/{i}/0", reason)))
                    await mailbox.get()
                tokens.abort(mailbox)
                early = await told(ends, [True, True, False])
                inbox = f"tcp://127.0.0.1:{ports[2]}"
                engine.send_multipart(message(frame(0, inbox, 5, "mixed/2/0")))
                await mailbox.get()
                tokens.abort(mailbox)
                return early, await told(ends, [False, False, True])

    async def told(ends: list[zmq.Socket[bytes]], wanted: list[bool]) -> list[bool]:
        times_ms = [5000 if is_wanted else 200 for is_wanted in wanted]
        polls = [asyncio.to_thread(end.poll, ms) for end, ms in zip(ends, times_ms, strict=True)]
        found = [bool(events) for events in await asyncio.gather(*polls)]
        for end in ends:
            while end.poll(0):
                end.recv_multipart()
        return found

    assert asyncio.run(main()) == ([True, True, False], [False, False, True])


@pytest.mark.parametrize(
    ("finish_reason", "wanted"), [("", ["r"]), ("handoff", ["r"]), ("stop", None)]
)
def test_an_engine_that_works_for_nobody_is_told_so(
    finish_reason: str, wanted: list[str] | None
) -> None:
    """It had been silent for long, so the abort of a client that left at once did not reach it."""

    async def main() -> list[str] | None:
        with zmq.Context() as context, receiver(context) as end:
            async with token_socket() as (tokens, engine):
                inbox = f"tcp://127.0.0.1:{end.bind_to_random_port('tcp://127.0.0.1')}"
                mailbox = tokens.open("r")
                tokens.close(mailbox)
                tokens.abort(mailbox)
                engine.send_multipart(
                    pack(frame(0, inbox, 5, finish_reason=finish_reason), CREDENTIALS)
                )
                if not await asyncio.to_thread(end.poll, 5000 if wanted else 300):
                    return None
                return decode(end.recv_multipart()[1], Abort).request_ids

    assert asyncio.run(main()) == wanted


def test_engines_that_are_gone_take_no_sockets_and_no_aborts_of_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engines of replaced replicas have other names, so that no epoch tells of their end."""

    async def main() -> tuple[list[str], set[str]]:
        context = zmq.Context()
        with context, receiver(context) as alive:
            address = f"tcp://127.0.0.1:{alive.bind_to_random_port('tcp://127.0.0.1')}"
            async with token_socket() as (tokens, engine):
                mailbox = tokens.open("r")
                for name, inbox in (("old", "tcp://127.0.0.1:9"), ("bad", "")):
                    engine.send_multipart(message(frame(0, inbox, 5, f"mixed/{name}/0")))
                engine.send_multipart(message(frame(0, address, 5)))
                async with asyncio.timeout(5):
                    for _ in range(3):
                        await mailbox.get()
                tokens._heard_at["tcp://127.0.0.1:9"] -= 2 * tokens_module.FORGET_AFTER_S
                tokens.abort(tokens.open("q"))  # nobody has spoken for it: all are told
                await asyncio.sleep(0)
                assert await asyncio.to_thread(alive.poll, 5000)
                return decode(alive.recv_multipart()[1], Abort).request_ids, set(tokens._newest)

    found, known = asyncio.run(main())
    assert found == ["q"] and known == {"mixed/bad/0", "mixed/a/0"}
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
    "outputs of nobody": lambda: message(frame(0, "tcp://127.0.0.1:9", 5, finish_reason="stop")),
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
            thread = threading.Thread(target=send, args=(tokens.address,))
            thread.start()
            try:
                await asyncio.sleep(0.2)
                done = asyncio.Event()
                gap = asyncio.create_task(longest_gap(done))
                mailbox, num_tokens = tokens.open("r"), 0
                ends_at = time.monotonic() + 0.7
                while time.monotonic() < ends_at:
                    engine.send_multipart(message(frame(0, "tcp://127.0.0.1:8", 5)))
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
        output_of(0, [5], "stop"), num_cached_tokens=3, prompt_logprobs=entries
    )
    [encoded] = frames_of([whole])
    assert max(map(len, encoded)) <= MAX_OUTPUT_BYTES + 100 and len(encoded) > 90
    body = encode(OutputFrame(0, "mixed/a/0", "tcp://127.0.0.1:9", encoded))

    async def main() -> tuple[float, float]:
        async with token_socket() as (tokens, engine):
            done = asyncio.Event()
            gap = asyncio.create_task(longest_gap(done))
            mailbox = tokens.open("r")
            await asyncio.to_thread(engine.send_multipart, message(body))
            async with asyncio.timeout(10):
                found = await mailbox.get()
            done.set()
            assert mailbox.num_ends == 1 and found == whole
            return await gap

    assert_loop_turns(main)


@pytest.mark.parametrize(
    "spoken", [b"xy" * 999, b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48]
)
def test_a_stranger_reaches_no_mailbox(spoken: bytes) -> None:
    async def main() -> list[int]:
        async with token_socket() as (tokens, engine):
            port = int(tokens.address.rpartition(":")[2])
            mailbox = tokens.open("r")
            with zmq.Context() as context, context.socket(zmq.PUSH) as other:
                other.linger = 0
                other.connect(tokens.address)
                other.send_multipart(message(frame(0, "tcp://127.0.0.1:9", 6)))
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(spoken)
                    engine.send_multipart(message(frame(0, "tcp://127.0.0.1:8", 5)))
                    async with asyncio.timeout(5):
                        return (await mailbox.get()).token_ids

    assert asyncio.run(main()) == [5]


def test_aborts_of_many_at_once_are_frames_that_an_engine_takes() -> None:
    async def main() -> list[int]:
        with zmq.Context() as context, receiver(context) as end:
            inbox = f"tcp://127.0.0.1:{end.bind_to_random_port('tcp://127.0.0.1')}"
            async with token_socket() as (tokens, _):
                for i in range(2500):
                    tokens._abort_at(inbox, f"r{i}")
                await asyncio.sleep(0)
                sizes: list[int] = []
                while sum(sizes) < 2500:
                    assert await asyncio.to_thread(end.poll, 5000)
                    sizes.append(len(decode(end.recv_multipart()[1], Abort).request_ids))
                return sizes

    assert asyncio.run(main()) == [1024, 1024, 452]


def test_engines_that_are_made_up_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "MAX_ENGINES", 4)

    async def main() -> tuple[int, int]:
        async with token_socket() as (tokens, _):
            for i in range(100):
                tokens._deliver(f"tcp://127.0.0.1:{i}", output_of(0, [5], "stop"))
                tokens._newest[f"mixed/{i}/0"] = (0, f"tcp://127.0.0.1:{i}")
                await asyncio.sleep(0)
            return len(tokens._heard_at), len(tokens._newest)

    num_heard, num_engines = asyncio.run(main())
    assert num_heard <= 8 and num_engines <= 9


# --- mailboxes ----------------------------------------------------------------------------------


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

        async with asyncio.timeout(10):
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


def test_a_mailbox_gives_its_first_output_and_its_ends_at_once_and_others_at_the_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve.event_loop.MAX_TICK_S", 1.0)

    async def run() -> tuple[list[float], list[int]]:
        tick = StreamBatcher()
        tick.num_streams = 100_000
        mailbox, began = Mailbox("r", tick), time.monotonic()
        taken_at, sizes = list[float](), list[int]()

        async def take() -> None:
            output = await mailbox.get()
            taken_at.append(time.monotonic() - began)
            sizes.append(len(output.token_ids))

        mailbox.put(scored_output(0, [0]))
        await take()
        for position in range(1, 4):
            mailbox.put(scored_output(position, [position]))
        await take()
        mailbox.put(scored_output(4, [4]))
        mailbox.put(scored_output(5, [], "handoff"))
        await take()
        await take()
        await asyncio.sleep(1.1)  # the tick that was asked for finds nothing
        mailbox.put(scored_output(5, [5]))
        mailbox.put(scored_output(6, [6], "stop"))
        await take()
        await take()
        return taken_at, sizes

    taken_at, sizes = asyncio.run(run())
    assert sizes == [1, 3, 1, 0, 1, 1]
    assert taken_at[0] < 0.9 and taken_at[1] > 0.99
    assert taken_at[3] - taken_at[1] < 0.9 and taken_at[5] - taken_at[3] < 1.9
