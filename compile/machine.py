"""The processor that native code is built for, and directories that it may be loaded from: those in
which no other user except root may place a file."""

from __future__ import annotations

import functools
import os
import stat
from pathlib import Path

ROOT = 0
"""May replace the program itself; a cache that is built into an image is root's."""


class PrivateDirectoryError(RuntimeError):
    """Another user could place a file. The message is one line: `PATH: wanted ..., found ...`."""


def make_private(directory: Path) -> Path:
    """Make `directory` if it is missing and return it; PrivateDirectoryError: others may write."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid not in (os.geteuid(), ROOT):
        wanted, found = f"a directory of user {os.geteuid()}", f"one of user {status.st_uid}"
        raise PrivateDirectoryError(f"{directory}: wanted {wanted}, found {found}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        wanted, mode = "a directory that only its owner writes", stat.filemode(status.st_mode)
        raise PrivateDirectoryError(f"{directory}: wanted {wanted}, found {mode}")
    return directory


@functools.cache
def processor() -> str:
    """Return model and features of the processor: `-march=native` compiles for both."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    fields = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.split("\t")[0].strip() in fields)
