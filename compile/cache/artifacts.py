"""Compiled pieces as files whose names are the hashes of their contents, compared when loaded.

An artifact is a zip archive of all that its code needs: `unzip -p FILE output_code.py` reads it.
"""

from __future__ import annotations

import hashlib
import io
import logging
import zipfile
from collections.abc import Mapping
from pathlib import Path

from compile.cache.disk import write_atomic

OUTPUT_CODE = "output_code.py"
"""The member that people read: what a compiler generated, or the piece as it was traced."""

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""No time of day: equal contents are equal archives."""

logger = logging.getLogger(__name__)


class ArtifactError(RuntimeError):
    """An artifact cannot be used. The message is one line: `NAME: wanted ..., found ...`."""


def pack(members: Mapping[str, bytes]) -> bytes:
    """Return an archive of `members`, the same for the same members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(members):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), members[name])
    return buffer.getvalue()


def unpack(data: bytes) -> dict[str, bytes]:
    """Return the members of an archive; ArtifactError: it is none, or one leads out of it."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise ArtifactError(f"artifact: wanted an archive, found {error}") from error
    for name in members:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ArtifactError(f"artifact: wanted names of members below it, found {name!r}")
    return members


class ArtifactStore:
    """A directory of artifacts. Invariant: a file's name is the sha256 of what was written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def put(self, data: bytes) -> str:
        """Write an artifact, also over one that was damaged, and return its name."""
        name = hashlib.sha256(data).hexdigest()
        write_atomic(self.directory / name, data)
        return name

    def offer(self, data: bytes) -> str | None:
        """Write an artifact if the disk takes it; None and a line in the log if it does not."""
        try:
            return self.put(data)
        except OSError as error:
            logger.warning("compile cache: artifact is not saved: %s", error)
            return None

    def get(self, name: str) -> bytes:
        """Return an artifact; ArtifactError: it is missing or not what was written."""
        try:
            data = (self.directory / name).read_bytes()
        except OSError as error:
            raise ArtifactError(f"artifact {name[:12]}: wanted a file, found {error}") from error
        if (found := hashlib.sha256(data).hexdigest()) != name:
            raise ArtifactError(f"artifact {name[:12]}: wanted its content, found {found[:12]}")
        return data
