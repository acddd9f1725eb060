"""Fuse what makes short numbers of a norm with that norm, the addition in front of it and, with
several ranks, their sum (after TensorRT-LLM's QUANT and OUT_QUANT forms of an all-reduce).

It runs behind the passes that fuse additions and sums with norms, on what they have fused. Each
quantizer has two ops for each kind of norm. One returns numbers, scales and the sum; the other,
for a norm that something else reads too, returns the norm in front of them. What a quantizer is
given beside the norm comes last. Shapes: T tokens, E hidden size.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.fx
from torch.fx import Node

from compile.custom_op import LIBRARY, direct_register_custom_op
from compile.passes import graph_pass, quantizers
from compile.passes.fuse_add_rms_norm import fused_add_rms_norm
from compile.passes.fuse_all_reduce_rms_norm import all_reduce_add_rms_norm
from compile.passes.graph_pass import Bind, Match, Op, Result, Scalar, operation, source_hash, value
from compile.passes.quantizers import QUANTIZERS, Quantizer

_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_Names = ("x", "residual", "weight", "eps")


class _Norm(NamedTuple):
    op: Any
    names: tuple[str, ...]
    """Of its arguments. It returns the norm and the sum, each shaped like x."""

    @property
    def name(self) -> str:
        return str(self.op.default._schema.name).rpartition("::")[2]


_NORMS = (
    _Norm(all_reduce_add_rms_norm, (*_Names, "group_name")),
    _Norm(fused_add_rms_norm, _Names),
)


class _Fused(NamedTuple):
    """The ops of a norm and a quantizer."""

    norm: _Norm
    quantizer: Quantizer
    quantized: Any
    with_norm: Any

    @property
    def pattern(self) -> Op:
        scalars = ("eps", "group_name")
        given = tuple(Scalar(n) if n in scalars else Bind(n) for n in self.norm.names)
        norm = Op(f"{LIBRARY}::{self.norm.name}", given, name="base")
        given_too = (Bind(name) for name in self.quantizer.names)
        return Op(self.quantizer.name, (Result(norm, 0, name="norm"), *given_too), name="quantized")

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.norm.names, *self.quantizer.names)


def _register(norm: _Norm, quantizer: Quantizer) -> _Fused:
    if norm.op is all_reduce_add_rms_norm:
        functions: tuple[Callable[..., Any], ...] = _after_a_sum(quantizer)
        written = ["x"]
    else:
        functions, written = _of_one_rank(quantizer), []

    def three(x: torch.Tensor, *_: Any) -> _Three:
        return *quantizer.results(x), x.new_empty(x.shape)

    def four(x: torch.Tensor, *_: Any) -> _Four:
        return x.new_empty(x.shape), *three(x)

    ops = [
        direct_register_custom_op(
            f"{norm.name}_{form}{quantizer.kind}",
            function,
            mutates_args=written,
            fake_impl=results,
            is_composite=True,
        )
        for form, function, results in zip(("", "out_"), functions, (three, four), strict=True)
    ]
    return _Fused(norm, quantizer, *ops)


def _after_a_sum(quantizer: Quantizer) -> tuple[Callable[..., _Three], Callable[..., _Four]]:
    def with_norm(
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        group_name: str,
        global_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the norm of residual plus the ranks' sum of x, its numbers and scales, and that
        sum. x is overwritten. x, residual: [T, E]; weight: [E]; global_scale: if the quantizer
        takes one."""
        normed, summed = all_reduce_add_rms_norm(x, residual, weight, eps, group_name)
        return normed, *_quantize(quantizer, normed, global_scale), summed

    def quantized(
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        group_name: str,
        global_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return with_norm(x, residual, weight, eps, group_name, global_scale)[1:]

    return quantized, with_norm


def _of_one_rank(quantizer: Quantizer) -> tuple[Callable[..., _Three], Callable[..., _Four]]:
    def with_norm(
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        global_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the norm of the sum, its numbers and scales, and the sum. x, residual: [T, E];
        weight: [E]; global_scale: if the quantizer takes one."""
        normed, summed = fused_add_rms_norm(x, residual, weight, eps)
        return normed, *_quantize(quantizer, normed, global_scale), summed

    def quantized(
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        global_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return with_norm(x, residual, weight, eps, global_scale)[1:]

    return quantized, with_norm


def _quantize(
    quantizer: Quantizer, normed: torch.Tensor, global_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    numbers, scales = quantizer.op(normed, *(() if global_scale is None else (global_scale,)))
    return numbers, scales


_FUSED = tuple(_register(norm, quantizer) for quantizer in QUANTIZERS for norm in _NORMS)


class FuseRMSNormQuantize:
    name = "fuse_rms_norm_quantize"

    def uuid(self) -> str:
        schemas = [str(op.default._schema) for each in _FUSED for op in each[2:]]
        return source_hash(sys.modules[__name__], graph_pass, quantizers, config=repr(schemas))

    def __call__(self, graph: torch.fx.Graph) -> int:
        return sum(
            graph_pass.rewrite(graph, [each.pattern], _can_replace(each), _replacing(each))
            for each in _FUSED
        )


def _can_replace(fused: _Fused) -> Callable[[Match], bool]:
    def can_replace(match: Match) -> bool:
        """All that reads the norm, the sum and the numbers does so by index, nothing writes, and
        what the quantizer is given beside the norm is there from the beginning."""
        norm, quantized, base = match["norm"], match["quantized"], match["base"]
        readers = [*base.users, *(user for twin in _twins(norm, quantized) for user in twin.users)]
        is_by_index = all(user.target is operator.getitem for user in readers)
        is_named = value(norm) is not None and _results(quantized) is not None
        is_there = all(match[name].op == "placeholder" for name in fused.quantizer.names)
        writes = any(graph_pass.writes(user) for user in norm.users)
        return is_by_index and is_named and is_there and not writes

    return can_replace


def _twins(norm: Node, quantized: Node) -> list[Node]:
    """Return the nodes that compute the same as one, itself among them: several layers may
    multiply one norm. One that is given another scale is a reader like any other."""
    return [user for user in norm.users if operation(user) == operation(quantized)]


def _results(node: Node) -> tuple[torch.Tensor, ...] | None:
    """Return the fake tensors that stand for an op's results."""
    found = node.meta.get("val", node.meta.get("example_value"))
    return tuple(found) if isinstance(found, (tuple, list)) else None


def _replacing(fused: _Fused) -> Callable[[torch.fx.Graph, Match], None]:
    def replace(graph: torch.fx.Graph, match: Match) -> None:
        base, norm, quantized = match["base"], match["norm"], match["quantized"]
        twins = _twins(norm, quantized)
        has_norm = len(norm.users) > len(twins)
        with graph.inserting_before(base):
            op = fused.with_norm if has_norm else fused.quantized
            new = graph.call_function(op.default, tuple(match[name] for name in fused.names))
        # `eager_input_vals` holds the norm's own arguments.
        new.meta = {key: old for key, old in base.meta.items() if key != "eager_input_vals"}
        norms, numbers = _results(base), _results(quantized)
        assert norms is not None and numbers is not None
        values = (*norms[:has_norm], *numbers, *norms[1:])
        new.meta["val" if "val" in base.meta else "example_value"] = values
        for twin in twins:
            for user in list(twin.users):
                index: Any = user.args[1]
                user.args = (new, has_norm + index)
            if twin is not quantized:
                graph.erase_node(twin)
        for user in list(base.users):
            if user.args[1] == 1:
                user.args = (new, len(values) - 1)
            elif has_norm:
                user.args = (new, 0)

    return replace
