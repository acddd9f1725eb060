"""What Inductor writes and is told while it works for the cache, and not a moment longer."""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compile.cache import inductor_directory
from compile.cache.inductor_directory import PROBES, InductorDirectory
from compile.cache.inductor_private import (
    CHECK_BUILD,
    LOAD_LIBRARY,
    LOAD_MODULE,
    PRECOMPILE_HEADER,
    RECHECK_TUNING,
    Private,
)

ENTERED = (PRECOMPILE_HEADER, LOAD_LIBRARY, LOAD_MODULE, CHECK_BUILD, RECHECK_TUNING)


def found(private: Private) -> Any:
    return private.find()[2]


def test_environment_and_names_are_as_before_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "before")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    before = [found(private) for private in ENTERED]
    with pytest.raises(KeyError), InductorDirectory(tmp_path).entered(is_loading=True):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
        assert all(found(each) is not old for each, old in zip(ENTERED, before, strict=True))
        raise KeyError
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "before"
    assert "TRITON_CACHE_DIR" not in os.environ
    assert [found(private) for private in ENTERED] == before


class _Isa:
    """Vector instructions that can be asked for; `asked` counts how often it is found out."""

    _arch_flags = "-mvector"
    asked = 0

    def __str__(self) -> str:
        return "vector"


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> type[_Isa]:
    """Vector instructions that this process did not ask for yet."""

    def check_build(self: Any, code: str) -> bool:
        _Isa.asked += 1
        return "good" in code

    _Isa.asked = 0
    module = importlib.import_module("torch._inductor.cpu_vec_isa")
    monkeypatch.setattr(module.VecISA, "check_build", check_build)
    monkeypatch.setattr(inductor_directory, "_answers", {})
    return _Isa


def ask(directory: Path, code: str) -> bool:
    with InductorDirectory(directory).entered(is_loading=True):
        answer: bool = found(CHECK_BUILD)(_Isa(), code)
    return answer


def test_an_answer_about_vector_instructions_is_remembered_by_a_later_process(
    tmp_path: Path, probes: type[_Isa], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        monkeypatch.setattr(inductor_directory, "_answers", {})
        assert ask(tmp_path, "good") and not ask(tmp_path, "bad")
        assert probes.asked == 2
    monkeypatch.setattr(probes, "_arch_flags", "-mvector -mmore")  # another question
    ask(tmp_path, "good")
    assert probes.asked == 3


@pytest.mark.parametrize("content", [b"", b"{}", b"# sha256 0\n{'vector': True}", b"\xff"])
def test_damaged_answers_are_asked_for_again(
    tmp_path: Path,
    probes: type[_Isa],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    content: bytes,
) -> None:
    ask(tmp_path, "good")
    (tmp_path / PROBES).write_bytes(content)
    monkeypatch.setattr(inductor_directory, "_answers", {})
    with caplog.at_level(logging.WARNING):
        assert ask(tmp_path, "good")
    assert probes.asked == 2 and "probed again" in caplog.text


def test_a_kernel_is_tuned_where_its_configuration_cannot_be_saved() -> None:
    config = pytest.importorskip("triton").Config
    results = [SimpleNamespace(config=config({"XBLOCK": size})) for size in (128, 256)]
    kernel = SimpleNamespace(
        filename="/gone/ab/abc.py", compile_results=results, inductor_meta={}, save_cache_hook=None
    )
    directory = Path("/proc")  # root can write anywhere else
    inductor_directory._rebind(kernel, directory)
    assert kernel.filename == "/proc/ab/abc.py"
    kernel.save_cache_hook(results[1].config, 0)
    assert not (directory / "ab").exists()


def test_what_inductor_loaded_from_elsewhere_is_forgotten_on_entering_and_on_leaving(
    tmp_path: Path,
) -> None:
    loaded = importlib.import_module("torch._inductor.codecache").PyCodeCache.modules_no_attr
    loaded["elsewhere.py"] = importlib
    with InductorDirectory(tmp_path).entered(is_loading=True):
        assert not loaded
        loaded["here.py"] = importlib
    assert not loaded
