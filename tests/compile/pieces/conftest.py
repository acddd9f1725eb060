"""Toy models that split; their pieces run as they were traced, and nothing is kept on disk.

A toy is built like a decoder. Each layer reserves an output, hands it to an opaque op that writes
it, and goes on; so L layers give 2 L + 1 pieces.

Shapes: T tokens, E = 8 hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import fx, nn

from compile.cache.manager import CompilerManager
from compile.config import CompilationConfig
from compile.context import ForwardContext, forward_context
from compile.custom_op import direct_register_custom_op
from compile.environment import DISABLE_COMPILE_CACHE
from compile.graphs.pools import GraphPools, new_graph_pool
from compile.pieces.decorator import support_torch_compile
from compile.scope import CompileScope, Shape, compile_scope

HIDDEN = 8
VOCAB = 16


def _attention(q: torch.Tensor, out: torch.Tensor, layer_name: str) -> None:
    """Mix each token with the one before it, as no function of a single token does."""
    assert layer_name
    out.copy_(q + q.roll(1, 0))


attention = direct_register_custom_op("toy_attention", _attention, mutates_args=["out"])


class ToyLayer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HIDDEN)
        self.o = nn.Linear(HIDDEN, HIDDEN)
        self.layer_name = f"layers.{index}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x)
        out = torch.empty_like(q)
        attention(q, out, self.layer_name)
        return x + torch.relu(self.o(out))


class Toy(nn.Module):
    """Tokens [T] and positions [T] to hidden states [T, E]."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(ToyLayer(i) for i in range(num_layers))
        self.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + torch.sin(positions.float()).unsqueeze(-1)
        for layer in self.layers:
            x = layer(x)
        return x


@support_torch_compile
class CompiledToy(Toy):
    """The same, decorated."""


def inputs(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions."""
    return torch.arange(num_tokens) * 7 % VOCAB, torch.arange(num_tokens) + 3


class Toys:
    """What tests of compiled forwards build with."""

    Plain, Compiled = Toy, CompiledToy
    inputs = staticmethod(inputs)

    def scope(self, tp_rank: int = 0, max_num_tokens: int | None = None, **config: Any) -> Any:
        """Return a scope; by default of level 3 with the toy's op as splitting op."""
        ops = ("lockstep::toy_attention",)
        fields = {"level": 3, "splitting_ops": ops, "compiler": "eager", **config}
        return CompileScope(
            CompilationConfig(**fields),
            tp_rank,
            pools=GraphPools(lambda: new_graph_pool(torch.device("cpu"))),
            max_num_tokens=max_num_tokens,
        )

    def build(self, make: Callable[[], Any] = CompiledToy, **fields: Any) -> Any:
        """Build a module in a scope with these fields."""
        torch.manual_seed(0)
        with compile_scope(self.scope(**fields)):
            return make()

    def expected(self, module: nn.Module, num_tokens: int) -> Any:
        """Run the forward as it is written."""
        return type(module).forward(module, *inputs(num_tokens))

    def check(self, module: nn.Module, *sizes: int) -> None:
        """Compare calls with so many tokens with the forward as it is written."""
        for n in sizes:
            assert torch.equal(module(*inputs(n)), self.expected(module, n))

    def trace(
        self, forward: Callable[..., Any], *args: torch.Tensor
    ) -> tuple[fx.GraphModule, tuple[Any, ...]]:
        """Return the graph of a function, and what Dynamo's code passes to it.

        The first dimension of the arguments is symbolic.
        """
        traced: list[tuple[fx.GraphModule, tuple[Any, ...]]] = []

        def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
            def run(*passed: Any) -> Any:
                traced.append((graph, passed))
                return graph.forward(*passed)

            return run

        given = [arg.clone() for arg in args]
        for arg in given:
            torch._dynamo.mark_dynamic(arg, 0)
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(forward, backend=backend, fullgraph=True, dynamic=False)(*given)
        return traced[0]


@pytest.fixture(scope="session")
def toys() -> Toys:
    return Toys()


@pytest.fixture(autouse=True, scope="module")
def _outside_of_steps() -> Iterator[None]:
    """Pieces find an empty forward context, and no cache."""
    with pytest.MonkeyPatch.context() as patch, forward_context(ForwardContext()):
        patch.setenv(DISABLE_COMPILE_CACHE, "1")
        yield


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that is on, for toys that are built with it."""
    monkeypatch.setenv(DISABLE_COMPILE_CACHE, "0")
    return tmp_path / "cache"


class Asked(NamedTuple):
    """What is asked of a compiler."""

    index: int
    shape: Shape
    inputs: list[Any]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """Each piece and shape that is compiled from now on."""
    calls: list[Asked] = []
    run = CompilerManager.compile

    def note(self: Any, graph: Any, example_inputs: Any, **about: Any) -> Any:
        calls.append(Asked(about["index"], about["shape"], list(example_inputs)))
        return run(self, graph, example_inputs, **about)

    monkeypatch.setattr(CompilerManager, "compile", note)
    return calls
