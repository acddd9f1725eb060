"""The attacks on a running application, and the load that is too much for it, as commands.

Speeds are not checked: a machine that is busy with other tests fails rows that it should not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "examples" / "bench"
ATTACKS = "odd-texts,methods,model-name,schema-references,grammar-chains"
ARGUMENTS = ["O=0", "dtype=float32"]
"""In bfloat16 an answer may depend on what else is in the batch."""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1500)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str, int]:
    """The report of five quick attacks, what was printed, and the exit code."""
    out = tmp_path_factory.mktemp("hostile") / "out.json"
    lengths = ("--seconds", "4", "--calm-s", "3")
    done = run("hostile.py", "--only", ATTACKS, *lengths, "--out", str(out), *ARGUMENTS)
    assert out.exists(), done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout, done.returncode


@pytest.mark.slow
@pytest.mark.ray
def test_each_attack_is_a_row_with_the_outcomes_of_its_requests(
    attacked: tuple[Any, str, int],
) -> None:
    """Behind a row without an attack. The exit code says whether a figure is beyond its target."""
    report, printed, code = attacked
    rows = {row["name"]: row for row in report["rows"]}
    assert [*rows] == ["nothing", *ATTACKS.split(",")]
    assert report["arguments"] == ["debug=true", *ARGUMENTS]
    for name, row in rows.items():
        seen = row["seen"]
        assert name in printed
        assert seen["health"]["polls"] > 0
        assert set(seen["growth_bytes"]) == {"ingress", "proxy", "ranks", "rest"}
        assert min(seen["growth_bytes"].values()) >= 0
        assert seen["honest"]["wrong"] == 0
        assert (seen["honest"]["token_gap_s"] > 0.5) == ("token" in " ".join(row["failures"]))
    num_failed = sum(bool(row["failures"]) for row in report["rows"])
    assert f"{num_failed} of 6 rows failed" in printed
    assert code == (1 if num_failed else 0)
    nothing, texts, methods, names, *_ = (row["attacked"] for row in report["rows"])
    assert nothing["outcomes"] == {} and nothing["most_bytes"] == 0
    assert sum(texts["outcomes"].values()) == 20
    assert {"200", "400"} <= set(texts["outcomes"])
    assert sum(methods["outcomes"].values()) == 42
    assert set(names["outcomes"]) == {"404"} and names["outcomes"]["404"] >= 1
    assert names["most_bytes"] > 8_000_000


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.feature("R09")
def test_grammars_that_would_end_an_ingress_are_refused_and_restart_nothing(
    attacked: tuple[Any, str, int],
) -> None:
    report, _, _ = attacked
    for row, num_refused in zip(report["rows"][-2:], (3, 4), strict=True):
        outcomes = row["attacked"]["outcomes"]
        # A busy machine answers some of them only when the attack has ended.
        assert set(outcomes) <= {"200", "400", "unanswered"}, outcomes
        others = sum(outcomes.values()) - num_refused
        assert "400" in outcomes and outcomes.get("200", 0) <= others, outcomes
        assert row["seen"]["restarted"] == [] and row["next_s"] is not None


def test_an_attack_that_does_not_exist_is_refused_by_name() -> None:
    done = run("hostile.py", "--only", "methods,nonsense")
    assert done.returncode == 1
    assert "found ['nonsense']" in done.stderr


@pytest.mark.slow
@pytest.mark.ray
def test_an_overload_is_admitted_or_told_when_to_come_again(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    places = ("--max-num-seqs", "2", "--max-queued-requests", "4")
    done = run("overload.py", *places, "--seconds", "5", "--out", str(out), *ARGUMENTS)
    assert out.exists(), done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["num_places"] == 6
    assert report["arguments"] == ["max_num_seqs=2", "max_queued_requests=4", *ARGUMENTS]
    assert report["unloaded"]["outcomes"] == {"200": 20}
    outcomes = report["overload"]["outcomes"]
    # On a machine with other work a client may need more than a second for its body, too.
    late = {told for told in outcomes if told.startswith("408") and "sooner under load" in told}
    assert set(outcomes) - late <= {"200", "429", "503"}
    assert outcomes["200"] > 0 and outcomes.get("429", 0) + outcomes.get("503", 0) > 0
    assert report["overload"]["no_retry_after"] == report["overload"]["wrong"] == 0
    assert sum(outcomes.values()) == round(5 * report["arrivals_per_second"])
    is_late = report["recovery_s"] is None or report["recovery_s"] > 5
    assert done.returncode == (1 if report["ratio"] > 1.5 or is_late or late else 0)
