"""Sizes that graphs are captured for, and the padding of a step to one of them.

Sizes are only ever dropped, never added or moved. A size that no step can have would cost memory
and time; one that was not asked for would surprise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

DEFAULT_NUM_TOKENS = (*(2**i for i in range(8)), *range(256, 3073, 256))
"""Token counts of piecewise graphs: powers of 2 to 128, then every 256th to 3072 (TensorRT-LLM)."""


def capture_sizes(explicit: Sequence[int] | None, graph_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return batch sizes to capture, ascending and each once, before any is dropped (ATOM).

    Args:
        explicit: wins where it is not None.
        graph_sizes: one value N stands for 1, 2, 4, 8 and every 16th up to N; several are listed.
    """
    if explicit is not None:
        return ascending(explicit)
    if len(graph_sizes) == 1:
        return (1, 2, 4, 8, *range(16, graph_sizes[0] + 1, 16))
    return ascending(graph_sizes)


def ascending(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return sizes in ascending order, each once."""
    return tuple(sorted(set(sizes)))


def within(sizes: Sequence[int], most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split sizes into those that a step can have and those above."""
    return tuple(n for n in sizes if n <= most), tuple(n for n in sizes if n > most)


def padded_size(sizes: Sequence[int], wanted: int, *, enable_padding: bool = True) -> int | None:
    """Return the smallest of ascending sizes that holds `wanted`; None where there is none.

    Without padding only `wanted` itself will do.
    """
    at = bisect_left(sizes, wanted)
    if at == len(sizes) or not (enable_padding or sizes[at] == wanted):
        return None
    return sizes[at]
