"""Fuse a residual's addition and the RMSNorm behind it, in torch functions or as an op, into one op
`fused_add_rms_norm`, which returns the norm of the sum, and the sum. It is registered here with
torch functions, so a rewritten graph also runs without a kernel. Shapes: E hidden size."""

from __future__ import annotations

import operator
import sys

import torch
import torch.fx

from compile.custom_op import LIBRARY, direct_register_custom_op
from compile.passes import graph_pass
from compile.passes.graph_pass import Bind, Cast, Match, Op, Scalar, source_hash, value

OP_NAME = "fused_add_rms_norm"


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of the sum, and the sum, contiguous. x, residual: [..., E]; weight: [E]."""
    summed = (x + residual).contiguous()
    x32 = summed.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * (x32 * scale).to(x.dtype), summed


def _fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


fused_add_rms_norm = direct_register_custom_op(OP_NAME, add_rms_norm, fake_impl=_fake)

_SUM = Op("add", (Bind("x"), Bind("residual")), name="sum")
_X32 = Cast(_SUM, name="x32")
_SCALE = Op("rsqrt", (Op("add", (Op("row_mean", (Op("square", (_X32,)),)), Scalar("eps"))),))
_NORMED = Cast(Op("mul", (_X32, _SCALE)), name="normed")
NORMS = (
    Op("mul", (Bind("weight"), _NORMED), name="norm"),
    Op(f"{LIBRARY}::rms_norm", (_SUM, Bind("weight"), Scalar("eps")), name="norm"),
)


class FuseAddRMSNorm:
    name = "fuse_add_rms_norm"

    def uuid(self) -> str:
        """Return a hash of this file, of what it finds norms with, and of the op's schema."""
        schema = str(fused_add_rms_norm.default._schema)
        return source_hash(sys.modules[__name__], graph_pass, config=schema)

    def __call__(self, graph: torch.fx.Graph) -> int:
        return graph_pass.rewrite(graph, NORMS, _can_replace, _replace)


def _can_replace(match: Match) -> bool:
    x, residual, weight = (value(match[name]) for name in ("x", "residual", "weight"))
    if x is None or residual is None or weight is None:
        return False
    # By their names: comparing symbols as numbers would guard on them.
    has_one_shape = str(x.shape) == str(residual.shape) and weight.shape == x.shape[-1:]
    wanted = dict.fromkeys(("residual", "weight", "normed", "norm"), x.dtype)
    wanted["x32"] = torch.float32
    is_rounded_alike = all(
        getattr(value(match[name]), "dtype", None) == dtype
        for name, dtype in wanted.items()
        if name in match
    )
    return has_one_shape and is_rounded_alike and _can_move(match)


def _can_move(match: Match) -> bool:
    node = match["sum"].next
    while node is not match["norm"]:
        if node is match["weight"] or graph_pass.writes(node):
            return False
        node = node.next
    return True


def _replace(graph: torch.fx.Graph, match: Match) -> None:
    summed, norm = match["sum"], match["norm"]
    arguments = tuple(match[name] for name in ("x", "residual", "weight", "eps"))
    with graph.inserting_before(summed):
        fused = graph.call_function(fused_add_rms_norm.default, arguments)
        results = [graph.call_function(operator.getitem, (fused, i)) for i in range(2)]
    for new, old in zip(results, (norm, summed), strict=True):
        new.meta = dict(old.meta)
        old.replace_all_uses_with(new)
    # `eager_input_vals` holds the norm's own arguments; Inductor matches them to the op's schema.
    left_out = ("val", "example_value", "eager_input_vals")
    fused.meta = {key: old for key, old in norm.meta.items() if key not in left_out}
    key = "val" if "val" in norm.meta else "example_value"
    fused.meta[key] = tuple(value(new) for new in results)
