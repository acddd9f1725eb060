"""Files appear whole, changes are recognised, and a lock is waited for no longer than asked."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from compile.cache import artifacts

PARTS = {"b.py": b"code", "inductor/ab/c.so": bytes(range(256))}


def test_the_same_parts_are_the_same_archive_in_any_order() -> None:
    assert artifacts.pack(PARTS) == artifacts.pack(dict(reversed(PARTS.items())))
    assert artifacts.unpack(artifacts.pack(PARTS)) == PARTS


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside", "inductor/../../outside"])
def test_a_part_outside_of_the_archive_is_refused(name: str) -> None:
    with pytest.raises(artifacts.ArtifactError, match="wanted names of members below it"):
        artifacts.unpack(artifacts.pack({name: b""}))


@pytest.mark.parametrize("damaged", [b"", b"conten", b"cOntent", b"content and more"])
def test_a_damaged_artifact_is_refused_and_mended_by_writing_it_again(
    tmp_path: Path, damaged: bytes
) -> None:
    store = artifacts.ArtifactStore(tmp_path)
    name = store.put(b"content")
    (tmp_path / name).write_bytes(damaged)
    with pytest.raises(
        artifacts.ArtifactError, match=f"^artifact {name[:12]}: wanted its content, found "
    ):
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
        assert artifacts.ArtifactStore(tmp_path).offer(b"content") is None
    assert "No space left on device" in caplog.text


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    artifacts.write_atomic(path, b"old")

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        artifacts.write_atomic(path, b"new")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("file", b"old")]


CHECKED = b"{'piece': 1, 'shape': None}\n"


def _flipped(position: int) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[position] ^= 1
        return bytes(changed)

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        *map(_flipped, (0, 20, 75, 80, -1)),
        *(lambda content, n=n: content[:n] for n in (0, 1, 70, 80)),
        lambda _: b"# sha256 \xff\xfe\n",
    ],
)
def test_checked_text_that_was_changed_or_cut_short_is_noticed(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "index.py"
    artifacts.write_checked(path, CHECKED.decode())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(artifacts.CorruptFileError, match=r"^.*index\.py: wanted .*, found "):
        artifacts.read_checked(path)
