"""Arithmetic on sizes that may be symbolic while a forward is traced."""

from __future__ import annotations

import torch


def next_pow2(n: int) -> int:
    """Return the smallest power of two that is at least `n`, and 1 below 1; up to 2^62. Without
    `bit_length`, which would make a graph for each value: every bit below the highest one of n - 1
    is set, in six steps for 64 bits (Warren, Hacker's Delight, 3-2)."""
    below = torch.sym_max(n, 1) - 1
    for shift in (1, 2, 4, 8, 16, 32):
        below = below | (below >> shift)
    power: int = below + 1
    return power
