"""Which nodes of a graph share memory."""

from __future__ import annotations

import torch
from torch.fx import Node


def tensors(node: Node) -> list[torch.Tensor]:
    """Return the fake tensors that a node of an ATen graph returns."""
    found = node.meta.get("val")
    results = found if isinstance(found, tuple | list) else (found,)
    return [each for each in results if isinstance(each, torch.Tensor)]


class Storages:
    """Which nodes share memory. Where an op writes in place, what it returned shares its argument's
    from then on."""

    def __init__(self) -> None:
        self._joined: dict[int, int] = {}
        # A storage that is gone would leave its number to another.
        self._kept: list[object] = []

    def of(self, node: Node) -> int | None:
        """Return a number that nodes have in common if they share memory; None: no tensor."""
        found = node.meta.get("val")
        if not isinstance(found, torch.Tensor):
            return None
        storage: int = found.untyped_storage()._cdata
        while storage in self._joined:
            storage = self._joined[storage]
        return storage

    def join(self, node: Node, other: Node) -> None:
        one, two = self.of(node), self.of(other)
        if one is not None and two is not None and one != two:
            self._joined[one] = two
            self._kept.append(node.meta["val"])
