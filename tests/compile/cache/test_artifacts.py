"""An artifact's name is the hash of its content, and its archive is the same for the same parts."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from compile.cache import artifacts
from compile.cache.artifacts import ArtifactError, ArtifactStore, pack, unpack

PARTS = {"b.py": b"code", "inductor/ab/c.so": bytes(range(256))}


def test_the_same_parts_are_the_same_archive_in_any_order() -> None:
    assert pack(PARTS) == pack(dict(reversed(PARTS.items())))
    assert unpack(pack(PARTS)) == PARTS


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside", "inductor/../../outside"])
def test_a_part_outside_of_the_archive_is_refused(name: str) -> None:
    with pytest.raises(ArtifactError, match="wanted names of members below it"):
        unpack(pack({name: b""}))


@pytest.mark.parametrize("damaged", [b"", b"conten", b"cOntent", b"content and more"])
def test_a_damaged_artifact_is_refused_and_mended_by_writing_it_again(
    tmp_path: Path, damaged: bytes
) -> None:
    store = ArtifactStore(tmp_path)
    name = store.put(b"content")
    (tmp_path / name).write_bytes(damaged)
    with pytest.raises(ArtifactError, match=f"^artifact {name[:12]}: wanted its content, found "):
        store.get(name)
    assert store.put(b"content") == name
    assert store.get(name) == b"content"


def test_a_full_disk_costs_the_artifact_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artifacts, "write_atomic", refuse)
    with caplog.at_level(logging.WARNING):
        assert ArtifactStore(tmp_path).offer(b"content") is None
    assert "No space left on device" in caplog.text
