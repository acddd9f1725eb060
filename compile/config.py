"""Compilation levels, graph modes and `CompilationConfig`.

A configuration is validated when it is built, never when it is used, so every
`CompilationConfig` is a legal one. What depends on the scheduler (sizes) and on the pool (the
preset mode) is filled in by `compile.resolve`, which returns a new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum, IntEnum
from functools import partial
from typing import Annotated, Any, Literal, get_type_hints

from compile import validate
from compile.environment import SaveFormat
from compile.errors import FieldError
from compile.validate import Options

CAPTURE_SIZES = "cudagraph_capture_sizes"
"""Among `compile_sizes`: stands for all sizes of that field."""

DEFAULT_GRAPH_SIZES = (512,)

DEFAULT_WARMUPS = {"num_warmups_full": 1, "num_warmups_piecewise": 3}
"""On a GPU, where a kernel's first runs build and tune it."""
DEFAULT_SPLITTING_OPS = ("lockstep::unified_attention_with_output", "lockstep::mla_attention")
"""Attention: its metadata changes with each step. A model need not have both."""

Count = Annotated[int, validate.whole_number(0)]
Directory = Annotated[str, validate.path()]
Sizes = Annotated[tuple[int, ...], validate.sizes()]
GraphSizes = Annotated[tuple[int, ...], validate.sizes(default=DEFAULT_GRAPH_SIZES)]
CompileSizes = Annotated[
    tuple[int | str, ...],
    validate.list_of(
        lambda size: size == CAPTURE_SIZES or validate.is_size(size),
        f'a list of whole numbers of at least 1 and "{CAPTURE_SIZES}"',
    ),
]
CompilerOptions = Annotated[Mapping[str, Any], validate.options()]
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
    """Each compiled piece is captured; splitting ops run eagerly between them."""
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

    Invariant: every field is legal by itself and with the others. `resolve` fills in what is
    None here and drops sizes that no step can have; `graph_bs` is set by it alone.

    Raises:
        FieldError: with the field, what was found and what is wanted.
    """

    level: Annotated[int, validate.whole_number(0, 3, wanted="a level from 0 to 3")] = 0
    """0: as written; 1: traced; 2: compiled whole; 3: split at attention and compiled in pieces."""
    use_cudagraph: bool = True
    """False: nothing is captured, whatever the mode; compilation is unaffected."""
    cudagraph_capture_sizes: Sizes | None = None
    """Batch sizes to capture; wins over the next field."""
    cuda_graph_sizes: GraphSizes = DEFAULT_GRAPH_SIZES
    """One value N: 1, 2, 4, 8 and every 16th up to N. Several: these. Empty: the default."""
    cudagraph_mode: CUDAGraphMode | None = None
    """None: the pool's preset; without one PIECEWISE at level 3, NONE below."""
    splitting_ops: Annotated[tuple[str, ...], validate.op_names()] | None = None
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
    compile_ranges: Annotated[tuple[tuple[int, int], ...], validate.ranges()] = ()
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
    passes: Annotated[tuple[str, ...], validate.different_names("passes")] | None = None
    """Graph passes by name, in order; None: those that the compiler does not do better itself."""

    graph_bs: Annotated[tuple[int, ...], validate.ascending()] = ()
    """Ascending batch sizes that are captured. Filled in by `resolve`."""

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            value = validate.accepted(f"compilation.{name}", kind, getattr(self, name))
            object.__setattr__(self, name, value)
        _check_mode(self)
        _check_combinations(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(CompilationConfig, **self.to_dict()), ()

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
        """Return whether graphs are split into pieces, which can then be captured."""
        return self.level == CompilationLevel.PIECEWISE and self.splitting_ops != ()


KINDS = {
    name: validate.kind_of(annotation)
    for name, annotation in get_type_hints(CompilationConfig, include_extras=True).items()
}
"""What each field may hold."""

FIELDS = tuple(name for name in KINDS if name != "graph_bs")
"""What may be asked for, in the order in which it is declared."""


def read_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields as they are kept, from text, JSON, YAML or Python.

    Text is read as JSON if the field does not hold text. Each field is checked by itself;
    the configuration that is built from them checks them together.

    Raises:
        FieldError: a field is unknown or holds what cannot be used.
    """
    return validate.read(given, {name: KINDS[name] for name in FIELDS}, "compilation")


def _check_mode(config: CompilationConfig) -> None:
    """Pieces can be captured only if there are pieces."""
    mode = config.cudagraph_mode
    if mode is None or not mode.requires_piecewise_compilation() or config.can_split:
        return
    if config.level == CompilationLevel.PIECEWISE:
        wanted = f"at least one op where cudagraph_mode is {mode.name}"
        raise FieldError("compilation.splitting_ops", wanted, list(config.splitting_ops or ()))
    wanted = f"NONE, FULL or FULL_DECODE_ONLY at level {config.level} (pieces need level 3)"
    raise FieldError("compilation.cudagraph_mode", wanted, mode.name)


def _check_combinations(config: CompilationConfig) -> None:
    if config.cudagraph_copy_inputs and not _may_copy_inputs(config):
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


def _may_copy_inputs(config: CompilationConfig) -> bool:
    return config.can_split and config.cudagraph_mode in (None, CUDAGraphMode.PIECEWISE)


def _as_plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Options):
        return {key: _as_plain(inner) for key, inner in value.items()}
    return [_as_plain(inner) for inner in value] if isinstance(value, tuple) else value
