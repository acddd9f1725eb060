"""Two compilers on Inductor: `standalone_compile`, and `compile_fx` with its caches around it.

An artifact holds torch's own file, and with it the generated Python and the machine code that
loading it would otherwise build. Each piece is compiled in a directory of its own and reaches the
shared one only through its artifact: half a library would end every process that loads it.
"""

from __future__ import annotations

import copy
import difflib
import functools
import hashlib
import importlib
import logging
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx

from compile.cache.artifacts import OUTPUT_CODE, ArtifactError, pack
from compile.cache.builds import inductor_builds
from compile.cache.compilers import CompilerInterface, EagerAdaptor, Handle, compiler_name
from compile.cache.inductor_directory import DIRECTORY, InductorDirectory
from compile.cache.inductor_private import (
    CALL_GRAPH,
    caching,
    compiler_facts,
    no_caches,
    replace,
)
from compile.cache.tuning import TUNING, watched
from compile.config import CompilationConfig
from compile.counters import counter
from compile.errors import FieldError
from compile.graphs.boundary import boundary
from compile.passes.aten import fresh_tracing
from compile.scope import Runnable

ARTIFACT = "artifact.bin"
BUNDLED = f"{DIRECTORY}/"
"""Members under this name go back into Inductor's directory."""
EXAMPLE_OPTION = "max_autotune"
"""Named where no option looks like the one that was given."""

logger = logging.getLogger(__name__)

_kept: list[tempfile.TemporaryDirectory[str]] = []
"""Where pieces were compiled that could not be saved: they run from there until the end."""


def import_runtime() -> None:
    """Import what the first load of an artifact, and the first capture on a CPU, would import,
    which holds up all Python for seconds."""
    for name in (
        "torch._dynamo",
        "torch._inductor.async_compile",
        "torch._inductor.compile_fx",
        "torch._inductor.standalone_compile",
        "torch._functorch._aot_autograd.aot_autograd_result",
    ):
        importlib.import_module(name)


class NotSaveableError(RuntimeError):
    """A compiled piece holds what cannot be written to a file."""


class _Source(NamedTuple):
    graph: fx.GraphModule
    inputs: Sequence[Any]
    options: Mapping[str, Any]


class InductorAdaptor(CompilerInterface):
    """Compiles with `compile_fx` and takes the artifact from the caches that it filled. Invariant:
    no guard on sizes is evaluated: what was compiled for a range is called for it alone."""

    name = "inductor"

    def __init__(self) -> None:
        super().__init__()
        self._directory = InductorDirectory(Path())

    def initialize_cache(self, cache_dir: str, disable_cache: bool = False) -> None:
        """Keep artifacts in `cache_dir` and Inductor's files next to it."""
        super().initialize_cache(cache_dir, disable_cache)
        self._directory = InductorDirectory(Path(cache_dir).parent / DIRECTORY)

    def compute_hash(self, config: CompilationConfig) -> str:
        """Hash torch's compiler sources, the device it compiles for, and its options."""
        return hashlib.sha256("\0".join(compiler_facts()).encode()).hexdigest()

    def compile(
        self,
        graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        compiler_config: Mapping[str, Any],
        key: str | None = None,
    ) -> tuple[Runnable, Handle | None]:
        """Compile a piece. What is saved is loaded again: a first start runs what later ones do."""
        counter.num_inductor_compiles += 1
        source = _Source(graph, example_inputs, compiler_config)
        if self._store is None or key is None:
            with inductor_builds(), no_caches(), watched():
                return DirectCall(self._compiled(source)), None
        scratch = tempfile.TemporaryDirectory(prefix="lockstep-inductor-")
        directory = InductorDirectory(Path(scratch.name), self._directory.probes)
        fresh, data = self._saved_in(directory, source)
        name = None if data is None else self._store.offer(data)
        try:
            if name is not None:
                loaded = self.load((key, name))
                scratch.cleanup()
                return loaded, (key, name)
        except ArtifactError as error:
            logger.warning("a piece was saved and cannot be loaded: %s", error)
        _kept.append(scratch)
        return DirectCall(fresh), None

    def _saved_in(
        self, directory: InductorDirectory, source: _Source
    ) -> tuple[Runnable, bytes | None]:
        """Return a compiled piece and what to store of it; None if it cannot be saved."""
        with (
            directory.entered(is_loading=False) as loaded,
            inductor_builds(),
            watched() as tuned,
        ):
            artifact = None
            try:
                artifact = self._compiled(source, is_saved=True)
                content = _saved(artifact)
            except NotSaveableError as error:
                logger.debug("piece that cannot be saved: %s", error)
                return artifact or self._compiled(source), None
            members = {BUNDLED + name: data for name, data in directory.collect(loaded).items()}
            sources = [path for path in loaded if path.suffix == ".py"]
            members[OUTPUT_CODE] = sources[-1].read_bytes() if sources else b""
            if tuned:
                members[TUNING] = "\n".join([*tuned, ""]).encode()
            return artifact, pack({**members, ARTIFACT: content})

    def _compiled(self, source: _Source, *, is_saved: bool = False) -> Any:
        """Return a piece, as a `CompiledArtifact` if it is to be saved, or NotSaveableError."""
        from torch._inductor import compile_fx
        from torch._inductor.standalone_compile import CacheCompiledArtifact

        graph, inputs = copy.deepcopy(source.graph), list(source.inputs)
        options = dict(source.options)
        with fresh_tracing(inputs), torch.no_grad():
            if not is_saved:
                return compile_fx.compile_fx(graph, inputs, config_patches=options)
            with caching():
                compiled: Any = compile_fx.compile_fx(graph, inputs, config_patches=options)
                return CacheCompiledArtifact(compiled, torch.compiler.save_cache_artifacts())

    def load(self, handle: Handle) -> Runnable:
        from torch._inductor.standalone_compile import CompiledArtifact

        members = self._members(handle)
        bundled = {n.removeprefix(BUNDLED): members[n] for n in members if n.startswith(BUNDLED)}
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / ARTIFACT
            path.write_bytes(members.get(ARTIFACT, b""))
            try:
                self._directory.restore(bundled)
                with self._directory.entered(is_loading=True), inductor_builds():
                    loaded: Runnable = CompiledArtifact.load(path=str(path), format="binary")
            except Exception as error:
                message = f"artifact {handle[1][:12]}: wanted to load it, found {_line(error)}"
                raise ArtifactError(message) from error
        return DirectCall(loaded)


class StandaloneInductorAdaptor(InductorAdaptor):
    """Compiles with `standalone_compile`, whose artifacts bundle all that belongs to a piece."""

    name = "inductor_standalone"

    def _compiled(self, source: _Source, *, is_saved: bool = False) -> Any:
        from torch._inductor import standalone_compile

        is_fake = any(isinstance(x, torch._subclasses.FakeTensor) for x in source.inputs)
        try:
            with torch.no_grad():
                return standalone_compile(
                    source.graph,
                    list(source.inputs),
                    # Real tensors have the sizes to compile for; fake ones belong to the graph.
                    dynamic_shapes="from_graph" if is_fake else "from_example_inputs",
                    options={"config_patches": dict(source.options)},
                    aot=is_saved,
                )
        except (RuntimeError, AssertionError) as error:
            if is_saved and "serialize" in str(error):
                raise NotSaveableError(_line(error)) from error
            raise


def make_compiler(config: CompilationConfig) -> CompilerInterface:
    """Return the compiler that a configuration means; FieldError: Inductor lacks an option."""
    name = compiler_name(config)
    if name == "eager":
        return EagerAdaptor()
    # torch lists what its module of options imports from typing, too.
    known = [option for option in torch._inductor.list_options() if not option.isupper()]
    for option in config.inductor_compile_config:
        if option not in known:
            close = difflib.get_close_matches(option, known, 3) or [EXAMPLE_OPTION]
            wanted = f"an option of torch._inductor, such as {', '.join(close)}"
            raise FieldError("compilation.inductor_compile_config", wanted, option)
    return StandaloneInductorAdaptor() if name == "inductor_standalone" else InductorAdaptor()


def _saved(artifact: Any) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / ARTIFACT
        try:
            artifact.save(path=str(path), format="binary")
        except Exception as error:
            raise NotSaveableError(_line(error)) from error
        return path.read_bytes()


def _line(error: BaseException) -> str:
    """Return the first line of an error, or its type if it has no message."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


Generated = Callable[[list[Any]], Sequence[Any]]


@dataclass
class _Call:
    code: Generated
    inputs: list[Any]
    outputs: Sequence[Any]


class DirectCall:
    """A compiled piece without torch's layers around it: five Python functions before the generated
    code, 12 us a piece on a CPU, 7 % of a decode step of the bundled model. They are left out if
    the first call shows that they pass everything through, so either way gives the same."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled
        self._code: Generated | None = None
        self._is_watched = False

    @boundary
    def __call__(self, *args: Any) -> Any:
        if (
            self._code is not None
            and torch.is_inference_mode_enabled()
            and not torch.autograd.profiler._is_profiler_enabled
        ):
            return self._code(list(args))
        if self._is_watched or not torch.is_inference_mode_enabled():
            return self.compiled(*args)
        self._is_watched = True
        with _watched() as calls:
            outputs = self.compiled(*args)
        if len(calls) == 1 and _is_same(args, outputs, calls[0]):
            self._code = calls[0].code
        return outputs


def _is_same(args: tuple[Any, ...], outputs: Any, call: _Call) -> bool:
    return (
        isinstance(outputs, tuple | list)
        and len(args) == len(call.inputs)
        and len(outputs) == len(call.outputs)
        and all(map(_is_one, args, call.inputs))
        and all(map(_is_one, outputs, call.outputs))
    )


def _is_one(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value is other
    return type(value) is type(other) and bool(value == other)


class _PerThread(threading.local):
    """Ranks of one process may be threads: each watches its own calls."""

    calls: list[_Call] | None = None


_watching = _PerThread()
_lock = threading.Lock()


@contextmanager
def _watched() -> Iterator[list[_Call]]:
    """Collect the calls of generated code that this thread makes inside."""
    with _lock:
        _install()
    _watching.calls = calls = list[_Call]()
    try:
        yield calls
    finally:
        _watching.calls = None


@functools.cache
def _install() -> None:
    replace(CALL_GRAPH, _watch)


def _watch(original: Callable[..., Any]) -> Callable[..., Any]:
    def watch(self: Any, inputs: Sequence[Any]) -> Any:
        calls = _watching.calls
        if calls is None:
            return original(self, inputs)
        before = list(inputs)  # generated code empties the list
        outputs = original(self, inputs)
        calls.append(_Call(self.current_callable, before, outputs))
        return outputs

    return watch
