"""What makes a piece runnable: the interface, and the compiler that changes nothing. A compiler's
`handle` is all that a later process needs. It has no path, so the cache may be moved."""

from __future__ import annotations

import math
import re
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from compile.cache.artifacts import OUTPUT_CODE, ArtifactError, ArtifactStore, pack, unpack
from compile.config import CompilationConfig
from compile.counters import counter
from compile.scope import Runnable

Handle = tuple[str, str]
"""The key that was given to `compile`, and a file's name below the cache directory."""

STANDALONE_SINCE = (2, 8)
"""The first torch that compiles pieces into files without help."""


class CompilerInterface(ABC):
    """Compiles pieces, and loads what it compiled in an earlier process."""

    name: str
    """What the configuration and the cache's index call it."""

    def __init__(self) -> None:
        self._store: ArtifactStore | None = None

    def initialize_cache(self, cache_dir: str, disable_cache: bool = False) -> None:
        """Keep the artifacts of all forwards and ranks in `cache_dir`, unless it is disabled."""
        self._store = None if disable_cache else ArtifactStore(Path(cache_dir))

    @abstractmethod
    def compute_hash(self, config: CompilationConfig) -> str:
        """Return a hash of what the compiler's output depends on besides its arguments."""

    @abstractmethod
    def compile(
        self,
        graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        compiler_config: Mapping[str, Any],
        key: str | None = None,
    ) -> tuple[Runnable, Handle | None]:
        """Compile a piece, whose graph is left as it was; return the runnable, and its handle, None
        if it is not saved, as nothing is without a key. `example_inputs` are the graph's fake
        tensors and symbols, or tensors of a fixed size."""

    @abstractmethod
    def load(self, handle: Handle) -> Runnable:
        """Return what was compiled, without its graph; ArtifactError: it cannot be used."""

    def _members(self, handle: Handle) -> dict[str, bytes]:
        assert self._store is not None, "cache: wanted initialize_cache first, found none"
        return unpack(self._store.get(handle[1]))


def compiler_name(config: CompilationConfig) -> str:
    """Return the name of the compiler that a configuration selects; `auto` is resolved."""
    if not config.has_inductor:
        return "eager"
    if config.compiler != "auto":
        return config.compiler
    major, minor = torch.__version__.split(".")[:2]
    is_new = (int(major), int(minor)) >= STANDALONE_SINCE
    return "inductor_standalone" if is_new else "inductor"


class EagerAdaptor(CompilerInterface):
    """Runs a piece as it was traced. Its artifact is the piece's Python source."""

    name = "eager"

    def compute_hash(self, config: CompilationConfig) -> str:
        return "eager"

    def compile(
        self,
        graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        compiler_config: Mapping[str, Any],
        key: str | None = None,
    ) -> tuple[Runnable, Handle | None]:
        counter.num_eager_compiles += 1
        if self._store is None or key is None or (source := graph_source(graph)) is None:
            return graph, None
        name = self._store.offer(pack({OUTPUT_CODE: source.encode()}))
        return graph, None if name is None else (key, name)

    def load(self, handle: Handle) -> Runnable:
        source = self._members(handle).get(OUTPUT_CODE)
        if source is None:
            raise ArtifactError(f"artifact {handle[1][:12]}: wanted {OUTPUT_CODE}, found none")
        namespace: dict[str, Any] = {}
        exec(compile(source, f"<{OUTPUT_CODE} of {handle[1][:12]}>", "exec"), namespace)
        forward = namespace["forward"]
        return lambda *args: forward(None, *args)


def graph_source(graph: fx.GraphModule) -> str | None:
    """Return Python that defines `forward(self, ...)` of a graph; None: it holds tensors or
    modules, or calls what cannot be imported by name."""
    if any(node.op in ("get_attr", "call_module") for node in graph.graph.nodes):
        return None
    code = _without_types(graph.graph).python_code("self")
    used = set(re.findall(r"\w+", code.src))
    names = sorted(used.intersection(code.globals))
    imports = [_import_line(name, code.globals[name]) for name in names]
    if None in imports:
        return None
    return "\n".join([*(line for line in imports if line), "", code.src.lstrip("\n"), ""])


def _without_types(graph: fx.Graph) -> fx.Graph:
    """Copy a graph without annotations, some of which cannot be imported by name."""
    copied = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        nodes[node] = copied.node_copy(node, lambda old: nodes[old])
        nodes[node].type = None
    return copied


def _import_line(name: str, value: Any) -> str | None:
    """Return Python that binds `name` to `value`; None if it cannot be imported by name."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, float):
        return f"from math import {'nan' if math.isnan(value) else 'inf'} as {name}"
    if value is type(None):
        return f"from types import NoneType as {name}"
    module, attribute = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not module or not attribute:
        return None
    if getattr(sys.modules.get(module), attribute, None) is not value:
        return None
    return f"from {module} import {attribute} as {name}"
