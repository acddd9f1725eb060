"""Suspects of all ingresses are tried one at a time."""

from __future__ import annotations

import asyncio

import pytest

from cluster.actors.turns import Turns
from serve.pools import quarantine as dock_module
from serve.pools.quarantine import SharedDock


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dock_module, "ASK_PERIOD_S", 0.01)


def dock_of(name: str, turns: Turns) -> SharedDock:
    async def ask() -> bool:
        await asyncio.sleep(0)
        return turns.take(name)

    return SharedDock(ask, lambda: turns.give_back(name))


def test_suspects_of_two_ingresses_are_tried_one_at_a_time() -> None:
    turns = Turns(60)
    docks = [dock_of(name, turns) for name in "ab"]
    now, tried = set[int](), list[int]()

    async def trial(suspect: int) -> None:
        await docks[suspect % 2].acquire()
        assert not now
        now.add(suspect)
        tried.append(suspect % 2)
        await asyncio.sleep(0.03)
        now.remove(suspect)
        docks[suspect % 2].release()

    async def run() -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*map(trial, range(8)))

    asyncio.run(run())
    assert tried == [0, 1] * 4, "neither ingress waits for all suspects of the other"


def test_a_client_that_leaves_does_not_keep_the_next_one_waiting() -> None:
    turns = Turns(60)
    mine, other = dock_of("a", turns), dock_of("b", turns)

    async def run() -> None:
        async with asyncio.timeout(60):
            await other.acquire()
            waiting = asyncio.create_task(mine.acquire())
            await asyncio.sleep(0.05)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            other.release()
            await mine.acquire()
            mine.release()

    asyncio.run(run())


def test_a_long_trial_is_not_taken_for_a_dead_ingress() -> None:
    turns = Turns(0.5)
    mine, other = dock_of("a", turns), dock_of("b", turns)

    async def run() -> bool:
        async with asyncio.timeout(60):
            await mine.acquire()
            waiting = asyncio.create_task(other.acquire())
            await asyncio.sleep(1.5)
            was_let_in = waiting.done()
            mine.release()
            await waiting
            other.release()
            return was_let_in

    assert not asyncio.run(run())
