"""`resolve`: what a configuration leaves open is filled in from the scheduler and the pool.

The order matters, since each step reads what those before it decided:

1. splitting ops: attention, at level 3;
2. capture sizes: the rule for sizes, then only what the scheduler can produce;
3. mode: the pool's preset if none is given, then only what attention can be part of;
4. compile sizes: "cudagraph_capture_sizes" becomes the sizes of step 2;
5. token counts: those of piecewise graphs, bounded in the same way;
6. warm-ups: none on a CPU, where nothing is built or allocated by a kernel's first run;
7. passes: those that gain over what the compiler does by itself;
8. whether a server starts before its pieces are compiled.

Resolving a resolved configuration changes nothing, unless attention can do less than was assumed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from compile.config import (
    DEFAULT_GRAPH_SIZES,
    DEFAULT_SPLITTING_OPS,
    DEFAULT_WARMUPS,
    AttentionGraphSupport,
    CompilationConfig,
    CompilationLevel,
    CUDAGraphMode,
)
from compile.dispatch import DEFAULT_NUM_TOKENS, ascending, capture_sizes, within
from compile.errors import FieldError

MAX_CPU_TOKENS = 64
"""The largest default size of piecewise graphs on a CPU. A replay saves only calls there, which is
nothing next to what more tokens cost to compute, and each capture computes them."""
MAX_NAMED = 16
"""Sizes that a warning lists one by one."""

log = logging.getLogger("lockstep.compile")

PRESETS = {
    "prefill": CUDAGraphMode.PIECEWISE,
    "decode": CUDAGraphMode.FULL_DECODE_ONLY,
    "mixed": CUDAGraphMode.FULL_AND_PIECEWISE,
}
"""The mode of a serving pool, by its name, if none is given."""


@dataclass(frozen=True)
class StepLimits:
    """What the scheduler can put into one step.

    Invariant: all at least 1. `query_len` is what each sequence computes in a decode step: 1, or 1
    and its draft tokens.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    query_len: int = 1

    @property
    def max_decode_seqs(self) -> int:
        """Sequences of the largest step in which all decode."""
        return min(self.max_num_seqs, self.max_num_batched_tokens // self.query_len)


@dataclass(frozen=True)
class _Surroundings:
    """What decides besides the configuration."""

    limits: StepLimits
    preset: CUDAGraphMode | None
    """Used if the configuration, as it was given, names no mode."""
    attention: AttentionGraphSupport
    backend_name: str
    is_captured: bool
    """Something is captured, so a size that is dropped is worth a warning."""
    are_sizes_tokens: bool
    """Batch sizes were listed, and no pool's preset gives them another meaning than pieces."""
    is_cpu: bool
    is_served: bool


def resolve(
    config: CompilationConfig,
    limits: StepLimits,
    *,
    preset: CUDAGraphMode | None = None,
    enforce_eager: bool = False,
    attention: AttentionGraphSupport = AttentionGraphSupport.ALWAYS,
    backend_name: str = "",
    device: str = "cuda",
    is_served: bool = False,
) -> CompilationConfig:
    """Return the configuration with nothing left open.

    Args:
        preset: the mode if the configuration names none; None: PIECEWISE. Below level 3 a mode
            must be named, so the preset does not count there.
        enforce_eager: level 0 and mode NONE, whatever the configuration says.
        attention: of which steps the attention backend `backend_name` can be part of a graph.
        device: cpu or cuda; a CPU captures fewer sizes by default, and without warm-ups.
        is_served: the engine belongs to a server, which may answer before it has compiled.

    Raises:
        FieldError: no size is left to capture, or the result contradicts itself.
    """
    if enforce_eager:
        config = _eager(config)
    around = _Surroundings(
        limits=limits,
        preset=preset,
        attention=attention,
        backend_name=backend_name,
        is_captured=_wanted_mode(config, preset) is not CUDAGraphMode.NONE,
        are_sizes_tokens=config.cudagraph_capture_sizes is not None
        and (preset is None or config.cudagraph_mode is not None),
        is_cpu=device == "cpu",
        is_served=is_served,
    )
    for fields, step in _STEPS:
        config = step(config, around)
        if log.isEnabledFor(logging.DEBUG):
            for field in fields.split():
                log.debug("compilation.%s: %s", field, config.to_dict()[field])
    _check_sizes_left(config, limits)
    return replace(
        config, cudagraph_capture_sizes=config.graph_bs or config.cudagraph_capture_sizes
    )


def _eager(config: CompilationConfig) -> CompilationConfig:
    return replace(
        config,
        level=int(CompilationLevel.NO_COMPILATION),
        cudagraph_mode=CUDAGraphMode.NONE,
        cudagraph_copy_inputs=False,
    )


def _splitting_ops(config: CompilationConfig, around: _Surroundings) -> CompilationConfig:
    if config.splitting_ops is not None:
        return config
    is_split = config.level == CompilationLevel.PIECEWISE
    return replace(config, splitting_ops=DEFAULT_SPLITTING_OPS if is_split else ())


def _capture_sizes(config: CompilationConfig, around: _Surroundings) -> CompilationConfig:
    sizes = capture_sizes(config.cudagraph_capture_sizes, config.cuda_graph_sizes)
    kept, dropped = within(sizes, around.limits.max_decode_seqs)
    # The sizes of the default rule were not asked for, so none is missed.
    is_asked = (
        config.cudagraph_capture_sizes is not None or config.cuda_graph_sizes != DEFAULT_GRAPH_SIZES
    )
    wanted = _wanted_mode(config, around.preset)
    is_of_tokens = around.are_sizes_tokens and wanted is CUDAGraphMode.PIECEWISE
    if is_asked and around.is_captured and not is_of_tokens:
        most = f"{around.limits.max_decode_seqs} decoding sequences"
        _warn_dropped(_sizes_field(config), dropped, most)
    largest, most_seqs = max(kept, default=0), around.limits.max_decode_seqs
    if wanted.has_full_cudagraphs() and not is_asked and largest < most_seqs:
        log.warning(
            "compilation.cuda_graph_sizes: steps in which %d to %d sequences decode have no graph "
            "of their own: the largest size up to max_num_seqs=%d is %d",
            largest + 1,
            most_seqs,
            most_seqs,
            largest,
        )
    return replace(config, graph_bs=kept)


def _sizes_field(config: CompilationConfig) -> str:
    is_listed = config.cudagraph_capture_sizes is not None
    return "cudagraph_capture_sizes" if is_listed else "cuda_graph_sizes"


def _mode(config: CompilationConfig, around: _Surroundings) -> CompilationConfig:
    wanted = _wanted_mode(config, around.preset)
    mode = _within_attention(wanted, around.attention, can_split=config.can_split)
    if mode is not wanted:
        log.warning(
            "compilation.cudagraph_mode: %s became %s: graphs of the attention backend %s: %s",
            wanted.name,
            mode.name,
            around.backend_name or "in use",
            around.attention.name,
        )
    copies = config.cudagraph_copy_inputs and mode is CUDAGraphMode.PIECEWISE
    return replace(config, cudagraph_mode=mode, cudagraph_copy_inputs=copies)


def _passes(config: CompilationConfig, around: _Surroundings) -> CompilationConfig:
    """Fuse norms unless the compiler does: Inductor, if they are torch functions, as on a CPU.

    On a GPU a norm is an op that Inductor cannot look into: fused, it is one launch with the
    residual's addition instead of two.
    """
    if config.passes is not None:
        return config
    has_inductor = config.use_inductor and config.compiler != "eager"
    is_fused_by_it = has_inductor and around.is_cpu
    return replace(config, passes=() if is_fused_by_it else ("fuse_add_rms_norm",))


def _wanted_mode(config: CompilationConfig, preset: CUDAGraphMode | None) -> CUDAGraphMode:
    if not config.use_cudagraph:
        return CUDAGraphMode.NONE
    if config.cudagraph_mode is not None:
        return config.cudagraph_mode
    if config.level != CompilationLevel.PIECEWISE:
        return CUDAGraphMode.NONE
    mode = CUDAGraphMode.PIECEWISE if preset is None else preset
    return mode if config.can_split else _without_pieces(mode)


def _without_pieces(mode: CUDAGraphMode) -> CUDAGraphMode:
    """Return the nearest mode for a graph that is not split."""
    if not mode.requires_piecewise_compilation():
        return mode
    has_full = mode.has_full_cudagraphs()
    return CUDAGraphMode.FULL_DECODE_ONLY if has_full else CUDAGraphMode.NONE


def _within_attention(
    mode: CUDAGraphMode, attention: AttentionGraphSupport, *, can_split: bool
) -> CUDAGraphMode:
    """Return the nearest mode whose full graphs attention can be part of."""
    if attention is AttentionGraphSupport.ALWAYS or not mode.has_full_cudagraphs():
        return mode
    if attention is AttentionGraphSupport.NEVER:
        return CUDAGraphMode.PIECEWISE if can_split else CUDAGraphMode.NONE
    if mode is not CUDAGraphMode.FULL:
        return mode
    return CUDAGraphMode.FULL_AND_PIECEWISE if can_split else CUDAGraphMode.FULL_DECODE_ONLY


def _compile_sizes(config: CompilationConfig, around: _Surroundings) -> CompilationConfig:
    if config.level != CompilationLevel.PIECEWISE:
        for field in ("compile_sizes", "compile_ranges", "compile_lazily"):
            if getattr(config, field):
                log.warning(
                    "compilation.%s: without effect at level %d: only the pieces of level 3 are "
                    "compiled for sizes",
                    field,
                    config.level,
                )
    sizes: list[int] = []
    for size in config.compile_sizes or ():
        sizes += _graph_tokens(config, around) if isinstance(size, str) else [size]
    kept, dropped = within(ascending(sizes), around.limits.max_num_batched_tokens)
    _warn_dropped("compile_sizes", dropped, f"{around.limits.max_num_batched_tokens} tokens")
    return replace(config, compile_sizes=kept)


def _num_tokens(config: CompilationConfig, around: _Surroundings) -> CompilationConfig:
    """Take listed batch sizes for token counts if only piecewise graphs are captured."""
    sizes: tuple[int, ...] = DEFAULT_NUM_TOKENS
    if around.is_cpu:
        sizes = within(sizes, MAX_CPU_TOKENS)[0]
    if config.capture_num_tokens is not None:
        sizes = ascending(config.capture_num_tokens)
    is_listed = around.are_sizes_tokens and config.graph_mode is CUDAGraphMode.PIECEWISE
    field = "capture_num_tokens" if config.capture_num_tokens is not None else ""
    if not field and is_listed:
        # As they were given, because the bound on batch sizes does not apply to token counts.
        field, query_len = "cudagraph_capture_sizes", around.limits.query_len
        sizes = ascending(n * query_len for n in config.cudagraph_capture_sizes or ())
    kept, dropped = within(sizes, around.limits.max_num_batched_tokens)
    if field and around.is_captured:
        _warn_dropped(field, dropped, f"{around.limits.max_num_batched_tokens} tokens")
    # If none is left, all are kept: `_check_sizes_left` refuses them if they matter.
    return replace(config, capture_num_tokens=kept or sizes)


def _warmups(config: CompilationConfig, around: _Surroundings) -> CompilationConfig:
    """Fill in the defaults, and refuse captures on a GPU without an eager run before them.

    A kernel's first run may build it, and allocate what the library keeps: neither may be captured.
    """
    for field, num in DEFAULT_WARMUPS.items():
        is_captured = not around.is_cpu and config.graph_mode is not CUDAGraphMode.NONE
        if is_captured and getattr(config, field) == 0:
            raise FieldError(f"compilation.{field}", "at least 1 with device=cuda", 0)
        if getattr(config, field) is None:
            changes: dict[str, Any] = {field: 0 if around.is_cpu else num}
            config = replace(config, **changes)
    return config


def _capture_logits(config: CompilationConfig, around: _Surroundings) -> CompilationConfig:
    if config.capture_logits is not None:
        return config
    return replace(config, capture_logits=not around.is_cpu)


def _serve_while_compiling(config: CompilationConfig, around: _Surroundings) -> CompilationConfig:
    """Decide what auto means.

    On CUDA the process that compiles would need memory of the device, which the KV cache has.
    """
    asked = config.serve_while_compiling
    if asked == "on" and not around.is_cpu:
        wanted = "auto or off with device=cuda (another process cannot compile there yet)"
        raise FieldError("compilation.serve_while_compiling", wanted, asked)
    if asked != "auto":
        return config
    is_kept = config.use_inductor and config.compiler != "eager" and not config.compile_lazily
    is_compiled = config.level >= CompilationLevel.DYNAMO_ONCE
    # Trials of graphs need what is compiled, before the KV cache takes its memory.
    is_on = around.is_served and around.is_cpu and is_compiled and is_kept
    is_on = is_on and not config.reserve_graph_memory
    return replace(config, serve_while_compiling="on" if is_on else "off")


def _graph_tokens(config: CompilationConfig, around: _Surroundings) -> tuple[int, ...]:
    return tuple(bs * around.limits.query_len for bs in config.graph_bs)


def _warn_dropped(field: str, dropped: tuple[int, ...], most: str) -> None:
    sizes = ", ".join(map(str, dropped))
    if len(dropped) > MAX_NAMED:
        sizes = f"{dropped[0]} to {dropped[-1]} ({len(dropped)} sizes)"
    if dropped:
        log.warning("compilation.%s: dropped %s: a step has at most %s", field, sizes, most)


def _check_sizes_left(config: CompilationConfig, limits: StepLimits) -> None:
    mode = config.graph_mode
    if mode.has_full_cudagraphs() and not config.graph_bs:
        field, most = _sizes_field(config), limits.max_decode_seqs
        wanted = f"a size of at most {most} (decoding sequences of the largest step)"
        raise FieldError(f"compilation.{field}", wanted, list(getattr(config, field)))
    most = limits.max_num_batched_tokens
    sizes = config.capture_num_tokens or ()
    needs_tokens = mode.requires_piecewise_compilation() or mode is CUDAGraphMode.FULL
    if needs_tokens and not within(sizes, most)[0]:
        wanted = f"a size of at most {most} (tokens of the largest step)"
        raise FieldError("compilation.capture_num_tokens", wanted, list(sizes))


_Step = Callable[[CompilationConfig, _Surroundings], CompilationConfig]
_STEPS: tuple[tuple[str, _Step], ...] = (
    ("splitting_ops", _splitting_ops),
    ("graph_bs", _capture_sizes),
    ("cudagraph_mode", _mode),
    ("compile_sizes", _compile_sizes),
    ("capture_num_tokens", _num_tokens),
    (" ".join(DEFAULT_WARMUPS), _warmups),
    ("passes", _passes),
    ("capture_logits", _capture_logits),
    ("serve_while_compiling", _serve_while_compiling),
)
