"""`support_torch_compile`: a module whose forward is traced at most once and then never again.

1. The class is decorated; its instances look at the scope that they are built in.
2. The first call finds a plan in the cache and binds it, or traces the forward, compiles its
   pieces and writes the plan.
3. Every call, the first one included, runs the written function: no guard is evaluated and Dynamo
   is not entered, so no request can trigger a compilation.

Levels 0 and 1 leave the module alone. Its forward runs as it is written; at level 1 the caller
compiles the whole model with `compile_as_is`.
"""

from __future__ import annotations

import inspect
import logging
import time
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from compile.cache.manager import CompilerManager
from compile.config import CompilationLevel, DynamicShapes
from compile.pieces.plan import (
    TOKEN_ARGUMENT,
    ForwardPlan,
    Guard,
    PlanError,
    bind,
    check_guards,
    forward_name,
    kind,
    load_pieces,
)
from compile.report import REPORT
from compile.scope import CompileScope, Runnable, current_model_tag, current_scope

if TYPE_CHECKING:
    from compile.pieces.backend import PiecewiseCompiler

logger = logging.getLogger(__name__)

Module = TypeVar("Module", bound=nn.Module)
Dims = int | Sequence[int]


class ForwardError(ValueError):
    """A forward is called in a way that it was not traced for."""


class CompiledForward(nn.Module):
    """Base of decorated modules: calls go to the compiled forward, if there is one."""

    do_not_compile: bool
    """The forward runs as it is written."""
    compiled_forward: TracedForward | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward. Hooks run only if it is not compiled."""
        if self.do_not_compile:
            return super().__call__(*args, **kwargs)
        assert self.compiled_forward is not None
        return self.compiled_forward(self, args, kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Load or trace and compile for calls like this one, without running the forward."""
        if self.compiled_forward is not None:
            self.compiled_forward.prepare(self, args, kwargs)

    def loading(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Load what an earlier process compiled for calls like this one, a piece at a time."""
        if self.compiled_forward is not None:
            yield from self.compiled_forward.loading(self, args, kwargs)

    @property
    def is_compiled(self) -> bool:
        """Whether calls find their compiled forward."""
        return self.compiled_forward is not None and self.compiled_forward.is_bound

    def run_as_written(self, as_written: bool) -> None:
        """Run the forward as it is written from now on; False: the compiled one again."""
        self.do_not_compile = as_written


def support_torch_compile(
    cls: type[Module] | None = None, *, dynamic_arg_dims: Mapping[str, Dims] | None = None
) -> Any:
    """Make a module class compile its forward as configured by the scope that it is built in.
    `dynamic_arg_dims` has for each argument its dimensions of tokens, counted from the end if
    negative; by default the first of every argument annotated as a tensor."""
    if cls is None:
        return lambda decorated: support_torch_compile(decorated, dynamic_arg_dims=dynamic_arg_dims)
    if issubclass(cls, CompiledForward):
        raise TypeError(f"{cls.__name__}: wanted a class that is not decorated, found one that is")
    dims = dynamic_dims(cls, dynamic_arg_dims)
    build = cls.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        scope = current_scope()
        self.do_not_compile = scope.config.level < CompilationLevel.DYNAMO_ONCE
        self.compiled_forward = None
        if not self.do_not_compile:
            parameters = list(inspect.signature(type(self).forward).parameters)[1:]
            self.compiled_forward = TracedForward(scope, parameters, dims)

    cls.__bases__ = (CompiledForward, *cls.__bases__)
    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def dynamic_dims(
    cls: type[nn.Module], given: Mapping[str, Dims] | None
) -> dict[str, tuple[int, ...]]:
    """Return the dimensions of tokens of a forward's arguments, as given or by annotation."""
    names = list(inspect.signature(cls.forward).parameters)[1:]
    if given is None:
        hints = typing.get_type_hints(cls.forward)
        given = {name: 0 for name in names if _is_tensor(hints.get(name))}
    for name in given:
        if name not in names:
            wanted = f"arguments of {cls.__name__}.forward"
            raise ValueError(f"dynamic_arg_dims: wanted {wanted}, found {name!r}")
    if not given:
        wanted = "an argument annotated as torch.Tensor, or dynamic_arg_dims"
        raise ValueError(f"{cls.__name__}.forward: wanted {wanted}, found none")
    return {n: (d,) if isinstance(d, int) else tuple(d) for n, d in given.items()}


def _is_tensor(hint: Any) -> bool:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [part for part in typing.get_args(hint) if part is not type(None)]
        return rest == [torch.Tensor]
    return hint is torch.Tensor


class TracedForward:
    """The compiled forward of one module. Invariant: `plan` and the function are set together."""

    def __init__(
        self, scope: CompileScope, parameters: Sequence[str], dims: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Prepare to compile a forward; `dims` has the dimensions of tokens of some arguments."""
        self.plan: ForwardPlan | None = None
        self.compiler: PiecewiseCompiler | None = None
        """What traced it; None after a warm start."""
        self.tag = current_model_tag()
        self._scope = scope
        self._parameters = tuple(parameters)
        self._dims = dims
        self._is_claimed = False
        self._run: Runnable | None = None
        self._names: tuple[str, ...] = ()
        self._absent: tuple[str, ...] = ()
        self._num_positional = -1
        """A call with exactly this many positional arguments has them in order."""

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run or self.prepare(module, args, kwargs)
        if run is None:
            return module.forward(*args, **kwargs)
        if kwargs or len(args) != self._num_positional:
            args = self._in_order(module, args, kwargs)
        return run(*args)

    @property
    def is_bound(self) -> bool:
        return self._run is not None

    def loading(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        """Bind the plan that an earlier process left, if there is one that fits."""
        if not self._is_claimed:
            self._scope.claim(self.tag)
            self._is_claimed = True
        if self._run is not None or self._scope.config.compile_lazily:
            return
        started, given = time.perf_counter(), _arguments(module, args, kwargs)
        manager = CompilerManager.open(self._scope, self.tag, None)
        text = manager.cache.load_plan() if manager is not None and manager.cache else None
        if manager is None or text is None:
            return
        try:
            plan = ForwardPlan.from_json(text)
            present = {name: kind(value) for name, value in given.items() if value is not None}
            wanted = forward_name(module), present
            found = plan.forward, dict(zip(plan.arguments, plan.kinds, strict=True))
            if wanted != found:
                raise PlanError(f"plan: wanted one of {wanted}, found one of {found}")
            pieces = yield from load_pieces(self._scope, manager, plan)
            self._bind(plan, module, pieces)
        except Exception as error:
            logger.warning("%s: traced again, because its plan is of no use: %s", self.tag, error)
            return
        self._tell_guards(plan.guards)
        took = time.perf_counter() - started
        logger.info("%s: %d pieces loaded in %.2f s", self.tag, len(plan.pieces), took)

    def prepare(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Runnable | None:
        """Load or trace now without computing anything, so that ranks that meet inside the forward
        can wait for each other before they enter it. None: there are too few tokens to trace with.
        """
        for _ in self.loading(module, args, kwargs):
            pass
        if self._run is not None:
            return self._run
        given: Mapping[str, Any] = _arguments(module, args, kwargs)
        dims = self._token_dims(given)
        mode = self._scope.config.dynamic_shapes
        num_tokens = next(given[name].shape[dims[name][0]] for name in dims)
        if num_tokens < 2 and mode is DynamicShapes.BACKED:
            logger.warning("%s: too few tokens to trace with: %d", self.tag, num_tokens)
        else:
            self._trace(module, given, dims)
        return self._run

    def _token_dims(self, given: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return each tensor's dimensions of tokens, counted from the front, all of one size."""
        dims: dict[str, tuple[int, ...]] = {}
        sizes: dict[str, int] = {}
        for name, wanted in self._dims.items():
            if (value := given[name]) is not None:
                for dim in wanted:
                    if not -value.ndim <= dim < value.ndim:
                        has = f"a dimension of {name}, which has {value.ndim}"
                        raise ForwardError(f"dynamic_arg_dims: wanted {has}, found {dim}")
                dims[name] = tuple(dim % value.ndim for dim in wanted)
                sizes |= {f"{name} dim {dim}": value.shape[dim] for dim in dims[name]}
        if len(set(sizes.values())) != 1:
            wanted_sizes = "one number of tokens in all arguments"
            raise ForwardError(f"{self.tag}: wanted {wanted_sizes}, found {sizes}")
        return dims

    def _trace(
        self, module: nn.Module, given: Mapping[str, Any], dims: Mapping[str, tuple[int, ...]]
    ) -> None:
        # A warm start imports neither Dynamo nor what needs it.
        from compile.pieces.backend import PiecewiseCompiler
        from compile.pieces.diagnose import GraphBreakError, recompile_hazards
        from compile.pieces.dynamo import trace_once

        forward = types.MethodType(type(module).forward, module)
        place = (forward.__code__.co_filename, forward.__code__.co_firstlineno)
        logger.debug("%s: tracing %s (%s:%d)", self.tag, forward_name(module), *place)
        for hazard in recompile_hazards(forward):
            logger.warning("%s: %s", self.tag, hazard)
        files = [place[0]]  # until there is a graph

        def new_compiler(traced: list[str]) -> PiecewiseCompiler:
            files[:] = traced
            self.compiler = PiecewiseCompiler(self._scope, self.tag, files)
            return self.compiler

        try:
            trace = trace_once(forward, given, dims, new_compiler, self._scope.config)
        except GraphBreakError as error:
            PiecewiseCompiler(self._scope, self.tag, files).report_break(error)
            raise
        compiler = self.compiler
        assert compiler is not None
        logger.debug("%s: traced files: %s", self.tag, ", ".join(trace.files))
        logger.debug("%s: %d guards dropped", self.tag, trace.dropped_guards.total())
        self._tell_guards(compiler.guards)
        report = compiler.report(trace)
        report.log()
        compiler.write_readable(REPORT, report.to_json)
        if trace.run is not None:
            effects = "; ".join(trace.side_effects)
            logger.warning(
                "%s: not kept in the cache, because it has side effects: %s", self.tag, effects
            )
            self._keep(trace.run, given, (), compiler.guards)
            return
        plan = compiler.plan(module, trace, dims)
        trace.arguments = trace.inputs = {}
        self._bind(plan, module, compiler.pieces_of(plan))
        compiler.save(plan, trace)

    def _tell_guards(self, guards: Iterable[Guard]) -> None:
        for guard in guards:
            logger.warning(
                "%s: traced for %s alone, as %s asked", self.tag, guard.expression, guard.where
            )

    def _bind(self, plan: ForwardPlan, module: nn.Module, pieces: Mapping[str, Runnable]) -> None:
        run = bind(self._scope, plan, module, pieces)
        self.plan = plan
        self._keep(run, plan.arguments, plan.absent, plan.guards)

    def _keep(
        self, run: Runnable, names: Iterable[str], absent: Iterable[str], guards: Sequence[Guard]
    ) -> None:
        self._names, self._absent = tuple(names), tuple(absent)
        self._run = run
        if self._names == self._parameters[: len(self._names)]:
            self._num_positional = len(self._names)
        if not self._scope.config.evaluate_guards:
            return
        position, dim = self._names.index(TOKEN_ARGUMENT), self._dims[TOKEN_ARGUMENT][0]

        def check_and_run(*args: Any) -> Any:
            check_guards(guards, args[position].shape[dim])
            return run(*args)

        self._run = check_and_run

    def _in_order(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Return the tensors that the compiled forward takes; ForwardError: others were traced."""
        given = _arguments(module, args, kwargs)
        unexpected = [name for name in self._absent if given[name] is not None]
        missing = [n for n in self._names if given[n] is None] if self.plan is not None else []
        if unexpected or missing:
            wanted = f"{', '.join(self._names)} as traced"
            found = ", ".join(name for name, value in given.items() if value is not None)
            raise ForwardError(f"{self.tag}: wanted the arguments {wanted}, found {found}")
        return tuple(given[name] for name in self._names)


def _arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, torch.Tensor | None]:
    """Return a forward's arguments by name, in order; ForwardError: one is no tensor."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    bound.apply_defaults()
    given = dict(list(bound.arguments.items())[1:])
    for name, value in given.items():
        if value is not None and not isinstance(value, torch.Tensor):
            wanted = "a tensor or None"
            raise ForwardError(f"{forward_name(module)}({name}): wanted {wanted}, found {value!r}")
    return given


def compile_as_is(module: nn.Module) -> Callable[..., Any]:
    """Return a module's forward as Dynamo traces it: one graph, guards and all, as written."""
    from compile.pieces.dynamo import traced_as_is

    return traced_as_is(module, dynamic_dims(type(module), None))
