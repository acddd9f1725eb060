"""The names that users know import from where the documentation says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "compile" / "README.md"
ROW = re.compile(r"^\| [^|]+ \| `(\w+)` \| `([\w.]+)` \|$", re.MULTILINE)


@pytest.mark.feature("Q09")
def test_every_documented_name_imports_from_its_place() -> None:
    rows = ROW.findall(README.read_text())
    assert len(rows) == 14
    for name, module in rows:
        found = getattr(importlib.import_module(module), name)
        assert found.__module__.split(".")[0] in ("compile", "serve"), name
