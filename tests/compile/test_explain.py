"""`python -m compile.explain` tells what is cached, why a start missed, and shows four layers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
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
    guards_kept=("num_tokens <= 64 (toy.py:5)",),
    guards_dropped=("x.size()[0] != 1",),
    pieces=(
        PieceReport("submod_0", 0, False, 2, "0123456789abcdef"),
        PieceReport("submod_1", 1, True, 1),
    ),
    timings_s={"dynamo": 1.25},
)


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model's trace leaves behind, this test's directory does not."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Root:
    """The root of a cache, in which a toy of one piece is compiled and which is explained."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self._capsys = path, capsys

    def leave(self, clock: int, **factors: str) -> Path:
        """Compile the toy and leave its files, as a backend does; return where."""
        config = CompilationConfig(level=3, compiler="eager", cache_dir=str(self.path))
        scope = CompileScope(config, tp_rank=1, key_factors={"dtype": "float32", **factors})
        cache = CompileCache.open(scope, "backbone", [])
        assert cache is not None
        manager = CompilerManager(scope, cache)
        graph = fx.symbolic_trace(lambda x: (x * 2,))
        for shape in (None, 4):
            manager.compile(graph, [torch.ones(4)], index=0, shape=shape, num_graphs=1, key="toy")
        (cache.directory / "report.json").write_text(REPORTED.to_json())
        (cache.directory / DYNAMO_GRAPH).write_text("the whole graph\n")
        (cache.directory / COMPUTATION_GRAPH).write_text("the split graph\n")
        (cache.directory / TRANSFORMED_CODE).write_text("the stitched function\n")
        # Which of two directories is older is seen from their files.
        os.utime(cache.shared / "cache_key_factors.json", (clock, clock))
        return cache.directory

    def explained(self, path: Path | None = None, *options: str) -> list[str]:
        assert explain.main([str(path or self.path), *options]) == 0
        return self._capsys.readouterr().out.splitlines()


@pytest.fixture
def root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Root:
    return Root(tmp_path, capsys)


@pytest.mark.feature("Q04")
@pytest.mark.parametrize(
    ("layer", "wanted"),
    [
        ("dynamo", "the whole graph"),
        ("split", "the split graph"),
        ("pieces", "    mul = torch.ops.aten.mul.Tensor(arg0_1, 2);  arg0_1 = None"),
        ("stitch", "the stitched function"),
    ],
)
def test_each_layer_can_be_read_in_full(root: Root, layer: str, wanted: str) -> None:
    root.leave(1)
    lines = root.explained(None, "--layer", layer)
    assert lines[0].startswith("# rank_1_0/backbone: ")
    assert lines.count(wanted) == 1


# --- a model ----------------------------------------------------------------------------------

TOY = """
import torch
from torch import nn

from compile.config import CompilationConfig
from compile.custom_op import direct_register_custom_op
from compile.graphs.pools import GraphPools, new_graph_pool
from compile.pieces.decorator import support_torch_compile
from compile.resolve import StepLimits, resolve
from compile.scope import CompileScope, compile_scope


def _mix(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x + x.roll(1, 0))


mix = direct_register_custom_op("explained_mix", _mix, mutates_args=["out"])


@support_torch_compile
class Toy(nn.Module):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = input_ids * 2
        BODY
        out = torch.empty_like(x)
        mix(x, out)
        return out + 1


def load(model, compilation_config):
    fields = {**compilation_config, "splitting_ops": ("lockstep::explained_mix",)}
    config = resolve(CompilationConfig(**fields), StepLimits(4, 16))
    pools = GraphPools(lambda: new_graph_pool(torch.device("cpu")))
    with compile_scope(CompileScope(config, pools=pools)):
        Toy().prepare(torch.arange(8))
"""


@pytest.fixture
def explain_toy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, list[str]]]:
    """Explains a toy with these lines in its forward; returns the exit code and what is printed."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    def run(name: str, body: str, *options: str) -> tuple[int, list[str]]:
        (tmp_path / f"{name}.py").write_text(TOY.replace("BODY", body))
        code = explain.main([str(tmp_path / "model"), "--loader", f"{name}:load", *options])
        return code, [line.strip() for line in capsys.readouterr().out.splitlines()]

    return run


@pytest.mark.feature("Q04")
def test_a_model_is_traced_and_its_layers_are_told(
    explain_toy: Callable[..., tuple[int, list[str]]], tmp_path: Path
) -> None:
    body = "x = x + 1 if x.shape[0] > 4 else x"
    for option, what in (("{}", "dropped"), ('{"evaluate_guards": true}', "kept")):
        code, lines = explain_toy("toy_branch", body, "--compilation", option)
        [told] = [line for line in lines if line.startswith("guard") and body in line]
        assert code == 0 and told.startswith(f"guard {what}: ") and "toy_branch.py:" in told
    code, lines = explain_toy("toy_whole", "pass")
    assert code == 0
    start = lines.index("rank_0_0/backbone")
    told = [line for line in lines[start:] if not line.startswith("took:")]
    assert told[:3] == [
        "rank_0_0/backbone",
        "miss: nothing was compiled before",
        "graph break: none",
    ]
    guards = [line for line in told if line.startswith("guard")]
    assert guards[0] == "guard kept: none" and "guard dropped: 1 x SHAPE_ENV" in guards
    rest = told[3 + len(guards) :]
    assert [
        re.sub(r"\w+ bytes|(?<=computes )\w+|(?<=key )\w+", "...", line) for line in rest[:6]
    ] == [
        "split: submod_0: 5 nodes, compiled, computes ...",
        "split: submod_1: 5 nodes, runs eagerly",
        "split: submod_2: 4 nodes, compiled, computes ...",
        f"traced files: {tmp_path}/toy_whole.py",
        "graph 0, shape general: eager, key ..., ...",
        "graph 1, shape general: eager, key ..., ...",
    ]
    assert [line.split(":")[0] for line in rest[6:]] == [f"layer {name}" for name in explain.LAYERS]
    for line in (rest[6], rest[7], rest[9]):
        assert Path(line.rpartition(": ")[2]).read_text()


@pytest.mark.feature("Q04")
@pytest.mark.parametrize(
    ("body", "cause", "remedy"),
    [
        ("x = x * x.sum().item()", "item", "compute it before the forward"),
        ("x = x.view(4, -1).sum(0) if len(x) == 8 else x", "8 taken for granted", "write it for"),
    ],
)
def test_the_graph_break_that_a_model_ends_at_is_told_with_its_place_and_a_remedy(
    explain_toy: Callable[..., tuple[int, list[str]]], body: str, cause: str, remedy: str
) -> None:
    name = f"toy_{cause.split()[-1]}"
    code, lines = explain_toy(name, body)
    assert code == 1
    [told] = [line for line in lines if line.startswith("graph break: ")]
    number = TOY.splitlines().index("        BODY") + 1
    place = rf"found {cause} at \S*{name}\.py:{number} `{re.escape(body)}`; to change: {remedy}"
    assert re.search(place, told), told
    assert any(line.startswith("traced files: ") and f"{name}.py" in line for line in lines)
    assert not any(line.startswith(("split:", "graph ")) and line != told for line in lines)
    assert lines[-1].endswith(told.removeprefix("graph break: "))


@pytest.mark.feature("Q04")
def test_a_checkpoint_is_started_by_the_offline_api(root: Root, tiny_checkpoint: Path) -> None:
    lines = [line.strip() for line in root.explained(tiny_checkpoint)]
    assert "graph break: none" in lines and "dtype = bfloat16" in lines
    splits = [line.rpartition(", ")[2] for line in lines if line.startswith("split:")]
    assert splits[1::2] == ["runs eagerly"] * 4 and len(splits) == 9
    assert len(set(splits[::2])) == 3


# --- misses -----------------------------------------------------------------------------------


@pytest.mark.feature("Q08")
def test_a_miss_names_the_factor_that_differed_from_the_nearest_older_directory(root: Root) -> None:
    far = root.leave(1, dtype="float16", model="other").parents[1].name
    near = root.leave(2, dtype="float32").parents[1].name
    late = root.leave(3, dtype="bfloat16").parents[1].name
    lines = root.explained()
    assert [line for line in lines if not line.startswith(" ")] == [far, near, late]
    missed = [line.strip() for line in lines if "missed" in line]
    assert missed == [
        "missed because nothing was compiled before",
        f"missed {far} because of dtype: float16 -> float32",
        f"missed {far} because of model: other -> (absent)",
        f"missed {near} because of dtype: float32 -> bfloat16",
    ]
    assert "  dtype = bfloat16" in lines


def test_one_directory_of_a_root_can_be_asked_for(root: Root) -> None:
    first, second = root.leave(1), root.leave(2, dtype="bfloat16")
    for directory in (second.parents[1], second):
        lines = root.explained(directory)
        assert [line for line in lines if not line.startswith(" ")] == [second.parents[1].name]
        assert first.parents[1].name not in lines[0]


def test_damaged_files_are_named_and_are_no_reason_to_stop(root: Root) -> None:
    directory = root.leave(1)
    (directory / "report.json").write_text("{}")
    for path in (directory.parents[1] / "artifacts").iterdir():
        path.write_bytes(b"")
    factors = directory.parents[1] / "cache_key_factors.json"
    factors.write_text(json.dumps({"dtype": "int8"}))
    text = "\n".join(root.explained())
    assert "report: wanted the fields of a report" in text
    assert "unusable: artifact" in text
    assert "cache_key_factors.json is not what the directory was named after" in text


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
