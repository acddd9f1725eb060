"""A mailbox: what is taken from it, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import output_of

from cluster.rank.output_sender import frames_of
from cluster.wire.messages import EngineOutput, FinishReason, TokenLogprobs, decode
from serve.event_loop import StreamBatcher
from serve.pools.mailbox import Mailbox


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


def test_a_mailbox_gives_its_first_output_and_its_ends_at_once_and_others_at_the_tick(
    run_in_jumps: Callable[..., Any],
) -> None:
    tick, taken = StreamBatcher(), list[tuple[int, float]]()
    tick.num_streams = 100_000
    assert tick.period_s == 0.1

    async def run() -> None:
        async def take() -> None:
            output = await mailbox.get()
            taken.append((len(output.token_ids), round(loop.time() - 1, 3)))

        mailbox, loop = Mailbox("r", tick), asyncio.get_running_loop()
        await asyncio.sleep(1)
        tick.call(lambda: None)
        await asyncio.sleep(0.01)
        mailbox.put(scored_output(0, [0]))
        await take()
        for position in range(1, 4):
            mailbox.put(scored_output(position, [position]))
        await take()
        mailbox.put(scored_output(4, [4]))
        mailbox.put(scored_output(5, [], "handoff"))
        await take()
        await take()
        await asyncio.sleep(0.15)  # the tick that was asked for finds nothing
        mailbox.put(scored_output(5, [5]))
        mailbox.put(scored_output(6, [6], "stop"))
        await take()
        await take()

    run_in_jumps(run())
    assert taken == [(1, 0.01), (3, 0.1), (1, 0.1), (0, 0.1), (1, 0.25), (1, 0.25)]


async def test_pieces_of_a_prompts_logprobs_are_taken_as_one_output() -> None:
    entries = [TokenLogprobs(-float(i), 1, [i] * 20, [-1.5] * 20) for i in range(2_000)]
    whole = msgspec.structs.replace(
        EngineOutput.ended("r", FinishReason.HANDOFF), token_ids=[5], prompt_logprobs=entries
    )
    [pieces] = frames_of([whole])
    assert len(pieces) > 5
    mailbox = Mailbox("r", StreamBatcher())
    for piece in pieces[:-1]:
        mailbox.put(decode(piece, EngineOutput))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(mailbox.get(), 0.01)
    mailbox.put(decode(pieces[-1], EngineOutput))
    mailbox.put(output_of(1, [6]))
    assert [await mailbox.get(), await mailbox.get()] == [whole, output_of(1, [6])]


async def test_the_first_tokens_tell_how_long_they_waited_also_behind_a_read() -> None:
    mailbox = Mailbox("r", StreamBatcher())
    mailbox.put(output_of(3, []))  # what was handed over has been read
    mailbox.put(msgspec.structs.replace(output_of(3, [7]), queued_us=250))
    output = await mailbox.get()
    assert (output.position, output.token_ids, output.queued_us) == (3, [7], 250)
