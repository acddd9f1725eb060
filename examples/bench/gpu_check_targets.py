"""What gpu_check.py's figures should reach: one table, and the verdicts on it.

A target names rows by how their names begin. It bounds a share of the floor's rate, how many times
as fast a row is as another one, a plain value, or asks only that the row is right. The features
behind it are those whose effect a GPU alone can show.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Figure(Enum):
    """What of a row is compared with the bound."""

    SHARE = "share of the floor's rate"
    """At least."""
    SPEEDUP = "times as fast"
    """As the row `against`; at least."""
    SAVING = "times as small"
    """As the value of the row `against`; at least."""
    VALUE = "value"
    """At most."""
    RIGHT = "right"
    """The row exists and is right; on every device."""


class State(Enum):
    """What became of a target."""

    MET = "met"
    MISSED = "MISSED"
    UNKNOWN = "not measured"
    """Its part failed or did not run, or another row is missing."""
    NOT_APPLICABLE = "not applicable"
    """It is a matter of speed, and this is no GPU, or shapes are small."""


@dataclass(frozen=True)
class Target:
    """One line of the table. `part` is the one that yields the row."""

    part: str
    row: str
    figure: Figure
    bound: float = 1.0
    features: tuple[str, ...] = ()
    against: str = ""


@dataclass(frozen=True)
class Judged:
    """A target with what was found."""

    target: Target
    row: str
    """The whole name, or its beginning if there is none."""
    found: float | None
    state: State

    @property
    def text(self) -> str:
        """The figure beside its target, in one line."""
        found = "not measured" if self.found is None else f"{self.found:.3g}"
        figure = self.target.figure
        if figure is Figure.RIGHT:
            line = f"{self.row}: wanted right, found {found if self.found is None else self._right}"
        else:
            least = "at most" if figure is Figure.VALUE else "at least"
            other = f" as {self.target.against}" if self.target.against else ""
            wanted = f"wanted {least} {self.target.bound:g} ({figure.value}{other})"
            line = f"{self.row}: {wanted}, found {found}"
        return line + (f" [{' '.join(self.target.features)}]" if self.target.features else "")

    @property
    def _right(self) -> str:
        return "right" if self.found else "wrong"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        target = asdict(self.target) | {"figure": self.target.figure.value}
        return target | {"row": self.row, "found": self.found, "state": self.state.value}


SHARE, SPEEDUP, SAVING = Figure.SHARE, Figure.SPEEDUP, Figure.SAVING
VALUE, RIGHT = Figure.VALUE, Figure.RIGHT
_STATES = "hidden states and logits, level"
_BEST = "3 FULL_AND_PIECEWISE shared"

TARGETS = (
    # Attention: the copy rate is what a decode can reach, the rate of a product what a prompt can.
    Target("decode", "decode, one long:", SHARE, 0.85),
    Target("decode", "decode, batch:", SHARE, 0.85),
    Target("pool", "decode, ", SHARE, 0.85),
    Target("ragged", "decode, ragged:", SHARE, 0.60),
    Target("prefill", "prefill, one prompt:", SHARE, 0.75),
    Target("prefill", "prefill, prompts:", SHARE, 0.75),
    Target(
        "tiles",
        "prefill, one prompt, 128 x 64 w8 s3:",
        SPEEDUP,
        against="prefill, one prompt, 128 x 32 w8 s3:",
    ),
    Target(
        "tiles",
        "prefill, one prompt, 64 x 64 w4 s3:",
        SPEEDUP,
        against="prefill, one prompt, 128 x 32 w8 s3:",
    ),
    Target("rope", "rope and KV write, prompt:", SHARE, 0.80),
    Target("elementwise", "norm:", SHARE, 0.90),
    Target("elementwise", "norm with residual:", SHARE, 0.90),
    Target("elementwise", "silu and mul:", SHARE, 0.90),
    Target("experts", "experts, one token:", SHARE, 0.80),
    Target("experts", "experts, decodes:", SHARE, 0.80),
    Target("experts", "experts, prompt:", SHARE, 0.60),
    # Whole models and the engine's loops.
    Target("step", "decode step, graph: 1 x", SHARE, 0.85, ("D01",)),
    Target("overlap", "gap between replays, overlapped:", VALUE, 100.0, ("D01",)),
    Target("overlap", "tokens, overlapped against plain", RIGHT),
    Target("sealed", "late compilations", RIGHT, features=("J04", "C05")),
    Target("collectives", "all_reduce of one rank", RIGHT, features=("P10",)),
    Target("collectives", "all_gather of one rank", RIGHT, features=("K08",)),
    Target("collectives", "gather of one rank", RIGHT, features=("P10",)),
    Target("sizing", "share of ", RIGHT, features=("C10",)),
    Target("sizing-moe", "share of ", RIGHT, features=("C10",)),
    Target("restart", "compilations and builds, second start", RIGHT, features=("G05",)),
    Target("restart", "tokens, second start against first", RIGHT, features=("G05",)),
    Target(
        "restart",
        "seconds, second start",
        SAVING,
        1.5,
        ("G05",),
        against="seconds, first start",
    ),
    # Graphs.
    Target(
        "modes",
        "decode step, 0.6B FULL: 1",
        SPEEDUP,
        1.9,
        ("B05",),
        against="decode step, 0.6B PIECEWISE: 1",
    ),
    Target(
        "modes",
        "prompt step, 0.6B PIECEWISE: 100",
        SPEEDUP,
        features=("N01",),
        against="prompt step, 0.6B eager: 100",
    ),
    Target("graphs-3-PIECEWISE-shared", f"{_STATES} 3 PIECEWISE shared", RIGHT, features=("B02",)),
    Target("graphs-0-FULL-shared", f"{_STATES} 0 FULL shared", RIGHT, features=("B03", "B08")),
    Target(
        "graphs-0-FULL_DECODE_ONLY-shared",
        f"{_STATES} 0 FULL_DECODE_ONLY shared",
        RIGHT,
        features=("B04", "K03", "M01"),
    ),
    Target(
        "graphs-0-FULL_AND_PIECEWISE-shared",
        f"{_STATES} 0 FULL_AND_PIECEWISE shared",
        RIGHT,
        features=("X03",),
    ),
    Target("graphs-3-FULL_AND_PIECEWISE-shared", f"{_STATES} {_BEST}", RIGHT, features=("B05",)),
    Target(
        "graphs-3-FULL_AND_PIECEWISE-shared-bfloat16",
        f"{_STATES} {_BEST} bfloat16",
        RIGHT,
        features=("B05",),
    ),
    Target(
        "graphs-2-NONE-shared",
        "decode step, level 2 NONE shared",
        SPEEDUP,
        1.0,
        ("A03",),
        against="decode step, level 0 NONE shared",
    ),
    Target(
        "graphs-3-FULL_AND_PIECEWISE-shared",
        f"graph pools, level {_BEST}",
        SAVING,
        1.0,
        ("C06",),
        against="graph pools, level 3 FULL_AND_PIECEWISE per_bucket",
    ),
    Target(
        "graphs-3-FULL_AND_PIECEWISE-shared-sizes",
        f"decode step, level {_BEST} sizes",
        SPEEDUP,
        1.0,
        ("F02", "F06"),
        against=f"decode step, level {_BEST}",
    ),
    Target(
        "graphs-3-FULL_AND_PIECEWISE-shared-streams",
        f"{_STATES} {_BEST} streams",
        RIGHT,
        features=("O08",),
    ),
    # Tests.
    Target(
        "tests",
        "test_a_smaller_graph_finds_its_memory_in_the_pool",
        RIGHT,
        features=("C02", "M03"),
    ),
    Target("tests", "test_reading_a_value_inside_of_a_capture", RIGHT, features=("C11",)),
    Target("tests", "test_on_a_gpu_too_planning_ahead_changes_no_token", RIGHT),
)

ELSEWHERE = {
    "more than one GPU": ["O05", "P01", "P06", "P12", "P14", "P15", "P16", "P19"],
    "a served application": ["P21", "Q10"],
    "no figure of its own here": [
        *("C04", "C08", "C09", "D04", "G12", "I04", "M04", "M06", "N03", "N06", "N07", "N09"),
        *("O02", "O03", "O04", "O07", "Q07"),
    ],
}
"""The other features of which a GPU alone shows something, by what it would take."""


def judge(parts: list[dict[str, Any]], *, has_speed: bool) -> list[Judged]:
    """Return a verdict on each target of these parts.

    Args:
        has_speed: this is a GPU at full size; else only what is right counts.
    """
    rows = {part["part"]: part["rows"] for part in parts}
    every = [row for part in parts for row in part["rows"]]
    judged = []
    for target in TARGETS:
        if target.part not in rows:
            continue
        found = [row for row in rows[target.part] if _is_of(target.row, row["name"])]
        if target.figure is not RIGHT and not has_speed:
            judged.append(Judged(target, target.row, None, State.NOT_APPLICABLE))
        elif not found:
            judged.append(Judged(target, target.row, None, State.UNKNOWN))
        else:
            judged += [_judged(target, row, every) for row in found]
    return judged


def _is_of(beginning: str, name: str) -> bool:
    """Return whether a row is meant: what ends like a whole name means that row alone."""
    is_open = beginning.endswith((":", " ", " x")) or beginning.startswith("test_")
    return name == beginning or (is_open and name.startswith(beginning))


def _judged(target: Target, row: dict[str, Any], every: list[dict[str, Any]]) -> Judged:
    figure = next(_figures(target, row, every), None)
    if figure is None:
        return Judged(target, row["name"], None, State.UNKNOWN)
    is_met = figure <= target.bound if target.figure is VALUE else figure >= target.bound
    return Judged(target, row["name"], figure, State.MET if is_met else State.MISSED)


def _figures(
    target: Target, row: dict[str, Any], every: list[dict[str, Any]]
) -> Iterator[float | None]:
    """Yield what the bound is compared with, or nothing if it cannot be known."""
    others = [other for other in every if target.against and _is_of(target.against, other["name"])]
    if target.figure is RIGHT:
        yield float(row["is_right"])
    elif target.figure is VALUE:
        yield row["value"]
    elif target.figure is SHARE:
        times = row.get("times_floor")
        yield 1 / times if times else None
    else:
        key = "seconds" if target.figure is SPEEDUP else "value"
        yield from (other[key] / row[key] for other in others if other[key] and row[key])
