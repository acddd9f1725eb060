"""What the router does when leaders lose or forget a request. Leaders are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from itertools import count

import msgspec
import pytest
from scripted import OURS, Connections, ScriptedConnection, output_of, report_of, request_of

from cluster.wire.credentials import Hashes
from cluster.wire.messages import EngineOutput, KVHandoff, Submit
from serve.event_loop import StreamBatcher
from serve.pools import quarantine as quarantine_module
from serve.pools.chooser import Routing
from serve.pools.directory import NoLeader
from serve.pools.quarantine import FairLock, Quarantine
from serve.pools.router import Router
from serve.requests.records import SequenceRecord

HANDOFF = KVHandoff(7, "r", [], [], [], 2, 1, "kv", 30.0)


class Run:
    """One request at a leader, which says what becomes of it."""

    def __init__(self, to: ScriptedConnection, submit: Submit) -> None:
        self.connection = to
        self.request_id = submit.request.request_id

    def output(
        self,
        token_ids: list[int],
        finish_reason: str = "",
        error: str = "",
        position: int = 0,
        queued_us: int = 0,
    ) -> None:
        found = output_of(position, token_ids, finish_reason, self.request_id)
        handoff = HANDOFF if finish_reason == "handoff" else None
        found = msgspec.structs.replace(found, error=error, queued_us=queued_us, handoff=handoff)
        self.connection.leader.deliver(found)

    def crash(self) -> None:
        """The leader's process ends, and another one is there at once."""
        self.connection.leader.on_end("its connection ended")


Script = Callable[[Run], None]


class Pools:
    """Pools of one leader each, which run a script for each submission, the last one for all that
    follow; a leader that is lost is rebuilt at once."""

    def __init__(self, *, decode_kv: str = "kv", **scripts: list[Script]) -> None:
        self.scripts = scripts
        self.hashes = {"decode": Hashes("ours", decode_kv)}
        routings = dict.fromkeys(scripts, Routing.LEAST_REQUESTS)
        self.connections = Connections(routings, on_submit=self._on_submit)
        self.received: dict[str, list[Submit]] = {pool: [] for pool in scripts}
        self.router = Router(self.connections.directory, next(iter(scripts)), StreamBatcher())
        self.record = SequenceRecord()
        self._num_ends = 0
        self._report()

    def _report(self) -> None:
        epoch, ends = self._num_ends, self._num_ends - 1
        last_end = f"rank dp=0 tp=0 epoch={ends} ended: killed" if self._num_ends else ""
        reports = [
            report_of(pool, epoch=epoch, last_end=last_end, hashes=self.hashes.get(pool, OURS))
            for pool in self.scripts
        ]
        self.connections.see(*reports)

    def _on_submit(self, to: ScriptedConnection, submit: Submit) -> None:
        asyncio.get_running_loop().call_soon(self._run, to, submit)

    def _run(self, to: ScriptedConnection, submit: Submit) -> None:
        pool = to.leader.report.pool
        self.received[pool].append(submit)
        scripts = self.scripts[pool]
        script = scripts.pop(0) if len(scripts) > 1 else scripts[0]
        script(Run(to, submit))
        if to.leader.is_lost:
            self._num_ends += 1
            self._report()

    def output_ids(self, pool: str = "mixed") -> list[list[int]]:
        """Return the output tokens with which each request was submitted."""
        return [submit.request.output_token_ids for submit in self.received[pool]]

    def aborted(self) -> list[str]:
        frames = (frame for each in self.connections.all for frame in each.aborted())
        return [request_id for frame in frames for request_id in frame]

    async def serve(self) -> list[EngineOutput]:
        """Run one request."""
        async with asyncio.timeout(60):
            async with aclosing(self.router.generate(request_of(), self.record)) as outputs:
                return [found async for found in outputs]


async def tokens_of(pools: Pools) -> list[int]:
    found = await pools.serve()
    assert found[-1].finish_reason == "length"
    return [token for each in found for token in each.token_ids]


def crash(run: Run) -> None:
    run.crash()


def lose(run: Run) -> None:
    run.output([], "kv_lost", "handoff 7 ended")


def give_up(run: Run) -> None:
    run.output([5])
    run.output([], "abort", position=1)


def crash_after(num_tokens: int, position: int = 0) -> Script:
    def script(run: Run) -> None:
        for i in range(num_tokens):
            run.output([5], position=position + i)
        run.crash()

    return script


def lose_after(num_tokens: int, position: int) -> Script:
    def script(run: Run) -> None:
        run.output([5] * num_tokens, position=position)
        run.output([], "kv_lost", "handoff 7 ended", position=position + num_tokens)

    return script


def finish_at(position: int) -> Script:
    return lambda run: run.output([7], "length", position=position)


@pytest.mark.parametrize(
    ("scripts", "tokens", "received", "aborted"),
    [
        # Tokens before a loss count as output, and come once.
        ([crash_after(2), finish_at(2)], [5, 5, 7], [[], [5, 5]], []),
        # An engine takes an ingress that it cannot reach for dead; the client is still there.
        ([give_up, finish_at(1)], [5, 7], [[], [5]], ["r.0"]),
        # Its KV is lost again and again, each time with new tokens.
        (
            [*(lose_after(2, 2 * i) for i in range(4)), finish_at(8)],
            [5] * 8 + [7],
            [[5] * 2 * i for i in range(5)],
            [f"r.{i}" for i in range(4)],
        ),
        # It dies again and again, of others, each time with new tokens.
        (
            [*(crash_after(3, 3 * i) for i in range(5)), finish_at(15)],
            [5] * 15 + [7],
            [[5] * 3 * i for i in range(6)],
            [],
        ),
    ],
    ids=["crash", "abort", "losses far apart", "crashes of others"],
)
async def test_what_is_lost_is_computed_again_with_the_tokens_so_far(
    scripts: list[Script], tokens: list[int], received: list[list[int]], aborted: list[str]
) -> None:
    """Each attempt has a name of its own, and an engine that lives is told to drop a lost one."""
    pools = Pools(mixed=scripts)
    assert await tokens_of(pools) == tokens
    assert pools.output_ids() == received
    assert pools.aborted() == aborted
    names = [submit.request.request_id for submit in pools.received["mixed"]]
    assert names == [f"r.{i}" for i in range(len(received))]


async def test_an_output_that_is_lost_on_its_way_is_no_gap_in_the_answer() -> None:
    def first_and_third(run: Run) -> None:
        run.output([5])
        finish_at(2)(run)

    pools = Pools(mixed=[first_and_third, finish_at(1)])
    assert await tokens_of(pools) == [5, 7]
    assert pools.output_ids() == [[], [5]]


def hand_over(run: Run) -> None:
    run.output([5], "handoff", queued_us=1_000)


def hand_over_and_crash(run: Run) -> None:
    hand_over(run)
    run.crash()


@pytest.mark.feature("R15")
async def test_each_attempt_is_noted_with_its_own_times_and_how_it_was_lost() -> None:
    def go_on(run: Run) -> None:
        run.output([6], "length", position=1, queued_us=2_000)

    pools = Pools(prefill=[crash, hand_over], decode=[go_on])
    assert await tokens_of(pools) == [5, 6]
    record = pools.record
    lost, done = record.attempts
    assert (lost.number, lost.lost, lost.first_at) == (0, "died", 0)
    assert lost.submitted_at <= lost.lost_at <= done.submitted_at
    assert (done.number, done.lost, done.lost_at) == (1, "", 0)
    assert done.submitted_at <= done.first_at <= done.handed_over_at <= done.resumed_at
    assert (record.queued_s, record.kv_wait_s, record.num_attempts) == (0.001, 0.002, 2)
    assert lost.engines == ["prefill/r/0"]
    assert done.engines == ["prefill/r/0", "decode/r/0"]


@pytest.mark.feature("R15")
async def test_what_leaves_an_engine_that_drains_has_moved() -> None:
    pools = Pools(mixed=[hand_over, finish_at(1)])
    assert await tokens_of(pools) == [5, 7]
    record = pools.record
    assert (record.num_moves, record.num_attempts) == (1, 1)
    assert [choice.engine for choice in record.engine_choices] == ["mixed/r/0"] * 2
    handed_over = Pools(prefill=[hand_over], decode=[finish_at(1)])
    assert await tokens_of(handed_over) == [5, 7]
    assert handed_over.record.num_moves == 0


async def test_the_handoff_goes_to_a_decode_engine_and_both_are_told_of_a_client_that_leaves() -> (
    None
):
    pools = Pools(prefill=[hand_over], decode=[lambda run: run.output([6], position=1)])
    outputs = pools.router.generate(request_of())
    assert [(await anext(outputs)).token_ids for _ in range(2)] == [[5], [6]]
    [decoding] = pools.received["decode"]
    assert (decoding.handoff, decoding.request.output_token_ids) == (HANDOFF, [5])
    await outputs.aclose()
    await asyncio.sleep(0)
    assert [each.aborted() for each in pools.connections.all] == [[["r.0"]], [["r.0"]]]


@pytest.mark.feature("X08")
async def test_kv_that_no_decode_engine_can_read_is_let_go_and_computed_there() -> None:
    """While a pool of other blocks replaces one: no loss, and no further attempt."""
    pools = Pools(prefill=[hand_over], decode=[finish_at(1)], decode_kv="of other blocks")
    assert await tokens_of(pools) == [5, 7]
    [decoding] = pools.received["decode"]
    assert (decoding.handoff, decoding.request.output_token_ids) == (None, [5])
    assert pools.connections["prefill/r/0"].aborted() == [[decoding.request.request_id]]
    assert len(pools.record.attempts) == 1


@pytest.mark.parametrize("first", [[7], []], ids=["with its next token", "before that"])
async def test_a_prefill_engine_that_ends_matters_until_its_kv_is_read(first: list[int]) -> None:
    """Before that, the request is prefilled again, with the tokens that its client has."""

    def never_read(run: Run) -> None: ...

    def hand_over_again(run: Run) -> None:
        run.output([6], "handoff", position=1)

    reads: list[Run] = []

    def read(run: Run) -> None:
        run.output(first, position=2)
        reads.append(run)

    pools = Pools(prefill=[hand_over_and_crash, hand_over_again], decode=[never_read, read])
    outputs = pools.router.generate(request_of())
    async with asyncio.timeout(60):
        assert [(await anext(outputs)).token_ids for _ in range(2)] == [[5], [6]]
        following = asyncio.create_task(_all(outputs))
        while not reads:
            await asyncio.sleep(0)
        leaders = [each.leader for each in pools.connections.all]
        [*_, prefill] = [leader for leader in leaders if leader.report.pool == "prefill"]
        while prefill._handed_over:
            await asyncio.sleep(0)
        prefill.on_end("its connection ended")
        finish_at(2 + len(first))(reads[0])
        *_, last = await following
        assert last.finish_reason == "length"
    assert pools.output_ids("prefill") == [[], [5]]
    assert pools.output_ids("decode") == [[5], [5, 6]]


async def _all(outputs: AsyncIterator[EngineOutput]) -> list[EngineOutput]:
    return [output async for output in outputs]


def twice(run: Run) -> None:
    run.output([5])
    finish_at(0)(run)


@pytest.mark.parametrize(
    ("script", "num_attempts", "error"),
    [
        (twice, 1, "output tokens: wanted those from 1 on, found from 0 on"),
        (lose, 3, "lost 3 times on its way, at last: handoff 7 ended"),
        (
            crash,
            5,
            "its ranks died 5 times, at last: mixed/r/0 epoch=4: its connection ended; "
            "rank dp=0 tp=0 epoch=4 ended: killed",
        ),
    ],
)
async def test_a_request_that_cannot_be_served_ends_with_the_reason(
    script: Script, num_attempts: int, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason of the ranks' end as well, where the board has told of it."""
    monkeypatch.setattr(quarantine_module, "LOSING_S", 0.0)
    pools = Pools(mixed=[script])
    last = (await pools.serve())[-1]
    assert (last.finish_reason, last.error) == ("error", error)
    assert len(pools.received["mixed"]) == num_attempts


@pytest.mark.feature("P07")
async def test_a_request_that_is_lost_again_and_again_fails_only_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A network that fails for a moment cuts each new connection at once."""
    monkeypatch.setattr(quarantine_module, "LOSING_S", 1.0)
    pools = Pools(mixed=[lose])
    began = asyncio.get_running_loop().time()
    last = (await pools.serve())[-1]
    assert asyncio.get_running_loop().time() - began >= 1.0
    num_attempts = len(pools.received["mixed"])
    assert num_attempts >= 3
    assert last.error.startswith(f"lost {num_attempts} times on its way, at last: ")


async def test_a_request_that_no_leader_takes_in_time_raises_and_another_stage_lets_go() -> None:
    connections = Connections(
        dict.fromkeys(("prefill", "decode"), Routing.LEAST_REQUESTS),
        0.05,
        lambda to, submit: hand_over(Run(to, submit)),
    )
    router = Router(connections.directory, "prefill", StreamBatcher())
    with pytest.raises(NoLeader, match="prefill pool"):
        await anext(router.generate(request_of()))
    connections.see(report_of("prefill"))
    outputs = router.generate(request_of())
    assert (await anext(outputs)).token_ids == [5]
    with pytest.raises(NoLeader, match="decode pool"):
        await anext(outputs)
    await asyncio.sleep(0)
    assert connections["prefill/r/0"].aborted() == [["r.0"]]


class Group:
    """A pool of one rank group: whoever is in it when it dies has lost its ranks."""

    def __init__(self, killer: str) -> None:
        self.connections = Connections(on_submit=self._on_submit)
        self._killer = killer
        self._epoch = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.connections.see(report_of())

    def _on_submit(self, to: ScriptedConnection, submit: Submit) -> None:
        self._tasks.append(asyncio.create_task(self._run(Run(to, submit), submit)))

    async def _run(self, run: Run, submit: Submit) -> None:
        await asyncio.sleep(0.02)
        if run.request_id.startswith(self._killer):
            self._epoch += 1
            self.connections.see(report_of(epoch=self._epoch))  # and the one before is lost
        position = len(submit.request.output_token_ids)
        for i in range(2):
            run.output([5], position=position + i)
            await asyncio.sleep(0.05)
        finish_at(position + 2)(run)


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
    group, lock = Group("killer"), FairLock()
    routers = [
        Router(
            group.connections.directory,
            "mixed",
            StreamBatcher(),
            Quarantine(Shared(lock, str(i))),
        )
        for i in range(num_ingresses)
    ]

    async def run(number: int, name: str) -> str:
        async with aclosing(routers[number % num_ingresses].generate(request_of(name))) as outputs:
            return [found async for found in outputs][-1].finish_reason

    async with asyncio.timeout(60):
        ends = await asyncio.gather(*map(run, range(5), ["a", "killer", "b", "c", "d"]))
    assert ends == ["length", "error", "length", "length", "length"]


async def test_a_suspect_waits_for_a_leader_before_its_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else all others, of any ingress, would wait for their trials as long as it does."""
    monkeypatch.setattr(quarantine_module, "ONE_EVENT_S", 0.0)
    epochs, lock, loop = iter((1,)), FairLock(), asyncio.get_running_loop()

    def die(to: ScriptedConnection) -> None:
        to.leader.on_end("its connection ended")
        connections.see(*(report_of(epoch=epoch) for epoch in epochs))

    connections = Connections(
        max_wait_s=0.05,
        on_submit=lambda to, submit: loop.call_soon(die, to),
    )
    connections.see(report_of())
    quarantine = Quarantine(Shared(lock, "ours"))
    router = Router(connections.directory, "mixed", StreamBatcher(), quarantine)
    client = asyncio.ensure_future(anext(router.generate(request_of())))
    while not client.done():
        assert lock.take("another")
        lock.give_back("another")
        await asyncio.sleep(0.01)
    with pytest.raises(NoLeader, match="mixed pool"):
        await client
    assert len(connections.all) == 2, "its ranks died twice"


async def test_suspects_whose_leader_goes_before_their_turn_wait_for_another_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quarantine_module, "ONE_EVENT_S", 0.0)
    monkeypatch.setattr(quarantine_module, "ASK_PERIOD_S", 0.01)
    lock, loop = FairLock(), asyncio.get_running_loop()
    epochs, max_wait_s = count(1), 3.0

    def die(to: ScriptedConnection) -> None:
        if not to.leader.is_lost:
            to.leader.on_end("its connection ended")
            connections.see(report_of(epoch=next(epochs)))

    connections = Connections(
        max_wait_s=max_wait_s, on_submit=lambda to, _: loop.call_soon(die, to)
    )
    connections.see(report_of())
    quarantine = Quarantine(Shared(lock, "ours"))
    router = Router(connections.directory, "mixed", StreamBatcher(), quarantine)
    ended: list[float] = []

    async def run(name: str) -> None:
        with pytest.raises(NoLeader):
            await anext(router.generate(request_of(name)))
        ended.append(loop.time())

    lock.take("another")  # its trial takes long
    clients = asyncio.gather(*map(run, ("a", "b", "c", "d")))
    while len(lock._asked_at) == 1:
        lock.take("another")
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    connections.all[-1].leader.on_end("its connection ended")
    lock.give_back("another")
    await clients
    assert ended[-1] - ended[0] < max_wait_s, "one after the other"


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_request_is_said_to_be_sent_again_when_it_is(
    leaves: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that leaves during the pause behind a loss is not prefilled again."""
    pools = Pools(mixed=[crash_after(1), finish_at(1)])
    outputs = pools.router.generate(request_of(), pools.record)
    await anext(outputs)
    client = asyncio.ensure_future(anext(outputs))
    while not pools.record.attempts[0].lost:
        await asyncio.sleep(0)
    if leaves:
        client.cancel()
    await asyncio.wait([client])
    await asyncio.sleep(0.1)
    assert len(pools.received["mixed"]) == (1 if leaves else 2)
    assert ("sent again" in caplog.text) != leaves


async def test_a_client_that_leaves_is_aborted_and_not_prefilled_again() -> None:
    pools = Pools(mixed=[lambda run: run.output([5])])
    outputs = pools.router.generate(request_of())
    assert (await anext(outputs)).token_ids == [5]
    client = asyncio.ensure_future(anext(outputs))
    await asyncio.sleep(0)
    client.cancel()
    await asyncio.wait([client])
    await asyncio.sleep(0.1)
    assert (pools.output_ids(), pools.aborted()) == ([[]], ["r.0"])
