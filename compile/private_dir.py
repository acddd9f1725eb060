"""Directories from which code is loaded: nobody but we, or root, may place a file there.

The one thing to know: what is checked is who could have written, not what was written. Libraries
and generated code run as soon as they are loaded, so a directory that others can write to is
refused before anything in it is read.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

ROOT = 0
"""May replace the program itself; a cache that is built into an image is root's."""


class PrivateDirectoryError(RuntimeError):
    """Somebody else could place a file. The message is one line: `PATH: wanted ..., found ...`."""


def make_private(directory: Path) -> Path:
    """Return `directory`, which is made if it is missing, once nobody else can write to it.

    Raises:
        PrivateDirectoryError: it belongs to another user than us or root, or others may write.
        OSError: it cannot be made.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid not in (os.geteuid(), ROOT):
        wanted, found = f"a directory of user {os.geteuid()}", f"one of user {status.st_uid}"
        raise PrivateDirectoryError(f"{directory}: wanted {wanted}, found {found}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        wanted, mode = "a directory that only its owner writes", stat.filemode(status.st_mode)
        raise PrivateDirectoryError(f"{directory}: wanted {wanted}, found {mode}")
    return directory
