"""The figures of `examples/bench/house_figures.py` are right for a tree counted by hand."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "examples" / "bench"
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


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sys.path.insert(0, str(BENCH))
    try:
        house_figures = importlib.import_module("house_figures")
    finally:
        sys.path.remove(str(BENCH))
    root = tmp_path_factory.mktemp("tree")
    for name in ("serve", "cluster", "model", "compile", "examples", "tests"):
        (root / name).mkdir()
        (root / name / "file.py").write_text(TESTS if name == "tests" else "def f(): ...\n")
    (root / "serve" / "file.py").write_text(PRODUCT)
    found: dict[str, Any] = house_figures.figures(root)
    return found


def test_code_is_counted_without_comments_docstrings_and_blank_lines(
    counted: dict[str, Any],
) -> None:
    """Functions and classes too, protocols by inherited members, names without underscores."""
    sizes = {"files": 1, "lines": len(PRODUCT.splitlines()), "code": 15, "functions": 4}
    sizes |= {"median": 1, "p95": 5, "longest": 5, "classes": 4}
    assert counted["sizes"]["serve"] == sizes
    assert counted["sizes"]["product"]["files"] == 4
    assert counted["protocols"] == 2
    assert counted["protocols of one class"] == ["Reader"]
    assert counted["class names of several"] == {"File": 2}
    assert counted["private accesses in tests"] == counted["patches in tests"] == 1
