"""How much memory of its node a rank may still take, by /proc and by the cgroups that it is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath


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
