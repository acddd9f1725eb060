"""The planted bugs still apply to the code that they break."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


def _runner() -> Any:
    spec = importlib.util.spec_from_file_location("lockstep_mutations", HERE / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


run = _runner()


@pytest.mark.parametrize("mutation", run.mutations(), ids=lambda mutation: mutation.name)
def test_a_patch_applies_and_names_tests_that_exist(mutation: Any) -> None:
    done = subprocess.run(
        ["git", "apply", "--check", str(mutation.path)],
        cwd=run.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert mutation.claim
    for test in mutation.tests:
        path, *names = test.split("::")
        assert (run.ROOT / path).is_file()
        assert all(f"def {name.split('[')[0]}(" in (run.ROOT / path).read_text() for name in names)
