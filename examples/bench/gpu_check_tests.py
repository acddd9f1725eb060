"""The part of gpu_check.py that runs the tests that are marked `gpu`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from gpu_check_rows import Row, Setting

ROOT = Path(__file__).resolve().parents[2]
RESULT = re.compile(r"^(?:\S*::)?(.+?) (PASSED|FAILED|ERROR|SKIPPED)\b")


def part_tests(at: Setting) -> Iterator[Row]:
    """One row for each test; one that is skipped says so."""
    marked = [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "@pytest.mark.gpu" in path.read_text(encoding="utf-8")
    ]
    command = [sys.executable, "-m", "pytest", "-v", "-W", "default", "-m", "gpu and not slow"]
    # Without the options of pytest-xdist, which a GPU machine may lack.
    command += ["-o", "addopts=--strict-markers --import-mode=importlib -p no:cacheprovider"]
    # Only the end of what is printed is kept: each failure's line there says why, if it is wide
    # enough, and records of torch's logs do not push out the rest.
    command += ["--show-capture=no", "--tb=short"]
    command += ["--continue-on-collection-errors", *(str(path) for path in marked)]
    num_found = 0
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "400"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=sys.stderr)
            if match := RESULT.match(line):
                num_found += 1
                is_bad = match[2] in ("FAILED", "ERROR")
                yield Row(match[1], error=float(is_bad), limit=0.0, note=match[2].lower())
    # 1: a test failed, which its row says.
    note = f"exit code {process.returncode} of pytest, {num_found} tests"
    is_bad = not num_found or process.returncode not in (0, 1)
    yield Row("pytest", error=float(is_bad), limit=0.0, note=note)
