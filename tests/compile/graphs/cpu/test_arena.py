"""Blocks are disjoint, stay where they are, and nothing is lost when they come back."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from compile.graphs.cpu.pool import ALIGNMENT, Arena, Block

SIZES = st.integers(0, 700)
# A size allocates; None releases the block that the number picks.
STEPS = st.lists(st.tuples(SIZES | st.none(), st.integers(0, 1000)), max_size=60)


def run(steps: list[tuple[int | None, int]], arena: Arena) -> list[Block]:
    live: list[Block] = []
    for size, pick in steps:
        if size is not None:
            live.append(arena.allocate(size))
        elif live:
            arena.release(live.pop(pick % len(live)))
    return live


def num_free_bytes(arena: Arena) -> int:
    return sum(stop - start for segment in arena._segments for start, stop in segment.gaps)


@given(STEPS)
def test_live_blocks_are_disjoint_and_cover_what_is_not_free(
    steps: list[tuple[int | None, int]],
) -> None:
    arena = Arena(segment_bytes=1024)
    live = sorted(run(steps, arena), key=lambda b: (b.segment, b.start))
    for before, after in itertools.pairwise(live):
        assert before.segment < after.segment or before.stop <= after.start
    used = sum(block.stop - block.start for block in live)
    assert used + num_free_bytes(arena) == arena.num_bytes


@given(STEPS)
def test_all_that_was_released_serves_one_block_again(steps: list[tuple[int | None, int]]) -> None:
    arena = Arena(segment_bytes=1 << 16)
    for block in [arena.allocate(1), *run(steps, arena)]:
        arena.release(block)
    assert (arena.num_bytes, num_free_bytes(arena)) == (1 << 16, 1 << 16)
    assert arena.allocate(1 << 16) == Block(0, 0, 1 << 16)


def test_a_block_larger_than_a_segment_gets_one_of_its_size() -> None:
    arena = Arena(segment_bytes=1024)
    arena.allocate(5000)
    assert arena.num_bytes == -(-5000 // ALIGNMENT) * ALIGNMENT
