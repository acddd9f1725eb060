"""A pace lets a few through per turn of the loop, in order, and loses no turn to who gave up."""

from __future__ import annotations

import asyncio

import pytest

from serve.pace import Pace


async def turns_of(
    pace: Pace, num: int, cancelled: frozenset[int] = frozenset()
) -> list[list[int]]:
    """Return who came through in each turn of the loop, where all came at once."""
    turns: list[list[int]] = [[]]

    async def come(i: int) -> None:
        await pace.wait()
        turns[-1].append(i)

    tasks = [asyncio.create_task(come(i)) for i in range(num)]
    await asyncio.sleep(0)
    for i in cancelled:
        tasks[i].cancel()
    while not all(task.done() for task in tasks):
        turns.append([])
        await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    return [turn for turn in turns if turn]


@pytest.mark.parametrize("num", [1, 4, 5, 103])
def test_few_come_through_at_once_and_all_in_order(num: int) -> None:
    turns = asyncio.run(turns_of(Pace(4), num))
    assert [i for turn in turns for i in turn] == list(range(num))
    assert all(len(turn) == 4 for turn in turns[:-1])


def test_who_gives_up_takes_nobodys_turn() -> None:
    gone = frozenset({5, 6, 7, 8, 20})
    turns = asyncio.run(turns_of(Pace(4), 30, gone))
    assert [i for turn in turns for i in turn] == [i for i in range(30) if i not in gone]
    assert all(len(turn) == 4 for turn in turns[:-1])


def test_who_comes_later_waits_behind_the_others() -> None:
    async def run() -> list[str]:
        pace, seen = Pace(1), list[str]()

        async def come(name: str) -> None:
            await pace.wait()
            seen.append(name)

        tasks = [asyncio.create_task(come(name)) for name in ("first", "second", "third")]
        await asyncio.sleep(0)
        assert seen == ["first"]
        tasks.append(asyncio.create_task(come("late")))
        await asyncio.gather(*tasks)
        return seen

    assert asyncio.run(run()) == ["first", "second", "third", "late"]


def test_an_idle_pace_keeps_nobody_waiting() -> None:
    async def run() -> None:
        pace = Pace(2)
        for _ in range(5):
            async with asyncio.timeout(0):  # ends at the first turn of the loop
                await pace.wait()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(run())
