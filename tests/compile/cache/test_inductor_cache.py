"""Compiled by Inductor once, a forward starts in a fresh process without compiling or building.

One process compiles with both compilers. The cache then moves, Inductor's own files are damaged,
and another process starts from it that has an empty home and an empty temporary directory.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

COMPILERS = ["inductor_standalone", "inductor"]
SCRIPT = Path(__file__).with_name("forwards.py")
ROOT = SCRIPT.parents[3]
SHAPES = [None, 4]
NUM_DIFFERENT = 2 * len(SHAPES)


@dataclass(frozen=True)
class Run:
    """One process. `results` holds for each compiler what it did."""

    eager: list[list[float]]
    results: dict[str, Any]
    log: str

    def counted(self, compiler: str, name: str) -> int:
        found: int = self.results[compiler]["counters"].get(name, 0)
        return found


def run(root: Path, **environment: str) -> Run:
    fields = {"cache_dir": str(root), "compilers": COMPILERS, "shapes": SHAPES}
    # What vector instructions there are is found out by builds, which a warm start repeats neither.
    inherited = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_VEC_ISA_OK"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps({**fields, "compile_sizes": [4]})],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
    )
    assert done.returncode == 0, done.stderr
    return Run(**json.loads(done.stdout.splitlines()[-1]), log=done.stderr)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(scope="module")
def cold(place: Path) -> Run:
    """The first start."""
    return run(place / "here")


@pytest.fixture(scope="module")
def warm(cold: Run, place: Path) -> Run:
    """A start elsewhere, after Inductor's own files were damaged."""
    (place / "far").mkdir()
    moved = shutil.move(place / "here", place / "far" / "there")
    suffixes = (".so", ".py")
    damaged = [p for p in Path(moved).glob("*/inductor/*/*") if p.suffix in suffixes]
    assert {path.suffix for path in damaged} == set(suffixes)
    for path in damaged:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    empty = place / "empty"
    empty.mkdir()
    nowhere = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), str(empty))
    return run(Path(moved), LOCKSTEP_COMPILE_CACHE_SAVE_FORMAT="unpacked", **nowhere)


@pytest.mark.feature("G05")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_first_start_compiles_each_different_piece_and_builds_it(
    cold: Run, compiler: str
) -> None:
    wanted = [pytest.approx(row, rel=1e-5) for row in cold.eager]
    assert cold.results[compiler]["was_traced"] and cold.results[compiler]["outputs"] == wanted
    assert cold.counted(compiler, "num_inductor_compiles") == NUM_DIFFERENT
    assert cold.counted(compiler, "num_compiled_artifacts_saved") == NUM_DIFFERENT
    assert cold.counted(compiler, "num_cpp_builds") >= NUM_DIFFERENT / 2


@pytest.mark.feature("G05", "G06", "H01", "H03")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_start_from_a_moved_cache_computes_the_same_and_compiles_and_builds_nothing(
    cold: Run, warm: Run, compiler: str
) -> None:
    assert warm.results[compiler]["outputs"] == cold.results[compiler]["outputs"]
    assert not warm.results[compiler]["was_traced"]
    assert warm.counted(compiler, "num_compiled_artifacts_loaded") == NUM_DIFFERENT
    for name in ("num_backend_compilations", "num_inductor_compiles", "num_eager_compiles"):
        assert warm.counted(compiler, name) == 0
    assert warm.counted(compiler, "num_cpp_builds") == 0
    assert warm.counted(compiler, "num_triton_builds") == 0


@pytest.mark.feature("G08", "G12")
@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_log_names_a_readable_file_of_generated_code_for_each_key(
    warm: Run, place: Path, compiler: str
) -> None:
    pattern = r"unpack graph (\d) of 3 for shape (\w+): key (\w+), path (\S+)"
    found = re.findall(pattern, warm.log)
    assert len(found) == 2 * NUM_DIFFERENT
    for index, shape, _, path in found:
        assert Path(path).is_relative_to(place / "far") and "rank_0_0/backbone" in path
        assert Path(path).name == f"piece_{index}_{shape}.py"
        functions = {
            n.name
            for n in ast.walk(ast.parse(Path(path).read_text()))
            if isinstance(n, ast.FunctionDef)
        }
        assert "call" in functions
    assert any("kernel" in Path(path).read_text() for *_, path in found)


@pytest.mark.feature("Q03")
def test_what_was_stored_is_what_is_loaded(cold: Run, warm: Run) -> None:
    pattern = r"{} graph (\d) of 3 for shape (\w+) from (\w+): key (\w+), path \S+/(\w+)\n"
    stored = re.findall(pattern.format("store"), cold.log)
    loaded = re.findall(pattern.format("load"), warm.log)
    assert len(stored) == 2 * NUM_DIFFERENT and set(stored) == set(loaded)


def test_a_warm_start_leaves_nothing_outside_of_the_cache(warm: Run, place: Path) -> None:
    left = [p for p in (place / "empty").rglob("*") if p.is_file() and ".triton" not in p.parts]
    assert left == []
