"""No order in which GPUs sum through memory that they all have mapped goes wrong, and planted bugs
are found."""

from __future__ import annotations

from itertools import product

import pytest
from peer_memory_model import ALONE, BUGS, CALLS, Model, is_found


@pytest.mark.feature("O02")
def test_no_order_of_programs_goes_wrong() -> None:
    sequences = product(CALLS, repeat=3)
    assert sum(Model(2, calls).num_states() for calls in sequences) > 40_000


@pytest.mark.feature("O02")
@pytest.mark.parametrize(("num_ranks", "least"), [(3, 1000), (4, 70_000)])
def test_no_order_of_several_ranks_goes_wrong(num_ranks: int, least: int) -> None:
    assert Model(num_ranks, (ALONE,) * 3).num_states() > least


@pytest.mark.parametrize("bug", BUGS)
def test_what_is_left_out_of_the_protocol_is_found(bug: str) -> None:
    assert is_found(bug)
