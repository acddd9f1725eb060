"""The benchmark of the HTTP layer alone, as a command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_our_server_and_a_bare_one_write_the_same_answers(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    loads = ("--cases", "plain", "tools", "schema", "--streams", "2")
    sizes = ("--tokens", "24", "--requests", "64")
    pace = ("--step-ms", "20", "--repeats", "1", "--others", "99", "--scrape-s", "0.2")
    command = [sys.executable, "examples/bench/http_layer.py", *loads, *sizes, *pace]
    command += ["--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())
    assert [row["load"]["case"] for row in rows[::4]] == ["plain", "tools", "schema"]
    for ours, bare in zip(rows[::2], rows[1::2], strict=True):
        assert [ours["server"], bare["server"]] == ["Lockstep", "bare Starlette"]
        [found], [beside] = ours["figures"], bare["figures"]
        assert found["cpu_s"] > 0 and beside["cpu_s"] > 0
        assert found["scrapes_ms"] and not beside["scrapes_ms"]
        if ours["load"]["streams"]:
            # Two streams of 24 tokens with a sleep of 20 ms before each but the first, and an event
            # of each at its end; a call's marker is part of no event.
            assert 0 < found["rate"] <= 2 * 24 / (23 * 0.020)
            assert 0 < found["chunks"] <= beside["chunks"] + 1 <= 100 * 25 / 24 + 2
    assert "scrapes: median" in done.stdout
