"""Compilation levels, graph modes and `CompilationConfig`, of which every one is legal: it is
checked when it is built. What depends on scheduler and pool is filled in by `compile.resolve`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum, IntEnum
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from compile.environment import SaveFormat
from compile.errors import FieldError

CAPTURE_SIZES = "cudagraph_capture_sizes"
"""Among `compile_sizes`: stands for all sizes of that field."""

DEFAULT_GRAPH_SIZES = (512,)

DEFAULT_WARMUPS = {"num_warmups_full": 1, "num_warmups_piecewise": 3}
"""On a GPU, where a kernel's first runs build and tune it."""
DEFAULT_SPLITTING_OPS = ("lockstep::unified_attention_with_output", "lockstep::mla_attention")
"""Attention: its metadata changes with each step. A model need not have both."""

KEYED_FIELDS = (
    "level",
    "splitting_ops",
    "use_inductor",
    "inductor_compile_config",
    "dynamic_shapes",
    "evaluate_guards",
    "passes",
    "max_num_streams",
    "enable_userbuffers",
)
"""Fields that change generated code. `compiler` is one too, by the name that auto stands for. The
others select which code is needed or how it is run; each size has its own entry. A test lists them,
so that a new field must be put into one list or the other."""

MAX_SIZE = 1 << 20
"""Of a batch. A larger one is a typing error, and a rule that fills sizes in would not end."""
_OP_NAME = re.compile(r"[A-Za-z_]\w*(::|\.)[A-Za-z_]\w*(\.[A-Za-z_]\w*)?")
"""`namespace::name` or `namespace.name`, with or without an overload."""


class Options(dict[str, Any]):
    """Options by name, of one configuration and so never changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


@dataclass(frozen=True)
class Bound:
    """Which values of its type a field may hold, and in which form it keeps them. Invariant: `keep`
    returns what is kept unchanged, and raises ValueError for what cannot be used."""

    wanted: str
    is_met: Callable[[Any], bool] = lambda value: True
    keep: Callable[[Any], Any] = lambda value: value


def _are_sizes(sizes: tuple[int, ...]) -> bool:
    return all(1 <= size <= MAX_SIZE for size in sizes)


def _are_apart(ranges: tuple[tuple[int, int], ...]) -> bool:
    are_ranges = all(1 <= first <= last for first, last in ranges)
    return are_ranges and all(one[1] < other[0] for one, other in pairwise(sorted(ranges)))


def _are_different_names(names: tuple[str, ...]) -> bool:
    return all(map(str.isidentifier, names)) and len(set(names)) == len(names)


def _flat(options: Mapping[Any, Any]) -> Options:
    """Return options by name; an object inside an object is a dotted name."""
    pairs = list(_flatten(options))
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError(options)
    return Options(found)


def _flatten(options: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in options.items():
        if not isinstance(key, str):
            raise ValueError(key)
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, _plain(value)


def _plain(value: Any) -> Any:
    """Return what survives JSON, hashing and a trip to another process; ValueError for others."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, bool | int | float | str | None) or not is_finite:
        raise ValueError(value)
    return value


Level = Annotated[int, Bound("a level from 0 to 3", lambda level: 0 <= level <= 3, int)]
Count = Annotated[int, Bound("a whole number of at least 0", lambda count: count >= 0)]
Streams = Annotated[int, Bound("a whole number from 1 to 16", lambda count: 1 <= count <= 16)]
Directory = Annotated[str, Bound("a path")]
_SIZES = f"a list of whole numbers from 1 to {MAX_SIZE}"
Sizes = Annotated[tuple[int, ...], Bound(_SIZES, lambda sizes: sizes and _are_sizes(sizes))]
GraphSizes = Annotated[
    tuple[int, ...], Bound(_SIZES, _are_sizes, lambda sizes: sizes or DEFAULT_GRAPH_SIZES)
]
CompileSizes = Annotated[
    tuple[int | str, ...],
    Bound(
        f'a list of whole numbers of at least 1 and "{CAPTURE_SIZES}"',
        lambda sizes: all(
            size >= 1 if isinstance(size, int) else size == CAPTURE_SIZES for size in sizes
        ),
    ),
]
Ranges = Annotated[
    tuple[tuple[int, int], ...],
    Bound(
        "a list of pairs [first, last] that do not overlap",
        _are_apart,
        lambda ranges: tuple(sorted(ranges)),
    ),
]
OpNames = Annotated[
    tuple[str, ...],
    Bound(
        "a list of ops such as lockstep::name",
        lambda names: all(map(_OP_NAME.fullmatch, names)),
        lambda names: tuple(n if "::" in n else n.replace(".", "::", 1) for n in names),
    ),
]
PassNames = Annotated[
    tuple[str, ...], Bound("a list of different names of passes", _are_different_names)
]
CompilerOptions = Annotated[
    Mapping[str, Any],
    Bound("an object of plain values (text, numbers, true, false, null, lists)", keep=_flat),
]
PoolPolicy = Literal["shared", "per_bucket"]
SealPolicy = Literal["warn", "strict"]
EarlyPolicy = Literal["auto", "on", "off"]


class CompilationLevel(IntEnum):
    """How much of a forward is compiled."""

    NO_COMPILATION = 0
    """The forward runs as written."""
    DYNAMO_AS_IS = 1
    """Dynamo traces the forward, which must be one graph; nothing is generated."""
    DYNAMO_ONCE = 2
    """The whole graph is compiled once; later calls evaluate no guard."""
    PIECEWISE = 3
    """The graph is split at the splitting ops and its pieces are compiled."""


class CUDAGraphMode(Enum):
    """Which steps replay captured graphs: a runtime mode, or a (decode, mixed) pair of them."""

    NONE = 0
    """Nothing is captured."""
    PIECEWISE = 1
    """Each compiled piece is captured, or at level 0 what runs between splitting ops; these ops run
    eagerly."""
    FULL = 2
    """A whole forward is one graph."""
    FULL_DECODE_ONLY = (2, 0)
    """Decode steps replay full graphs, all others none."""
    FULL_AND_PIECEWISE = (2, 1)
    """Decode steps replay full graphs, all others piecewise ones."""

    def decode_mode(self) -> CUDAGraphMode:
        """Return the runtime mode of steps in which every sequence decodes."""
        return CUDAGraphMode(self.value[0]) if isinstance(self.value, tuple) else self

    def mixed_mode(self) -> CUDAGraphMode:
        """Return the runtime mode of all other steps."""
        return CUDAGraphMode(self.value[1]) if isinstance(self.value, tuple) else self

    def separate_routine(self) -> bool:
        """Return whether decode and other steps differ."""
        return isinstance(self.value, tuple)

    def has_full_cudagraphs(self) -> bool:
        """Return whether some step replays a full graph."""
        return self.max_cudagraph_mode() is CUDAGraphMode.FULL

    def requires_piecewise_compilation(self) -> bool:
        """Return whether some step replays piecewise graphs."""
        return CUDAGraphMode.PIECEWISE in (self.decode_mode(), self.mixed_mode())

    def max_cudagraph_mode(self) -> CUDAGraphMode:
        """Return the runtime mode that captures most."""
        return CUDAGraphMode(max(self.value)) if isinstance(self.value, tuple) else self


class AttentionGraphSupport(Enum):
    """Of which steps an attention backend can be part of a graph."""

    NEVER = "never"
    """Of none: only the pieces between attention are captured."""
    UNIFORM_DECODE = "uniform_decode"
    """Of steps in which every sequence has the same number of query tokens."""
    ALWAYS = "always"
    """Of all."""


class DynamicShapes(Enum):
    """How the token dimension stays symbolic while a forward is traced."""

    BACKED = "backed"
    """A symbol with a hint; guards that tracing adds are dropped and counted."""
    BACKED_SIZE_OBLIVIOUS = "backed_size_oblivious"
    """As BACKED, and sizes 0 and 1 are not special."""
    UNBACKED = "unbacked"
    """A symbol without a hint: code that needs its value is an error with file and line."""


@dataclass(frozen=True)
class CompilationConfig:
    """How forwards are compiled and captured.

    Invariant: every field is legal by itself and with the others. Lists are kept as tuples and
    names as members, so what means the same is equal and hashes the same, and what `to_dict`
    returns builds an equal one. `resolve` fills in what is None here and drops sizes that no step
    can have; `graph_bs` is set by it alone. What is illegal is a FieldError.
    """

    level: Level = 0
    """0: as written; 1: traced; 2: compiled whole; 3: split at attention and compiled in pieces."""
    use_cudagraph: bool = True
    """False: nothing is captured, whatever the mode; compilation is unaffected."""
    cudagraph_capture_sizes: Sizes | None = None
    """Batch sizes to capture; wins over the next field."""
    cuda_graph_sizes: GraphSizes = DEFAULT_GRAPH_SIZES
    """One value N: 1, 2, 4, 8 and every 16th up to N. Several: these. Empty: the default. On a CPU
    the default has every 4th to 32 and every 8th to 64 besides."""
    cudagraph_mode: CUDAGraphMode | None = None
    """None: the pool's preset; without one PIECEWISE at level 3, NONE below."""
    splitting_ops: OpNames | None = None
    """Where graphs are split, as `lockstep::name`; None at level 3: attention."""
    cudagraph_copy_inputs: bool = False
    """Copy inputs of pieces into static buffers first; PIECEWISE only."""
    use_inductor: bool = True
    """False: pieces run as traced."""
    compile_sizes: CompileSizes | None = None
    """Token counts that get a piece of their own; "cudagraph_capture_sizes" stands for those."""
    inductor_compile_config: CompilerOptions = field(default_factory=dict)
    """Options of Inductor, by its own names."""
    debug_dump_path: Directory = ""
    """Where traced graphs and decompiled code are written; empty: nowhere."""
    cache_dir: Directory = ""
    """Root of the compile cache, from which a second start takes what the first compiled; empty:
    `compile` below `LOCKSTEP_CACHE_ROOT`, by default `~/.cache/lockstep`."""

    compiler: Literal["auto", "inductor", "inductor_standalone", "eager"] = "auto"
    """auto, inductor, inductor_standalone or eager."""
    compile_ranges: Ranges = ()
    """Token ranges (first, last) with pieces of their own beside the general ones."""
    compile_lazily: bool = False
    """Compile a listed size when it is met for the second time, not before ready."""
    dynamic_shapes: DynamicShapes = DynamicShapes.BACKED_SIZE_OBLIVIOUS
    """How the number of tokens stays symbolic while a forward is traced."""
    evaluate_guards: bool = False
    """For debugging: keep guards on sizes and fail if one does not hold."""
    share_artifacts: bool = True
    """Equal pieces compile on one rank and the others take them; False: each rank for itself."""
    compile_cache_save_format: SaveFormat | None = None
    """binary or unpacked; None: as the environment says, binary by default."""
    capture_num_tokens: Sizes | None = None
    """Token counts that piecewise graphs are captured for; None: 20 sizes up to 3072, on a CPU 7 up
    to 64."""
    enable_padding: bool = True
    """Decode steps replay the next larger graph; False: graphs of exactly their size."""
    num_warmups_full: Count | None = None
    """Eager runs before a whole forward is captured; None: 1, on a CPU 0."""
    num_warmups_piecewise: Count | None = None
    """Eager runs before pieces are captured; None: 3, on a CPU 0."""
    graph_pool: PoolPolicy = "shared"
    """shared: all graphs use one memory pool; per_bucket: those of each size one of their own."""
    poison_graph_pool: bool = False
    """For debugging, on CPU: overwrite what graphs let go of, so that its use shows."""
    reserve_graph_memory: bool | None = None
    """Capture the largest graphs for trial and leave their memory out of the KV cache; None: on
    CUDA, where the KV cache takes what is left."""
    capture_logits: bool | None = None
    """Score the vocabulary and find the likeliest tokens of a replayed decode step in a second
    graph behind the full one; None: on CUDA. It scores padding as well, which takes a CPU longer
    than the calls that it saves."""
    sealed: SealPolicy = "warn"
    """Whether what compiles or captures after ready is named (warn) or refused (strict). While a
    group serves and compiles, from the step on at which it has gone over to what was compiled."""
    serve_while_compiling: EarlyPolicy = "auto"
    """on: if the cache lacks a piece, serve eagerly at once and compile in another process; the
    group goes over between steps. off: compile, then serve. auto: on in a server's pools on a CPU,
    if the cache can keep what is compiled; off in `LLM`."""
    passes: PassNames | None = None
    """Graph passes by name, in order; None: those that the compiler does not do better itself."""
    max_num_streams: Streams = 1
    """CUDA streams over which a piece is spread that Inductor does not compile, so that what is
    independent runs side by side."""
    enable_userbuffers: bool = False
    """Let products write into memory that the other tensor-parallel ranks read, where a piece that
    Inductor does not compile adds them up, and each rank keep its rows of the residual."""

    graph_bs: Annotated[tuple[int, ...], Bound("batch sizes")] = ()
    """Ascending batch sizes that are captured. Filled in by `resolve`."""

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, _kept(value, kind))
            except ValueError:
                raise FieldError(f"compilation.{name}", WANTED[name], value) from None
        _check_mode(self)
        _check_combinations(self)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON has them, in the order in which they are declared."""
        return {f.name: _as_plain(getattr(self, f.name)) for f in fields(self)}

    @property
    def graph_mode(self) -> CUDAGraphMode:
        """The effective mode: NONE if graphs are off."""
        if not self.use_cudagraph or self.cudagraph_mode is None:
            return CUDAGraphMode.NONE
        return self.cudagraph_mode

    @property
    def can_split(self) -> bool:
        """Whether a forward is captured in parts: pieces of level 3, or what level 0 runs between
        splitting ops."""
        levels = (CompilationLevel.NO_COMPILATION, CompilationLevel.PIECEWISE)
        return self.level in levels and self.splitting_ops != ()

    @property
    def has_breakable_graphs(self) -> bool:
        """Whether the forward is captured as it is written, and captures end at splitting ops."""
        is_written = self.level == CompilationLevel.NO_COMPILATION
        return is_written and self.graph_mode.requires_piecewise_compilation()

    @property
    def has_inductor(self) -> bool:
        """Whether Inductor compiles; without it pieces run as they were traced."""
        return self.use_inductor and self.compiler != "eager"


_KINDS = get_type_hints(CompilationConfig, include_extras=True)


def _words(kind: Any) -> str:
    arguments = get_args(kind)
    if get_origin(kind) is Annotated:
        return str(arguments[1].wanted)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(arguments)}"
    if NoneType in arguments:
        return f"{_words(arguments[0])}, or null"
    return "true or false" if kind is bool else f"one of {', '.join(kind.__members__)}"


WANTED = {name: _words(kind) for name, kind in _KINDS.items()}
"""What each field may hold, in words."""

FIELDS = tuple(name for name in _KINDS if name != "graph_bs")
"""What may be asked for, in the order in which it is declared."""


def _kept(value: Any, kind: Any) -> Any:
    """Return a value, or what JSON has in its place, as a field of this type keeps it. Raises
    ValueError if it is not of this type or not within its bounds."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        bare, bound = arguments
        value = _kept(value, bare)
        if not bound.is_met(value):
            raise ValueError(value)
        return bound.keep(value)
    if NoneType in arguments:
        return None if value is None else _kept(value, arguments[0])
    if origin is tuple and isinstance(value, list | tuple):
        kinds = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        return tuple(_kept(item, of) for item, of in zip(value, kinds, strict=True))
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(value, str):
        return _kept(kind.__members__.get(value.upper()), kind)
    if origin is Literal:
        fits = value in arguments
    else:
        fits = isinstance(value, kind if origin in (None, UnionType) else origin)
    if not fits or isinstance(value, bool) is not (kind is bool):
        raise ValueError(value)
    return value


def _check_mode(config: CompilationConfig) -> None:
    """Parts can be captured only if there are parts."""
    mode = config.cudagraph_mode
    if mode is None or not mode.requires_piecewise_compilation() or config.can_split:
        return
    if config.level in (CompilationLevel.NO_COMPILATION, CompilationLevel.PIECEWISE):
        wanted = f"at least one op where cudagraph_mode is {mode.name}"
        raise FieldError("compilation.splitting_ops", wanted, [])
    modes = f"NONE, FULL or FULL_DECODE_ONLY at level {config.level}"
    wanted = f"{modes} (piecewise graphs need level 0 or 3)"
    raise FieldError("compilation.cudagraph_mode", wanted, mode.name)


def _check_combinations(config: CompilationConfig) -> None:
    has_pieces = config.level == CompilationLevel.PIECEWISE and config.can_split
    can_copy = has_pieces and config.cudagraph_mode in (None, CUDAGraphMode.PIECEWISE)
    if config.cudagraph_copy_inputs and not can_copy:
        wanted = "false where cudagraph_mode is not PIECEWISE at level 3"
        raise FieldError("compilation.cudagraph_copy_inputs", wanted, True)
    if config.compile_lazily and config.sealed == "strict":
        wanted = "false where sealed is strict (nothing compiles after ready)"
        raise FieldError("compilation.compile_lazily", wanted, True)
    if config.serve_while_compiling == "on" and config.compile_lazily:
        wanted = "auto or off where compile_lazily is true (it compiles in the rank)"
        raise FieldError("compilation.serve_while_compiling", wanted, "on")
    if config.serve_while_compiling == "on" and config.reserve_graph_memory:
        wanted = "auto or off where reserve_graph_memory is true (trials need what is compiled)"
        raise FieldError("compilation.serve_while_compiling", wanted, "on")
    if config.evaluate_guards and config.dynamic_shapes is DynamicShapes.UNBACKED:
        wanted = "false where dynamic_shapes is UNBACKED (it has no guards)"
        raise FieldError("compilation.evaluate_guards", wanted, True)
    if not config.use_inductor and config.compiler.startswith("inductor"):
        wanted = "auto or eager where use_inductor is false"
        raise FieldError("compilation.compiler", wanted, config.compiler)


def _as_plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Options):
        return {key: _as_plain(inner) for key, inner in value.items()}
    return [_as_plain(inner) for inner in value] if isinstance(value, tuple) else value
