"""Which sizes are captured, and which of them holds a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile.dispatch import DEFAULT_NUM_TOKENS, capture_sizes, padded_size, within
from compile.resolve import StepLimits

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("explicit", "graph_sizes", "wanted"),
    [
        (None, (512,), (1, 2, 4, 8, *range(16, 513, 16))),
        (None, (100,), (1, 2, 4, 8, 16, 32, 48, 64, 80, 96)),
        (None, (16,), (1, 2, 4, 8, 16)),
        (None, (15,), (1, 2, 4, 8)),
        (None, (4,), (1, 2, 4, 8)),
        (None, (24, 3, 3, 7), (3, 7, 24)),
        ((9, 5, 9), (512,), (5, 9)),
        ((6,), (24, 3), (6,)),
    ],
)
def test_a_list_wins_over_one_value_which_stands_for_a_pattern(
    explicit: tuple[int, ...] | None, graph_sizes: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    assert capture_sizes(explicit, graph_sizes) == wanted


def test_token_counts_are_the_20_of_the_reference() -> None:
    assert (
        *(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048),
        *(2304, 2560, 2816, 3072),
    ) == DEFAULT_NUM_TOKENS


@given(st.integers(1, 100), st.integers(1, 300), st.integers(1, 5))
def test_the_largest_decode_step_fills_neither_rows_nor_budget_too_far(
    max_num_seqs: int, budget: int, query_len: int
) -> None:
    most = StepLimits(max_num_seqs, budget, query_len).max_decode_seqs
    assert most <= max_num_seqs and most * query_len <= budget
    assert most == max_num_seqs or (most + 1) * query_len > budget


@given(SIZES, st.integers(0, 50))
def test_sizes_are_dropped_and_never_moved(sizes: list[int], most: int) -> None:
    kept, dropped = within(sorted(sizes), most)
    assert [*kept, *dropped] == sorted(sizes)
    assert all(n <= most for n in kept) and all(n > most for n in dropped)


@given(SIZES, st.integers(1, 50))
def test_padding_takes_the_smallest_size_that_holds_a_step(sizes: list[int], wanted: int) -> None:
    holding = [n for n in sizes if n >= wanted]
    assert padded_size(sorted(sizes), wanted) == (min(holding) if holding else None)
    exact = wanted if wanted in sizes else None
    assert padded_size(sorted(sizes), wanted, enable_padding=False) == exact
