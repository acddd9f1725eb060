"""No order in which ranks exchange data through shared memory goes wrong, and planted bugs are
found."""

from __future__ import annotations

from itertools import product

import pytest
from communicator_model import BUGS, KINDS, is_found, num_states

ALIKE = [(kind,) * 3 for kind in KINDS]


@pytest.mark.parametrize(
    ("num_ranks", "sequences"), [(2, [*product(KINDS, repeat=3)]), (4, ALIKE)], ids=["2", "4"]
)
def test_no_order_of_the_ranks_goes_wrong(num_ranks: int, sequences: list[tuple[str, ...]]) -> None:
    assert sum(num_states(num_ranks, kinds) for kinds in sequences) > 5000


@pytest.mark.parametrize("bug", BUGS)
def test_what_is_left_out_of_the_protocol_is_found(bug: str) -> None:
    assert is_found(bug, 2)
