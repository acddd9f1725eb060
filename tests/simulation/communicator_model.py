"""What ranks do that exchange data through memory that they share, in every order.

    python tests/simulation/communicator_model.py [--ranks 2 4] [--exchanges 3]

A model of `communicator.cpp`: each rank's counter, its two slots and its user buffer, and what it
does to them, one access after the other; what is being filled holds nothing. The states that any
order of the ranks leads to are visited once. Wrong is a read of what is not there or not from this
exchange, and an order in which nobody can go on. Printed are the numbers of states, and which of
the planted bugs (`BUGS`) are found.

Ranks that all wait for one another at every exchange cannot be more than two exchanges apart, so
three exchanges in a row show what more would.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, TypeVar

S = TypeVar("S")
ONE_SHOT, TWO_SHOT, BROADCAST, GATHER = "one-shot", "two-shot", "broadcast", "gather"
GATHER_TO_ALL = "gather to all"
USER_BUFFERS = "user buffers"
"""A sum of what lies in user buffers, and the gathering of its rows."""
KINDS = (ONE_SHOT, TWO_SHOT, BROADCAST, GATHER, USER_BUFFERS)
USER_BUFFER = 2
"""Behind the slots 0 and 1."""
PLACES = 3
BUGS = {
    "no wait before a slot is filled": "fill",
    "one slot instead of two": "slots",
    "the counter is raised before the slot is full": "raise",
    "no wait before slots are read": "read",
    "a part is added up without a second raise": "second raise",
    "user buffers are filled again before all have read": "gather rows",
}
"""Each a part of the protocol that is left out."""


class Access(NamedTuple):
    """What a rank does at once: it waits until the counters of `ranks` are `count`, then acts.

    `what` is "fill", "full", "raise", "read" (of the part of `rank` in the slot of `ranks[0]`, as
    `wanted`) or "add" (the own part, in the own slot).
    """

    what: str
    slot: int = 0
    ranks: tuple[int, ...] = ()
    count: int = 0
    part: int = -1
    wanted: tuple[int, str] = (0, "")


@dataclass(frozen=True)
class State:
    places: tuple[int, ...]
    """The next access of each rank."""
    counters: tuple[int, ...]
    slots: tuple[tuple[tuple[int, str], ...], ...]
    """Of each rank's slots and its user buffer the parts, with the exchange that they are from."""


class Program:
    """One rank's accesses, in order."""

    def __init__(self, rank: int, ranks: int, without: str = "") -> None:
        self.accesses: list[Access] = []
        self._rank, self._all = rank, tuple(range(ranks))
        self._without = without
        self._exchange = self._count = 0

    def add(self, kind: str) -> None:
        """Append the accesses of an exchange."""
        if kind == USER_BUFFERS:
            self._add_up_user_buffers()
            return
        rank, count = self._rank, self._count
        self._exchange += 1
        slot = 0 if self._without == "slots" else self._exchange % 2
        data, total = (self._exchange, "data"), (self._exchange, "sum")
        if kind != BROADCAST or rank == 0:
            waits = () if self._without == "fill" else self._all
            steps = [
                Access("fill", slot, waits, count),
                Access("full", slot, wanted=data),
                Access("raise", count=count + 1),
            ]
            if self._without == "raise":
                steps[1:] = steps[:0:-1]
            self.accesses += steps
        else:
            self.accesses.append(Access("raise", count=count + 1))
        self._count = count = count + 1
        if kind in (ONE_SHOT, GATHER_TO_ALL) or (kind == GATHER and rank == 0):
            self._read_all(slot, count, -1, data)
        elif kind == BROADCAST and rank != 0:
            self._read(slot, 0, (0,), -1, data)
        elif kind == TWO_SHOT:
            self._read_all(slot, count, rank, data)
            self.accesses.append(Access("add", slot, part=rank, wanted=total))
            if self._without != "second raise":
                self._count = count = count + 1
                self.accesses.append(Access("raise", count=count))
            for other in self._all:
                self._read(slot, other, (other,), other, total)

    def _add_up_user_buffers(self) -> None:
        self._exchange += 1
        data = (self._exchange, "data")
        self._count += 1
        self.accesses += [
            Access("fill", USER_BUFFER),
            Access("full", USER_BUFFER, wanted=data),
            Access("raise", count=self._count),
        ]
        self._read_all(USER_BUFFER, self._count, -1, data)
        if self._without != "gather rows":
            self.add(GATHER_TO_ALL)

    def _read_all(self, slot: int, count: int, part: int, wanted: tuple[int, str]) -> None:
        """Wait for all, then read from each."""
        for other in self._all:
            self._read(slot, other, self._all, part, wanted)

    def _read(
        self, slot: int, other: int, waits: tuple[int, ...], part: int, wanted: tuple[int, str]
    ) -> None:
        count = 0 if self._without == "read" else self._count
        ranks = (other, *(each for each in waits if each != other))
        self.accesses.append(Access("read", slot, ranks, count, part, wanted))


class WrongError(Exception):
    """An order in which the ranks go wrong."""


def num_states(ranks: int, kinds: tuple[str, ...], without: str = "") -> int:
    """Visit every state of these exchanges, and return how many there are; WrongError: one is
    wrong."""
    programs = []
    for rank in range(ranks):
        program = Program(rank, ranks, without)
        for kind in kinds:
            program.add(kind)
        programs.append(tuple(program.accesses))
    empty = ((0, "") for _ in range(ranks))
    slots = (tuple(empty),) * (PLACES * ranks)
    first = State((0,) * ranks, (0,) * ranks, slots)
    ends = tuple(map(len, programs))
    return visit(first, lambda state: successors(state, programs), lambda s: s.places == ends)


def visit(first: S, following: Callable[[S], Iterable[S]], has_ended: Callable[[S], bool]) -> int:
    """Visit every state that follows from the first, and return how many there are; WrongError:
    `following` says so, or nothing follows though not all has ended."""
    seen, waiting = {first}, [first]
    while waiting:
        state = waiting.pop()
        can_go_on = False
        for each in following(state):
            can_go_on = True
            if each not in seen:
                seen.add(each)
                waiting.append(each)
        if not can_go_on and not has_ended(state):
            raise WrongError(f"nobody can go on: {state}")
    return len(seen)


def successors(state: State, programs: list[tuple[Access, ...]]) -> Iterator[State]:
    for rank, (at, program) in enumerate(zip(state.places, programs, strict=True)):
        if at == len(program):
            continue
        access = program[at]
        if access.what in ("fill", "read") and not all(
            state.counters[each] >= access.count for each in access.ranks
        ):
            continue
        yield after(state, rank, access)


def after(state: State, rank: int, access: Access) -> State:
    places, counters, slots = list(state.places), list(state.counters), list(state.slots)
    places[rank] += 1
    own = PLACES * rank + access.slot
    if access.what == "read":
        found = slots[PLACES * access.ranks[0] + access.slot]
        parts = found if access.part < 0 else found[access.part : access.part + 1]
        if any(part != access.wanted for part in parts):
            raise WrongError(f"rank {rank} reads {parts}, wanted {access.wanted}: {state.places}")
    elif access.what == "raise":
        counters[rank] = access.count
    elif access.what == "fill":
        slots[own] = ((0, "being filled"),) * len(slots[own])
    elif access.what == "full":
        slots[own] = (access.wanted,) * len(slots[own])
    else:
        parts = list(slots[own])
        parts[access.part] = access.wanted
        slots[own] = tuple(parts)
    return State(tuple(places), tuple(counters), tuple(slots))


def is_found(bug: str, ranks: int, exchanges: int = 3) -> bool:
    """Return whether some sequence of exchanges goes wrong without a part of the protocol."""
    for kinds in product(KINDS, repeat=exchanges):
        try:
            num_states(ranks, kinds, BUGS[bug])
        except WrongError:
            return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--exchanges", type=int, default=3)
    options = parser.parse_args()
    for ranks in options.ranks:
        sequences = list(product(KINDS, repeat=options.exchanges))
        total = sum(num_states(ranks, kinds) for kinds in sequences)
        print(f"{ranks} ranks, {len(sequences)} sequences of {options.exchanges}: {total} states")
    for bug in BUGS:
        print(f"{bug}: {'found' if is_found(bug, 2) else 'NOT FOUND'}")


if __name__ == "__main__":
    main()
