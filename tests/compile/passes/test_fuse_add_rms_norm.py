"""Additions and norms become one op wherever both can be seen, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from compile.passes.fuse_add_rms_norm import FuseAddRMSNorm, fused_add_rms_norm
from model.kernels import dispatch, elementwise

T, E = 5, 16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.15}
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)


def num_fused(graph: torch.fx.Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=fused_add_rms_norm.default))


def arguments(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((T, E), (T, E), (E,))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return elementwise.rms_norm(x, weight, 1e-5)


def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    """Two fused norms in a row, the second sum unused by anything behind it."""
    residual = residual + x
    normed = norm(residual, weight)
    return elementwise.rms_norm(normed * 2 + residual, weight, 0.25), residual


@DTYPES
def test_both_norms_of_a_block_are_fused(graph_of: Any, dtype: torch.dtype) -> None:
    args = arguments(dtype)
    module = graph_of(block, *args)
    before = len(module.graph.nodes)
    assert FuseAddRMSNorm()(module.graph) == 2
    module.graph.lint()
    module.recompile()
    assert num_fused(module.graph) == 2
    # What was matched is gone; three nodes came for each.
    assert len(module.graph.nodes) < before
    calls = module.graph.find_nodes(op="call_function", target=fused_add_rms_norm.default)
    assert [call.args[3] for call in calls] == [1e-5, 0.25]
    inputs = [named(args, node) for node in module.graph.find_nodes(op="placeholder")]
    for found, wanted in zip(module(*inputs), block(*args), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[dtype])


def named(args: tuple[torch.Tensor, ...], node: torch.fx.Node) -> torch.Tensor:
    """Return the argument that a placeholder stands for."""
    names = {"x": 0, "residual": 1, "weight": 2}
    name = node.name.removeprefix("l_").split("_")[0]
    return args[names[name]]


def test_the_norm_of_a_gpu_is_fused_as_well(graph_of: Any) -> None:
    def opaque(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        residual = residual + x
        return dispatch.rms_norm(residual, weight, 1e-5), residual

    module = graph_of(opaque, *arguments(torch.float32))
    assert FuseAddRMSNorm()(module.graph) == 1
    assert num_fused(module.graph) == 1


def subtracts_the_mean(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    summed = x + residual
    centred = summed - summed.mean(-1, keepdim=True)
    return weight * (centred * torch.rsqrt(summed.square().mean(-1, keepdim=True) + 1e-5))


def norms_columns(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    summed = x + residual
    return weight * (summed * torch.rsqrt(summed.square().mean(0, keepdim=True) + 1e-5))


def writes_between(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    summed = x + residual
    x.add_(1)
    return norm(summed, weight), summed


UNLIKE: dict[str, Callable[..., Any]] = {
    "no sum": lambda x, residual, weight: norm(x, weight) + residual,
    "a sum of two shapes": lambda x, residual, weight: norm(x + residual[:1], weight),
    "a sum with a number": lambda x, residual, weight: norm(x + 1.0, weight) + residual,
    "a wider weight": lambda x, residual, weight: norm((x + residual).bfloat16(), weight),
    "a wider sum": lambda x, residual, weight: norm(x + residual.double(), weight),
    "a weight of rows": lambda x, residual, weight: norm(x + residual, x * weight),
    "another mean": norms_columns,
    "another norm": subtracts_the_mean,
    "a weight made later": lambda x, residual, weight: (lambda s: norm(s, weight * s[0]))(
        x + residual
    ),
    "a write between": writes_between,
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_is_not_a_norm_of_a_sum_is_left_alone(graph_of: Any, name: str) -> None:
    module = graph_of(UNLIKE[name], *arguments(torch.float32))
    text = module.print_readable(print_output=False)
    assert FuseAddRMSNorm()(module.graph) == 0
    module.recompile()
    assert module.print_readable(print_output=False) == text


def test_a_norm_whose_parts_are_used_elsewhere_keeps_them() -> None:
    def leaks(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        summed = x + residual
        scale = torch.rsqrt(summed.square().mean(-1, keepdim=True) + 1e-5)
        return weight * (summed * scale), scale

    args = arguments(torch.float32)
    module = make_fx(leaks, tracing_mode="fake")(*args)
    assert FuseAddRMSNorm()(module.graph) == 1
    module.graph.lint()
    module.recompile()
    for found, wanted in zip(module(*args), leaks(*args), strict=True):
        torch.testing.assert_close(found, wanted)
