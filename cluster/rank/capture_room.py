"""Whether a graph fits into memory: asked before each capture, and answered alike on all ranks.

The one thing to know: ranks find different amounts of free memory, but a size that one of them
must skip is skipped by all. The question is therefore a barrier as well: nobody captures before
everybody has come to the same size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cluster.rank.available_memory import available_memory_bytes
from cluster.rank.groups import GroupMembership
from model.config import ModelConfig

MARGIN_BYTES = 64 << 20
"""Left to others: allocators round up, and libraries take a workspace when they first run."""
LIVE_TENSORS = 8
"""Of the widest kind that a layer holds at once: input, residual, gate, up, output, copies."""


class CaptureRoom:
    """The free memory of the rank with the least.

    Invariant: `has_room` is called for the same sizes in the same order on all ranks.
    """

    def __init__(
        self,
        group: GroupMembership,
        device: torch.device,
        bytes_per_token: int,
        free_bytes: Callable[[torch.device], int] | None = None,
    ) -> None:
        self._group = group
        self._device = device
        self._bytes_per_token = bytes_per_token
        self._free_bytes = free_bytes or free_memory_bytes
        self._num_asked = 0

    def has_room(self, num_tokens: int) -> bool:
        """Wait for all ranks; tell whether a graph of so many tokens fits on each."""
        self._num_asked += 1
        free = self._group.minimum(f"free/{self._num_asked}", self._free_bytes(self._device))
        return free >= MARGIN_BYTES + num_tokens * self._bytes_per_token


def free_memory_bytes(device: torch.device) -> int:
    """Return what this rank could still allocate on the device."""
    if device.type == "cpu":
        return available_memory_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    # What torch keeps for itself is free for a graph's pool only after it was given back.
    return int(free)


def bytes_per_token(model: ModelConfig, dtype: str) -> int:
    """Return at least what the tensors that live at once take for one token."""
    itemsize: int = getattr(torch, dtype).itemsize
    widest = max(model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim)
    return LIVE_TENSORS * widest * itemsize
