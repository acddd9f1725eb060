"""The figures of `examples/bench/house_figures.py` are right for a tree counted by hand."""

from __future__ import annotations

import importlib
from pathlib import Path

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
