"""The benchmarks as commands, against servers that they start: ours and a bare one.

And the figures of the code, for a tree counted by hand.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve.config import deploy_config, offline_pool

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "examples" / "bench"
SERVE = Path(sys.executable).with_name("serve")
IMPORT_ALL = """
import importlib, sys, traceback
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception:
        print(name, traceback.format_exc().splitlines()[-1])
"""
APPLICATION = """
http_options: {{host: 127.0.0.1, port: {port}}}
applications:
- {{name: default, route_prefix: /, import_path: "serve.app:deploy", args: {{pools: mixed, O: 0}}}}
"""
SERVED = """
max_num_seqs: 8
kv_memory: 64MiB
pools: mixed
compilation_config: {level: 0, cudagraph_mode: FULL_DECODE_ONLY, cudagraph_capture_sizes: [4, 8]}
"""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / script), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)


def measured(out: Path, script: str, *arguments: str) -> tuple[Any, str]:
    """Return what a benchmark wrote and what it printed."""
    done = run(script, *arguments, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout


def test_every_benchmark_can_be_imported() -> None:
    names = sorted(path.stem for path in BENCH.glob("*.py"))
    assert "agreement_model" in names
    command = [sys.executable, "-c", IMPORT_ALL, *names]
    done = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.feature("Q10")
def test_an_engine_is_measured_with_the_yaml_file_of_a_server(tmp_path: Path) -> None:
    """Three streams of which two requests each decode together, in graphs of four sequences."""
    config = tmp_path / "serve.yaml"
    config.write_text(SERVED)
    given = {"config": str(config)}
    [served] = deploy_config(given).pools
    # A server alone tells other processes whose KV it can read.
    assert offline_pool(given).engine == replace(served.engine, kv_hash="")
    sizes = ("--requests", "6", "--streams", "3", "--input", "20", "--output", "9")
    out = tmp_path / "out.json"
    found, printed = measured(out, "offline_throughput.py", *sizes, f"config={config}")
    assert (found["requests"], found["output_tokens"]) == (6, 6 * 9)
    assert found["tokens_per_s"] == pytest.approx(54 / found["seconds"])
    computed, padded = 6 * (20 + 8), 2 * 8
    assert (found["scheduled_tokens"], found["padding_tokens"]) == (computed, padded)
    assert found["padding_share"] == pytest.approx(padded / (computed + padded))
    for name in ("ttft_ms", "tpot_ms"):
        assert 0 < found[name]["p50"] <= found[name]["p99"] and found[name]["mean"] > 0
    # The run that warms up is told of as well.
    assert re.search(r"^ +4 +32 +96 +32 +25.0%$", printed, re.MULTILINE), printed
    assert "least with 2: padding 0: 3" in printed


@pytest.mark.feature("R16")
def test_pools_are_scaled_apart_through_a_quarter_of_a_day() -> None:
    """At no more than what fixed pools of the best sizes cost, and with no fewer in time."""
    done = run("scaling_day.py", "--hours", "6")
    assert done.returncode == 0, done.stdout + done.stderr
    sizes = re.findall(r"(\d) to (\d) replicas, (\d+) steps", done.stdout)
    assert len(sizes) == 2 and sizes[0] != sizes[1]


@pytest.mark.slow
def test_our_server_and_a_bare_one_write_the_same_answers(tmp_path: Path) -> None:
    loads = ("--cases", "plain", "tools", "schema", "--streams", "2")
    sizes = ("--tokens", "24", "--requests", "64")
    pace = ("--step-ms", "20", "--repeats", "1", "--others", "99", "--scrape-s", "0.2")
    rows, printed = measured(tmp_path / "out.json", "http_layer.py", *loads, *sizes, *pace)
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
    assert "scrapes: median" in printed


@pytest.mark.slow
@pytest.mark.ray
def test_an_engine_that_computes_nothing_is_served_beside_a_bare_server(tmp_path: Path) -> None:
    """Behind HAProxy; behind Ray's own proxy run those of `test_hostile.py`."""
    loads = ("--streams", "2", "--output", "40", "--repeats", "1", "--step-ms", "20")
    (ours, bare), printed = measured(tmp_path / "out.json", "serving_path.py", "--haproxy", *loads)
    assert [ours["server"], bare["server"]] == ["Lockstep", "bare Starlette"]
    for row in (ours, bare):
        # Two streams with a token each in a step, which lasts 20 ms or a little longer.
        assert 10 < row["tokens_per_s"][0] <= 100
        assert 0 < row["chunks"][0] <= 100
    assert set(ours["cpu_ms"]) == {"ingress", "proxy", "ranks", "rest"}
    assert ours["cpu_ms"]["ingress"][0] > 0 and ours["cpu_ms"]["ranks"][0] > 0
    assert set(bare["cpu_ms"]) == {"ingress"}
    assert "tokens/s" in printed


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
    servers = ("--server", "a", *ours, "--server", "b", *bare)
    report, printed = measured(tmp_path / "out.json", "streams.py", *servers, *loads)
    found = [(row["server"], row["streams"]) for row in report["rows"]]
    assert found == [("a", 1), ("a", 3), ("b", 1), ("b", 3)]
    for row in report["rows"]:
        assert len(row["figures"]) + (row["num_disturbed"] == 3) == 1
        for found in row["figures"]:
            assert found["tokens_per_s"] > 0 and found["cpu_s"] > 0
            assert found["ttft_ms"] > 0 and 0 < found["tpot_ms"] <= found["gap_p99_ms"]
            assert 0 < found["chunks"] <= 100
            assert found["memory_mib"] > (100 if row["server"] == "a" else 10)
    assert set(report["ready_s"]) == {"a", "b"}
    assert "tokens/s" in printed and "b: ready after" in printed


def test_cost_finds_more_of_shared_prefixes_and_answers_sooner_than_turns_do() -> None:
    done = run("prefix_routing.py", "--requests", "400")
    assert done.returncode == 0, done.stderr
    shared, hot = (part.splitlines()[1:] for part in done.stdout.split("\n\n"))
    found = {line[:26].strip(): [float(n) for n in line[26:].split()] for line in shared}
    (hits, _, ttft_ms, _), turns = found["cost"], found["round_robin"]
    assert hits > turns[0] and ttft_ms < turns[2], done.stdout
    _, _, largest_queue = hot[0].split()
    assert float(largest_queue) < 1.5, done.stdout


def test_a_server_that_ends_is_told() -> None:
    done = run("streams.py", "--server", "none", "http://127.0.0.1:9", "false")
    assert done.returncode == 1
    assert "false: wanted an answer of /v1/completions, found none" in done.stderr


PRODUCT = '''"""A module."""

from typing import Protocol  # a comment beside code


class Reader(Protocol):
    """A Protocol with one implementation."""

    size: int
    """In bytes."""

    def read(self) -> bytes: ...


class Call(Protocol):
    def __call__(self) -> None: ...


class _File:
    # A comment of its own.
    def __init__(self) -> None:
        self.size = 0
        self._text = """a

text"""


class File(_File):
    def read(self) -> bytes:
        """Return it."""
        return b""
'''
TESTS = """
def test_a_file(monkeypatch, file):
    monkeypatch.setattr(file, "size", 1)
    assert file._text and file.__class__
"""


def test_code_is_counted_without_comments_docstrings_and_blank_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions and classes too, protocols by inherited members, names without underscores."""
    monkeypatch.syspath_prepend(str(BENCH))
    for name in ("serve", "cluster", "model", "compile", "examples", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.py").write_text(TESTS if name == "tests" else "def f(): ...\n")
    (tmp_path / "serve" / "file.py").write_text(PRODUCT)
    counted = importlib.import_module("house_figures").figures(tmp_path)
    sizes = {"files": 1, "lines": len(PRODUCT.splitlines()), "code": 15, "functions": 4}
    sizes |= {"median": 1, "p95": 5, "longest": 5, "classes": 4}
    assert counted["sizes"]["serve"] == sizes
    assert counted["sizes"]["product"]["files"] == 4
    assert counted["protocols"] == 2
    assert counted["protocols of one class"] == ["Reader"]
    assert counted["class names of several"] == {"File": 2}
    assert counted["private accesses in tests"] == counted["patches in tests"] == 1
