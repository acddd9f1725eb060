"""`python -m compile.explain` tells what is cached, why a start missed, and shows four layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import fx

from compile import explain
from compile.cache.index import CompileCache
from compile.cache.manager import CompilerManager
from compile.config import CompilationConfig
from compile.report import (
    COMPUTATION_GRAPH,
    DYNAMO_GRAPH,
    TRANSFORMED_CODE,
    CompileReport,
    PieceReport,
)
from compile.scope import CompileScope

ROOT = Path(__file__).resolve().parents[2]
REPORTED = CompileReport(
    prefix="backbone",
    traced_files=("toy",),
    graph_breaks=("call of print (toy.py:3)",),
    guards_kept=("num_tokens <= 64 (toy.py:5)",),
    guards_dropped=("x.size()[0] != 1",),
    pieces=(
        PieceReport("submod_0", 0, False, 2, "0123456789abcdef"),
        PieceReport("submod_1", 1, True, 1),
    ),
    timings_s={"dynamo": 1.25},
)


@pytest.fixture
def leave(tmp_path: Path) -> Callable[..., Path]:
    """Compiles a toy of one piece and leaves its files, as a backend does; returns where."""

    def compiled(clock: int, **factors: str) -> Path:
        config = CompilationConfig(level=3, compiler="eager", cache_dir=str(tmp_path))
        scope = CompileScope(config, tp_rank=1, key_factors={"dtype": "float32", **factors})
        cache = CompileCache.open(scope, "backbone", [])
        assert cache is not None
        manager = CompilerManager(scope, cache)
        graph = fx.symbolic_trace(lambda x: (x * 2,))
        manager.compile(graph, [], index=0, shape=None, num_graphs=1, key="toy")
        manager.compile(graph, [], index=0, shape=4, num_graphs=1, key="toy")
        REPORTED.write(cache.directory)
        (cache.directory / DYNAMO_GRAPH).write_text("the whole graph\n")
        (cache.directory / COMPUTATION_GRAPH).write_text("the split graph\n")
        (cache.directory / TRANSFORMED_CODE).write_text("the stitched function\n")
        # Which of two directories is older is seen from their files.
        os.utime(cache.shared / "cache_key_factors.json", (clock, clock))
        return cache.directory

    return compiled


def explained(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[str]:
    assert explain.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.feature("Q04")
def test_breaks_guards_splits_and_layers_are_told(
    leave: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = leave(1)
    lines = [line.strip() for line in explained(capsys, tmp_path)]
    wanted = [
        "rank_1_0/backbone",
        "miss: none",
        "graph break: call of print (toy.py:3)",
        "guard kept: num_tokens <= 64 (toy.py:5)",
        "guard dropped: x.size()[0] != 1",
        "split: submod_0: 2 nodes, compiled, computes 0123456789ab",
        "split: submod_1: 1 nodes, runs eagerly",
        "traced files: toy",
        "took: dynamo 1.25 s",
    ]
    start = lines.index(wanted[0])
    assert lines[start : start + len(wanted)] == wanted
    entries = lines[start + len(wanted) : -4]
    assert [line.split(", key")[0] for line in entries] == [
        "graph 0, shape 4: eager",
        "graph 0, shape general: eager",
    ]
    assert all(line.endswith(" bytes") for line in entries)
    assert lines[-4:] == [
        f"layer dynamo: what Dynamo traced: {directory / DYNAMO_GRAPH}",
        f"layer split: split at the splitting ops: {directory / COMPUTATION_GRAPH}",
        "layer pieces: what the compiler generated for each piece: 2 artifacts",
        f"layer stitch: the function that runs the pieces: {directory / TRANSFORMED_CODE}",
    ]


@pytest.mark.feature("Q04")
@pytest.mark.parametrize(
    ("layer", "wanted"),
    [
        ("dynamo", "the whole graph"),
        ("split", "the split graph"),
        ("pieces", "    mul = x * 2;  x = None"),
        ("stitch", "the stitched function"),
    ],
)
def test_each_layer_can_be_read_in_full(
    leave: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    layer: str,
    wanted: str,
) -> None:
    leave(1)
    lines = explained(capsys, tmp_path, "--layer", layer)
    assert lines[0].startswith("# rank_1_0/backbone: ")
    assert lines.count(wanted) == 1


@pytest.mark.feature("Q08")
def test_a_miss_names_the_factor_that_differed_from_the_nearest_older_directory(
    leave: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far = leave(1, dtype="float16", model="other").parents[1].name
    near = leave(2, dtype="float32").parents[1].name
    late = leave(3, dtype="bfloat16").parents[1].name
    lines = explained(capsys, tmp_path)
    assert [line for line in lines if not line.startswith(" ")] == [far, near, late]
    missed = [line.strip() for line in lines if "missed" in line]
    assert missed == [
        "missed because nothing was compiled before",
        f"missed {far} because of dtype: float16 -> float32",
        f"missed {far} because of model: other -> (absent)",
        f"missed {near} because of dtype: float32 -> bfloat16",
    ]
    assert "  dtype = bfloat16" in lines


def test_one_directory_of_a_root_can_be_asked_for(
    leave: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = leave(1), leave(2, dtype="bfloat16")
    for directory in (second.parents[1], second):
        lines = explained(capsys, directory)
        assert [line for line in lines if not line.startswith(" ")] == [second.parents[1].name]
        assert first.parents[1].name not in lines[0]


def test_damaged_files_are_named_and_are_no_reason_to_stop(
    leave: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = leave(1)
    (directory / "report.json").write_text("{}")
    for path in (directory.parents[1] / "artifacts").iterdir():
        path.write_bytes(b"")
    factors = directory.parents[1] / "cache_key_factors.json"
    factors.write_text(json.dumps({"dtype": "int8"}))
    text = "\n".join(explained(capsys, tmp_path))
    assert "report: wanted JSON with a version" in text
    assert "unusable: artifact" in text
    assert "cache_key_factors.json is not what the directory was named after" in text


def test_a_forward_that_left_no_report_is_still_listed(
    leave: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = leave(1)
    for name in ("report.json", DYNAMO_GRAPH):
        (directory / name).unlink()
    text = "\n".join(explained(capsys, tmp_path))
    assert "report: none was left" in text and "what Dynamo traced: not kept" in text


@pytest.mark.feature("Q04")
def test_it_runs_as_a_module_and_says_where_there_is_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "compile.explain", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert done.stdout.startswith("directory: wanted one with cache_key_factors.json")
