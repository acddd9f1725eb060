"""Passes find an operation in every spelling and nothing else, and run by name and in order.

Additions and norms become one op wherever both can be seen.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from compile.config import CompilationConfig
from compile.counters import counter
from compile.errors import FieldError
from compile.passes.fuse_add_rms_norm import FuseAddRMSNorm, add_rms_norm, fused_add_rms_norm
from compile.passes.fuse_rms_norm_quantize import FuseRMSNormQuantize
from compile.passes.graph_pass import (
    Bind,
    Cast,
    Match,
    Op,
    Scalar,
    find,
    matched_nodes,
    operation,
    source_hash,
    value,
    writes,
)
from compile.passes.manager import PASSES, PassManager
from compile.passes.quantizers import (
    quantize_fp8_per_token,
    quantize_fp8_per_token_group,
    quantize_nvfp4,
)
from model.kernels import dispatch, elementwise


def _torch_graph(function: Callable[..., Any], *args: Any) -> torch.fx.GraphModule:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True)(*args)
    torch._dynamo.reset()
    return graphs[0]


def _aten_graph(function: Callable[..., Any], *args: Any) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


@pytest.fixture(params=[_torch_graph, _aten_graph], ids=["torch", "aten"])
def graph_of(request: pytest.FixtureRequest) -> Any:
    """Traces a function: as Dynamo writes it, or to ATen ops."""
    return request.param


# --- patterns ------------------------------------------------------------------------------------

X, Y = torch.ones(3, 4), torch.ones(3, 4)
SCALED = Op("mul", (Bind("x"), Op("add", (Bind("y"), Scalar("eps")))), name="product")


def matches(pattern: Any, module: torch.fx.GraphModule) -> list[Match]:
    """Return the first match of each node."""
    found = (next(find(pattern, node), None) for node in module.graph.nodes)
    return [match for match in found if match is not None]


SPELLINGS: dict[str, Callable[..., torch.Tensor]] = {
    "operators": lambda x, y: x * (y + 0.5),
    "functions": lambda x, y: torch.mul(x, torch.add(y, 0.5)),
    "methods": lambda x, y: x.mul(y.add(0.5)),
    "other order": lambda x, y: (0.5 + y) * x,
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_one_pattern_finds_every_spelling(graph_of: Any, name: str) -> None:
    graph = graph_of(SPELLINGS[name], X, Y)
    [match] = matches(SCALED, graph)
    assert [match[name].name.strip("l_1") for name in ("x", "y")] == ["x", "y"]
    assert match["eps"] == 0.5
    assert match["product"] in matched_nodes(match)
    assert len(matched_nodes(match)) == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x * (y + x),
        lambda x, y: x * torch.add(y, 0.5, alpha=2),
        lambda x, y: x / (y + 0.5),
        lambda x, y: x * (y - 0.5),
    ],
    ids=["tensor for scalar", "option", "other op outside", "other op inside"],
)
def test_what_is_something_else_is_not_found(graph_of: Any, function: Any) -> None:
    assert matches(SCALED, graph_of(function, X, Y)) == []


def test_a_cast_may_be_there_or_not(graph_of: Any) -> None:
    pattern = Op("rsqrt", (Cast(Op("add", (Bind("x"), Bind("y")), name="sum"), name="wide"),))

    def casts(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.rsqrt((x + y).float()), torch.rsqrt((x + y).to(torch.float64)), (x + y).rsqrt()

    found = matches(pattern, graph_of(casts, X.bfloat16(), Y.bfloat16()))
    assert [value(match["wide"]).dtype for match in found] == [
        torch.float32,
        torch.float64,
        torch.bfloat16,
    ]
    assert [match["wide"] is match["sum"] for match in found] == [False, False, True]


@pytest.mark.parametrize(
    ("function", "is_found"),
    [
        (lambda x: x.mean(-1, keepdim=True), True),
        (lambda x: torch.mean(x, 1, True), True),
        (lambda x: torch.mean(x, [1], keepdim=True), True),
        (lambda x: x.mean(0, keepdim=True), False),
        (lambda x: x.mean(-1), False),
        (lambda x: x.mean(-1, keepdim=True, dtype=torch.float64), False),
    ],
)
def test_a_mean_of_rows_keeps_its_dimension(graph_of: Any, function: Any, is_found: bool) -> None:
    kinds = [operation(node).kind for node in graph_of(function, X).graph.nodes]
    assert ("row_mean" in kinds) == is_found


@pytest.mark.parametrize("function", [lambda x: x * x, lambda x: x**2, torch.square])
def test_squares_are_squares(graph_of: Any, function: Any) -> None:
    assert "square" in [operation(node).kind for node in graph_of(function, X).graph.nodes]


def test_a_write_is_noticed(graph_of: Any) -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y.mul_(2)
        y[0] = 3
        return y

    assert sum(writes(node) for node in graph_of(write, X).graph.nodes) >= 2
    assert not any(writes(node) for node in graph_of(lambda x: x * 2 + x, X).graph.nodes)


# --- the fused norm ------------------------------------------------------------------------------

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
    names = {"x": 0, "residual": 1, "weight": 2, "scale": 3, "other": 4}
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


# --- the norm that is quantized ------------------------------------------------------------------


def quantized(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    normed, summed = fused_add_rms_norm(x, residual, weight, 1e-5)
    return *quantize_fp8_per_token(normed), summed


def quantized_in_groups(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    normed, summed = fused_add_rms_norm(x, residual, weight, 1e-5)
    return *quantize_fp8_per_token_group(normed), summed


def quantized_twice(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    normed, summed = fused_add_rms_norm(x, residual, weight, 1e-5)
    first, second = quantize_fp8_per_token(normed), quantize_fp8_per_token(normed)
    return first[0].float() * second[1], second[0], normed * 2, summed


def without_the_sum(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    normed, _ = fused_add_rms_norm(x, residual, weight, 1e-5)
    return quantize_fp8_per_token(normed)


@pytest.mark.feature("O03")
@pytest.mark.parametrize(
    ("function", "op"),
    [
        (quantized, "fused_add_rms_norm_fp8"),
        (quantized_in_groups, "fused_add_rms_norm_fp8_group"),
        (quantized_twice, "fused_add_rms_norm_out_fp8"),
        (without_the_sum, "fused_add_rms_norm_fp8"),
    ],
)
@DTYPES
def test_a_norm_and_what_quantizes_it_are_one_op(
    graph_of: Any, function: Any, op: str, dtype: torch.dtype
) -> None:
    """The op returns the norm as well if something else reads it, and quantizes it once."""
    args = arguments(dtype)
    module = graph_of(function, *args)
    assert FuseRMSNormQuantize()(module.graph) == 1
    module.graph.lint()
    module.recompile()
    called = [node for node in module.graph.nodes if "lockstep" in str(node.target)]
    assert [node.target for node in called] == [getattr(torch.ops.lockstep, op).default]
    shapes = [each.shape for each in called[0].meta.get("val", called[0].meta.get("example_value"))]
    assert shapes == [each.shape for each in called[0].target(*args, 1e-5)]
    inputs = [named(args, node) for node in module.graph.find_nodes(op="placeholder")]
    for found, wanted in zip(module(*inputs), function(*args), strict=True):
        assert torch.equal(found.float(), wanted.float())


_FP4_SCALES = torch.tensor([300.0]), torch.tensor([40.0])


def fp4_arguments(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Of rows of whole blocks."""
    return torch.randn(5, 32).to(dtype), torch.randn(5, 32).to(dtype), torch.randn(32).to(dtype)


def quantized_to_fp4(x: Any, residual: Any, weight: Any, scale: Any, other: Any) -> Any:
    normed, summed = fused_add_rms_norm(x, residual, weight, 1e-5)
    return *quantize_nvfp4(normed, scale), summed


def with_the_norm_to_fp4(x: Any, residual: Any, weight: Any, scale: Any, other: Any) -> Any:
    normed, summed = fused_add_rms_norm(x, residual, weight, 1e-5)
    first, second = quantize_nvfp4(normed, scale), quantize_nvfp4(normed, scale)
    return first[0], second[1], normed * 2, summed


def by_two_scales(x: Any, residual: Any, weight: Any, scale: Any, other: Any) -> Any:
    normed, summed = fused_add_rms_norm(x, residual, weight, 1e-5)
    return *quantize_nvfp4(normed, scale), *quantize_nvfp4(normed, other), summed


@pytest.mark.feature("O04")
@pytest.mark.parametrize(
    ("function", "ops"),
    [
        (quantized_to_fp4, ["fused_add_rms_norm_nvfp4"]),
        (with_the_norm_to_fp4, ["fused_add_rms_norm_out_nvfp4"]),
        (by_two_scales, ["fused_add_rms_norm_out_nvfp4", "quantize_nvfp4"]),
    ],
)
@DTYPES
def test_a_norm_and_what_makes_fp4_of_it_are_one_op(
    graph_of: Any, function: Any, ops: list[str], dtype: torch.dtype
) -> None:
    """The scale that the numbers are made by is the op's last argument."""
    args = (*fp4_arguments(dtype), *_FP4_SCALES)
    module = graph_of(function, *args)
    assert FuseRMSNormQuantize()(module.graph) == 1
    module.graph.lint()
    module.recompile()
    called = [node for node in module.graph.nodes if "lockstep" in str(node.target)]
    assert [operation(node).kind for node in called] == [f"lockstep::{op}" for op in ops]
    found = called[0].meta.get("val", called[0].meta.get("example_value"))
    wanted = called[0].target(*args[:3], 1e-5, args[3])
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in wanted]
    inputs = [named(args, node) for node in module.graph.find_nodes(op="placeholder")]
    for each, expected in zip(module(*inputs), function(*args), strict=True):
        assert torch.equal(each.float(), expected.float())


def by_a_scale_that_follows(x: Any, residual: Any, weight: Any, scale: Any, other: Any) -> Any:
    normed, summed = fused_add_rms_norm(x, residual, weight, 1e-5)
    return *quantize_nvfp4(normed, scale * normed.abs().amax()), summed


def test_numbers_by_a_scale_that_follows_from_the_norm_are_made_behind_it(graph_of: Any) -> None:
    module = graph_of(by_a_scale_that_follows, *fp4_arguments(torch.float32), *_FP4_SCALES)
    assert FuseRMSNormQuantize()(module.graph) == 0


def quantizes_the_sum(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    normed, summed = fused_add_rms_norm(x, residual, weight, 1e-5)
    return normed, *quantize_fp8_per_token(summed)


def quantizes_a_plain_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    return *quantize_fp8_per_token(norm(x, weight)), residual


@pytest.mark.parametrize("function", [quantizes_the_sum, quantizes_a_plain_norm])
def test_what_quantizes_something_else_stays(graph_of: Any, function: Any) -> None:
    module = graph_of(function, *arguments(torch.float32))
    assert FuseRMSNormQuantize()(module.graph) == 0


# --- the manager ---------------------------------------------------------------------------------


class Swap:
    """Replaces additions, or what it is told to find."""

    def __init__(
        self, name: str, replacement: object, found: object = torch.ops.aten.add.Tensor
    ) -> None:
        self.name = name
        self.replacement = replacement
        self.found = found

    def uuid(self) -> str:
        return source_hash(sys.modules[__name__], config=repr(self.replacement))

    def __call__(self, graph: torch.fx.Graph) -> int:
        found = graph.find_nodes(op="call_function", target=self.found)
        for node in found:
            node.target = self.replacement
        return len(found)


def traced() -> torch.fx.GraphModule:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        return ((x + y) + y,)

    return torch.fx.symbolic_trace(function)


@pytest.mark.feature("O06")
def test_passes_run_in_their_order_until_they_find_nothing_more() -> None:
    """The first one undoes what the second one makes, but for what is not there a third time."""
    sub, mul = torch.ops.aten.sub.Tensor, torch.ops.aten.mul.Tensor
    first, second = Swap("first", sub), Swap("second", mul, found=sub)
    manager = PassManager([first, second])
    module, inputs = traced(), [torch.tensor(7), torch.tensor(2)]
    with counter.expect(num_pass_matches=4):
        found = manager.apply(module, inputs)
    assert found(*inputs)[0].item() == 7 * 2 * 2
    assert module(*inputs)[0].item() == 7 + 2 + 2, "the piece is left as it was"


def test_an_unknown_name_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(FieldError) as caught:
        PassManager.from_config(CompilationConfig(passes=("fuse_add_rms_norm", "fuse_all")))
    known = ", ".join(sorted(PASSES))
    assert str(caught.value) == f"compilation.passes: wanted names out of {known}, found 'fuse_all'"


def test_an_error_names_the_pass_that_raised_it() -> None:
    class Broken(Swap):
        def __call__(self, graph: torch.fx.Graph) -> int:
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside") as caught:
        PassManager([Broken("broken", None)])(traced().graph)
    assert caught.value.__notes__ == ["in graph pass 'broken'; compilation.passes turns it off"]


def test_a_managers_uuid_follows_its_passes_and_their_order() -> None:
    first, second = Swap("first", operator.sub), Swap("second", operator.mul)
    uuids = [
        PassManager(passes).uuid()
        for passes in ([], [first], [second], [first, second], [second, first])
    ]
    assert len(set(uuids)) == len(uuids)
    assert PassManager([Swap("first", operator.sub)]).uuid() == PassManager([first]).uuid()


class Fuse(FuseAddRMSNorm):
    """A version of a pass."""

    def __init__(self, version: str) -> None:
        self.version = version

    def uuid(self) -> str:
        return super().uuid() + self.version


def test_inductors_caches_know_what_the_passes_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, residual, weight = torch.randn(5, 8), torch.randn(5, 8), torch.randn(8)
    counts = []
    for version in ("1", "1", "2"):
        torch._dynamo.reset()
        manager, before = PassManager([Fuse(version)]), counter.num_pass_matches
        compiled = torch.compile(
            lambda *args: add_rms_norm(*args, 1e-5), options=manager.inductor_config()
        )
        with torch.inference_mode():
            found = compiled(x, residual, weight)
        assert torch.equal(found[1], x + residual)
        counts.append(counter.num_pass_matches - before)
    # The second one finds the first one's code and has nothing to rewrite; the third one does not.
    assert counts == [1, 0, 1]
