"""A lock that cannot be had is reported, and never waited for."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest

from compile.file_lock import file_lock


@pytest.mark.parametrize("reason", ["the file cannot be opened", "the filesystem has no locks"])
def test_a_lock_that_cannot_be_had_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if "opened" in reason:
        (tmp_path / "lock").mkdir()
    monkeypatch.setattr(fcntl, "flock", flock)
    with file_lock(tmp_path / "lock", 5) as is_held:
        assert not is_held
    with pytest.raises(ZeroDivisionError), file_lock(tmp_path / "lock", 0):
        raise ZeroDivisionError
