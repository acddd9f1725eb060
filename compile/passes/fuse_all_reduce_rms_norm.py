"""Fuse a sum over ranks, a residual's addition and the RMSNorm behind it into one op, which a
kernel over the ranks' memory can do at once (on a GPU: `model.parallel`). It runs behind
`fuse_add_rms_norm`, on what that has fused, and on norms that are one op already. Shapes: T tokens,
E hidden size."""

from __future__ import annotations

import sys

import torch
import torch.fx

from compile.custom_op import LIBRARY, direct_register_custom_op
from compile.passes import graph_pass
from compile.passes.fuse_add_rms_norm import fused_add_rms_norm
from compile.passes.graph_pass import Bind, Match, Op, Scalar, source_hash, value

OP_NAME = "all_reduce_add_rms_norm"


def all_reduce_then_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of residual plus the ranks' sum of x, and that sum with the residual. x is
    overwritten. x, residual: [T, E]; weight: [E]."""
    torch.ops.lockstep.all_reduce(x, group_name)
    normed, summed = fused_add_rms_norm(x, residual, weight, eps)
    return normed, summed


def _fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


all_reduce_add_rms_norm = direct_register_custom_op(
    OP_NAME, all_reduce_then_norm, mutates_args=["x"], fake_impl=_fake, is_composite=True
)

_REDUCED = Op(f"{LIBRARY}::all_reduce", (Bind("x"), Scalar("group_name")), name="reduced")
_REST = (Bind("weight"), Scalar("eps"))
NORMS = (
    Op(f"{LIBRARY}::fused_add_rms_norm", (_REDUCED, Bind("residual"), *_REST), name="fused"),
    Op(f"{LIBRARY}::fused_add_rms_norm", (Bind("residual"), _REDUCED, *_REST), name="fused"),
)


class FuseAllReduceRMSNorm:
    name = "fuse_all_reduce_rms_norm"

    def uuid(self) -> str:
        schema = str(all_reduce_add_rms_norm.default._schema)
        return source_hash(sys.modules[__name__], graph_pass, config=schema)

    def __call__(self, graph: torch.fx.Graph) -> int:
        return graph_pass.rewrite(graph, NORMS, _can_replace, _replace)


def _can_replace(match: Match) -> bool:
    """Only this norm reads the sum over ranks, and nothing else what that is written into."""
    x, residual = value(match["x"]), value(match["residual"])
    is_alone = all(len(match[name].users) == 1 for name in ("x", "reduced"))
    if x is None or residual is None or match["x"].op == "placeholder":
        return False
    return is_alone and str(x.shape) == str(residual.shape) and x.dtype == residual.dtype


def _replace(graph: torch.fx.Graph, match: Match) -> None:
    fused = match["fused"]
    names = ("x", "residual", "weight", "eps", "group_name")
    with graph.inserting_before(fused):
        new = graph.call_function(
            all_reduce_add_rms_norm.default, tuple(match[name] for name in names)
        )
    # `eager_input_vals` holds the norm's own arguments; Inductor matches them to the op's schema.
    new.meta = {key: old for key, old in fused.meta.items() if key != "eager_input_vals"}
    fused.replace_all_uses_with(new)
