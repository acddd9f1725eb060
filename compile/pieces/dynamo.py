"""Run Dynamo over a forward once. Its private names are used in this file alone.

Tracing computes nothing: the code that Dynamo wrote around the graph runs with placeholders for its
outputs. So ranks that trace and ranks that find a plan run their first forward equally often, and
collectives inside it meet.
"""

from __future__ import annotations

import dis
import inspect
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.convert_frame import BackendInput, CaptureOutput, fullgraph_capture
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._guards import TracingContext, tracing
from torch.fx.experimental import _config

from compile.config import CompilationConfig, CUDAGraphMode, DynamicShapes
from compile.counters import counter
from compile.errors import LateCompilation
from compile.graphs.capture import note_late_compile
from compile.pieces.backend import PiecewiseCompiler
from compile.pieces.diagnose import TraceError, explained
from compile.pieces.stitch import Structure

_lock = threading.RLock()
"""Shape settings are the process's; ranks may be threads of one."""

_shape_config: Any = _config

_MUTATING_OP = re.compile(r"(STORE|DELETE)_(ATTR|GLOBAL|SUBSCR|SLICE|NAME|DEREF)")
_MUTATING_METHOD = re.compile(
    r"update|clear|append(left)?|extend(left)?|insert|pop(item)?|remove|setdefault|add|discard"
    r"|__(set|del)attr__|object_setattr_ignore_descriptor|setstate|set_rng_state|copy_"
)


@dataclass
class Trace:
    """What tracing a forward found out. Invariant: if Dynamo's code, around the graph, has side
    effects, `returns` is None and nothing but that code, as `run`, can run the forward."""

    files: list[str]
    code: CodeType
    side_effects: list[str]
    dropped_guards: Counter[str]
    """Their number by kind."""
    elapsed_s: float = 0.0
    compile_s: float = 0.0
    """Of it, in the backend."""
    arguments: Mapping[str, torch.Tensor | None] = field(default_factory=dict)
    """The forward's arguments: aliases of the caller's, no two the same object."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """What Dynamo's code passed to the graph for them, by the graph's name of it."""
    returns: Structure | None = None
    run: Callable[..., Any] | None = None
    """Runs the forward with its side effects, and evaluates no guard."""


class _Output:
    """Stands for an output of the graph while Dynamo's code builds the result."""

    def __init__(self, index: int) -> None:
        self.index = index


def trace_once(
    forward: MethodType,
    arguments: Mapping[str, torch.Tensor | None],
    dims: Mapping[str, Sequence[int]],
    new_compiler: Callable[[list[str]], PiecewiseCompiler],
    config: CompilationConfig,
) -> Trace:
    """Trace `forward`, whose dimensions `dims` stay symbolic, and compile it by what `new_compiler`
    makes for its files. GraphBreakError: it is not one graph; TraceError: it returns what its graph
    does not compute, or changes Python state while graphs are on."""
    started, mode = time.perf_counter(), config.dynamic_shapes
    with _lock, _settings(mode):
        marked = {
            name: _marked(value, dims.get(name, ()), mode) for name, value in arguments.items()
        }
        captured, graph = _captured(forward, marked)
        traced = captured.graph_capture_output
        names = [code.co_filename for code in traced.traced_code]
        trace = Trace(
            # Generated code has no file.
            files=[name for name in dict.fromkeys(names) if not name.startswith("<")],
            code=traced.bytecode,
            side_effects=side_effects(traced.bytecode),
            dropped_guards=Counter(g.create_fn_name() for g in traced.output_graph.guards),
        )
        if trace.side_effects and config.graph_mode is not CUDAGraphMode.NONE:
            found = "; ".join(trace.side_effects)
            wanted = "a forward that changes no Python state while graphs are on"
            raise TraceError(f"forward: wanted {wanted}, found {found}")
        nodes = list(graph.graph_module.graph.nodes)
        compiling = time.perf_counter()
        # What compilers expect to be around them.
        context = TracingContext(graph.fake_mode)
        context.tensor_to_context = graph.tensor_to_context
        with tracing(context):
            compiled = new_compiler(trace.files)(graph.graph_module, graph.example_inputs)
        trace.compile_s = time.perf_counter() - compiling
    counter.num_dropped_guards += trace.dropped_guards.total()
    if trace.side_effects:
        run = _around(captured, forward, compiled)
        trace.run = _in_place(run, forward.__func__.__globals__)
    else:
        inputs = [node.name for node in nodes if node.op == "placeholder"]
        outputs = tuple(_Output(index) for index in range(len(nodes[-1].args[0])))

        def enter(*passed: Any) -> tuple[_Output, ...]:
            trace.inputs = dict(zip(inputs, passed, strict=True))
            return outputs

        trace.arguments = marked
        trace.returns = _structure(_around(captured, forward, enter)(**marked))
    trace.elapsed_s = time.perf_counter() - started
    return trace


@contextmanager
def _settings(mode: DynamicShapes) -> Iterator[None]:
    """Make all sizes that are not marked constants, also after traces of other instances."""
    is_oblivious = mode is DynamicShapes.BACKED_SIZE_OBLIVIOUS
    with (
        _shape_config.patch(backed_size_oblivious=is_oblivious),
        torch._dynamo.config.patch(automatic_dynamic_shapes=False),
        nullcontext() if torch.is_inference_mode_enabled() else torch.no_grad(),
        # Torch times what happens inside, and loading an artifact fails without a timer.
        get_metrics_context(),
        dynamo_timed("fullgraph_capture"),
    ):
        yield


def _captured(
    forward: MethodType, arguments: Mapping[str, Any]
) -> tuple[CaptureOutput, BackendInput]:
    try:
        captured = fullgraph_capture(forward, (), dict(arguments))
    except Exception as error:
        if (named := explained(error, forward)) is not None:
            raise named from error
        raise
    graph = captured.backend_input
    if graph is None:
        raise TraceError("forward: wanted one that computes tensors, found one without any")
    # Dynamo leaves the graph among the globals, and nothing else would remove it.
    forward.__func__.__globals__.pop(graph.backend_id, None)
    return captured, graph


def _around(captured: CaptureOutput, forward: MethodType, call: Callable[..., Any]) -> MethodType:
    """Return Dynamo's code, bound to the module, with `call` in the place of the graph."""
    names = forward.__func__.__globals__
    run = captured.forward_callable(compiled_fn=call, extra_globals=names)
    return MethodType(run, forward.__self__)


def _in_place(run: MethodType, names: dict[str, Any]) -> Callable[..., Any]:
    """Return Dynamo's code with the globals themselves, of which `run` has a copy, so that what it
    assigns to a global is seen everywhere."""
    code = run.__func__
    names |= {name: value for name, value in code.__globals__.items() if name not in names}
    bound = FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)
    bound.__kwdefaults__ = code.__kwdefaults__
    return MethodType(bound, run.__self__)


def side_effects(code: CodeType) -> list[str]:
    """List what Dynamo's code does beside fetching inputs and building the result."""
    found = []
    for instruction in dis.get_instructions(code):
        is_call = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL")
        name = str(instruction.argval)
        if _MUTATING_OP.fullmatch(instruction.opname):
            found.append(f"{instruction.opname} {name}".removesuffix(" None"))
        elif is_call and _MUTATING_METHOD.fullmatch(name):
            found.append(f"a call of {name}")
    return list(dict.fromkeys(found))


def _structure(result: Any) -> Structure:
    """Say which outputs of the graph a result is made of."""
    if isinstance(result, _Output):
        return result.index
    if type(result) in (tuple, list):
        return tuple(_structure(part) for part in result)
    wanted = "a tensor or a tuple of tensors that it computes"
    raise TraceError(f"forward: wanted {wanted} as its result, found {type(result).__name__}")


def traced_as_is(module: nn.Module, dims: Mapping[str, Sequence[int]]) -> Callable[..., Any]:
    """Return a forward that Dynamo traces and guards as it always does; see `compile_as_is`."""

    def as_traced(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        counter.num_graphs_seen += 1
        note_late_compile(f"{type(module).__name__}, traced again as a guard failed")
        return graph.forward

    traced = torch.compile(module, backend=as_traced, fullgraph=True, dynamic=False)
    signature = inspect.signature(type(module).forward)
    forward = MethodType(type(module).forward, module)
    mode = DynamicShapes.BACKED_SIZE_OBLIVIOUS

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(module, *args, **kwargs)
        given = {
            name: _marked(value, dims[name], mode) if name in dims else value
            for name, value in list(bound.arguments.items())[1:]
        }
        with _oblivious:
            try:
                return traced(**given)
            except Exception as error:
                late = getattr(error, "inner_exception", None)  # Dynamo wraps what a backend raises
                if isinstance(late, LateCompilation):
                    raise late from None
                if (named := explained(error, forward)) is not None:
                    raise named from error
                raise

    return run


class _Oblivious:
    """Sizes 0 and 1 are not special while any thread is inside; threads may be ranks that meet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._before = False

    def __enter__(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                self._before = _shape_config.backed_size_oblivious
                _shape_config.backed_size_oblivious = True
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                _shape_config.backed_size_oblivious = self._before


_oblivious = _Oblivious()


def _marked(value: torch.Tensor | None, dims: Sequence[int], mode: DynamicShapes) -> Any:
    """Return an alias whose dimensions are marked; the caller's tensor stays as it is."""
    if value is None:
        return None
    alias = value.detach()
    for dim in dims:
        if mode is DynamicShapes.UNBACKED:
            torch._dynamo.decorators.mark_unbacked(alias, dim, shape_id="num_tokens")
        else:
            torch._dynamo.mark_dynamic(alias, dim)
    return alias
