"""`PassManager`: the configured passes, run in order on every graph, inside Inductor or without it,
until they find nothing more. Its `uuid` belongs in every cache key."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch.fx

from compile.config import CompilationConfig
from compile.counters import counter
from compile.errors import FieldError
from compile.passes.aten import functional
from compile.passes.fuse_add_rms_norm import FuseAddRMSNorm
from compile.passes.fuse_all_reduce_rms_norm import FuseAllReduceRMSNorm
from compile.passes.fuse_rms_norm_quantize import FuseRMSNormQuantize
from compile.passes.graph_pass import GraphPass
from compile.passes.reinplace import reinplace
from compile.passes.storages import Storages
from compile.passes.streams import spread_over_streams
from compile.passes.user_buffers import use_user_buffers

logger = logging.getLogger(__name__)

PASSES: dict[str, Callable[[], GraphPass]] = {
    entry.name: entry for entry in (FuseAddRMSNorm, FuseAllReduceRMSNorm, FuseRMSNormQuantize)
}
"""Every pass by the name that `compilation.passes` lists it under."""


class PassManager:
    def __init__(
        self,
        passes: Sequence[GraphPass],
        max_num_streams: int = 1,
        *,
        enable_userbuffers: bool = False,
    ) -> None:
        """Take the passes, in order. Pieces without a compiler are spread over so many streams, and
        add up in user buffers."""
        self.passes = tuple(passes)
        self._max_num_streams = max_num_streams
        self._enable_userbuffers = enable_userbuffers

    @classmethod
    def from_config(cls, config: CompilationConfig) -> PassManager:
        """Return a manager of the passes that a configuration names; FieldError: there is none."""
        names = config.passes or ()
        for name in names:
            if name not in PASSES:
                wanted = f"names out of {', '.join(sorted(PASSES))}"
                raise FieldError("compilation.passes", wanted, name)
        return cls(
            [PASSES[name]() for name in names],
            config.max_num_streams,
            enable_userbuffers=config.enable_userbuffers,
        )

    def apply(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> torch.fx.GraphModule:
        """Return a piece as it runs without a compiler: ATen ops, rewritten, that write in place
        again, on as many streams as they may. The piece is left as it was; inputs: as for
        `functional`."""
        found = functional(module, inputs)
        self(found.graph)
        storages = Storages()
        reinplace(found.graph, storages)
        if self._enable_userbuffers:
            use_user_buffers(found.graph)
        if spread := spread_over_streams(found.graph, self._max_num_streams, storages):
            logger.debug("spread a piece: %s", spread)
        # Nothing that looks for dead code may follow.
        found.graph.lint()
        found.recompile()
        return found

    def __call__(self, graph: torch.fx.Graph) -> int:
        """Rewrite a graph in place, whose module the caller recompiles; return all matches."""
        total = 0
        # Each round but the last takes something away, so there are no more than nodes.
        for _ in range(len(graph.nodes)):
            count = sum(self._run(entry, graph) for entry in self.passes)
            if not count:
                break
            total += count
        counter.num_pass_matches += total
        return total

    def _run(self, entry: GraphPass, graph: torch.fx.Graph) -> int:
        try:
            return entry(graph)
        except Exception as error:
            error.add_note(f"in graph pass {entry.name!r}; compilation.passes turns it off")
            raise

    def uuid(self) -> str:
        """Return a hash of the passes, their order and their configuration."""
        parts = (f"{entry.name}={entry.uuid()}" for entry in self.passes)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def inductor_config(self) -> dict[str, Any]:
        """Return the options with which Inductor runs these passes on each graph it compiles."""
        return {"post_grad_custom_pre_pass": _for_inductor(self)} if self.passes else {}


def _for_inductor(passes: PassManager) -> Any:
    """Return the passes as Inductor takes them: ahead of its own, which may take additions away."""
    # Importing Inductor takes a second that a process without it need not spend.
    from torch._inductor.custom_graph_pass import CustomGraphPass

    uuid = passes.uuid()

    class PostGradPass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            passes(graph)

        def uuid(self) -> str:
            return uuid

    return PostGradPass()
