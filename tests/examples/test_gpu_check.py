"""The accelerator check runs on a CPU too, and survives parts that fail or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "bench" / "gpu_check.py"


def check(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--quick", *arguments]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_part_runs_on_a_cpu_and_is_right(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = check("--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    assert [part["failure"] for part in found["parts"]] == [""] * 26
    rows = [row for part in found["parts"] for row in part["rows"]]
    assert len(rows) >= 60
    notes = {row["name"]: row["note"] for row in rows if row["name"].startswith("hidden states")}
    assert len(notes) == 11
    for name, note in notes.items():
        assert note.startswith("0 replays") == (" NONE " in name), (name, note)
    assert all(row["name"] in done.stdout for row in rows)
    timed = [row for row in rows if row["seconds"] is not None]
    assert all(row["floor_s"] > 0 and row["times_floor"] > 0 for row in timed)
    assert sum(row["limit"] is not None for row in rows) >= 42


def test_a_part_that_cannot_run_is_recorded_and_the_next_one_runs(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('broken on purpose')")
    out = tmp_path / "out.json"
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    done = check("--only", "rope", "model", "elementwise", "--out", str(out), PYTHONPATH=path)
    assert done.returncode == 1
    parts = {part["part"]: part for part in json.loads(out.read_text())["parts"]}
    assert parts["model"]["failure"] == "exit code 1"
    assert "broken on purpose" in parts["model"]["stderr"]
    assert "FAILED model: exit code 1" in done.stdout
    for name in ("rope", "elementwise"):
        assert parts[name]["failure"] == ""
        assert parts[name]["rows"]


def test_a_part_that_does_not_end_is_killed_and_recorded(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = check("--only", "rope", "--time-limit", "0.05", "--out", str(out))
    assert done.returncode == 1
    parts = json.loads(out.read_text())["parts"]
    # Without floors no other part is worth its time.
    assert [part["failure"] for part in parts] == ["no end within 0.05 s"]
    assert "no other part runs" in done.stdout


def test_parts_are_chosen_by_how_their_names_begin() -> None:
    code = "import gpu_check; print(*gpu_check.chosen(['graphs', 'rope', 'step']))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parent)
    names = done.stdout.split()
    assert names[:3] == ["machine", "rope", "step"], done.stderr
    assert len(names) == 3 + 11 and all(name.startswith("graphs-") for name in names[3:])


def test_slices_hold_every_part_once_and_end_in_nine_minutes() -> None:
    code = (
        "import gpu_check as g; cut = g.slices(list(g.PARTS));"
        "print(sorted(n for names in cut for n in names[1:]) == sorted(list(g.PARTS)[1:]),"
        " {names[0] for names in cut}, max(sum(g.PARTS[n][1] for n in names) for names in cut))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parent)
    whole, machine, longest = done.stdout.split()
    assert (whole, machine) == ("True", "{'machine'}"), done.stderr
    assert 0 < float(longest) <= 540


def test_a_slice_runs_its_parts_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    parts = ("rope", "elementwise", "decode", "pool")
    done = check("--only", *parts, "--slice", "2", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("slice 2 of 2: machine rope elementwise\n")
    names = [part["part"] for part in json.loads(out.read_text())["parts"]]
    assert names == ["machine", "rope", "elementwise"]
    assert "--slice: wanted 1 to 2, found 3" in check("--only", *parts, "--slice", "3").stderr


def run_altered(alteration: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the check with a line of Python before it."""
    code = f"import gpu_check, gpu_check_kernels as parts, time\n{alteration}\ngpu_check.main()"
    command = [sys.executable, "-c", code, "--device", "cpu", "--quick", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parent)


def test_a_case_that_fails_is_wrong_and_the_others_run() -> None:
    done = run_altered(
        "real = parts.dispatch.paged_decode\n"
        "def paged_decode(*args):\n"
        "    if args[-1]: raise ValueError('broken on purpose')\n"
        "    real(*args)\n"
        "parts.dispatch.paged_decode = paged_decode",
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


def test_parts_behind_the_deadline_are_recorded_as_not_run() -> None:
    done = run_altered(
        "gpu_check._run_process = lambda *_: (time.sleep(0.3), ([], '', ''))[1]",
        *("--only", "rope", "decode", "--deadline", "0.2"),
    )
    assert done.returncode == 1, done.stderr
    for name in ("decode", "rope"):
        assert f"FAILED {name}: not run: the deadline of 0.2 s has passed" in done.stdout


def test_an_error_that_is_no_number_is_not_right() -> None:
    code = (
        "import gpu_check, gpu_check_kernels as parts;"
        "parts.error_of = lambda found, wanted: float('nan');"
        "gpu_check.main()"
    )
    command = [sys.executable, "-c", code, "--part", "elementwise", "--device", "cpu", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parent)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["is_right"] for row in rows] == [False] * 3


@pytest.mark.gpu
@pytest.mark.slow
def test_every_part_is_right_on_a_gpu() -> None:
    done = check("--device", "cuda")
    assert done.returncode == 0, done.stdout
