"""Code is loaded only from directories in which nobody else can place a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compile.machine import PrivateDirectoryError, make_private


def test_a_new_directory_is_for_its_owner_alone(tmp_path: Path) -> None:
    made = make_private(tmp_path / "new")
    assert made.stat().st_mode & 0o777 == 0o700
    assert make_private(made) == made


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_directory_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(PrivateDirectoryError, match="only its owner writes, found d") as caught:
        make_private(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: ")


def test_a_directory_of_root_is_taken_unless_others_write_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image, which root builds and another user runs."""
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr("compile.machine.ROOT", owner)
    tmp_path.chmod(0o755)
    assert make_private(tmp_path) == tmp_path
    monkeypatch.setattr("compile.machine.ROOT", owner + 2)
    with pytest.raises(PrivateDirectoryError, match=f"found one of user {owner}"):
        make_private(tmp_path)
    monkeypatch.setattr("compile.machine.ROOT", owner)
    tmp_path.chmod(0o775)
    with pytest.raises(PrivateDirectoryError, match="a directory that only its owner writes"):
        make_private(tmp_path)
