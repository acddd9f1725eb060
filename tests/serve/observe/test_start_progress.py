"""Progress of a start: lines of the ingress's log, with counts and times."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from serve.observe.start_progress import LINE_PERIOD_S, StartLog

ROOT = Path(__file__).resolve().parents[3]
SERVE = Path(sys.executable).with_name("serve")


def loading(done: int, total: int, elapsed_s: float, remaining_s: float | None) -> dict[str, Any]:
    times = {"elapsed_s": elapsed_s, "remaining_s": remaining_s}
    return {"what": "mixed: compiling", "done": done, "total": total, **times}


def test_a_start_says_what_it_does_every_few_seconds_and_each_change_at_once() -> None:
    now, said = 10.0, list[str]()
    log = StartLog(said.append, clock=lambda: now)

    def see(status: str, *entries: dict[str, Any], compiling: bool = False) -> list[str]:
        said.clear()
        log.see({"status": status, "compiling": compiling, "loading": list(entries)})
        return said

    two_ranks = loading(3, 7, 2.0, 8.4), loading(2, 7, 4.0, None)
    assert see("loading", *two_ranks) == ["loading, 0 s: mixed: compiling 2/7 (2 ranks) for 4 s"]
    now += LINE_PERIOD_S - 1
    assert see("loading", *two_ranks) == []
    now += 1
    assert see("loading", loading(3, 7, 9.0, 8.4)) == [
        "loading, 5 s: mixed: compiling 3/7 for 9 s, about 8 s to go"
    ]
    assert see("ready", loading(4, 7, 9.0, None), compiling=True) == [
        "serves after 5.0 s, and compiles meanwhile"
    ]
    now += LINE_PERIOD_S
    assert see("ready", loading(5, 7, 9.0, None), compiling=True) == [
        "compiling while it serves, 10 s: mixed: compiling 5/7 for 9 s"
    ]
    assert see("ready") == ["ready after 10.0 s"]
    now += 100
    assert see("degraded", loading(0, 1, 0.0, None)) == ["degraded, 0 s: mixed: compiling for 0 s"]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.feature("R20")
def test_serve_run_shows_how_a_start_goes_on(
    ray_cluster: Any, http_port: int, tmp_path: Path
) -> None:
    from ray import serve as ray_serve

    env = os.environ | {"RAY_ADDRESS": ray_cluster.address_info["gcs_address"]}
    options = ["--name", "progress", "--route-prefix", "/progress"]
    # A warm start may be over before there is a second line.
    arguments = ["pools=mixed", f"compilation.cache_dir={tmp_path}"]
    out = tmp_path / "out"
    with out.open("wb") as file:
        started = subprocess.Popen(
            [SERVE, "run", *options, "serve.app:deploy", *arguments],
            cwd=ROOT,
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 300
        while "lockstep.ingress: ready after" not in out.read_text():
            assert started.poll() is None and time.monotonic() < deadline, out.read_text()
            time.sleep(0.1)
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait(timeout=60)
        ray_serve.delete("progress")
    line = r"lockstep\.ingress: (loading|compiling while it serves), \d+ s: mixed: .* \d+/\d+ .*"
    assert re.search(line, out.read_text()), out.read_text()
