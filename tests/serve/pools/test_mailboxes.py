"""Mailboxes: whose outputs reach one, where aborts go, and what is taken from one."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.wire.messages import EngineOutput, FinishReason, FrameError, TokenLogprobs
from serve.event_loop import StreamBatcher
from serve.pools import mailboxes as mailboxes_module
from serve.pools.mailboxes import Mailbox, TokenMailboxes


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


async def test_a_mailbox_gives_its_first_output_and_its_ends_at_once_and_others_at_the_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve.event_loop.MAX_TICK_S", 1.0)

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
    assert sizes == [1, 3, 1, 0, 1, 1]
    assert taken_at[0] < 0.9 and taken_at[1] > 0.99
    assert taken_at[3] - taken_at[1] < 0.9 and taken_at[5] - taken_at[3] < 1.9
