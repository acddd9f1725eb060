"""Memory that other processes of the node can map."""

from __future__ import annotations

import fcntl
import mmap
import os

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """Writable memory of this process that peers on the node can open by (pid, fd). An anonymous
    memory file backs it, so a killed process leaves nothing behind. It is sealed: a file that
    shrinks would end the process of any peer that has mapped it."""

    def __init__(self, size_bytes: int) -> None:
        self.pid = os.getpid()
        self.fd = os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        self._map = mmap.mmap(self.fd, size_bytes)
        self.view = memoryview(self._map)


def open_shared(pid: int, fd: int) -> memoryview:
    """Map a peer's memory, writable, because torch refuses read-only buffers; readers must not
    write. An `OSError` if the peer is gone, may not be looked into, or has no such memory there."""
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # Only memory files have seals: the answer for any other file is an OSError.
        if fcntl.fcntl(opened, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise OSError(f"/proc/{pid}/fd/{fd}: wanted sealed memory, found another file")
        return memoryview(mmap.mmap(opened, os.fstat(opened).st_size))
    finally:
        os.close(opened)
