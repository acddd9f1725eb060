"""Which processes stand on one node: what they must share to reach each other without a network."""

from __future__ import annotations

import os
from pathlib import Path


def node_id() -> str:
    """Return what two processes share exactly when one can open the other's /proc entries.

    The boot id alone is the same in two containers that do not see each other's processes, so
    the process namespace is part of it.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def link_node() -> str:
    """Return what two processes share exactly when Unix sockets connect them.

    Abstract Unix sockets belong to a network namespace.
    """
    return f"{node_id()}/{os.readlink('/proc/self/ns/net')}"
