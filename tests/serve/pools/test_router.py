"""What the router does when pools refuse, lose or forget a request. Pools are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from cluster.wire.messages import (
    EngineOutput,
    FinishReason,
    GenerateRequest,
    Sampling,
    Submit,
    decode,
)
from serve.event_loop import StreamBatcher
from serve.pools import quarantine as quarantine_module
from serve.pools import router as router_module
from serve.pools.mailboxes import Mailbox
from serve.pools.pool_core import PoolUnavailable
from serve.pools.quarantine import FairLock, Quarantine
from serve.pools.router import Router
from serve.requests.records import SequenceRecord

GREEDY = Sampling(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    max_tokens=8,
    stop_token_ids=(),
    num_logprobs=-1,
    num_prompt_logprobs=-1,
    rules=None,
    grammar=None,
)
REQUEST = GenerateRequest("r", [1, 2], [], GREEDY, "", b"")
Script = Callable[[Mailbox], Any]
"""What a pool does with one call: it may put outputs, and returns what the call returns."""


def output(
    token_ids: list[int],
    finish_reason: str = "",
    error: str = "",
    position: int = 0,
    queued_us: int = 0,
) -> EngineOutput:
    ended = EngineOutput.ended("", FinishReason(finish_reason), error, position=position)
    return msgspec.structs.replace(ended, token_ids=token_ids, queued_us=queued_us)


class Tokens:
    """The token socket without a socket: pools put outputs into its mailboxes."""

    address = "tcp://10.0.0.1:1"

    def __init__(self) -> None:
        self.mailboxes: dict[str, Mailbox] = {}
        self.aborted: list[str] = []
        self.waiting: list[Callable[[], None]] = []
        """What has come and waits in the socket."""

    async def caught_up(self) -> None:
        for put in self.waiting:
            put()

    def engines_of(self, mailbox: Any) -> list[str]:
        return []

    def open(self, request_id: str) -> Mailbox:
        self.mailboxes[request_id] = Mailbox(request_id, StreamBatcher())
        return self.mailboxes[request_id]

    def close(self, mailbox: Mailbox) -> None:
        del self.mailboxes[mailbox.request_id]

    def abort(self, mailbox: Mailbox) -> None:
        self.aborted.append(mailbox.request_id)


class Pool:
    """Runs one script per call, and the last one for all calls that follow."""

    def __init__(self, tokens: Tokens, scripts: list[Script]) -> None:
        self._tokens = tokens
        self._scripts = scripts
        self.received: list[list[int]] = []
        """The output tokens of each request that was submitted."""

    def generate(self, request_id: str, frame: bytes) -> Any:
        self.received.append(decode(frame, Submit).request.output_token_ids)
        script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]

        async def call() -> Any:
            return script(self._tokens.mailboxes[request_id])

        return asyncio.ensure_future(call())


class Pools:
    """Pools of scripts, by name, with a router before them."""

    def __init__(self, **scripts: list[Script]) -> None:
        self.tokens = Tokens()
        self.pools = {name: Pool(self.tokens, each) for name, each in scripts.items()}
        self.router = Router(self.pools, self.tokens)  # type: ignore[arg-type]
        self.record = SequenceRecord()

    @property
    def received(self) -> list[list[int]]:
        [pool] = self.pools.values()
        return pool.received

    async def serve(self) -> list[EngineOutput]:
        """Run one request."""
        async with asyncio.timeout(60):
            async with aclosing(self.router.generate(REQUEST, self.record)) as outputs:
                return [found async for found in outputs]


async def tokens_of(pools: Pools) -> list[int]:
    found = await pools.serve()
    assert found[-1].finish_reason == "length"
    return [token for each in found for token in each.token_ids]


def refuse(mailbox: Mailbox) -> Any:
    raise PoolUnavailable("wanted a ready rank group, found it failed")


def crash(mailbox: Mailbox) -> Any:
    raise RuntimeError("traceback\nrank dp=0 tp=0 epoch=0 ended: killed")


def lose(mailbox: Mailbox) -> Any:
    mailbox.put(output([], "kv_lost", "handoff 7 ended"), "engine")
    return "kv_lost"


def cancel(mailbox: Mailbox) -> Any:
    mailbox.put(output([5]), "engine")
    raise asyncio.CancelledError


def give_up(mailbox: Mailbox) -> str:
    mailbox.put(output([5]), "engine")
    mailbox.put(output([], "abort", position=1), "engine")
    return "abort"


def crash_after(num_tokens: int, position: int = 0) -> Script:
    def script(mailbox: Mailbox) -> Any:
        for i in range(num_tokens):
            mailbox.put(output([5], position=position + i), "engine")
        return crash(mailbox)

    return script


def finish_at(position: int) -> Script:
    def script(mailbox: Mailbox) -> str:
        mailbox.put(output([7], "length", position=position), "engine")
        return "length"

    return script


@pytest.mark.parametrize(
    ("scripts", "tokens", "received"),
    [
        # A pool that is restarted makes a request wait, more often than losses are allowed.
        ([*[refuse] * 5, finish_at(0)], [7], [[]] * 6),
        # Tokens before a loss count as output, and come once.
        ([crash_after(2), finish_at(2)], [5, 5, 7], [[], [5, 5]]),
        # An engine takes an ingress that it cannot reach for dead; the client is still there.
        ([give_up, finish_at(1)], [5, 7], [[], [5]]),
        # Somebody else cancelled the call.
        ([cancel, finish_at(1)], [5, 7], [[], [5]]),
        # A call returns without a last output.
        ([lambda mailbox: "length", finish_at(0)], [7], [[], []]),
        # It dies again and again, of others, each time with new tokens.
        (
            [*(crash_after(3, 3 * i) for i in range(5)), finish_at(15)],
            [5] * 15 + [7],
            [[5] * 3 * i for i in range(6)],
        ),
    ],
)
async def test_what_is_lost_is_computed_again_with_the_tokens_so_far(
    scripts: list[Script],
    tokens: list[int],
    received: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_module, "LAST_OUTPUT_GRACE_S", 0.05)
    pools = Pools(mixed=scripts)
    assert await tokens_of(pools) == tokens
    assert pools.received == received
    # Who had something of a lost attempt was told to let go.
    assert pools.tokens.aborted == [f"r.{i}" for i in range(len(received) - 1)]
    assert not pools.tokens.mailboxes


async def test_an_output_that_is_lost_on_its_way_is_no_gap_in_the_answer() -> None:
    def first_and_third(mailbox: Mailbox) -> Any:
        mailbox.put(output([5]), "engine")
        return finish_at(2)(mailbox)

    pools = Pools(mixed=[first_and_third, finish_at(1)])
    assert await tokens_of(pools) == [5, 7]
    assert pools.received == [[], [5]]


@pytest.mark.feature("R15")
async def test_each_attempt_is_noted_with_its_own_times_and_how_it_was_lost() -> None:
    def hand_over(mailbox: Mailbox) -> str:
        mailbox.put(output([5], "handoff", queued_us=1_000), "engine")
        return "handoff"

    def go_on(mailbox: Mailbox) -> str:
        mailbox.put(output([6], "length", position=1, queued_us=2_000), "engine")
        return "length"

    pools = Pools(prefill=[crash, hand_over], decode=[go_on])
    assert await tokens_of(pools) == [5, 6]
    record = pools.record
    lost, done = record.attempts
    assert (lost.number, lost.lost, lost.first_at) == (0, "died", 0)
    assert lost.submitted_at <= lost.lost_at <= done.submitted_at
    assert (done.number, done.lost, done.lost_at) == (1, "", 0)
    assert done.submitted_at <= done.first_at <= done.handed_over_at <= done.resumed_at
    assert (record.queued_s, record.kv_wait_s, record.num_attempts) == (0.001, 0.002, 2)


def twice(mailbox: Mailbox) -> str:
    mailbox.put(output([5]), "engine")
    return finish_at(0)(mailbox)


@pytest.mark.parametrize(
    ("script", "num_attempts", "error"),
    [
        (twice, 1, "output tokens: wanted those from 1 on, found from 0 on"),
        (lose, 3, "lost 3 times on its way, at last: handoff 7 ended"),
        (
            crash,
            4,
            "its ranks died 4 times, at last: mixed replica: rank dp=0 tp=0 epoch=0 ended: killed",
        ),
    ],
)
async def test_a_request_that_cannot_be_served_ends_with_the_reason(
    script: Script, num_attempts: int, error: str
) -> None:
    pools = Pools(mixed=[script])
    last = (await pools.serve())[-1]
    assert (last.finish_reason, last.error) == ("error", error)
    assert len(pools.received) == num_attempts


class Group:
    """A pool of one rank group: whoever is in it when it dies has lost its ranks."""

    def __init__(self, tokens: Tokens, killer: str) -> None:
        self._tokens = tokens
        self._killer = killer
        self._death = asyncio.Event()

    def generate(self, request_id: str, frame: bytes) -> Any:
        return asyncio.ensure_future(self._run(request_id, decode(frame, Submit).request))

    async def _run(self, request_id: str, request: GenerateRequest) -> str:
        mailbox, death = self._tokens.mailboxes[request_id], self._death
        await asyncio.sleep(0.02)
        if request_id.startswith(self._killer):
            self._death = asyncio.Event()
            death.set()
        for i in range(2):
            if death.is_set():
                raise RuntimeError("rank ended")
            position = len(request.output_token_ids) + i
            mailbox.put(output([5], position=position), "engine")
            await asyncio.sleep(0.05)
        return str(finish_at(position + 1)(mailbox))


class Shared:
    """One ingress's way to a lock."""

    def __init__(self, lock: FairLock, name: str) -> None:
        self._lock, self._name = lock, name

    async def take(self) -> bool:
        return self._lock.take(self._name)

    def give_back(self) -> None:
        self._lock.give_back(self._name)


@pytest.mark.feature("R22")
@pytest.mark.parametrize("num_ingresses", [1, 2])
async def test_requests_beside_one_that_kills_its_ranks_are_served(
    monkeypatch: pytest.MonkeyPatch, num_ingresses: int
) -> None:
    """Four requests share a group with one of which it dies: they end well, that one does not.

    Whichever ingress they came to.
    """
    monkeypatch.setattr(quarantine_module, "ASK_PERIOD_S", 0.01)
    tokens, lock = Tokens(), FairLock()
    handles = {"mixed": Group(tokens, "killer")}
    routers = [
        Router(handles, tokens, Quarantine(Shared(lock, str(i))))  # type: ignore[arg-type]
        for i in range(num_ingresses)
    ]

    async def run(number: int, name: str) -> str:
        request = msgspec.structs.replace(REQUEST, request_id=name)
        async with aclosing(routers[number % num_ingresses].generate(request)) as outputs:
            return [found async for found in outputs][-1].finish_reason

    async with asyncio.timeout(60):
        ends = await asyncio.gather(*map(run, range(5), ["a", "killer", "b", "c", "d"]))
    assert ends == ["length", "error", "length", "length", "length"]


async def test_an_output_that_waits_in_the_socket_is_no_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long: a loop that has much to do must not have its requests computed again."""
    monkeypatch.setattr(router_module, "LAST_OUTPUT_GRACE_S", 0.05)

    def finish_late(mailbox: Mailbox) -> str:
        pools.tokens.waiting.append(lambda: finish_at(0)(mailbox))
        return "length"

    pools = Pools(mixed=[finish_late])
    assert await tokens_of(pools) == [7]
    assert pools.received == [[]]


async def test_nothing_waits_behind_a_request_whose_last_output_has_come() -> None:
    pools = Pools(mixed=[finish_at(0)])
    assert await tokens_of(pools) == [7]
    for _ in range(5):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("end", [RuntimeError("replica died"), asyncio.CancelledError()])
async def test_a_prefill_replica_that_ends_after_its_handoff_wastes_no_decode(
    end: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "LEAVING_GRACE_S", 0)

    def hand_over_and_die(mailbox: Mailbox) -> Any:
        mailbox.put(output([5], "handoff"), "prefill")
        raise end

    pools = Pools(prefill=[hand_over_and_die], decode=[finish_at(1)])
    assert await tokens_of(pools) == [5, 7]
    assert [pool.received for pool in pools.pools.values()] == [[[]], [[5]]]


async def test_a_client_that_leaves_is_not_prefilled_again() -> None:
    """Serve cancels its calls first, and a moment later who waits for them."""
    pools = Pools(mixed=[cancel])
    outputs = pools.router.generate(REQUEST)
    assert (await anext(outputs)).token_ids == [5]
    client = asyncio.ensure_future(anext(outputs))
    await asyncio.sleep(router_module.LEAVING_GRACE_S / 4)
    client.cancel()
    await asyncio.wait([client])
    await asyncio.sleep(2 * router_module.LEAVING_GRACE_S)
    assert (pools.received, pools.tokens.aborted) == ([[]], ["r.0"])


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_request_is_said_to_be_sent_again_when_it_is(
    leaves: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(router_module, "LEAVING_GRACE_S", 0)
    pools = Pools(mixed=[cancel, finish_at(1)])
    outputs = pools.router.generate(REQUEST)
    await anext(outputs)
    client = asyncio.ensure_future(anext(outputs))
    while not pools.tokens.aborted:  # its call is lost, and the pause begins
        await asyncio.sleep(0)
    if leaves:
        client.cancel()
    await asyncio.wait([client])
    assert len(pools.received) == (1 if leaves else 2)
    assert ("sent again" in caplog.text) != leaves
