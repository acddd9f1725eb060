"""What GPUs do that sum through memory which they all have mapped, in every order.

    python tests/simulation/peer_memory_model.py [--calls 3]

A model of the kernel in `model/kernels/triton/all_reduce.py`: of each rank the flags and two slots,
of each program what it does to them, one access after the other; what is being filled holds
nothing. A slot has two cells. Which program fills which of them, or none, is another matter in each
call: rows may be few, or long. A rank's kernels run one after the other, and their programs at
once. The flags of one program are set in any order.

The states that any order of all programs leads to are visited once. Wrong is a read of what is not
there or not from this call, an order in which nobody can go on, and a flag that was not set in the
end. Not modelled is the order in which one GPU's accesses become visible to another: that is what
the kernel's `release` and `acquire` are for.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from communicator_model import WrongError, visit

Cells = tuple[int, ...]
Call = tuple[Cells, ...]
"""Of each program the cells that its rows lie in."""
WIDE: Call = ((0,), (1,))
CROSSED: Call = ((1,), (0,))
SHORT: Call = ((0,), ())
LONG: Call = ((0, 1), ())
CALLS = (WIDE, CROSSED, SHORT, LONG)
ALONE: Call = ((0,),)
"""Of one program."""
FILLING = -1
BUGS = {
    "no wait for flags": "wait",
    "no flag is set": "flags",
    "flags are set before the rows are there": "order",
    "one slot instead of two": "slots",
    "a program without rows does not count the call": "count",
    "a replayed graph has the number of its capture": "number",
    "kernels of one rank overlap": "stream",
}
"""Each a part of the protocol that is left out."""


class Step(NamedTuple):
    """`what` is "fill", "full", "flag" (of any rank that lacks it) or "read" (of the cell of
    `rank`, once the flags here are `count`)."""

    what: str
    call: int
    count: int
    cell: int = 0
    rank: int = 0


class State(NamedTuple):
    places: tuple[int, ...]
    """The next step of each program of each rank."""
    flags: tuple[int, ...]
    """By whose memory, program and who set it."""
    cells: tuple[int, ...]
    """By rank, slot and cell: the call that filled it, or FILLING."""


class Model:
    def __init__(self, num_ranks: int, calls: tuple[Call, ...], without: str = "") -> None:
        self.num_ranks, self.num_programs = num_ranks, len(calls[0])
        self._without = without
        self._programs = [
            self._steps(rank, program, calls)
            for rank in range(num_ranks)
            for program in range(self.num_programs)
        ]
        self._first_of_call = [
            [sum(step.call < call for step in steps) for call in range(1, len(calls) + 2)]
            for steps in self._programs
        ]

    def _steps(self, rank: int, program: int, calls: tuple[Call, ...]) -> list[Step]:
        steps: list[Step] = []
        others = [each for each in range(self.num_ranks) if each != rank]
        count = 0
        for call, cells in enumerate((each[program] for each in calls), 1):
            count += bool(cells) if self._without == "count" else 1
            number = 1 if self._without == "number" else count
            fills = [Step(w, call, number, cell) for cell in cells for w in ("fill", "full")]
            flags = [Step("flag", call, number)] * (len(others) if cells else 0)
            if self._without == "flags":
                flags = []
            steps += flags + fills if self._without == "order" else fills + flags
            steps += [Step("read", call, number, c, r) for c in cells for r in others]
        return steps

    def num_states(self) -> int:
        """Visit every state of these calls and return how many there are; WrongError: one is
        wrong."""
        num_flags = self.num_ranks * len(self._programs)
        first = State((0,) * len(self._programs), (0,) * num_flags, (0,) * (4 * self.num_ranks))
        return visit(first, self._following, self._has_ended)

    def _has_ended(self, state: State) -> bool:
        if state.places != tuple(map(len, self._programs)):
            return False
        for at, steps in enumerate(self._programs):
            rank, program = divmod(at, self.num_programs)
            wanted = max((step.count for step in steps), default=0)
            others = (each for each in range(self.num_ranks) if each != rank)
            if any(state.flags[self._flag(rank, program, other)] != wanted for other in others):
                raise WrongError(f"flags in the end: {state}")
        return True

    def _flag(self, rank: int, program: int, other: int) -> int:
        return (rank * self.num_programs + program) * self.num_ranks + other

    def _following(self, state: State) -> Iterator[State]:
        for at, steps in enumerate(self._programs):
            place = state.places[at]
            if place == len(steps) or not self._has_begun(state, at, steps[place].call):
                continue
            step, (rank, program) = steps[place], divmod(at, self.num_programs)
            places = _set(state.places, at, place + 1)
            slot = 0 if self._without == "slots" else step.count % 2
            if step.what == "flag":
                for other in range(self.num_ranks):
                    flag = self._flag(other, program, rank)
                    if other != rank and (
                        state.flags[flag] < step.count or self._without == "number"
                    ):
                        flags = _set(state.flags, flag, step.count)
                        yield State(places, flags, state.cells)
            elif step.what == "read":
                if self._waits(state, rank, program, step.count):
                    continue
                found = state.cells[4 * step.rank + 2 * slot + step.cell]
                if found != step.call:
                    wanted = f"call {step.call} of rank {step.rank}"
                    raise WrongError(f"rank {rank} reads {found}, wanted {wanted}: {state}")
                yield State(places, state.flags, state.cells)
            else:
                cell = 4 * rank + 2 * slot + step.cell
                value = step.call if step.what == "full" else FILLING
                yield State(places, state.flags, _set(state.cells, cell, value))

    def _has_begun(self, state: State, at: int, call: int) -> bool:
        """Return whether all programs of the rank have ended the kernel before."""
        if call == 1 or self._without == "stream":
            return True
        first = at - at % self.num_programs
        return all(
            state.places[each] >= self._first_of_call[each][call - 1]
            for each in range(first, first + self.num_programs)
        )

    def _waits(self, state: State, rank: int, program: int, count: int) -> bool:
        others = (each for each in range(self.num_ranks) if each != rank)
        return self._without != "wait" and any(
            state.flags[self._flag(rank, program, other)] < count for other in others
        )


def _set(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def is_found(bug: str, num_calls: int = 3) -> bool:
    """Return whether some sequence of calls of two ranks goes wrong without a part of the
    protocol."""
    for calls in product(CALLS, repeat=num_calls):
        try:
            Model(2, calls, BUGS[bug]).num_states()
        except WrongError:
            return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=3)
    options = parser.parse_args()
    sequences = list(product(CALLS, repeat=options.calls))
    total = sum(Model(2, calls).num_states() for calls in sequences)
    print(f"2 ranks of 2 programs, {len(sequences)} sequences of {options.calls}: {total} states")
    for num_ranks in (3, 4):
        total = Model(num_ranks, (ALONE,) * options.calls).num_states()
        print(f"{num_ranks} ranks of 1 program, {options.calls} calls: {total} states", flush=True)
    for bug in BUGS:
        print(f"{bug}: {'found' if is_found(bug) else 'NOT FOUND'}", flush=True)


if __name__ == "__main__":
    main()
