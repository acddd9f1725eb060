"""The memory that a rank may still take, by which KV pools are refused and graphs skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import torch

from model.config import ModelConfig

MARGIN_BYTES = 64 << 20
"""Left to others: allocators round up, and libraries take a workspace when they first run."""
LIVE_TENSORS = 8
"""Of the widest kind that a layer holds at once: input, residual, gate, up, output, copies."""


def free_memory_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return available_memory_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    # What torch keeps for itself is free for a graph's pool only after it was given back.
    return int(free)


def bytes_per_token(model: ModelConfig, dtype: str, num_data_ranks: int = 1) -> int:
    """Return at least what the tensors that live at once take for one token, if the tokens of
    `num_data_ranks` data-parallel ranks meet in a layer of experts."""
    itemsize: int = getattr(torch, dtype).itemsize
    shared = 0 if model.experts is None else model.experts.shared_size
    widest = max(model.hidden_size, model.intermediate_size, model.attention_width, shared)
    dense = LIVE_TENSORS * widest * itemsize
    if model.experts is None:
        return dense
    # A row for each token and chosen expert, gated in the model's dtype and computed in float32.
    experts = model.experts
    row = experts.intermediate_size * itemsize + model.hidden_size * torch.float32.itemsize
    return dense + num_data_ranks * experts.num_experts_per_tok * row


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return what can still be allocated, page cache included, within the cgroups' limits."""
    fields = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return min([available, *_left_in_cgroups(root)])


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Yield what each cgroup that this process is in, and each around it, still allows. Read from
    memory controllers of version 2, else 1. Files that were read are released before memory runs
    out."""
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
