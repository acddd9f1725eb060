"""The passes as Inductor takes them: on its graph of ATen ops, ahead of its own.

Behind them a residual's addition may have become part of the product before it (`addmm`), as it
does on a GPU, and on CPUs whose weights stay plain.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.fx
from torch._inductor.custom_graph_pass import CustomGraphPass


class PostGradPass(CustomGraphPass):
    """Runs a `PassManager`; its uuid is part of the keys of Inductor's caches."""

    def __init__(self, run: Callable[[torch.fx.Graph], int], uuid: str) -> None:
        self._run = run
        self._uuid = uuid

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Rewrite Inductor's graph in place."""
        self._run(graph)

    def uuid(self) -> str:
        """Return what Inductor's cache keys say of the passes."""
        return self._uuid
