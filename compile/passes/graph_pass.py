"""What a graph pass is."""

from __future__ import annotations

import hashlib
import inspect
from types import ModuleType
from typing import Protocol

import torch.fx


class GraphPass(Protocol):
    """Rewrites a graph in place.

    Invariant: a pass understands a graph as Dynamo traces it and one of ATen ops alike, and leaves
    alone what it does not understand. Values stay what they were, up to rounding.
    """

    @property
    def name(self) -> str:
        """What configurations call the pass."""

    def uuid(self) -> str:
        """Return a hash of all that decides what the pass does: its source and configuration."""

    def __call__(self, graph: torch.fx.Graph) -> int:
        """Rewrite every match and return how many there were."""


def source_hash(*modules: ModuleType, config: str = "") -> str:
    """Return a hash of modules' sources and a configuration."""
    sources = (inspect.getsource(module) for module in modules)
    return hashlib.sha256("\0".join([config, *sources]).encode()).hexdigest()
