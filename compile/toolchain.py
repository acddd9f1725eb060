"""The toolchain of a serving process: compilers behind a cache, pieces behind graphs."""

from __future__ import annotations

from collections.abc import Sequence

from compile.cache.index import CompileCache
from compile.cache.manager import CompilerManager
from compile.config import CUDAGraphMode
from compile.graphs.pools import GraphPools
from compile.graphs.wrapper import CUDAGraphWrapper, StableOutputs
from compile.scope import CompileScope, Opened, Runnable


class StandardToolchain:
    """Opens the cache on disk, and captures pieces into the pools of the process."""

    def __init__(self, pools: GraphPools) -> None:
        self._pools = pools

    def open(
        self, scope: CompileScope, prefix: str, traced_files: Sequence[str] | None
    ) -> Opened | None:
        """Return compilers and cache; see `Toolchain.open`."""
        cache = CompileCache.open(scope, prefix, traced_files)
        if traced_files is None and cache is None:
            return None
        return Opened(CompilerManager(scope, cache), cache)

    def wrap(self, runnable: Runnable, *, is_first: bool) -> Runnable:
        """Return a piece that is captured and replayed as the forward context says."""
        return CUDAGraphWrapper(runnable, CUDAGraphMode.PIECEWISE, self._pools, is_first=is_first)

    def keep_outputs(self, op: Runnable) -> Runnable:
        """Return one call of an eager op, its outputs at fixed addresses."""
        return StableOutputs(op)
