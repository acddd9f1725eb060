"""The benchmark of streams, as a command against servers that it starts: ours and a bare one."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVE = Path(sys.executable).with_name("serve")
APPLICATION = """
http_options: {{host: 127.0.0.1, port: {port}}}
applications:
- {{name: default, route_prefix: /, import_path: "serve.app:deploy", args: {{pools: mixed, O: 0}}}}
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "bench" / "streams.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.ray
def test_servers_are_asked_in_turn_and_compared(
    tmp_path: Path, new_port: Callable[[], int]
) -> None:
    port, bare_port = new_port(), new_port()
    (tmp_path / "app.yaml").write_text(APPLICATION.format(port=port))
    ours = (f"http://127.0.0.1:{port}", shlex.join([str(SERVE), "run", f"{tmp_path}/app.yaml"]))
    bare_command = (sys.executable, "examples/bench/serving_path.py", "--step-ms", "2")
    bare = (
        f"http://127.0.0.1:{bare_port}",
        shlex.join([*bare_command, "--bare-server", str(bare_port)]),
    )
    loads = ("--streams", "1", "3", "--input", "16", "--output", "8", "--repeats", "1")
    loads += ("--arriving", "24")
    out = tmp_path / "out.json"
    done = run("--server", "a", *ours, "--server", "b", *bare, *loads, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert [(row["server"], row["streams"]) for row in report["rows"]] == [
        ("a", 1),
        ("a", 3),
        ("b", 1),
        ("b", 3),
    ]
    for row in report["rows"]:
        assert len(row["figures"]) + (row["num_disturbed"] == 3) == 1
        for found in row["figures"]:
            assert found["tokens_per_s"] > 0 and found["cpu_s"] > 0
            assert found["ttft_ms"] > 0 and 0 < found["tpot_ms"] <= found["gap_p99_ms"]
            assert 0 < found["chunks"] <= 100
            assert found["memory_mib"] > (100 if row["server"] == "a" else 10)
    assert set(report["ready_s"]) == {"a", "b"}
    assert "tokens/s" in done.stdout and "b: ready after" in done.stdout


def test_a_server_that_ends_is_told() -> None:
    done = run("--server", "none", "http://127.0.0.1:9", "false")
    assert done.returncode == 1
    assert "false: wanted an answer of /v1/completions, found none" in done.stderr
