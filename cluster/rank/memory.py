"""Memory of a KV pool that other processes of the node can map.

An anonymous memory file backs it: it has no name, so a killed process leaves nothing behind, and
a peer opens it through the owner's entry in /proc.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath


def node_id() -> str:
    """Return what two processes share exactly when one can open the other's /proc entries.

    The boot id alone is the same in two containers that do not see each other's processes, so
    the process namespace is part of it.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


class SharedMemory:
    """Writable memory of this process that peers on the node can open by (pid, fd)."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("lockstep-kv", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size_bytes)
        self._map = mmap.mmap(self.fd, size_bytes)
        self.view = memoryview(self._map)

    @property
    def pid(self) -> int:
        """The process whose /proc entry leads to the memory."""
        return os.getpid()


def open_shared(pid: int, fd: int) -> memoryview:
    """Map a peer's memory.

    Writable, because torch refuses read-only buffers; readers must not write.

    Raises:
        OSError: the peer is gone or may not be looked into.
    """
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(opened, os.fstat(opened).st_size))
    finally:
        os.close(opened)


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return what can still be allocated, page cache included, within the cgroups' limits."""
    fields = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return min([available, *_left_in_cgroups(root)])


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Yield what each cgroup that this process is in, and each around it, still allows.

    Read from memory controllers of version 2, else 1. Files that were read count as used there,
    but are let go of before anybody runs out.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, version = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            mount, version = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        # A container may see its own group as the mount's root, whatever the path says.
        inner = PurePosixPath(path.lstrip("/"))
        for group in dict.fromkeys((inner, *inner.parents)):
            with suppress(OSError, ValueError, KeyError):  # not there, or no limit: "max"
                yield _left_in(mount / group, *version)


_V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def _left_in(group: Path, limit: str, used: str, files: tuple[str, ...]) -> int:
    allowed = int((group / limit).read_text())
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return allowed - int((group / used).read_text()) + sum(int(stat[name]) for name in files)
