"""The accelerator check runs on a CPU too, and survives parts that fail or hang."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "bench" / "gpu_check.py"


def check(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--quick", *arguments]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True)


RUNS: dict[str, tuple[str, ...]] = {
    "kernels": (),
    # Neither what "kernels" has measured nor the sizing of a model with experts.
    "models": (
        "model",
        "step",
        "overlap",
        "drafts",
        "sealed",
        "collectives",
        "sizing",
        "restart",
        "runner",
    ),
    # What the other modes do on a CPU is the matrix of `tests/cluster/parity`; here every kind of
    # part is to run.
    "graphs": (
        "modes",
        "graphs-0-NONE-shared",
        "graphs-0-FULL-shared",
        "graphs-3-FULL_AND_PIECEWISE-shared-bfloat16",
        "graphs-3-FULL_AND_PIECEWISE-per_bucket",
        "graphs-3-FULL_AND_PIECEWISE-shared-sizes",
        "graphs-3-FULL_AND_PIECEWISE-shared-streams",
    ),
    "tests": (),
}
"""The parts of each run that the test runs; all if none is named."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("run", RUNS)
def test_every_part_runs_on_a_cpu_and_is_right(run: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    only = ("--only", *RUNS[run]) if RUNS[run] else ()
    done = check(run, *only, "--slow", "3", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    assert {part["failure"] for part in found["parts"]} == {""}
    rows = [row for part in found["parts"] for row in part["rows"]]
    for row in rows:
        if row["name"].startswith("hidden states"):
            assert row["note"].startswith("0 replays") == (" NONE " in row["name"]), row
    assert all(row["name"] in done.stdout for row in rows)
    parts = {part["part"] for part in found["parts"]}
    targets = [each for each in found["targets"] if each["part"] in parts]
    assert targets
    assert not [each for each in targets if each["state"] in ("MISSED", "not measured")]


def test_a_part_that_cannot_run_is_recorded_and_the_next_one_runs(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('broken on purpose')")
    out = tmp_path / "out.json"
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    done = check("models", "--only", "model", "collectives", "--out", str(out), PYTHONPATH=path)
    assert done.returncode == 1
    parts = {part["part"]: part for part in json.loads(out.read_text())["parts"]}
    assert parts["model"]["failure"] == "exit code 1"
    assert "broken on purpose" in parts["model"]["stderr"]
    assert "FAILED model: exit code 1" in done.stdout
    assert parts["collectives"]["failure"] == "" and parts["collectives"]["rows"]


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("gpu_check")


@pytest.fixture
def run_parts(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run parts whose processes are stood in for by `process`; return what was written."""
    out = tmp_path / "deep" / "out.json"

    def run(process: Any, *names: str) -> dict[str, Any]:
        monkeypatch.setattr(gpu_check, "_run_process", process)
        monkeypatch.setattr(gpu_check, "BEGAN", time.monotonic())
        options = argparse.Namespace(device="cuda", quick=False, deadline=60.0, slow=1.0, out=out)
        gpu_check.run_parts("kernels", names, options)
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    return run


def row(name: str, **fields: Any) -> dict[str, Any]:
    plain: dict[str, Any] = dict.fromkeys(("error", "limit", "seconds", "value"))
    return (
        plain
        | {"name": name, "num_bytes": 0, "num_flops": 0, "unit": "", "note": ""}
        | {"is_right": True, "copy": "copy", "is_replayed": False}
        | fields
    )


def test_a_part_that_does_not_fit_is_not_run_and_said_to_be(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, run_parts: Any, capsys: Any
) -> None:
    limits: list[float] = []

    def process(name: str, options: Any, limit_s: float) -> Any:
        limits.append(limit_s)
        # Its clock is what the next part's limit follows from.
        monkeypatch.setattr(gpu_check.time, "monotonic", lambda: now + 55.0)
        return [], "", ""

    now = time.monotonic()
    found = run_parts(process, "machine", "decode", "rope")
    [limit] = limits
    assert 50.0 < limit <= 60.0  # the deadline, which is shorter than the part's own limit
    assert [part["is_run"] for part in found["parts"]] == [True, False, False]
    assert "no time for it" in found["parts"][2]["failure"]
    assert not gpu_check.is_right(found["parts"])
    printed = capsys.readouterr().out
    assert "NOT RUN rope" in printed and "  not run: 2\n    decode\n    rope" in printed


def test_what_is_to_come_is_on_disk_while_a_part_runs_and_a_failed_machine_stops_nothing(
    run_parts: Any,
) -> None:
    seen = []

    def process(name: str, options: Any, limit_s: float) -> Any:
        parts = json.loads(options.out.read_text())["parts"]
        seen.append([part["part"] for part in parts if part["is_run"]])
        if name == "machine":
            raise OSError("no process left")
        return [row(name, seconds=1.0, num_bytes=1)], "", ""

    found = run_parts(process, "machine", "decode", "rope")
    assert seen == [[], ["machine"], ["machine", "decode"]]
    machine, decode, rope = found["parts"]
    assert "no process left" in machine["failure"]
    assert decode["failure"] == rope["failure"] == ""
    assert "floor_s" not in rope["rows"][0]


def test_a_missed_target_is_printed_and_written_and_is_not_wrong(
    gpu_check: ModuleType, run_parts: Any, capsys: Any
) -> None:
    rates = [row("copy", seconds=1.0, num_bytes=100), row("matmul", seconds=1.0, num_flops=100)]
    rows = {
        "machine": rates,
        "decode": [
            row("decode, one long: 1 x 9", seconds=1.0, num_bytes=90),
            row("decode, batch: 4 x 9", seconds=2.0, num_bytes=90),
        ],
    }
    found = run_parts(lambda name, *_: (rows.get(name, []), "", ""), "machine", "decode", "ragged")
    states = {
        each["row"]: (each["found"] and round(each["found"], 6), each["state"])
        for each in found["targets"]
    }
    assert states == {
        "decode, one long: 1 x 9": (0.9, "met"),
        "decode, batch: 4 x 9": (0.45, "MISSED"),
        "decode, ragged:": (None, "not measured"),
    }
    assert gpu_check.is_right(found["parts"])
    printed = capsys.readouterr().out
    assert "MISSED decode, batch: 4 x 9: wanted at least 0.85" in printed
    assert "targets missed: 1" in printed and "targets not measured: 1" in printed


def test_a_floor_has_the_launch_of_what_is_replayed_and_the_rate_of_the_link_of_what_crosses_it(
    run_parts: Any,
) -> None:
    rows = {
        "machine": [
            row("copy", seconds=1.0, num_bytes=100),
            row("matmul", seconds=1.0, num_flops=10),
            row("launch", seconds=0.5),
        ],
        "decode": [
            row("alone", seconds=4.0, num_bytes=100, num_flops=20),
            row("replayed", seconds=5.0, num_bytes=200, is_replayed=True),
        ],
        "transfer": [
            row("link", seconds=1.0, num_bytes=10, copy="link"),
            row("blocks", seconds=4.0, num_bytes=20, copy="link"),
        ],
    }
    found = run_parts(lambda name, *_: (rows[name], "", ""), *rows)
    floors = {each["name"]: each.get("floor_s") for p in found["parts"] for each in p["rows"]}
    assert floors == {
        **{"copy": 1.0, "matmul": 1.0, "launch": None, "alone": 2.0, "replayed": 2.5},
        **{"link": 1.0, "blocks": 2.0},
    }


def test_a_part_that_does_not_end_is_killed_with_what_it_started(gpu_check: ModuleType) -> None:
    options = argparse.Namespace(device="cpu", quick=True)
    rows, failure, _ = gpu_check._run_process("machine", options, 0.05)
    assert (rows, failure) == ([], "no end within 0.05 s")


def run_altered(alteration: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the check with a line of Python before it."""
    code = f"import gpu_check, gpu_check_kernels as parts, time\n{alteration}\ngpu_check.main()"
    command = [sys.executable, "-c", code, "--device", "cpu", "--quick", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parent)


def test_a_case_that_fails_is_wrong_and_the_others_run() -> None:
    done = run_altered(
        "from model.kernels import cpu\n"
        "real = cpu.paged_decode\n"
        "def paged_decode(*args):\n"
        "    if args[-1]: raise ValueError('broken on purpose')\n"
        "    real(*args)\n"
        "cpu.paged_decode = paged_decode",
        *("--part", "decode"),
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["is_right"] for row in rows] == [True, True, True, False], done.stderr
    assert rows[-1]["note"] == "ValueError: broken on purpose"
    assert rows[-1]["name"] == "decode, window"


def test_a_part_that_hangs_tells_its_stack_before_its_limit() -> None:
    done = run_altered(
        "def part_rope(at):\n    time.sleep(4)\n    yield parts.Row('late')\n"
        "parts.part_rope = part_rope",
        *("--part", "rope", "--time-limit", "3.5"),
    )
    assert "Timeout (0:00:00.5" in done.stderr and "in part_rope" in done.stderr
    assert json.loads(done.stdout)["name"] == "late"


def test_an_error_that_is_no_number_is_not_right() -> None:
    done = run_altered("parts.error_of = lambda *_: float('nan')", "--part", "elementwise")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    found = [row["is_right"] for row in rows if "not applicable" not in row["note"]]
    assert found == [False] * 3, done.stderr


FAILING = """
import logging

import pytest


@pytest.mark.gpu
def test_that_fails_behind_a_name_that_is_longer_than_the_lines_of_a_terminal_are() -> None:
    for number in range(500):
        logging.getLogger("torch.__trace").warning("record %d", number)
    raise ValueError("broken on purpose")
"""


def test_why_a_test_failed_is_at_the_end_of_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)  # of the run that this test is part of
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_failing.py").write_text(FAILING)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n slow\n")
    done = run_altered(
        f"import gpu_check_tests, pathlib\ngpu_check_tests.ROOT = pathlib.Path({str(tmp_path)!r})",
        *("--part", "tests"),
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["note"] for row in rows] == ["failed", "exit code 1 of pytest, 1 tests"]
    summary = done.stderr[done.stderr.rindex("short test summary info") :]
    assert "ValueError: broken on purpose" in summary
    assert "record" not in done.stderr[-4000:]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("run", [*RUNS][:3])
def test_every_part_is_right_on_a_gpu(run: str) -> None:
    done = check(run, "--device", "cuda")
    assert done.returncode == 0, done.stdout
