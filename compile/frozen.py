"""What a recorded call keeps of its arguments: tensors by address, all else by value.

The one thing to know: a graph owns no tensor. One from outside of the pool is watched, and its
death makes the graph unusable, as the memory it lay in may hold anything now. On a GPU nothing
would notice.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from typing import Any

import torch

from compile.context import ForwardContext
from compile.cpu_pool import CpuGraphPool
from compile.graph_errors import ForeignTensorError
from compile.nested import rebuild


class Watch:
    """Notices deaths of tensors. Invariant: `dead` describes the watched ones that are gone."""

    def __init__(self) -> None:
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.dead: list[str] = []

    def add(self, tensor: torch.Tensor, name: str) -> None:
        """Watch the memory of a tensor."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._watched:
            dead, found = self.dead, f"{name}: {describe(tensor)}"
            # Torch keeps a storage's Python object as long as the storage: this is its death.
            self._watched[address] = weakref.ref(storage, lambda _: dead.append(found))


class Freezer:
    """Freezes the arguments and contexts of one graph."""

    def __init__(self, pool: CpuGraphPool) -> None:
        self._pool = pool
        self.watch = Watch()

    def freeze(self, value: Any, name: str) -> Any:
        """Return `value` as a replay will see it.

        Containers and dataclasses are copied, tensors become aliases; other objects stay as they
        are and are followed.

        Raises:
            ForeignTensorError: a tensor lies on another device, or is no strided one.
        """
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if isinstance(value, tuple | list):
            items = [self.freeze(item, f"{name}[{i}]") for i, item in enumerate(value)]
            return rebuild(value, items)
        if isinstance(value, dict):
            return {key: self.freeze(item, f"{name}[{key!r}]") for key, item in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value, name)
        return value

    def context(self, value: ForwardContext | None) -> ForwardContext | None:
        """Return a forward context as a replay will see it."""
        frozen: ForwardContext | None = self.freeze(value, "forward context")
        return frozen

    def _dataclass(self, value: Any, name: str) -> Any:
        frozen = copy.copy(value)
        for field in dataclasses.fields(value):
            item = self.freeze(getattr(value, field.name), f"{name}.{field.name}")
            object.__setattr__(frozen, field.name, item)
        return frozen

    def _tensor(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        check_addressable(tensor, self._pool.device, name)
        if tensor.numel() and not self._pool.owns(tensor):
            self.watch.add(tensor, name)
        return self._pool.alias(tensor)


def check_addressable(tensor: torch.Tensor, device: torch.device, name: str) -> None:
    """Raise where a tensor has no address on `device`."""
    if tensor.device.type != device.type:
        raise ForeignTensorError(name, f"a tensor on {device}", describe(tensor))
    if tensor.layout is not torch.strided:
        raise ForeignTensorError(name, "a strided tensor", describe(tensor))
    if tensor.is_conj() or tensor.is_neg():
        found = f"a lazy conjugate or negative: {describe(tensor)}"
        raise ForeignTensorError(name, "a tensor whose memory holds its values", found)


def describe(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype, shape and device in words."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return f"{dtype} {list(tensor.shape)} on {tensor.device}{layout}"
