"""`python -m compile.waste`: padding by captured size, and sizes that would pad less."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile import waste as waste_module
from compile.waste import SizeWaste, proposed, waste

COUNTS = st.dictionaries(st.integers(1, 40), st.integers(1, 50), min_size=1, max_size=9)
SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=8)


@pytest.mark.feature("N07")
@given(COUNTS, SIZES)
def test_each_step_is_padded_to_the_next_size_or_runs_eagerly(
    counts: dict[int, int], sizes: list[int]
) -> None:
    found = waste(counts, sizes)
    assert [each.size for each in found.sizes] == sorted({*sizes})
    wanted = {size: [0, 0] for size in sizes}
    above = 0
    for num_tokens, num_steps in counts.items():
        if holding := [size for size in sizes if size >= num_tokens]:
            wanted[min(holding)][0] += num_steps
            wanted[min(holding)][1] += num_steps * (min(holding) - num_tokens)
        else:
            above += num_steps
    assert {each.size: [each.num_steps, each.padding] for each in found.sizes} == wanted
    assert found.num_above == above


@pytest.mark.feature("N07")
@given(COUNTS, SIZES, st.integers(1, 50))
def test_a_size_more_pads_no_step_more(counts: dict[int, int], sizes: list[int], more: int) -> None:
    before, after = waste(counts, sizes), waste(counts, [*sizes, more])
    assert after.num_above <= before.num_above
    if after.num_above == before.num_above:  # else there is more to pad
        assert after.padding <= before.padding


@pytest.mark.feature("N07")
@given(COUNTS, st.integers(1, 9))
def test_what_is_proposed_holds_all_and_no_other_sizes_pad_less(
    counts: dict[int, int], most: int
) -> None:
    found = proposed(counts, most)
    assert len(found) <= most and found[-1] == max(counts)
    others = [
        waste(counts, (*chosen, max(counts))).padding
        for number in range(most)
        for chosen in combinations(sorted(counts), number)
    ]
    assert waste(counts, found).padding == min(others)


def test_a_proposal_of_no_size_is_refused() -> None:
    with pytest.raises(ValueError, match="wanted 1 size or more, found 0"):
        proposed({1: 1}, 0)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    code = waste_module.main(arguments)
    said = capsys.readouterr()
    return code, said.out.splitlines(), said.err


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([5] * 10 + [9] * 30 + [16, 40]))
    return str(path)


@pytest.mark.feature("N07")
def test_the_table_of_a_trace_adds_up(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = run(capsys, trace, "--sizes", "8,16,32", "--most", "2")
    assert code == 0
    assert lines == [
        "trace: 42 steps, 3 sizes",
        "    size    steps     tokens    padding   share",
        "       8       10         50         30   37.5%",
        "      16       31        286        210   42.3%",
        "      32        0          0          0",
        "     all       41        336        240   41.7%",
        "   above        1   run eagerly",
        "least with 2: padding 64: 9,40",
    ]


@pytest.mark.parametrize(
    ("text", "arguments", "error"),
    [
        ("[1, 2]", [], "--sizes: wanted with a list of steps, found none"),
        (
            "[1, 0]",
            ["--sizes=4"],
            "trace: wanted a list of the tokens of each step, found '[1, 0]'",
        ),
        ('{"pools": 3}', [], "trace: wanted an answer of /debug/ranks, found none: "),
        ('{"pools": {}}', [], "trace: wanted a group that captured graphs, found none"),
        ("{", [], "Expecting property name"),
        ("[1]", ["--sizes=4", "--mib=1"], "--mib: wanted a trace that tells what graphs take"),
        ("[1]", ["--sizes=4", "--most=0"], "most: wanted 1 size or more, found 0"),
    ],
)
def test_what_cannot_be_judged_is_one_line_and_exit_code_1(
    text: str,
    arguments: list[str],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    code, lines, said = run(capsys, *arguments)
    assert (code, lines) == (1, [])
    assert said.startswith(error) and said.count("\n") == 1


def rank(mode: str, steps: list[tuple[int, int, int]], **captured: Any) -> dict[str, Any]:
    """Return what a rank tells of these steps: kind, mode, and the tokens of its longest rank."""
    agreements = [
        {"kind": kind, "mode": mode, "has_work": tokens > 0, "num_scheduled_tokens": [1, tokens]}
        for kind, mode, tokens in steps
    ]
    return {"captured": captured, "agreements": agreements}


@pytest.mark.feature("N07")
def test_a_servers_steps_are_told_by_the_graphs_that_hold_them() -> None:
    told = rank(
        "full",
        [(1, 2, 3), (1, 2, 4), (1, 0, 9), (2, 1, 30), (2, 2, 30), (0, 0, 0)],
        full=[4, 8],
        piecewise=[32],
        bytes=3 << 20,
    )
    body = {"pools": {"mixed": {"replicas": [{"id": "r", "ranks": [told, {"error": "gone"}]}]}}}
    full, piecewise = waste_module.traffic_of(body)
    assert full.token_counts == Counter({3: 1, 4: 1, 9: 1})
    assert (full.name, full.sizes, full.num_bytes) == ("mixed/r, full graphs", (4, 8), 2 << 20)
    assert piecewise.token_counts == Counter({30: 1}) and piecewise.num_bytes == 1 << 20
    assert waste(full.token_counts, full.sizes).sizes == (SizeWaste(4, 2, 7), SizeWaste(8, 0, 0))
    # In the memory of one graph there is one size, and in that of three there are three.
    assert waste_module.table(full, budget_bytes=1 << 20)[-1] == "least with 1: padding 11: 9"
    assert waste_module.table(full, budget_bytes=3 << 20)[-1] == "least with 3: padding 0: 3,4,9"
