"""The part of gpu_check.py that captures collectives: a group of one rank, made as ranks make it.

One GPU can show no other NCCL. A group of one runs the product's ops over the product's backend:
communicators come up in the first call, a capture takes the ops in, and a replay follows its
inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from gpu_check_rows import Row, Setting, attempts, error_of

from cluster.group.membership import make_group
from compile.graphs.pools import new_graph_pool, new_step_graph
from model import parallel

HOST = "127.0.0.1"


def part_collectives(at: Setting) -> Iterator[Row]:
    """All-reduce, all-gather, gather and reduce-scatter of one rank, captured and replayed."""
    # Held here: ops find a group by its name for as long as it lives.
    group = make_group(dist.HashStore(), 0, 1, device=at.device.type, host=HOST)
    name = parallel.register_group("tp", group)
    shape = (at.pick(64, 4), at.pick(8192, 64))
    rows = shape[0]

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        parallel.all_reduce(y, name)
        return y

    def all_gather(x: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = parallel.all_gather(x + 1, [rows], 0, name)
        return gathered

    def gather(x: torch.Tensor) -> torch.Tensor:
        parts = x.new_empty((1, *x.shape))
        parallel.gather(x + 1, parts, name)
        return parts[0]

    def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
        return parallel.reduce_scatter(x + 1, [rows], name)

    # The last one of these is no op: it runs inside opaque ones.
    cases = [(step.__name__, step) for step in (all_reduce, all_gather, gather, reduce_scatter)]

    def collective(title: str, step: Callable[[torch.Tensor], torch.Tensor]) -> Row:
        x = at.randn(*shape)
        row = Row(f"{title} of one rank", limit=0.0, num_bytes=4 * x.numel())
        eager = step(x).clone()
        row.error = error_of(eager, x + 1)
        if at.device.type != "cuda":
            row.note = "over gloo, without a graph"
            row.seconds = at.time(lambda: step(x))
            return row
        graph = new_step_graph(new_graph_pool(at.device))
        replayed = graph.capture(lambda: step(x))
        for _ in range(3):
            x.copy_(at.randn(*shape))
            graph.replay()
            row.error = max(row.error, error_of(replayed, x + 1))
        row.note = "over NCCL, replayed"
        row.seconds = at.time(graph.replay)
        return row

    try:
        yield from attempts(collective, cases)
    finally:
        group.shutdown()
