"""The benchmark of the way from engine to client, as a command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.ray
def test_an_engine_that_computes_nothing_is_served_beside_a_bare_server(tmp_path: Path) -> None:
    """Behind HAProxy; behind Ray's own proxy run those of `test_hostile.py`."""
    out = tmp_path / "out.json"
    loads = ("--streams", "2", "--output", "40", "--repeats", "1", "--step-ms", "20")
    command = [sys.executable, "examples/bench/serving_path.py", "--haproxy", *loads]
    command += ["--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, bare = json.loads(out.read_text())
    assert [ours["server"], bare["server"]] == ["Lockstep", "bare Starlette"]
    for row in (ours, bare):
        # Two streams with a token each in a step, which lasts 20 ms or a little longer.
        assert 10 < row["tokens_per_s"][0] <= 100
        assert 0 < row["chunks"][0] <= 100
    assert set(ours["cpu_ms"]) == {"ingress", "proxy", "ranks", "rest"}
    assert ours["cpu_ms"]["ingress"][0] > 0 and ours["cpu_ms"]["ranks"][0] > 0
    assert set(bare["cpu_ms"]) == {"ingress"}
    assert "tokens/s" in done.stdout
