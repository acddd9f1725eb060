"""Run Dynamo over a forward once, and learn everything that must be learned while it runs.

Tracing computes nothing. The forward's graph is handed to a backend; the code that Dynamo wrote
around it then runs with placeholders for the graph's outputs, which tells what the forward returns.
So a rank that traces and a rank that finds a plan in its cache run their first forward equally
often, and collectives inside it meet.

Dynamo's private names are used in this file alone.
"""

from __future__ import annotations

import dis
import inspect
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental import _config

from compile.config import DynamicShapes
from compile.counters import counter
from compile.graphs.capture import note_late_compile
from compile.graphs.errors import LateCompilation
from compile.pieces.diagnose import explained
from compile.pieces.stitch import Structure

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

_lock = threading.RLock()
"""Hooks and shape settings are the process's; ranks may be threads of one."""

_shape_config: Any = _config

_MUTATING_OP = re.compile(r"(STORE|DELETE)_(ATTR|GLOBAL|SUBSCR|SLICE|NAME|DEREF)")
_MUTATING_METHOD = re.compile(
    r"update|clear|append(left)?|extend(left)?|insert|pop(item)?|remove|setdefault|add|discard"
    r"|__(set|del)attr__|object_setattr_ignore_descriptor|setstate|set_rng_state|copy_"
)


class TraceError(RuntimeError):
    """A forward was traced, but cannot be run from what was traced."""


@dataclass
class Trace:
    """What tracing a forward found out.

    Invariant: `code` is Dynamo's, which fetches the graph's inputs, calls the graph and builds
    the result; `returns` says which of the graph's outputs that is. `returns` is None where the
    code has side effects: then nothing but the code itself can run the forward.
    """

    files: list[str] = field(default_factory=list)
    code: CodeType | None = None
    side_effects: list[str] = field(default_factory=list)
    dropped_guards: Counter[str] = field(default_factory=Counter)
    """Their number by kind."""
    inputs: tuple[Any, ...] = ()
    """What Dynamo's code passed to the graph."""
    returns: Structure | None = None
    result: Any = None
    """The forward's result where it ran already, with its side effects."""
    elapsed_s: float = 0.0
    compile_s: float = 0.0
    """Of it, in the backend."""


class _Output:
    """Stands for an output of the graph while Dynamo's code builds the result."""

    def __init__(self, index: int) -> None:
        self.index = index


def trace_once(
    forward: MethodType,
    arguments: Mapping[str, torch.Tensor | None],
    dims: Mapping[str, Sequence[int]],
    backend: Callable[[Trace], Backend],
    *,
    mode: DynamicShapes,
    tolerates_side_effects: bool,
) -> Trace:
    """Trace `forward` with these arguments, whose dimensions `dims` stay symbolic.

    Args:
        backend: gets the trace, whose files are known when the graph is, and returns a backend.
        tolerates_side_effects: run a forward that changes Python state by Dynamo's code.

    Raises:
        GraphBreakError: the forward is not one graph.
        TraceError: it has side effects, or returns what its graph does not compute.
    """
    trace = Trace(files=[forward.__code__.co_filename])
    run = _Run(trace, tolerates_side_effects)
    started = time.perf_counter()
    with _lock, ExitStack() as stack:
        stack.enter_context(_files_collected(trace.files))
        stack.enter_context(_bytecode_seen(forward.__code__, run.see_code))
        is_oblivious = mode is DynamicShapes.BACKED_SIZE_OBLIVIOUS
        stack.enter_context(_shape_config.patch(backed_size_oblivious=is_oblivious))
        if not torch.is_inference_mode_enabled():
            stack.enter_context(torch.no_grad())
        given = {
            name: _marked(value, dims.get(name, ()), mode) for name, value in arguments.items()
        }
        # Dynamo takes the filter out of the options it is given, so they are built afresh.
        options: dict[str, Any] = {"guard_filter_fn": run.drop_guards}
        traced = torch.compile(
            forward,
            backend=run.backend(backend(trace)),
            fullgraph=True,
            dynamic=False,
            options=options,
        )
        try:
            result = traced(**given)
        except Exception as error:
            if run.failure is not None:
                raise run.failure from None
            if (named := explained(error, forward)) is not None:
                raise named from error
            raise
        finally:
            _forget(forward)
    trace.elapsed_s = time.perf_counter() - started
    counter.num_dropped_guards += trace.dropped_guards.total()
    if trace.side_effects:
        trace.result = result
    else:
        trace.returns = _structure(result)
    return trace


class _Run:
    """What happens inside Dynamo while it traces once."""

    def __init__(self, trace: Trace, tolerates_side_effects: bool) -> None:
        self._trace = trace
        self._tolerates = tolerates_side_effects
        self.failure: Exception | None = None

    def backend(self, inner: Backend) -> Backend:
        def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            started = time.perf_counter()
            try:
                forward = inner(graph, inputs)
            except Exception as error:
                self.failure = error
                raise
            self._trace.compile_s = time.perf_counter() - started
            outputs = next(n for n in graph.graph.nodes if n.op == "output").args[0]
            return self._entered(forward, len(outputs))

        return compile_graph

    def _entered(self, forward: Callable[..., Any], num_outputs: int) -> Callable[..., Any]:
        """Return what Dynamo's code calls: placeholders, unless the code must run for real."""

        def enter(*inputs: Any) -> Any:
            if not self._trace.side_effects:
                self._trace.inputs = inputs
                return tuple(_Output(i) for i in range(num_outputs))
            if not self._tolerates:
                found = "; ".join(self._trace.side_effects)
                wanted = "a forward that changes no Python state while graphs are on"
                self.failure = TraceError(f"forward: wanted {wanted}, found {found}")
                raise self.failure
            return forward(*inputs)

        return enter

    def see_code(self, code: CodeType) -> None:
        self._trace.code = code
        self._trace.side_effects = side_effects(code)

    def drop_guards(self, guards: Sequence[Any]) -> list[bool]:
        self._trace.dropped_guards = Counter(guard.guard_type for guard in guards)
        return [False] * len(guards)


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


def by_code(forward: MethodType, code: CodeType) -> MethodType:
    """Return the forward that runs Dynamo's code, without evaluating a guard."""
    function = forward.__func__
    traced = FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
    traced.__defaults__, traced.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return MethodType(traced, forward.__self__)


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
    """Sizes 0 and 1 are not special while any thread is inside.

    A lock around the whole call would not do: ranks may be threads that wait for one another.
    """

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


# --- dimensions -------------------------------------------------------------------------------


def _marked(value: torch.Tensor | None, dims: Sequence[int], mode: DynamicShapes) -> Any:
    """Return an alias whose dimensions are marked; the caller's tensor stays as it is."""
    if value is None:
        return None
    alias = value.detach()
    for dim in dims:
        if mode is DynamicShapes.UNBACKED:
            _mark_unbacked(alias, dim)
        else:
            torch._dynamo.mark_dynamic(alias, dim)
    return alias


def _mark_unbacked(value: torch.Tensor, dim: int) -> None:
    mark = torch._dynamo.decorators.mark_unbacked
    if "shape_id" in inspect.signature(mark).parameters:
        mark(value, dim, shape_id="num_tokens")
    else:
        mark(value, dim)


# --- hooks ------------------------------------------------------------------------------------


@contextmanager
def _bytecode_seen(traced: CodeType, see: Callable[[CodeType], None]) -> Iterator[None]:
    def hook(code: CodeType, new_code: CodeType) -> CodeType | None:
        if code is traced:
            see(new_code)
        return None

    handle = torch._dynamo.convert_frame.register_bytecode_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _files_collected(files: list[str]) -> Iterator[None]:
    """Add the file of each function that Dynamo traces into; generated code has none."""
    translator: Any = torch._dynamo.symbolic_convert.InliningInstructionTranslator
    inline = getattr(translator, "inline_call_", None)
    if inline is None:
        raise TraceError("torch: wanted a hook for inlined calls, found none in this version")

    def collect(tracer: Any, *args: Any, **kwargs: Any) -> Any:
        name = tracer.f_code.co_filename
        if not name.startswith("<") and name not in files:
            files.append(name)
        return inline(tracer, *args, **kwargs)

    translator.inline_call_ = collect
    try:
        yield
    finally:
        translator.inline_call_ = inline


def _forget(forward: MethodType) -> None:
    """Drop Dynamo's entry: another instance of the class traces for itself.

    Entries of one code object count against a limit, whichever instance they belong to.
    """
    torch._dynamo.eval_frame.remove_from_cache(forward.__func__)
