"""Toy models that split, and a toolchain whose compilers take no time.

A toy is built like a decoder. Each layer reserves an output, hands it to an opaque op that writes
it, and goes on; so L layers give 2 L + 1 pieces.

Shapes: T tokens, E = 8 hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from compile.config import CompilationConfig
from compile.counters import counter
from compile.custom_op import direct_register_custom_op
from compile.pieces.decorator import support_torch_compile
from compile.scope import CompileScope, Runnable, Shape, compile_scope

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


@dataclass
class MemoryManager:
    """Keeps what it compiled in memory, by what a piece computes. Compiling does nothing."""

    artifacts: dict[tuple[str, Shape], Runnable] = field(default_factory=dict)
    calls: list[tuple[int, Shape]] = field(default_factory=list)
    inputs: list[tuple[Shape, list[Any]]] = field(default_factory=list)
    loads: list[tuple[str, Shape]] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)
    cache: Any = None

    def compile(
        self,
        graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        index: int,
        shape: Shape,
        num_graphs: int,
        key: str,
    ) -> Runnable:
        assert index < num_graphs
        self.calls.append((index, shape))
        self.inputs.append((shape, list(example_inputs)))
        if (key, shape) not in self.artifacts:
            counter.num_backend_compilations += 1
            counter.num_eager_compiles += 1
            self.artifacts[key, shape] = graph.forward
        return self.artifacts[key, shape]

    def load(self, key: str, *, index: int, shape: Shape, num_graphs: int) -> Runnable:
        self.loads.append((key, shape))
        return self.artifacts[key, shape]


@dataclass
class PlanDirectory:
    """A cache that keeps a plan and nothing else."""

    directory: Path
    text: str | None = None

    def load_plan(self) -> str | None:
        return self.text

    def save_plan(self, text: str) -> None:
        self.text = text


@dataclass
class Tools:
    """A toolchain that notes what it is asked for."""

    manager: MemoryManager = field(default_factory=MemoryManager)
    cache: PlanDirectory | None = None
    events: list[str] = field(default_factory=list)
    files: tuple[str, ...] = ()

    def open(self, scope: CompileScope, prefix: str, traced_files: Sequence[str] | None) -> Any:
        self.manager.cache = self.cache
        if traced_files is None:
            self.events.append("look")
            return self.manager if self.cache else None
        self.events.append("open")
        self.files = tuple(traced_files)
        return self.manager

    def wrap(self, runnable: Runnable, *, is_first: bool) -> Runnable:
        return Wrapped(runnable, is_first, self.events)

    def keep_outputs(self, op: Runnable) -> Runnable:
        return Kept(op)


@dataclass
class Wrapped:
    """Stands where a graph wrapper stands."""

    runnable: Runnable
    is_first: bool
    events: list[str]

    def __call__(self, *args: Any) -> Any:
        self.events.append("wrapper")
        return self.runnable(*args)


@dataclass
class Kept:
    """Stands around an eager op that returns something."""

    op: Runnable
    num_calls: int = 0

    def __call__(self, *args: Any) -> Any:
        self.num_calls += 1
        return self.op(*args)


class Toys:
    """What tests of compiled forwards build with."""

    Layer, Plain, Compiled, Tools, Kept = ToyLayer, Toy, CompiledToy, Tools, Kept
    PlanDirectory, Wrapped, Manager = PlanDirectory, Wrapped, MemoryManager
    inputs = staticmethod(inputs)
    attention = attention

    def build(
        self,
        make: Callable[[], Any] = CompiledToy,
        tools: Tools | None = None,
        **config: Any,
    ) -> Any:
        """Build a module in a scope; by default at level 3 with the toy's op as splitting op."""
        fields = {"level": 3, "splitting_ops": ("lockstep::toy_attention",), **config}
        scope = CompileScope(CompilationConfig(**fields), toolchain=tools or Tools())
        torch.manual_seed(0)
        with compile_scope(scope):
            return make()

    def expected(self, module: nn.Module, num_tokens: int) -> Any:
        """Run the forward as it is written."""
        return type(module).forward(module, *inputs(num_tokens))

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
