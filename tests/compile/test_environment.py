"""The environment is read in one place, when it is asked."""

from __future__ import annotations

import logging
from collections.abc import Callable
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


@pytest.mark.feature("G07", "G08")
@pytest.mark.parametrize(
    ("variable", "read", "values", "refused"),
    [
        (
            environment.LOG_LEVEL,
            environment.log_level,
            {None: logging.INFO, "debug": logging.DEBUG},
            "LOCKSTEP_LOG_LEVEL: wanted one of .*, found 'odd'",
        ),
        (
            environment.DISABLE_COMPILE_CACHE,
            environment.is_compile_cache_disabled,
            {None: False, "1": True, "0": False, "": False},
            "wanted 0 or 1, found 'odd'",
        ),
        (
            environment.COMPILE_CACHE_SAVE_FORMAT,
            environment.compile_cache_save_format,
            {None: "binary", "unpacked": "unpacked"},
            "binary, unpacked, found 'odd'",
        ),
    ],
)
def test_a_variable_has_a_default_and_refuses_other_values(
    variable: str,
    read: Callable[[], object],
    values: dict[str | None, object],
    refused: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(variable, raising=False)
    for value, wanted in values.items():
        if value is not None:
            monkeypatch.setenv(variable, value)
        assert read() == wanted
    monkeypatch.setenv(variable, "odd")
    with pytest.raises(environment.FieldError, match=refused):
        read()
