"""Which code makes a graph for each size, how it is found, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compile.pieces.diagnose import recompile_hazards
from compile.pieces.shapes import next_pow2

# --- a power of two -----------------------------------------------------------------------------


@pytest.mark.feature("J05")
def test_next_pow2_is_exact() -> None:
    power = 1
    for n in range(2**20 + 1):
        if n > power:
            power *= 2
        assert next_pow2(n) == power
    for k in range(2, 62):
        assert [next_pow2(2**k + i) for i in (-1, 0, 1)] == [2**k, 2**k, 2 ** (k + 1)]
    assert [next_pow2(n) for n in (2**62 - 1, 2**62, 2**62 + 1)] == [2**62, 2**62, 2**63]
    assert [next_pow2(n) for n in (-5, 0, 1)] == [1, 1, 1]


# --- what makes graphs, and what does not ---------------------------------------------------------


def by_bit_length(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * (1 << (n - 1).bit_length())


def by_next_pow2(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * next_pow2(n)


def by_max(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    return x + max(sizes)


def by_sym_max(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    return x + torch.sym_max(sizes[0], sizes[1])


def by_branch(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] > 16 else x + 1


def by_where(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.tensor(x.shape[0] > 16), x * 2, x + 1)


def by_loop(x: torch.Tensor) -> torch.Tensor:
    while x.shape[0] > 1:
        x = x[: x.shape[0] // 2]
    return x


# --- finding them ---------------------------------------------------------------------------------


@pytest.mark.feature("J05")
@pytest.mark.parametrize(
    ("function", "better", "pattern", "remedy"),
    [
        (by_bit_length, by_next_pow2, "bit_length()", "next_pow2"),
        (by_max, by_sym_max, "max() of a list", "torch.sym_max"),
        (by_branch, by_where, "a branch on a size", "torch.where"),
        (by_loop, by_where, "a loop on a size", "torch.where"),
    ],
)
def test_a_hazard_is_named_with_its_line_and_its_remedy_which_is_none(
    function: Callable[..., Any], better: Callable[..., Any], pattern: str, remedy: str
) -> None:
    assert recompile_hazards(better) == []
    (hazard,) = recompile_hazards(function)
    line = f"{__file__}:{function.__code__.co_firstlineno + 1}"
    assert hazard.startswith(f"{line}: wanted {remedy}") and hazard.endswith(f", found {pattern}")
