"""The environment is read in one place, when it is asked."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from compile import environment


def test_the_cache_root_is_below_the_users_cache_by_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(environment.CACHE_ROOT, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert environment.cache_root() == Path.home() / ".cache" / "lockstep"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment.cache_root() == tmp_path / "lockstep"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(environment.CACHE_ROOT, "below")
    assert environment.cache_root() == tmp_path / "below"


def test_the_log_level_is_a_name_of_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.LOG_LEVEL, raising=False)
    assert environment.log_level() == logging.INFO
    monkeypatch.setenv(environment.LOG_LEVEL, "debug")
    assert environment.log_level() == logging.DEBUG
    monkeypatch.setenv(environment.LOG_LEVEL, "loud")
    with pytest.raises(environment.FieldError) as caught:
        environment.log_level()
    assert str(caught.value).startswith("LOCKSTEP_LOG_LEVEL: wanted one of ")
    assert str(caught.value).endswith("found 'loud'")


@pytest.mark.feature("G07")
def test_the_compile_cache_is_on_unless_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.DISABLE_COMPILE_CACHE, raising=False)
    assert not environment.is_compile_cache_disabled()
    for value, is_disabled in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(environment.DISABLE_COMPILE_CACHE, value)
        assert environment.is_compile_cache_disabled() is is_disabled
    monkeypatch.setenv(environment.DISABLE_COMPILE_CACHE, "no")
    with pytest.raises(environment.FieldError, match="wanted 0 or 1, found 'no'"):
        environment.is_compile_cache_disabled()


@pytest.mark.feature("G08")
def test_the_save_format_is_binary_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.COMPILE_CACHE_SAVE_FORMAT, raising=False)
    assert environment.compile_cache_save_format() == "binary"
    monkeypatch.setenv(environment.COMPILE_CACHE_SAVE_FORMAT, "unpacked")
    assert environment.compile_cache_save_format() == "unpacked"
    monkeypatch.setenv(environment.COMPILE_CACHE_SAVE_FORMAT, "zip")
    with pytest.raises(environment.FieldError, match="binary, unpacked, found 'zip'"):
        environment.compile_cache_save_format()
