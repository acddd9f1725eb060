"""The functional ATen graph of a piece that no compiler sees, as Inductor would see it.

Passes find the same operations in a piece whether it is compiled or runs as it is. An op that
writes into its arguments is wrapped in `auto_functionalized_v2`, which returns what it has written;
`reinplace` takes the wrapper away again, behind the passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx


@contextmanager
def fresh_tracing(inputs: Sequence[Any]) -> Iterator[None]:
    """Compile outside of the tracing that is going on, with the symbols of its inputs."""
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = detect_fake_mode(inputs) or FakeTensorMode(shape_env=ShapeEnv())
    with tracing(TracingContext(mode)):
        yield


def functional(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """Return the ATen graph of a piece, which takes and returns what the piece does, in order; the
    piece is left as it was. inputs: its fake tensors and symbols, or tensors of a fixed size.

    No node but the last ones writes: those bring into the piece's own arguments what it writes into
    them. Each node's value is in its `meta`, with the symbols of the inputs.
    """
    from torch._functorch.aot_autograd import aot_module_simplified

    traced: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, example_inputs: Any) -> Any:
        traced.append(gm)
        return gm.forward

    with fresh_tracing(inputs), torch.no_grad():
        aot_module_simplified(
            module,
            list(inputs),
            fw_compiler=keep,
            bw_compiler=keep,
            inference_compiler=keep,
            keep_inference_input_mutations=True,
        )
    [graph] = traced
    return graph
