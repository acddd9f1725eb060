"""The planted bugs still fit the code that they break."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def run() -> Any:
    spec = importlib.util.spec_from_file_location("lockstep_mutations", HERE / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(HERE))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(HERE))
    return module


def test_each_bug_can_be_planted_and_names_tests_that_exist(run: Any) -> None:
    assert len({mutation.claim for mutation in run.MUTATIONS}) == len(run.MUTATIONS) > 20
    for mutation in run.MUTATIONS:
        source = (run.ROOT / mutation.path).read_text()
        broken = run.mutated(mutation, source)
        assert broken != source
        if mutation.path.endswith(".py"):
            compile(broken, mutation.path, "exec")
        for test in mutation.tests:
            path, *names = test.split("::")
            tests = (run.ROOT / path).read_text()
            assert all(f"def {name.split('[')[0]}(" in tests for name in names)


def test_a_bug_that_no_longer_fits_is_told(run: Any) -> None:
    mutation = run.MUTATIONS[0]
    [old] = mutation.edits
    for source, found in (("", 0), (f"{old}\n{old}\n", 2)):
        with pytest.raises(ValueError, match=f"wanted once, found {found} times"):
            run.mutated(mutation, source)
