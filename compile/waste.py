"""`python -m compile.waste`: what padding steps to captured sizes costs, and which would cost less.

    curl -s localhost:8000/debug/ranks | python -m compile.waste       the last steps of a server
    python -m compile.waste TRACE.json --sizes 1,2,4,8,16              a list of tokens, one a step
    python -m compile.waste TRACE.json --sizes 1,2,4,8,16 --most 4     at most so many sizes
    curl -s localhost:8000/debug/ranks | python -m compile.waste --mib 64     in so much memory

A server answers `/debug/ranks` if it was started with `debug=true`. Nothing is changed: sizes are
arguments of the next start, `cudagraph_capture_sizes` of decode steps and `capture_num_tokens` of
others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from compile.config import CUDAGraphMode
from compile.dispatch import ascending, padded_size

MIB = 1 << 20
DECODE = 1
"""The kind of a step in which every sequence decodes, as `/debug/ranks` has it."""


class SizeWaste(NamedTuple):
    """What one captured size is used for."""

    size: int
    num_steps: int
    num_tokens: int
    """That were asked for."""

    @property
    def padding(self) -> int:
        return self.size * self.num_steps - self.num_tokens


class Waste(NamedTuple):
    sizes: tuple[SizeWaste, ...]
    """Of all sizes, ascending, used or not."""
    num_above: int
    """Steps that no size holds: they run eagerly, without padding."""

    @property
    def padding(self) -> int:
        return sum(each.padding for each in self.sizes)

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for each in self.sizes)


def waste(token_counts: Mapping[int, int], sizes: Sequence[int]) -> Waste:
    """Return what padding to these sizes costs. token_counts: how many steps had so many tokens. A
    size more pads no step more that had one before."""
    sizes = ascending(sizes)
    held = {size: [0, 0] for size in sizes}
    above = 0
    for num_tokens, num_steps in token_counts.items():
        size = padded_size(sizes, num_tokens)
        if size is None:
            above += num_steps
        else:
            held[size][0] += num_steps
            held[size][1] += num_steps * num_tokens
    return Waste(tuple(SizeWaste(size, *counts) for size, counts in held.items()), above)


def proposed(token_counts: Mapping[int, int], most: int) -> tuple[int, ...]:
    """Return at most `most` sizes that hold every step and pad least, ascending; ValueError: none.

    Each is a count that occurs: a size between two counts could be lowered. Of the cheapest ways to
    hold the first counts with k sizes, the one with k + 1 follows by where its last size begins.
    """
    if most < 1:
        raise ValueError(f"most: wanted 1 size or more, found {most}")
    counts = sorted(token_counts)
    steps = [0, *accumulate(token_counts[count] for count in counts)]
    tokens = [0, *accumulate(count * token_counts[count] for count in counts)]

    def padding(first: int, end: int) -> int:
        """That the counts from `first` to before `end` get, padded to the last of them."""
        return counts[end - 1] * (steps[end] - steps[first]) - (tokens[end] - tokens[first])

    def best(end: int, before: list[tuple[int, tuple[int, ...]]]) -> tuple[int, tuple[int, ...]]:
        """What the counts before `end` cost with one size more than those `before` have."""
        largest = counts[end - 1]
        ways = ((cost + padding(i, end), (*held, largest)) for i, (cost, held) in enumerate(before))
        return min(ways)

    numbers = range(1, len(counts) + 1)
    cheapest = [(0, ()), *(best(end, [(0, ())]) for end in numbers)]
    for _ in range(min(most, len(counts)) - 1):
        cheapest = [(0, ()), *(best(end, cheapest[:end]) for end in numbers)]
    return cheapest[-1][1]


@dataclass(frozen=True)
class Traffic:
    """Steps of one kind, and the sizes that were captured for them."""

    name: str
    token_counts: Mapping[int, int]
    sizes: tuple[int, ...]
    num_bytes: int = 0
    """That its graphs take; 0: unknown."""


def traffic_of(told: Any) -> Iterator[Traffic]:
    """Yield the steps of each group in an answer of `/debug/ranks`, by the kind of graphs that they
    replay or would if one were large enough; ValueError: it is no such answer."""
    try:
        groups = [
            (f"{pool}/{replica['id']}", rank)
            for pool, replicas in told["pools"].items()
            for replica in replicas["replicas"]
            for rank in replica["ranks"][:1]  # the others have agreed to the same
            if "error" not in rank
        ]
        for name, rank in groups:
            yield from _traffic_of(name, rank)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"trace: wanted an answer of /debug/ranks, found none: {error!r}"
        ) from error


def _traffic_of(name: str, rank: Mapping[str, Any]) -> Iterator[Traffic]:
    captured, counts = rank["captured"], {"full": Counter[int](), "piecewise": Counter[int]()}
    for agreed in rank["agreements"]:
        is_mixed = agreed["kind"] != DECODE
        if agreed["has_work"] and not (is_mixed and agreed["mode"] == CUDAGraphMode.FULL.value):
            kind = "piecewise" if is_mixed or not captured["full"] else "full"
            counts[kind][max(agreed["num_scheduled_tokens"])] += 1
    num_graphs = sum(len(captured[kind]) for kind in counts)
    for kind, token_counts in counts.items():
        if sizes := tuple(captured[kind]):
            num_bytes = captured["bytes"] * len(sizes) // num_graphs
            yield Traffic(f"{name}, {kind} graphs", token_counts, sizes, num_bytes)


def table(traffic: Traffic, most: int | None = None, budget_bytes: int | None = None) -> list[str]:
    """Return lines that tell what is wasted, and which sizes would waste less: as many as there
    are, at most `most`, and as many as have room in `budget_bytes`; ValueError: it tells of none.
    """
    found = waste(traffic.token_counts, traffic.sizes)
    num_steps = sum(traffic.token_counts.values())
    each = f", about {_mib(traffic.num_bytes / len(found.sizes))} each" if traffic.num_bytes else ""
    lines = [f"{traffic.name}: {num_steps} steps, {len(found.sizes)} sizes{each}"]
    lines.append(f"{'size':>8} {'steps':>8} {'tokens':>10} {'padding':>10} {'share':>7}")
    lines += [_row(str(size.size), size.num_steps, size) for size in found.sizes]
    lines.append(_row("all", num_steps - found.num_above, found))
    if found.num_above:
        lines.append(f"{'above':>8} {found.num_above:>8}   run eagerly")
    if not num_steps:
        return lines
    if budget_bytes is not None:
        if not traffic.num_bytes:
            raise ValueError("--mib: wanted a trace that tells what graphs take, found none")
        have_room = max(1, budget_bytes * len(found.sizes) // traffic.num_bytes)
        most = min(most or have_room, have_room)
    most = len(found.sizes) if most is None else most
    better = proposed(traffic.token_counts, most)
    padding = waste(traffic.token_counts, better).padding
    lines.append(f"least with {most}: padding {padding}: {','.join(map(str, better))}")
    return lines


def _row(name: str, num_steps: int, found: SizeWaste | Waste) -> str:
    num_tokens, padding = found.num_tokens, found.padding
    share = f"{padding / (num_tokens + padding):7.1%}" if num_tokens else ""
    return f"{name:>8} {num_steps:>8} {num_tokens:>10} {padding:>10} {share}".rstrip()


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:.1f} MiB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of each kind of steps; return 1 if the trace has none."""
    parser = argparse.ArgumentParser(prog="python -m compile.waste", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("trace", nargs="?", type=Path, help="a file (standard input)")
    parser.add_argument("--sizes", type=_sizes, help="judge these, not those that were captured")
    parser.add_argument("--most", type=int, help="sizes to propose, at most (as many as there are)")
    parser.add_argument("--mib", type=float, help="memory for all graphs of one kind")
    given = parser.parse_args(arguments)
    try:
        found = _read(given.trace.read_text() if given.trace else sys.stdin.read(), given.sizes)
        budget_bytes = None if given.mib is None else int(given.mib * MIB)
        tables = [table(each, given.most, budget_bytes) for each in found]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n\n".join("\n".join(lines) for lines in tables))
    return 0


def _read(text: str, sizes: tuple[int, ...] | None) -> list[Traffic]:
    told = json.loads(text)
    if isinstance(told, dict):
        found = list(traffic_of(told))
        if not found:
            raise ValueError("trace: wanted a group that captured graphs, found none")
        return [Traffic(t.name, t.token_counts, sizes or t.sizes, t.num_bytes) for t in found]
    if not isinstance(told, list) or not all(type(each) is int and each > 0 for each in told):
        raise ValueError(f"trace: wanted a list of the tokens of each step, found {text[:80]!r}")
    if sizes is None:
        raise ValueError("--sizes: wanted with a list of steps, found none")
    return [Traffic("trace", Counter(told), sizes)]


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    sys.exit(main())
