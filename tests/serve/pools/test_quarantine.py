"""Suspects of all ingresses are tried one at a time, in the order of asking.

Their lock is one actor, made when it is first asked for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.wire.messages import FinishReason
from serve.pools import quarantine as quarantine_module
from serve.pools.quarantine import LOST_AFTER_S, CrashHistory, FairLock, Quarantine


@pytest.fixture(autouse=True)
def ask_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine_module, "ASK_PERIOD_S", 0.01)


class Shared:
    """One ingress's way to a lock."""

    def __init__(self, lock: FairLock, name: str) -> None:
        self._lock, self._name = lock, name

    async def take(self) -> bool:
        await asyncio.sleep(0)
        return self._lock.take(self._name)

    def give_back(self) -> None:
        self._lock.give_back(self._name)


def suspect() -> CrashHistory:
    history = CrashHistory()
    while not history.is_suspect:
        history.add(FinishReason.DIED, 0.0)
    return history


@pytest.mark.parametrize(
    ("at", "is_suspect"),
    [
        ([0.0], False),
        ([0.0, 1.9], False),  # a node, with engines of two pools
        ([0.0, 2.1], True),
        ([0.0, 0.1, 0.2], True),  # whatever kills ranks at once
        ([0.0, 0.1, 5.0], True),
        ([5.0, 5.1, 5.1, 5.2], True),
    ],
)
def test_two_deaths_at_once_are_one_event_and_a_third_is_none(
    at: list[float], is_suspect: bool
) -> None:
    history = CrashHistory()
    for now in at:
        history.add(FinishReason.DIED, now)
    assert history.is_suspect is is_suspect


def trials(*names: str) -> list[AbstractAsyncContextManager[None]]:
    """Return a trial in the quarantine of each ingress."""
    lock = FairLock()
    made = {name: Quarantine(Shared(lock, name)) for name in names}
    return [made[name].attempt(suspect()) for name in names]


@asynccontextmanager
async def soon() -> AsyncIterator[None]:
    async with asyncio.timeout(60):
        yield


async def test_suspects_of_two_ingresses_are_tried_one_at_a_time() -> None:
    now, tried = set[int](), list[int]()

    async def run(number: int, trial: AbstractAsyncContextManager[None]) -> None:
        async with trial:
            assert not now
            now.add(number)
            tried.append(number % 2)
            await asyncio.sleep(0.03)
            now.remove(number)

    async with soon():
        await asyncio.gather(*map(run, range(8), trials(*"abababab")))
    assert tried == [0, 1] * 4, "neither ingress waits for all suspects of the other"


async def test_a_client_that_leaves_does_not_keep_the_next_one_waiting() -> None:
    other, leaving, next_one = trials("b", "a", "c")
    async with soon():
        async with other:
            waiting = asyncio.create_task(leaving.__aenter__())
            await asyncio.sleep(0.05)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        async with next_one:
            pass


async def test_a_long_trial_is_not_taken_for_a_dead_ingress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quarantine_module, "LOST_AFTER_S", 0.5)
    mine, other = trials("a", "b")
    async with soon():
        async with mine:
            waiting = asyncio.create_task(other.__aenter__())
            await asyncio.sleep(1.5)
            assert not waiting.done()
        await waiting
        await other.__aexit__(None, None, None)


async def test_who_is_no_suspect_waits_for_nobody_and_who_gave_tokens_holds_nobody_up() -> None:
    quarantine, tried, free = Quarantine(), suspect(), CrashHistory()
    async with soon(), quarantine.attempt(tried):
        async with quarantine.attempt(free):
            assert tried.is_on_trial and not free.is_on_trial
        tried.count(1)
        assert tried.is_on_trial
        tried.count(1)
        assert not tried.is_on_trial
        async with quarantine.attempt(suspect()):
            pass


def test_who_is_silent_loses_the_lock_and_its_place() -> None:
    now = 0.0
    lock = FairLock(lambda: now)
    assert lock.take("dead") and not lock.take("next")
    now = LOST_AFTER_S
    assert not lock.take("next")
    now += 0.1
    assert lock.take("next") and not lock.take("dead")


def test_each_has_the_lock_in_the_order_in_which_they_asked() -> None:
    lock = FairLock(lambda: 0.0)
    assert lock.take("a") and not lock.take("b") and not lock.take("c")
    assert lock.take("a"), "it keeps what it has"
    lock.give_back("a")
    assert not lock.take("c") and not lock.take("a") and lock.take("b")
    lock.give_back("c")  # does not wait any more
    lock.give_back("b")
    assert lock.take("a")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40))
def test_nobody_takes_what_another_has_and_nobody_starves(steps: list[tuple[str, bool]]) -> None:
    lock, holder, had = FairLock(lambda: 0.0), None, Counter[str]()
    for name, is_taking in [*steps, *(("abc"[i % 3], i % 2 == 0) for i in range(30))]:
        if is_taking and lock.take(name):
            assert holder in (None, name)
            holder = name
            had[name] += 1
        elif not is_taking and holder == name:
            lock.give_back(name)
            holder = None
    assert min(had[name] for name in "abc") > 0


@pytest.mark.ray
async def test_ingresses_share_a_lock_and_go_on_where_its_actor_dies(ray_cluster: Any) -> None:
    import ray

    from serve.ingress import ActorLock

    a, b = (ActorLock("quarantined", name) for name in "ab")

    def actor() -> Any:
        return ray.get_actor("quarantine:quarantined", namespace="lockstep")

    a.give_back()  # of what was never taken
    with pytest.raises(ValueError):
        actor()
    assert await a.take() and not await b.take()
    a.give_back()
    assert await b.take() and not await a.take()
    ray.kill(actor())
    async with asyncio.timeout(60):
        while not (await a.take() and not await b.take()):
            await asyncio.sleep(0.1)
    ray.kill(actor())
