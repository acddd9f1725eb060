"""The written function does what the stitching graph does, with no graph and no value too long."""

from __future__ import annotations

import ast
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from compile.custom_op import direct_register_custom_op
from compile.pieces import stitch
from compile.pieces.split import placeholders, split_graph

ATTENTION = "lockstep::toy_attention"
X = torch.randn(5, 8)


def _options(
    x: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    sizes: list[int],
    name: str | None = None,
    dtype: torch.dtype = torch.float32,
    flag: bool = False,
) -> None:
    out.copy_(x * (0 if math.isinf(scale) else scale) + sum(sizes) + flag)


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


options = direct_register_custom_op("toy_options", _options, mutates_args=["out"])
double = direct_register_custom_op("toy_double", _double, fake_impl=torch.empty_like)


class Stitched:
    """A function, split, and its written form with the pieces as they were traced."""

    def __init__(self, toys: Any, forward: Callable[..., Any], args: Any, ops: Any) -> None:
        graph, self.passed = toys.trace(forward, *args)
        self.root, self.items = split_graph(graph, ops)
        nodes = [node.name for node in placeholders(self.root)]
        [output] = self.root.graph.find_nodes(op="output")
        self.code = stitch.generate_execution_code(
            self.root,
            self.items,
            nodes,
            [stitch.BoundInput(argument=name) for name in nodes],
            tuple(range(len(output.args[0]))),
        )
        self.pieces = {name: getattr(self.root, item) for name, item in self.code.pieces.items()}

    def run(self, kept: Callable[..., Any] = lambda op: op) -> Any:
        values = {**self.pieces, **stitch.bind_ops(self.code.ops, kept)}
        return stitch.compile_execution_fn(self.code.source, values)(*self.passed)


@pytest.fixture
def stitched(toys: Any) -> Callable[..., Stitched]:
    return lambda forward, *args, ops=(ATTENTION,): Stitched(toys, forward, args, ops)


@pytest.mark.feature("E08")
@pytest.mark.parametrize("num_layers", [1, 3])
def test_the_written_function_equals_the_stitching_graph(
    toys: Any, stitched: Any, num_layers: int
) -> None:
    toy, given = toys.Plain(num_layers), toys.inputs(6)
    found = stitched(toy.forward, *given)
    (by_graph,), (by_text,) = found.root(*found.passed), found.run()
    assert torch.equal(by_text, by_graph) and torch.equal(by_text, toy(*given))


def test_a_value_is_freed_before_the_piece_after_its_last_use(toys: Any, stitched: Any) -> None:
    found = stitched(toys.Plain(2).forward, *toys.inputs(6))
    alive: list[int] = []
    made: list[weakref.ref[torch.Tensor]] = []

    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            alive.append(sum(ref() is not None for ref in made))
            outputs = run(*args)
            made.extend(weakref.ref(value) for value in outputs)
            return outputs

        return call

    found.pieces = {name: watched(run) for name, run in found.pieces.items()}
    gc.disable()
    try:
        found.run()
    finally:
        gc.enable()
    # Of each layer's three outputs the query is dropped behind attention; sums and outputs live
    # until the next piece took them.
    assert alive == [0, 2, 2]


@pytest.mark.parametrize(
    "arguments", [(2.5, [1, 2]), (math.inf, [3]), (1.0, [], "a 'quoted' \\ name"), (0.5, [4], None)]
)
def test_constants_of_an_op_are_written_as_they_are(stitched: Any, arguments: Any) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        options(x, out, *arguments, dtype=torch.bfloat16, flag=True)
        return out + 1

    found = stitched(forward, X, ops=("lockstep::toy_options",))
    ast.parse(found.code.source)
    assert "dtype=torch.bfloat16, flag=True" in found.code.source
    assert torch.equal(found.run()[0], forward(X))


def test_results_of_splitting_ops_are_used_and_each_call_may_keep_its_own(stitched: Any) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return double(double(x + 1)) * 3 + double(x)

    found = stitched(forward, X, ops=("lockstep::toy_double",))
    assert sorted(found.code.ops.values()) == ["lockstep::toy_double.default"] * 3
    kept: list[Any] = []
    assert torch.equal(found.run(lambda op: (kept.append(op), op)[1])[0], forward(X))
    assert len(kept) == 3


def test_ops_that_return_nothing_are_not_kept(toys: Any, stitched: Any) -> None:
    found = stitched(toys.Plain().forward, *toys.inputs(6))
    assert found.code.ops == {"toy_attention": "lockstep::toy_attention.default"}
    found.run(lambda op: pytest.fail("attention writes into its caller's output"))


@pytest.mark.feature("M06")
def test_inputs_with_tokens_arrive_at_fixed_addresses_with_their_values() -> None:
    addresses: list[tuple[int, ...]] = []
    values: list[list[torch.Tensor]] = []

    def seen(*args: torch.Tensor) -> None:
        addresses.append(tuple(arg.data_ptr() for arg in args))
        values.append([arg.clone() for arg in args])

    weight = torch.randn(4)
    # The tokens of the third are in its second dimension, and the last has none.
    call = stitch.make_copy_and_call(seen, [(0,), (0,), (1,), ()], 8)
    given = [
        (torch.arange(n), torch.randn(n, 3), torch.arange(3 * n).view(3, n), weight)
        for n in (5, 8, 1, 5)
    ]
    for i, args in enumerate(given):
        with torch.inference_mode(i == 0):  # buffers made in it can be written outside
            call(*args)
    assert len(set(addresses)) == 1
    assert addresses[0][3] == weight.data_ptr()
    for args, found in zip(given, values, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(args, found, strict=True))
    with pytest.raises(stitch.CopyError, match="wanted at most 8 tokens, found 9"):
        call(torch.arange(9), *given[0][1:])
