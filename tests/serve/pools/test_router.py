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
from serve.pools.errors import PoolUnavailable
from serve.pools.mailboxes import Mailbox
from serve.pools.quarantine import FairLock, Quarantine
from serve.pools.router import Router
from serve.requests.records import SequenceRecord

REQUEST = GenerateRequest(
    "r", [1, 2], [], Sampling(0.0, 0, 1.0, 0.0, 0, 8, (), -1, -1, None, None), "", b""
)


def output(
    token_ids: list[int], finish_reason: str = "", error: str = "", position: int = 0
) -> EngineOutput:
    ended = EngineOutput.ended("", FinishReason(finish_reason), error, position=position)
    return msgspec.structs.replace(ended, token_ids=token_ids)


def serve_pd(
    prefill: list[Callable[[Mailbox], Any]], decode: list[Callable[[Mailbox], Any]]
) -> tuple[list[EngineOutput], Pool, Pool]:
    """Run one request through two pools."""

    async def main() -> tuple[list[EngineOutput], Pool, Pool]:
        tokens = Tokens()
        pools = {"prefill": Pool(tokens, *prefill), "decode": Pool(tokens, *decode)}
        router = Router(pools, tokens)  # type: ignore[arg-type]
        async with asyncio.timeout(20), aclosing(router.generate(REQUEST)) as outputs:
            found = [o async for o in outputs]
        return found, pools["prefill"], pools["decode"]

    return asyncio.run(main())


class Tokens:
    """The token socket without a socket: pools put outputs into its mailboxes."""

    address = "tcp://10.0.0.1:1"

    def __init__(self) -> None:
        self.mailboxes: dict[str, Mailbox] = {}
        self.aborted: list[str] = []
        self.late: list[tuple[str, EngineOutput]] = []
        """What has come and waits in the socket."""

    async def caught_up(self) -> None:
        for request_id, found in self.late:
            self.mailboxes[request_id].put(found, "engine")
        self.late.clear()

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
    """Runs one script per call; a script may put outputs and returns what the call returns."""

    def __init__(self, tokens: Tokens, *scripts: Callable[[Mailbox], Any]) -> None:
        self._tokens = tokens
        self._scripts = list(scripts)
        self.submitted: list[Submit] = []

    def generate(self, request_id: str, frame: bytes) -> Any:
        self.submitted.append(decode(frame, Submit))
        script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]

        async def call() -> Any:
            return script(self._tokens.mailboxes[request_id])

        task = asyncio.ensure_future(call())
        return task


def serve(*scripts: Callable[[Mailbox], Any]) -> tuple[list[EngineOutput], Pool, Tokens]:
    """Run one request through a mixed pool."""

    async def main() -> tuple[list[EngineOutput], Pool, Tokens]:
        tokens = Tokens()
        pool = Pool(tokens, *scripts)
        router = Router({"mixed": pool}, tokens)  # type: ignore[arg-type]
        async with asyncio.timeout(20), aclosing(router.generate(REQUEST)) as outputs:
            found = [o async for o in outputs]
        await asyncio.sleep(0)
        return found, pool, tokens

    return asyncio.run(main())


def refuse(mailbox: Mailbox) -> Any:
    raise PoolUnavailable("wanted a ready rank group, found it failed")


def crash(mailbox: Mailbox) -> Any:
    raise RuntimeError("traceback\nrank dp=0 tp=0 epoch=0 ended: killed")


def lose(mailbox: Mailbox) -> Any:
    mailbox.put(output([], "kv_lost", "ticket 7 ended"), "engine")
    return "kv_lost"


def two_then_crash(mailbox: Mailbox) -> Any:
    mailbox.put(output([5]), "engine")
    mailbox.put(output([6], position=1), "engine")
    raise RuntimeError("rank ended")


def finish(mailbox: Mailbox, position: int = 0) -> str:
    mailbox.put(output([7], "length", position=position), "engine")
    return "length"


def test_a_pool_that_is_restarted_makes_a_request_wait_and_not_fail() -> None:
    found, pool, _ = serve(*[refuse] * 5, finish)  # more often than losses are allowed
    assert [o.token_ids for o in found] == [[7]]
    assert found[-1].finish_reason == "length"
    assert len(pool.submitted) == 6


def test_tokens_before_a_loss_count_as_output_and_come_once() -> None:
    found, pool, tokens = serve(two_then_crash, lambda mailbox: finish(mailbox, position=2))
    assert [t for o in found for t in o.token_ids] == [5, 6, 7]
    assert [s.request.output_token_ids for s in pool.submitted] == [[], [5, 6]]
    # Who had something of the lost attempt was told to let go.
    assert tokens.aborted == [pool.submitted[0].request.request_id]
    assert not tokens.mailboxes


@pytest.mark.feature("R15")
def test_each_attempt_is_noted_with_its_own_times_and_how_it_was_lost() -> None:
    def hand_over(mailbox: Mailbox) -> str:
        first = msgspec.structs.replace(output([5], "handoff"), queued_us=1_000)
        mailbox.put(first, "engine")
        return "handoff"

    def go_on(mailbox: Mailbox) -> str:
        last = msgspec.structs.replace(output([6], "length", position=1), queued_us=2_000)
        mailbox.put(last, "engine")
        return "length"

    async def main() -> SequenceRecord:
        tokens, record = Tokens(), SequenceRecord()
        pools = {"prefill": Pool(tokens, crash, hand_over), "decode": Pool(tokens, go_on)}
        router = Router(pools, tokens)  # type: ignore[arg-type]
        async with asyncio.timeout(20), aclosing(router.generate(REQUEST, record)) as outputs:
            assert [o.token_ids async for o in outputs if o.token_ids] == [[5], [6]]
        return record

    record = asyncio.run(main())
    lost, done = record.attempts
    assert (lost.number, lost.lost, lost.first_at) == (0, "died", 0)
    assert lost.submitted_at <= lost.lost_at <= done.submitted_at
    assert (done.number, done.lost, done.lost_at) == (1, "", 0)
    assert done.submitted_at <= done.first_at <= done.handed_over_at <= done.resumed_at
    assert (record.queued_s, record.kv_wait_s, record.num_attempts) == (0.001, 0.002, 2)


def first_and_third(mailbox: Mailbox) -> str:
    mailbox.put(output([5]), "engine")
    mailbox.put(output([7], "length", position=2), "engine")
    return "length"


def test_an_output_that_is_lost_on_its_way_is_no_gap_in_the_answer() -> None:
    found, pool, _ = serve(first_and_third, lambda mailbox: finish(mailbox, position=1))
    assert [o.token_ids for o in found] == [[5], [7]]
    assert [s.request.output_token_ids for s in pool.submitted] == [[], [5]]


def test_an_output_that_comes_twice_ends_the_request_with_the_reason() -> None:
    def twice(mailbox: Mailbox) -> str:
        mailbox.put(output([5]), "engine")
        return finish(mailbox)

    found, pool, _ = serve(twice)
    assert [o.token_ids for o in found] == [[5], []]
    assert found[-1].finish_reason == "error"
    assert found[-1].error == "output tokens: wanted those from 1 on, found from 0 on"
    assert len(pool.submitted) == 1


def test_a_request_that_is_lost_again_and_again_ends_with_the_reason() -> None:
    found, pool, _ = serve(lose)
    assert len(pool.submitted) == quarantine_module.MAX_LOSSES
    [last] = found
    assert (last.finish_reason, last.error) == (
        "error",
        "lost 3 times on its way, at last: ticket 7 ended",
    )


def test_a_request_whose_ranks_die_in_its_own_trials_ends_with_the_reason() -> None:
    found, pool, _ = serve(crash)
    assert (
        len(pool.submitted) == quarantine_module.SHARED_DEATHS + quarantine_module.MAX_FAILED_TRIALS
    )
    [last] = found
    assert last.finish_reason == "error"
    assert last.error.startswith("its ranks died 4 times, at last: mixed replica")
    assert "rank dp=0 tp=0 epoch=0 ended: killed" in last.error


def test_a_request_that_dies_again_and_again_of_others_is_served() -> None:
    def three_then_crash(position: int) -> Callable[[Mailbox], Any]:
        def script(mailbox: Mailbox) -> Any:
            for i in range(3):
                mailbox.put(output([5], position=position + i), "engine")
            raise RuntimeError("rank ended")

        return script

    scripts = [three_then_crash(3 * i) for i in range(5)]
    found, pool, _ = serve(*scripts, lambda mailbox: finish(mailbox, position=15))
    assert [t for o in found for t in o.token_ids] == [5] * 15 + [7]
    assert len(pool.submitted) == 6


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
        mailbox.put(output([7], "length", position=position + 1), "engine")
        return "length"


@pytest.mark.feature("R22")
@pytest.mark.parametrize("num_ingresses", [1, 2])
def test_requests_beside_one_that_kills_its_ranks_are_served(
    monkeypatch: pytest.MonkeyPatch, num_ingresses: int
) -> None:
    """Four requests share a group with one of which it dies: they end well, that one does not.

    Whichever ingress they came to.
    """
    monkeypatch.setattr(quarantine_module, "ASK_PERIOD_S", 0.01)

    async def main() -> dict[str, str]:
        tokens, lock = Tokens(), FairLock()
        group = Group(tokens, "killer")

        class Shared:
            def __init__(self, name: str) -> None:
                self._name = name

            async def take(self) -> bool:
                return lock.take(self._name)

            def give_back(self) -> None:
                lock.give_back(self._name)

        def ingress(name: str) -> Router:
            return Router({"mixed": group}, tokens, Quarantine(Shared(name)))  # type: ignore[arg-type]

        routers = [ingress(f"ingress {i}") for i in range(num_ingresses)]

        async def run(place: int, name: str) -> str:
            request = msgspec.structs.replace(REQUEST, request_id=name)
            router = routers[place % num_ingresses]
            async with aclosing(router.generate(request)) as outputs:
                return [o async for o in outputs][-1].finish_reason

        names = ["a", "killer", "b", "c", "d"]
        async with asyncio.timeout(60):
            ends = await asyncio.gather(*(run(i, name) for i, name in enumerate(names)))
        return dict(zip(names, ends, strict=True))

    ends = asyncio.run(main())
    assert ends.pop("killer") == "error"
    assert set(ends.values()) == {"length"}


def test_a_call_that_returns_without_a_last_output_is_a_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_module, "LAST_OUTPUT_GRACE_S", 0.05)
    found, _, _ = serve(lambda mailbox: "length", finish)
    assert [o.token_ids for o in found] == [[7]]


def test_an_output_that_waits_in_the_socket_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long: a loop that has much to do must not have its requests computed again."""
    monkeypatch.setattr(router_module, "LAST_OUTPUT_GRACE_S", 0.05)

    def finish_late(mailbox: Mailbox) -> str:
        tokens.late.append((mailbox.request_id, output([7], "length")))
        return "length"

    tokens = Tokens()

    async def main() -> tuple[list[EngineOutput], Pool]:
        pool = Pool(tokens, finish_late)
        router = Router({"mixed": pool}, tokens)  # type: ignore[arg-type]
        async with asyncio.timeout(20), aclosing(router.generate(REQUEST)) as outputs:
            return [o async for o in outputs], pool

    found, pool = asyncio.run(main())
    assert [(o.token_ids, o.finish_reason) for o in found] == [([7], "length")]
    assert len(pool.submitted) == 1


def test_a_request_that_its_engine_gave_up_is_computed_again() -> None:
    """An engine takes an ingress that it cannot reach for dead; the client is still there."""

    def give_up(mailbox: Mailbox) -> str:
        mailbox.put(output([5]), "engine")
        mailbox.put(output([], "abort", position=1), "engine")
        return "abort"

    found, pool, _ = serve(give_up, lambda mailbox: finish(mailbox, position=1))
    assert [(o.token_ids, o.finish_reason) for o in found] == [([5], ""), ([7], "length")]
    assert len(pool.submitted) == 2


def test_a_prefill_replica_that_dies_after_its_handoff_wastes_no_decode() -> None:
    def hand_over_and_die(mailbox: Mailbox) -> Any:
        mailbox.put(output([5], "handoff"), "prefill")
        raise RuntimeError("replica died")

    def go_on(mailbox: Mailbox) -> str:
        return finish(mailbox, position=1)

    found, prefill, decode = serve_pd([hand_over_and_die], [go_on])
    assert [t for o in found for t in o.token_ids] == [5, 7]
    assert len(prefill.submitted) == len(decode.submitted) == 1


def cancel(mailbox: Mailbox) -> Any:
    mailbox.put(output([5]), "engine")
    raise asyncio.CancelledError


def test_a_call_that_somebody_else_cancelled_is_a_loss() -> None:
    found, pool, _ = serve(cancel, lambda mailbox: finish(mailbox, position=1))
    assert [o.token_ids for o in found] == [[5], [7]]
    assert [s.request.output_token_ids for s in pool.submitted] == [[], [5]]


def test_a_client_that_leaves_is_not_prefilled_again() -> None:
    """Serve cancels its calls first, and a moment later who waits for them."""

    async def main() -> tuple[Pool, Tokens]:
        tokens = Tokens()
        pool = Pool(tokens, cancel)
        router = Router({"mixed": pool}, tokens)  # type: ignore[arg-type]
        outputs = router.generate(REQUEST)
        assert (await anext(outputs)).token_ids == [5]
        client = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(router_module.LEAVING_GRACE_S / 4)
        client.cancel()
        await asyncio.wait([client])
        await asyncio.sleep(2 * router_module.LEAVING_GRACE_S)
        return pool, tokens

    pool, tokens = asyncio.run(main())
    assert len(pool.submitted) == 1
    assert tokens.aborted == ["r.0"]


@pytest.mark.parametrize("leaves", [False, True])
def test_a_request_is_said_to_be_prefilled_again_when_it_is(
    leaves: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(router_module, "LEAVING_GRACE_S", 0)

    async def main() -> int:
        tokens = Tokens()
        pool = Pool(tokens, cancel, lambda mailbox: finish(mailbox, position=1))
        router = Router({"mixed": pool}, tokens)  # type: ignore[arg-type]
        outputs = router.generate(REQUEST)
        await anext(outputs)
        client = asyncio.ensure_future(anext(outputs))
        while not tokens.aborted:  # its call is lost, and the pause begins
            await asyncio.sleep(0)
        if leaves:
            client.cancel()
        await asyncio.wait([client])
        return len(pool.submitted)

    assert asyncio.run(main()) == (1 if leaves else 2)
    assert ("prefilled again" in caplog.text) != leaves
