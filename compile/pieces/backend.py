"""`PiecewiseCompiler`, the torch.compile backend: from one graph to its compiled pieces.

1. Hash: compilers and cache are opened for the files that were traced.
2. Split at the splitting ops; below level 3 the whole graph is one piece.
3. Compile every piece for every shape, under fake tensors.
4. Wrap each compiled piece if steps replay pieces, and put it in place of its graph.
5. Write the graphs for readers.
6. Write the stitching function (`plan`), with which `bind` makes the forward.

All of this is done before the first call returns, so no request waits for a compiler.
"""

from __future__ import annotations

import dis
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor

from compile.cache.manager import CompilerManager
from compile.config import DEFAULT_SPLITTING_OPS, CompilationConfig, CompilationLevel
from compile.counters import counter
from compile.pieces.diagnose import (
    GraphBreakError,
    SpecialisedError,
    check_stays_on_device,
    find_token_symbol,
    shape_guards,
    unify_token_symbols,
    warn_unrolled,
)
from compile.pieces.piecewise import PieceShapes, PiecewiseBackend, find_tokens
from compile.pieces.plan import (
    ForwardPlan,
    Guard,
    PiecePlan,
    Weight,
    attribute,
    forward_name,
    kind,
    layout,
    sources_of,
    wrapped,
)
from compile.pieces.split import (
    SplitItem,
    canonical_key,
    check_pieces,
    example_value,
    is_symbolic,
    placeholders,
    split_graph,
)
from compile.pieces.stitch import generate_execution_code
from compile.report import (
    COMPUTATION_GRAPH,
    DYNAMO_GRAPH,
    REPORT,
    TRANSFORMED_CODE,
    CompileReport,
    PieceReport,
)
from compile.scope import CompileScope, Runnable

if TYPE_CHECKING:
    from compile.pieces.dynamo import Trace

logger = logging.getLogger(__name__)


def splitting_ops(config: CompilationConfig) -> tuple[str, ...]:
    """Return where a resolved configuration cuts graphs: nowhere below level 3."""
    if config.level != CompilationLevel.PIECEWISE:
        return ()
    return DEFAULT_SPLITTING_OPS if config.splitting_ops is None else config.splitting_ops


class PiecewiseCompiler:
    """Compiles one graph, once. Invariant: afterwards `split_gm` runs the compiled pieces."""

    def __init__(self, scope: CompileScope, prefix: str, traced_files: Sequence[str] = ()) -> None:
        """Prepare to compile the forward called `prefix`, traced from these files."""
        self.manager: CompilerManager | None = None
        self.graph: fx.GraphModule
        self.split_gm: fx.GraphModule
        self.items: list[SplitItem] = []
        self.pieces: dict[str, Runnable] = {}
        self.backends: dict[str, PiecewiseBackend] = {}
        self.guards: tuple[Guard, ...] = ()
        self.scope = scope
        self._prefix = prefix
        self._traced_files = tuple(traced_files)
        self.split_s = 0.0

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Runnable:
        """Compile; return what runs the pieces by the stitching graph. Raises GraphBreakError if
        the graph reads values or the number of tokens is a constant."""
        assert self.manager is None, (
            "PiecewiseCompiler: wanted one graph for each module, found two"
        )
        counter.num_graphs_seen += 1
        self.graph = graph
        check_stays_on_device(graph)
        self.symbol = find_token_symbol(graph)
        unify_token_symbols(graph, self.symbol)
        self.guards = shape_guards(self.symbol)
        warn_unrolled(graph)
        self._open()
        self.write_readable(DYNAMO_GRAPH, lambda: readable(graph))
        started = time.perf_counter()
        self.split_gm, self.items = split_graph(graph, splitting_ops(self.scope.config))
        self.split_s = time.perf_counter() - started
        self._check()
        inputs = map(example_value, placeholders(self.split_gm))
        PiecewiseCompileInterpreter(self).run(*inputs)
        if not is_symbolic(self.symbol):
            wanted = "pieces for any number of tokens"
            found = f"that their compiler fixed it at {self.symbol}"
            raise SpecialisedError(f"{self._prefix}: wanted {wanted}, found {found}")
        self.write_readable(COMPUTATION_GRAPH, lambda: readable(self.split_gm))
        run: Runnable = self.split_gm.forward
        return run

    def _open(self) -> None:
        self.manager = CompilerManager.open(self.scope, self._prefix, self._traced_files)

    def _check(self) -> None:
        captured = self.scope.config.graph_mode.requires_piecewise_compilation()
        compiled = [item for item in self.items if not item.is_splitting]
        counter.num_piecewise_graphs_seen += len(self.items)
        counter.num_piecewise_capturable_graphs_seen += len(compiled)
        check_pieces(self.items, self.symbol.node.expr, captured=captured)
        for item in self.items:
            how = "eager" if item.is_splitting else "compiled"
            logger.debug("%s: %s, %d nodes", item.name, how, len(item.graph.graph.nodes))

    def report(self, trace: Trace) -> CompileReport:
        assert self.manager is not None
        keeps_guards = self.scope.config.evaluate_guards
        conditions = tuple(f"{guard.expression} ({guard.where})" for guard in self.guards)
        others = tuple(f"{number} x {kind}" for kind, number in trace.dropped_guards.items())
        return CompileReport(
            prefix=self._prefix,
            traced_files=tuple(trace.files),
            guards_kept=conditions if keeps_guards else (),
            guards_dropped=others if keeps_guards else (*conditions, *others),
            pieces=tuple(
                PieceReport(
                    name=item.name,
                    id=item.index,
                    is_splitting=item.is_splitting,
                    num_nodes=len(item.graph.graph.nodes),
                    key="" if item.is_splitting else self.backends[item.name].key,
                )
                for item in self.items
            ),
            timings_s={
                "dynamo": trace.elapsed_s - trace.compile_s,
                "split": self.split_s,
                "compile": trace.compile_s - self.split_s,
            },
            misses=tuple(self.manager.misses),
        )

    def report_break(self, error: GraphBreakError) -> None:
        """Write down what tracing broke on, in place of a graph that could be compiled."""
        self._open()
        files = self._traced_files
        report = CompileReport(self._prefix, traced_files=files, graph_breaks=(str(error),))
        self.write_readable(REPORT, report.to_json)

    def write_readable(self, name: str, text: Callable[[], str]) -> None:
        """Write a file for readers next to the cache's plan and into the dump path, if there are
        any. Nothing depends on it, so one that cannot be written is a warning."""
        directories = []
        if self.manager is not None and self.manager.cache is not None:
            directories.append(self.manager.cache.directory)
        if dump := self.scope.config.debug_dump_path:
            rank = f"rank_{self.scope.tp_rank}_{self.scope.dp_rank}"
            directories.append(Path(dump) / rank / self._prefix)
        content = text() if directories else ""
        for directory in directories:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                (directory / name).write_text(content)
            except OSError as error:
                logger.warning("%s: %s is not written: %s", self._prefix, name, error)
            else:
                logger.debug("%s: wrote %s", self._prefix, directory / name)

    def plan(
        self, module: nn.Module, trace: Trace, dims: Mapping[str, tuple[int, ...]]
    ) -> ForwardPlan:
        """Write down how the forward runs; `dims` has the dimensions of tokens of the arguments."""
        given = {name: value for name, value in trace.arguments.items() if value is not None}
        inputs = sources_of(trace.inputs, module, given, dims)
        assert trace.returns is not None
        code = generate_execution_code(
            self.split_gm, self.items, list(given), inputs, trace.returns
        )
        backends = {name: self.backends[submod] for name, submod in code.pieces.items()}
        return ForwardPlan(
            forward=forward_name(module),
            arguments=tuple(given),
            absent=tuple(name for name in trace.arguments if name not in given),
            kinds=tuple(kind(value) for value in given.values()),
            symbolic_dims=tuple(dims.get(name, ()) for name in given),
            source=code.source,
            weights=tuple(
                Weight(name, path, layout(attribute(module, path)))
                for name, path in code.weights.items()
            ),
            ops=code.ops,
            pieces=tuple(PiecePlan(n, b.index, b.key, b.tokens) for n, b in backends.items()),
            guards=self.guards,
        )

    def pieces_of(self, plan: ForwardPlan) -> dict[str, Runnable]:
        """Return what runs each compiled piece, by its name in the plan."""
        by_index = {self.backends[submod].index: run for submod, run in self.pieces.items()}
        return {piece.name: by_index[piece.index] for piece in plan.pieces}

    def save(self, plan: ForwardPlan, trace: Trace) -> None:
        assert self.manager is not None
        self.write_readable(TRANSFORMED_CODE, lambda: _transformed(trace.code, plan))
        if self.manager.cache is not None:
            self.manager.cache.save_plan(plan.to_json())


def readable(graph: fx.GraphModule) -> str:
    """Return a graph as Python with shapes; eager pieces and compiled ones alike."""
    text: str = graph.print_readable(print_output=False)
    return f"from torch import device, inf, nan\nimport torch\n\n\n{text}\n"


class PiecewiseCompileInterpreter(fx.Interpreter):
    """Runs the stitching graph on fake tensors and compiles each piece where it is called, with the
    fake mode off: a compiler may time kernels on real tensors."""

    def __init__(self, compiler: PiecewiseCompiler) -> None:
        super().__init__(compiler.split_gm)
        self._compiler = compiler
        self._items = {item.name: item for item in compiler.items}
        compiled = [item.name for item in compiler.items if not item.is_splitting]
        self._indices = {name: index for index, name in enumerate(compiled)}

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Decompositions of symbolic shapes are written in Python.
        with _fake_mode(args), enable_python_dispatcher():
            outputs = super().call_module(target, args, kwargs)
        if not self._items[target].is_splitting:
            self._compile(self._items[target], list(args))
        return outputs

    def _compile(self, item: SplitItem, example_inputs: list[Any]) -> None:
        """Compile a piece in place of its graph: `__dict__` wins over the submodule."""
        compiler, index = self._compiler, self._indices[item.name]
        backend = PiecewiseBackend(
            index=index,
            num_graphs=len(self._indices),
            tokens=find_tokens(example_inputs, compiler.symbol.node.expr),
            shapes=PieceShapes.of(compiler.scope.config),
            key=canonical_key(item.graph, example_inputs),
            manager=compiler.manager,
            graph=item.graph,
            example_inputs=example_inputs,
        )
        compiler.backends[item.name] = backend
        compiler.pieces[item.name] = wrapped(compiler.scope, backend, index)
        compiler.split_gm.__dict__[item.name] = compiler.pieces[item.name]


def _fake_mode(values: Iterable[Any]) -> AbstractContextManager[Any]:
    modes = [value.fake_mode for value in values if isinstance(value, FakeTensor)]
    return modes[0] if modes else nullcontext()


def _transformed(code: CodeType, plan: ForwardPlan) -> str:
    head = "# Dynamo's code around the graph, of which the function below takes the place:"
    lines = [f"# {line}".rstrip() for line in dis.Bytecode(code).dis().splitlines()]
    return "\n".join([head, *lines, "", "import torch", "", "", plan.source])
