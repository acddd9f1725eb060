"""What a GPU's kernels were tuned to is found by the next start, wherever the cache lies then."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("cross_compiled.py")
ROOT = SCRIPT.parents[3]


def run(*arguments: str) -> Any:
    # Nothing outside the cache is left for the next process.
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": scratch},
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.feature("G06")
@pytest.mark.parametrize("compiler", ["inductor_standalone", "inductor"])
def test_a_moved_cache_has_what_kernels_were_tuned_to_and_builds_nothing(
    tmp_path: Path, compiler: str
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    cold = run("compile", str(here), compiler)
    assert cold["counts"] == {"num_inductor_compiles": 1, "num_triton_builds": 2}
    assert len(cold["tuned"]) == 2
    shutil.move(here, there)
    warm = run("load", str(there), compiler, *cold["handle"])
    assert warm["configs"] == {name: [config] for name, config in cold["tuned"].items()}
    assert warm["counts"] == {"num_inductor_compiles": 0, "num_triton_builds": 0}
