"""Who is named when a rank group does not start, hangs or ends. Its ranks are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from cluster.actors import rank_group
from cluster.actors.rank_group import CallEnd, RankDied, RankGroup, place_in_group
from cluster.config import ParallelConfig
from cluster.engine.divergence import StepDivergence
from cluster.engine.watchdog import Heartbeat, Phase
from cluster.group.rendezvous import Rendezvous
from cluster.wire.messages import FIRST_LOADED_ID, LoraAdapter

BROKEN = CallEnd(cause="connection closed", error=RuntimeError("connection closed"))
GONE = CallEnd(cause="gone", is_death=True)
MEETS = CallEnd(Rendezvous("127.0.0.1", 1, "", (), ("a", "b")))  # type: ignore[arg-type]

STEPPING = CallEnd(Heartbeat(12, Phase.RUNNING, 0.0, 0.0, False))


class Rank:
    """A rank whose calls end as the test says, a while later; with None, never."""

    def __init__(
        self,
        *,
        meet: CallEnd | None = MEETS,
        load: tuple[float, CallEnd] | None = (0.0, CallEnd("inbox")),
        beat: CallEnd | None = None,
        run: tuple[float, CallEnd] | None = None,
    ) -> None:
        self._meet, self._load, self._beat, self._run = meet, load, beat, run
        self.is_killed = False
        self.adapters: list[Sequence[LoraAdapter]] = []
        """What it was told to have."""

    async def meet(self) -> CallEnd:
        return self._meet or await _after(None)

    def load(self, rendezvous: Rendezvous | None) -> Awaitable[CallEnd]:
        return _after(self._load)

    def run(self) -> Awaitable[CallEnd]:
        return _after(self._run)

    async def heartbeat(self) -> CallEnd:
        return self._beat or await _after(None)

    async def stats(self, prefixes_since: int | None) -> CallEnd:
        raise NotImplementedError

    async def set_adapters(self, adapters: Sequence[LoraAdapter]) -> CallEnd:
        self.adapters.append(adapters)
        return self._beat or await _after(None)

    def stop(self) -> None:
        """Go on."""

    def kill(self) -> None:
        self.is_killed = True


async def _after(end: tuple[float, CallEnd] | None) -> CallEnd:
    await asyncio.sleep(60 if end is None else end[0])
    assert end is not None
    return end[1]


def group(*ranks: Rank, tp: int = 1, lockstep: bool = True, watchdog_s: float = 10.0) -> RankGroup:
    parallel = ParallelConfig(tp, len(ranks) // tp, lockstep)
    return RankGroup(parallel, ranks, watchdog_s=watchdog_s, epoch=2)


def finds(wrong: int) -> CallEnd:
    error = StepDivergence(f"rank dp={wrong} tp=0 epoch=2", 7, "kind", 1, 2)
    return CallEnd(cause=str(error), error=error)


@pytest.mark.parametrize(
    ("runs", "named"),
    [
        # Leaders that diverge all raise; the one that differs finds the first of the others wrong.
        ([(0.0, finds(1)), (0.02, finds(2)), (0.04, finds(1))], 1),
        ([(0.02, finds(2)), (0.0, finds(0)), (0.04, finds(0))], 0),
        ([(0.04, finds(2)), (0.02, finds(2)), (0.0, finds(0))], 2),
        ([(0.0, BROKEN), (0.02, finds(2)), (0.04, BROKEN)], 2),
        # A collective fails within milliseconds of a death, before Ray tells of the death.
        ([(0.0, BROKEN), (0.05, GONE), None], 1),
        ([(0.0, BROKEN), (0.01, BROKEN), (0.05, GONE)], 2),
        ([(0.05, BROKEN), (0.0, GONE)], 1),
        ([None, (0.0, BROKEN)], 1),
        ([None, (0.0, CallEnd())], 1),
    ],
)
def test_who_dies_or_is_found_wrong_by_most_is_to_blame(
    runs: list[tuple[float, CallEnd] | None], named: int
) -> None:
    async def scenario() -> str:
        made = group(*(Rank(run=run) for run in runs))
        await made.start()
        return await made.wait_for_end()

    assert asyncio.run(scenario()).startswith(f"rank dp={named} tp=0 epoch=2 ended: ")


def test_two_that_find_each_other_wrong_are_both_named() -> None:
    async def scenario() -> str:
        made = group(*(Rank(run=(0.0, finds(other))) for other in (1, 0)))
        await made.start()
        return await made.wait_for_end()

    found = "rank dp=0 tp=0 epoch=2 found rank dp=1 tp=0 epoch=2 step 7: kind: wanted 1, found 2"
    assert asyncio.run(scenario()) == f"rank dp=1 tp=0 epoch=2 ended: {found}"


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_cannot_load_is_named_although_others_have_loaded(late: int) -> None:
    ranks = [Rank(), Rank()]
    ranks[late] = Rank(load=(0.05, BROKEN))
    with pytest.raises(RankDied, match=f"rank dp={late} tp=0 epoch=2 ended while loading: conn"):
        asyncio.run(group(*ranks).start())
    assert all(rank.is_killed for rank in ranks)


@pytest.mark.feature("P09")
@pytest.mark.parametrize(("lockstep", "named"), [(False, "dp=1"), (True, "dp=0")])
def test_engines_that_step_apart_are_judged_apart(
    lockstep: bool, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sleeps at step 12 while the other stands in its own step 5000."""
    monkeypatch.setattr(rank_group, "HEARTBEAT_PERIOD_S", 0.05)
    beats = [
        Heartbeat(12, Phase.WAITING, 600.0, 0.0, True),
        Heartbeat(5000, Phase.RUNNING, 11.0, 0.0, False),
    ]
    made = group(*(Rank(beat=CallEnd(beat)) for beat in beats), lockstep=lockstep)
    found = asyncio.run(asyncio.wait_for(made.watch(), 5))
    assert found.startswith(f"rank {named} tp=0 epoch=2: does not advance in step")


@pytest.mark.feature("P09")
def test_a_rank_that_loads_is_not_silent_while_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "HEARTBEAT_PERIOD_S", 0.02)
    monkeypatch.setattr(rank_group, "FIRST_WORD_S", 0.5)
    monkeypatch.setattr(rank_group, "LOADING_TIMES", 0.1)  # of three seconds
    answers, silent = CallEnd(None), None  # no heartbeat yet

    async def named(*beats: CallEnd | None) -> str:
        made = group(*(Rank(load=None, beat=beat) for beat in beats), tp=2, watchdog_s=1.0)
        async with asyncio.timeout(2.0):
            with pytest.raises(RankDied) as raised:
                await made.start()
        return str(raised.value)

    with pytest.raises(TimeoutError):  # nobody is named for twice as long as a rank may be silent
        asyncio.run(named(answers, answers))
    found = asyncio.run(named(answers, silent))
    assert found.startswith("rank dp=0 tp=1 epoch=2: no heartbeat for 0.")


@pytest.mark.feature("P09")
@pytest.mark.parametrize("silent_at", [0.0, 0.01, 0.3, 0.99, 1.01, 3.51, 7.26, 7.99, 8.0])
def test_a_rank_that_falls_silent_is_named_half_a_second_after_it_may_be(
    silent_at: float, run_in_jumps: Callable[..., Any]
) -> None:
    class Falling(Rank):
        async def heartbeat(self) -> CallEnd:
            if asyncio.get_running_loop().time() > silent_at:
                await asyncio.Event().wait()
            return STEPPING

    async def named_at() -> float:
        found = await group(Rank(beat=STEPPING), Falling(), tp=2, watchdog_s=3.0).watch()
        assert found.startswith("rank dp=0 tp=1 epoch=2: no heartbeat for 3.")
        return asyncio.get_running_loop().time()

    silent_s = run_in_jumps(named_at()) - silent_at
    # The owner may have heard of the rank last a whole period earlier.
    assert 2.0 < silent_s < 3.55


@pytest.mark.feature("P09")
@pytest.mark.parametrize(
    ("meets", "named"),
    [
        ((MEETS, GONE), "rank dp=1 tp=0 epoch=2 ended before loading: gone"),
        ((None, GONE), "rank dp=1 tp=0 epoch=2 ended before loading: gone"),
        ((GONE, None), "rank dp=0 tp=0 epoch=2 ended before loading: gone"),
        ((MEETS, None), "rank dp=1 tp=0 epoch=2: no word of it for 2.3 s before loading"),
    ],
)
def test_a_leader_that_does_not_open_its_endpoints_is_named(
    meets: tuple[Any, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "FIRST_WORD_S", 2.0)
    monkeypatch.setattr(rank_group, "LOADING_TIMES", 0.1)  # of three seconds
    ranks = [Rank(meet=meet) for meet in meets]
    with pytest.raises(RankDied, match=named):
        asyncio.run(group(*ranks, watchdog_s=1.0).start())
    assert all(rank.is_killed for rank in ranks)


def test_the_rank_that_was_blamed_is_read_from_the_reason() -> None:
    assert place_in_group("rank dp=0 tp=1 epoch=3 ended: killed") == "dp=0 tp=1"
    assert place_in_group("the owner ended") == "unknown"


@pytest.mark.feature("S10")
def test_each_leader_is_told_of_adapters_and_one_that_is_gone_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapters = [LoraAdapter(FIRST_LOADED_ID, "name", "/path", b"f")]
    ranks = [Rank(beat=STEPPING) for _ in range(4)]
    asyncio.run(group(*ranks, tp=2).set_adapters(adapters))
    assert [rank.adapters for rank in ranks] == [[adapters], [], [adapters], []]
    ranks[2]._beat = BROKEN
    with pytest.raises(RankDied, match=r"^rank dp=1 tp=0 epoch=2: connection closed$"):
        asyncio.run(group(*ranks, tp=2).set_adapters(adapters))
    ranks[2]._beat = None
    monkeypatch.setattr(rank_group, "STATS_TIMEOUT_S", 0.01)
    with pytest.raises(TimeoutError):
        asyncio.run(group(*ranks, tp=2).set_adapters(adapters))
