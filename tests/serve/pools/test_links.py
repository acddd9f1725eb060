"""The connections of an ingress to leaders, over real sockets: who answers, who is lost and when,
and that nothing that comes holds the event loop up."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from scripted import output_of, report_of, request_of, stage_of

from cluster.config import EngineConfig
from cluster.group.context import RankContext, RankPlace
from cluster.rank import leader as leader_module
from cluster.rank.leader import MAX_INBOX_WAITING, BadSubmit, Inbox
from cluster.rank.output_sender import MAX_OUTPUT_BYTES, OutputSender, frames_of
from cluster.wire.credentials import Credentials
from cluster.wire.messages import (
    Abort,
    EngineOutput,
    FinishReason,
    OutputFrame,
    Submit,
    TokenLogprobs,
    encode,
)
from cluster.wire.sockets import split
from serve.event_loop import StreamBatcher
from serve.pools import links
from serve.pools.chooser import Routing
from serve.pools.directory import ConnectedLeader, Directory
from serve.pools.links import SILENT_S, LeaderLinks
from serve.pools.mailbox import Mailbox

CREDENTIALS = Credentials("ours", b"s" * 32)
HOST, ENGINE_ID = "127.0.0.1", "mixed/r/0"
CONFIG = EngineConfig("", max_model_len=64)
LONG_STEP, STEP_S = [9, 9, 9], 3.0
Context = zmq.Context[zmq.Socket[bytes]]


class Engine:
    """A leader without an engine: its inbox, and what sends outputs; `take` is a step's border."""

    def __init__(
        self, engine_id: str = ENGINE_ID, secret: bytes = CREDENTIALS.secret, host: str = HOST
    ) -> None:
        self._context: Context = zmq.Context()
        credentials = Credentials("ours", secret)
        rank = RankContext(
            CONFIG, RankPlace(epoch=1), host, credentials=credentials, engine_id=engine_id
        )
        self.inbox = Inbox(rank, self._context, vocab_size=256)
        self.sender = OutputSender(self.inbox.socket)

    def take(self) -> list[Submit | BadSubmit | Abort]:
        taken = []
        for peer, message in self.inbox.take():
            taken.append(message)
            if isinstance(message, Submit):
                self.sender.expect(message.request.request_id, peer)
        return taken

    def step_forever(self) -> None:
        """Answer who connects, and give each request a token, in a process of its own. One request
        is a long step, in which no other thread runs Python."""
        while True:
            self.inbox.socket.poll(10)
            taken = [each for each in self.take() if isinstance(each, Submit)]
            if any(submit.request.prompt_token_ids == LONG_STEP for submit in taken):
                sys.setswitchinterval(1000)
                ends_at = time.monotonic() + STEP_S
                while time.monotonic() < ends_at:
                    pass
                sys.setswitchinterval(0.005)
            self.sender.send([output_of(0, [5], "", each.request.request_id) for each in taken])

    def close(self) -> None:
        self.inbox.close()
        self._context.destroy(linger=0)


@contextmanager
def engine_process() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run an engine in a process of its own; yield its inbox."""
    here = Path(__file__).resolve()
    code = (
        "from test_links import Engine; e = Engine(); "
        "print(e.inbox.address, flush=True); e.step_forever()"
    )
    path = os.pathsep.join([str(here.parents[3]), str(here.parent)])
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().decode().strip(), process
    finally:
        process.kill()
        process.communicate()


class Ingress:
    """A directory over real links, with one pool."""

    def __init__(self) -> None:
        self.links = LeaderLinks(CREDENTIALS)
        routings = {"mixed": Routing.LEAST_REQUESTS}
        self.directory = Directory(
            routings, self.links.connect, numerics_hash="ours", max_wait_s=60.0
        )

    def see(self, inbox: str, **fields: Any) -> ConnectedLeader:
        self.directory.see([report_of(inbox=inbox, epoch=1, **fields)])
        return self.directory._leaders[ENGINE_ID]

    async def submit(self, name: str, prompt: list[int] | None = None) -> Mailbox:
        stage, mailbox = stage_of(name, prompt), Mailbox(name, StreamBatcher())
        leader = (await self.directory.choose("mixed", stage)).leader
        leader.submit(stage, mailbox)
        return mailbox


@asynccontextmanager
async def ingress() -> AsyncIterator[Ingress]:
    made = Ingress()
    try:
        async with asyncio.timeout(60):
            yield made
    finally:
        made.directory.close()
        made.links.shutdown()


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = Engine(host=getattr(request, "param", HOST))
    yield made
    made.close()


async def until(condition: Callable[[], Any]) -> Any:
    while not (found := condition()):
        await asyncio.sleep(0.005)
    return found


async def connected(made: Ingress, engine: Engine) -> ConnectedLeader:
    leader = made.see(engine.inbox.address)
    await until(lambda: engine.take() or leader.can_take())
    return leader


# --- who is chosen ---


@pytest.mark.parametrize("engine", [HOST, "::1"], indirect=True)
async def test_what_a_leader_is_asked_reaches_it_and_its_outputs_come_back(engine: Engine) -> None:
    async with ingress() as made:
        leader = await connected(made, engine)
        mailbox = await made.submit("r")
        assert await until(engine.take) == [Submit(request_of("r"), None)]
        assert engine.sender.send([output_of(0, [5]), output_of(1, [6], "length")]) == []
        assert [(await mailbox.get()).token_ids for _ in range(2)] == [[5], [6]]
        await made.submit("left")
        leader.abort("left")
        taken = await until(lambda: engine.take())
        while len(taken) < 2:
            taken += await until(engine.take)
        assert taken[1] == Abort(["left"])


@pytest.mark.parametrize("kind", ["mute", "another engine", "another epoch", "stranger", "nobody"])
async def test_who_does_not_answer_as_that_leader_is_never_chosen(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its port may be another process's by now."""
    engine = Engine("mixed/other/0") if kind == "another engine" else Engine()
    secret = b"t" * 32 if kind == "stranger" else CREDENTIALS.secret
    if kind == "stranger":
        engine.close()
        engine = Engine(secret=secret)
    inbox = engine.inbox.address
    if kind == "nobody":
        engine.close()
    try:
        async with ingress() as made:
            epoch = 2 if kind == "another epoch" else 1
            made.directory.see([report_of(inbox=inbox, epoch=epoch)])
            [leader] = made.directory._leaders.values()
            waiting = asyncio.create_task(made.submit("r"))
            for _ in range(20):
                await asyncio.sleep(0.05)
                if kind not in ("mute", "nobody"):
                    assert not engine.take()
            if kind in ("stranger", "nobody"):
                await until(lambda: leader.is_lost)
            assert not waiting.done() and not leader.can_take()
            assert leader.is_lost == (kind in ("stranger", "nobody"))
            waiting.cancel()
    finally:
        if kind != "nobody":
            engine.close()
    if kind.startswith("another"):
        assert "inbox: wanted Hello(engine_id=" in caplog.text


@pytest.mark.parametrize(
    "spoken", [b"", b"xy" * 999, b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48]
)
async def test_a_stranger_that_has_a_leaders_port_is_lost_when_it_speaks_or_hangs_up(
    spoken: bytes,
) -> None:
    with socket.create_server((HOST, 0)) as stranger, ExitStack() as ends:
        async with ingress() as made:
            leader = made.see(f"tcp://{HOST}:{stranger.getsockname()[1]}")
            stranger.settimeout(30)
            for _ in range(2):
                end, _ = await asyncio.to_thread(stranger.accept)
                ends.enter_context(end)
                end.sendall(spoken)
            if not spoken:
                await asyncio.sleep(0.1)
                assert not leader.is_lost and not leader.can_take()
                ends.close()
            await until(lambda: leader.is_lost)


@pytest.mark.parametrize(
    "frame", [b"\x90", b"\xc1", encode(Abort(["r"])), encode(OutputFrame([b"x"]))]
)
async def test_a_leader_that_sends_what_is_no_frame_is_lost(frame: bytes, engine: Engine) -> None:
    async with ingress() as made:
        leader = await connected(made, engine)
        mailbox = await made.submit("r")
        await until(engine.take)
        [peer] = engine.sender._peers.values()
        engine.inbox.socket.send_multipart((peer, frame))
        lost = await mailbox.get()
        assert lost.finish_reason == "died" and "frame: wanted" in lost.error
        assert leader.is_lost


# --- who is lost, and when ---


@pytest.mark.feature("P14")
@pytest.mark.parametrize(("number", "within_s"), [(signal.SIGKILL, 0.5), (signal.SIGSTOP, 2.0)])
async def test_a_process_that_is_killed_is_lost_at_once_and_one_that_is_stopped_soon(
    number: signal.Signals, within_s: float
) -> None:
    with engine_process() as (inbox, process):
        async with ingress() as made:
            leader = made.see(inbox)
            mailbox = await made.submit("r")
            assert (await mailbox.get()).token_ids == [5]
            began = time.monotonic()
            process.send_signal(number)
            await until(lambda: leader.is_lost)
            took = time.monotonic() - began
    print(f"{number.name}: lost after {took:.3f} s")
    # A busy machine wakes this one late.
    assert took < within_s + 3.0, "and not with a request's timeout"
    assert number != signal.SIGSTOP or took > SILENT_S / 2


@pytest.mark.feature("P14")
async def test_a_process_whose_python_is_busy_is_not_lost_however_much_it_has_not_taken() -> None:
    """As during one long step: its inbox fills up, and the connection has other things to say."""
    with engine_process() as (inbox, _):
        async with ingress() as made:
            leader = made.see(inbox)
            mailboxes = [await made.submit("busy", LONG_STEP)]
            began = time.monotonic()
            for i in range(3 * MAX_INBOX_WAITING):
                mailboxes.append(await made.submit(str(i)))
            outputs = [await mailbox.get() for mailbox in mailboxes]
            assert time.monotonic() - began > STEP_S - 0.5, "it was busy"
            assert not leader.is_lost
    assert all(output.token_ids == [5] for output in outputs)


async def test_an_ingress_that_is_busy_loses_no_leader_and_no_token(engine: Engine) -> None:
    """Frames wait in the leader once no more fit here."""
    async with ingress() as made:
        leader = await connected(made, engine)
        mailbox = await made.submit("r")
        await until(engine.take)
        for position in range(3000):
            assert not engine.sender.send([output_of(position, [5])])
        time.sleep(2.5)  # the event loop has other things to do
        num_tokens = 0
        while num_tokens < 3000:
            output = await mailbox.get()
            assert output.position == num_tokens and not output.finish_reason
            num_tokens += len(output.token_ids)
        assert leader.can_take()


async def test_an_ingress_that_is_gone_loses_its_requests_at_the_next_output(
    engine: Engine,
) -> None:
    async with ingress() as stays:
        async with ingress() as leaves:
            for made, name in ((stays, "stays"), (leaves, "leaves")):
                await connected(made, engine)
                await made.submit(name)
                await until(engine.take)
        tokens = [output_of(0, [5], "", name) for name in ("stays", "leaves")]
        assert await until(lambda: engine.sender.send(tokens)) == ["leaves"]
        assert not engine.sender.expects("leaves")
        ended = [output_of(0, [], "abort", "leaves"), output_of(1, [6], "stop", "stays")]
        engine.sender.send(ended)
        assert not engine.sender._peers and not engine.sender._given_up


async def test_an_ingress_that_did_not_read_for_long_goes_on_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader_module, "MAX_OUTPUTS_WAITING", 10)
    monkeypatch.setattr(links, "SILENT_S", 30.0)  # a busy machine may not run ZeroMQ's threads
    engine = Engine()
    async with ingress() as made:
        leader = await connected(made, engine)
        mailbox = await made.submit("r")
        await until(engine.take)
        while not engine.sender.send([output_of(0, [5] * 60_000)]):
            pass  # without a turn of the event loop
        assert engine.sender.send([output_of(0, [], "abort")]) == []

        async def step() -> None:
            while True:
                engine.sender.send([])
                await asyncio.sleep(0.001)

        stepping = asyncio.create_task(step())
        while (output := await mailbox.get()).finish_reason == "":
            pass
        stepping.cancel()
        assert output.finish_reason == "died" and "nobody read here" in output.error
        assert leader.is_lost
    engine.close()


# --- the event loop ---


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


def test_outputs_of_nobody_leave_the_loop_its_time(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One leader floods; tokens of another one arrive meanwhile."""
    monkeypatch.setattr(logging.getLogger("lockstep.outputs"), "disabled", True)
    honest, is_over = Engine("mixed/honest/0"), threading.Event()

    def flood(peer: bytes) -> None:
        frame = split(encode(OutputFrame([encode(output_of(0, [5], "stop", "nobody's"))] * 50)))
        while not is_over.is_set():
            try:
                engine.inbox.socket.send_multipart((peer, *frame), zmq.NOBLOCK)
            except zmq.ZMQError:
                time.sleep(0.001)

    async def main() -> tuple[float, float]:
        is_over.clear()
        async with ingress() as made:
            await connected(made, engine)
            await made.submit("r")
            await until(engine.take)
            thread = threading.Thread(target=flood, args=(engine.sender._peers.pop("r"),))
            thread.start()
            try:
                known = [report_of(inbox=engine.inbox.address, epoch=1, state="draining")]
                known.append(report_of(replica="honest", inbox=honest.inbox.address, epoch=1))
                made.directory.see(known)
                leader = made.directory._leaders["mixed/honest/0"]
                await until(lambda: honest.take() or leader.can_take())
                mailbox = await made.submit("h")
                await until(honest.take)
                done = asyncio.Event()
                gap = asyncio.create_task(longest_gap(done))
                num_tokens, ends_at = 0, time.monotonic() + 0.7
                while time.monotonic() < ends_at:
                    honest.sender.send([output_of(num_tokens, [5], "", "h")])
                    await mailbox.get()
                    num_tokens += 1
                done.set()
                assert num_tokens > 3
                honest.sender._peers.clear()
                return await gap
            finally:
                is_over.set()
                thread.join()

    assert_loop_turns(main)
    honest.close()


def test_a_long_prompts_logprobs_arrive_as_one_output_and_hold_nothing_up(engine: Engine) -> None:
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

    async def main() -> tuple[float, float]:
        async with ingress() as made:
            await connected(made, engine)
            mailbox = await made.submit("r")
            await until(engine.take)
            done = asyncio.Event()
            gap = asyncio.create_task(longest_gap(done))
            assert await asyncio.to_thread(engine.sender.send, [whole]) == []
            found = await mailbox.get()
            done.set()
            assert found == whole
            return await gap

    assert_loop_turns(main)
