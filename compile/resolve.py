"""`resolve`: what a configuration leaves open is filled in from the scheduler and the pool.
`_RULES` has one rule for each field that may be open, in the order in which they are decided.
Resolving again changes nothing, unless attention can do less than was assumed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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

CPU_SIZES = (1, 2, 4, *range(8, 32, 4), *range(32, 64, 8), *range(64, 513, 16))
"""Default sizes on a CPU, where padding costs as much as tokens do, and another size next to
nothing: padded to 32, 17 sequences would compute almost twice what they need."""
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
    """What the scheduler can put into one step. Invariant: all at least 1."""

    max_num_seqs: int
    max_num_batched_tokens: int
    query_len: int = 1
    """What a sequence computes in a decode step, at most: 1, or 1 and its draft tokens."""

    @property
    def max_decode_seqs(self) -> int:
        """Sequences of the largest step in which all decode."""
        return min(self.max_num_seqs, self.max_num_batched_tokens // self.query_len)


@dataclass(frozen=True)
class _Facts:
    limits: StepLimits
    asked_mode: CUDAGraphMode
    mode: CUDAGraphMode
    """The nearest to `asked_mode` that attention can be part of."""
    attention: str
    """The attention backend and what it supports, in words."""
    are_sizes_tokens: bool
    """Batch sizes were listed, and no pool's preset gives them another meaning than pieces."""
    is_cpu: bool
    is_served: bool

    @property
    def is_captured(self) -> bool:
        """Something is captured, so a size that is dropped is worth a warning."""
        return self.asked_mode is not CUDAGraphMode.NONE


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
    """Return the configuration with nothing left open; FieldError if no size is left to capture, or
    the result contradicts itself. `preset` is the mode of level 3 if the configuration names none;
    `enforce_eager` overrides it with level 0 and mode NONE; `attention` says which steps the
    backend `backend_name` can be captured in; a CPU captures fewer sizes, without warm-ups; an
    engine that `is_served` may answer before it has compiled."""
    if enforce_eager:
        level, mode = int(CompilationLevel.NO_COMPILATION), CUDAGraphMode.NONE
        config = replace(config, level=level, cudagraph_mode=mode, cudagraph_copy_inputs=False)
    asked = _asked_mode(config, preset)
    facts = _Facts(
        limits=limits,
        asked_mode=asked,
        mode=_within_attention(asked, attention, can_split=config.can_split),
        attention=f"{backend_name or 'in use'}: {attention.name}",
        are_sizes_tokens=config.cudagraph_capture_sizes is not None
        and (preset is None or config.cudagraph_mode is not None),
        is_cpu=device == "cpu",
        is_served=is_served,
    )
    for field, rule in _RULES.items():
        changes: dict[str, Any] = {field: rule(config, facts)}
        config = replace(config, **changes)
        log.debug("compilation.%s: %s", field, config.to_dict()[field])
    return config


def _asked_mode(config: CompilationConfig, preset: CUDAGraphMode | None) -> CUDAGraphMode:
    if not config.use_cudagraph:
        return CUDAGraphMode.NONE
    if config.cudagraph_mode is not None:
        return config.cudagraph_mode
    if config.level != CompilationLevel.PIECEWISE:
        return CUDAGraphMode.NONE
    mode = CUDAGraphMode.PIECEWISE if preset is None else preset
    if config.can_split or not mode.requires_piecewise_compilation():
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


def _mode(config: CompilationConfig, facts: _Facts) -> CUDAGraphMode:
    if facts.mode is not facts.asked_mode:
        log.warning(
            "compilation.cudagraph_mode: %s became %s: graphs of the attention backend %s",
            facts.asked_mode.name,
            facts.mode.name,
            facts.attention,
        )
    return facts.mode


def _graph_bs(config: CompilationConfig, facts: _Facts) -> tuple[int, ...]:
    most = facts.limits.max_decode_seqs
    # The sizes of the default rule were not asked for, so none is missed.
    is_asked = (
        config.cudagraph_capture_sizes is not None or config.cuda_graph_sizes != DEFAULT_GRAPH_SIZES
    )
    sizes = CPU_SIZES
    if is_asked or not facts.is_cpu:
        sizes = capture_sizes(config.cudagraph_capture_sizes, config.cuda_graph_sizes)
    kept, dropped = within(sizes, most)
    is_of_tokens = facts.are_sizes_tokens and facts.asked_mode is CUDAGraphMode.PIECEWISE
    if is_asked and facts.is_captured and not is_of_tokens:
        _warn_dropped(_sizes_field(config), dropped, f"{most} decoding sequences")
    largest = max(kept, default=0)
    if facts.asked_mode.has_full_cudagraphs() and not is_asked and largest < most:
        log.warning(
            "compilation.cuda_graph_sizes: steps in which %d to %d sequences decode have no graph "
            "of their own: the largest size up to max_num_seqs=%d is %d",
            *(largest + 1, most, most, largest),
        )
    return kept


def _sizes_field(config: CompilationConfig) -> str:
    is_listed = config.cudagraph_capture_sizes is not None
    return "cudagraph_capture_sizes" if is_listed else "cuda_graph_sizes"


def _compile_sizes(config: CompilationConfig, facts: _Facts) -> tuple[int, ...]:
    if config.level != CompilationLevel.PIECEWISE:
        for field in ("compile_sizes", "compile_ranges", "compile_lazily"):
            if getattr(config, field):
                log.warning(
                    "compilation.%s: without effect at level %d: only the pieces of level 3 are "
                    "compiled for sizes",
                    *(field, config.level),
                )
    most, captured = facts.limits.max_num_batched_tokens, config.graph_bs
    sizes: list[int] = []
    for size in config.compile_sizes or ():
        is_name = isinstance(size, str)
        lengths = {1, facts.limits.query_len}  # without draft tokens, and with them
        sizes += [bs * n for bs in captured for n in lengths] if is_name else [int(size)]
    kept, dropped = within(ascending(sizes), most)
    _warn_dropped("compile_sizes", dropped, f"{most} tokens")
    return kept


def _num_tokens(config: CompilationConfig, facts: _Facts) -> tuple[int, ...]:
    """Take listed batch sizes for token counts if only piecewise graphs are captured."""
    most, listed = facts.limits.max_num_batched_tokens, ""
    sizes = within(CPU_SIZES, MAX_CPU_TOKENS)[0] if facts.is_cpu else DEFAULT_NUM_TOKENS
    if config.capture_num_tokens is not None:
        listed, sizes = "capture_num_tokens", ascending(config.capture_num_tokens)
    elif facts.are_sizes_tokens and facts.mode is CUDAGraphMode.PIECEWISE:
        # As they were given, because the bound on batch sizes does not apply to token counts.
        given = config.cudagraph_capture_sizes or ()
        listed = "cudagraph_capture_sizes"
        sizes = ascending(n * facts.limits.query_len for n in given)
    kept, dropped = within(sizes, most)
    if listed and facts.is_captured:
        _warn_dropped(listed, dropped, f"{most} tokens")
    # If none is left, all are kept: `_sizes_left` refuses them if they matter.
    return kept or sizes


def _warn_dropped(field: str, dropped: tuple[int, ...], most: str) -> None:
    sizes = ", ".join(map(str, dropped))
    if len(dropped) > MAX_NAMED:
        sizes = f"{dropped[0]} to {dropped[-1]} ({len(dropped)} sizes)"
    if dropped:
        log.warning("compilation.%s: dropped %s: a step has at most %s", field, sizes, most)


def _sizes_left(config: CompilationConfig, facts: _Facts) -> tuple[int, ...] | None:
    """Return the batch sizes that are captured, and refuse a mode that has no size left."""
    mode, most = config.graph_mode, facts.limits.max_num_batched_tokens
    if mode.has_full_cudagraphs() and not config.graph_bs:
        field, most = _sizes_field(config), facts.limits.max_decode_seqs
        wanted = f"a size of at most {most} (decoding sequences of the largest step)"
        raise FieldError(f"compilation.{field}", wanted, list(getattr(config, field)))
    sizes = config.capture_num_tokens or ()
    needs_tokens = mode.requires_piecewise_compilation() or mode is CUDAGraphMode.FULL
    if needs_tokens and not within(sizes, most)[0]:
        wanted = f"a size of at most {most} (tokens of the largest step)"
        raise FieldError("compilation.capture_num_tokens", wanted, list(sizes))
    return config.graph_bs or config.cudagraph_capture_sizes


def _splitting_ops(config: CompilationConfig, facts: _Facts) -> tuple[str, ...]:
    if config.splitting_ops is not None:
        return config.splitting_ops
    is_split = config.can_split and facts.mode.requires_piecewise_compilation()
    has_pieces = config.level == CompilationLevel.PIECEWISE
    return DEFAULT_SPLITTING_OPS if has_pieces or is_split else ()


def _warmups(field: str, config: CompilationConfig, facts: _Facts) -> int:
    """Refuse captures on a GPU without an eager run before them, which may build and allocate."""
    given: int | None = getattr(config, field)
    if given == 0 and not facts.is_cpu and facts.mode is not CUDAGraphMode.NONE:
        raise FieldError(f"compilation.{field}", "at least 1 with device=cuda", 0)
    default = 0 if facts.is_cpu else DEFAULT_WARMUPS[field]
    return default if given is None else given


FUSED_SUM = "fuse_all_reduce_rms_norm"
FUSED_QUANTIZER = "fuse_rms_norm_quantize"
DEFAULT_PASSES = ("fuse_add_rms_norm", FUSED_SUM, FUSED_QUANTIZER)


def _passes(config: CompilationConfig, facts: _Facts) -> tuple[str, ...]:
    """Fuse norms with what is in front of them, unless Inductor does: it cannot look into the op
    that a norm is on a GPU."""
    if config.passes is not None:
        return config.passes
    if config.has_inductor and facts.is_cpu:
        return ()
    # A sum in user buffers has no form that quantizes.
    left_out = (FUSED_QUANTIZER,) if config.enable_userbuffers else ()
    return tuple(name for name in DEFAULT_PASSES if name not in left_out)


_NO_INDUCTOR = "where Inductor compiles (use_inductor=false runs pieces as they were traced)"


def _max_num_streams(config: CompilationConfig, facts: _Facts) -> int:
    asked = config.max_num_streams
    if asked == 1:
        return asked
    if config.level < CompilationLevel.DYNAMO_ONCE:
        log.warning(
            "compilation.max_num_streams: without effect at level %d: only what is compiled is "
            "spread over streams",
            config.level,
        )
        return 1
    if facts.is_cpu:
        wanted = "1 with device=cpu (it has no streams)"
        raise FieldError("compilation.max_num_streams", wanted, asked)
    if config.has_inductor:
        wanted = f"1 {_NO_INDUCTOR}"
        raise FieldError("compilation.max_num_streams", wanted, asked)
    return asked


def _enable_userbuffers(config: CompilationConfig, facts: _Facts) -> bool:
    field = "compilation.enable_userbuffers"
    if not config.enable_userbuffers:
        return False
    if config.level < CompilationLevel.DYNAMO_ONCE:
        log.warning("%s: without effect at level %d: only what is compiled", field, config.level)
        return False
    if not facts.is_cpu:
        wanted = "false with device=cuda (GPUs share no memory yet)"
    elif config.has_inductor:
        wanted = f"false {_NO_INDUCTOR}"
    elif FUSED_SUM not in _passes(config, facts):
        wanted = f"false without {FUSED_SUM} among compilation.passes"
    elif FUSED_QUANTIZER in _passes(config, facts):
        wanted = f"false with {FUSED_QUANTIZER} among compilation.passes"
    else:
        return True
    raise FieldError(field, wanted, True)


def _serve_while_compiling(config: CompilationConfig, facts: _Facts) -> str:
    """Decide what auto means. On CUDA the KV cache has the memory that compiling would need."""
    asked = config.serve_while_compiling
    if asked == "on" and not facts.is_cpu:
        wanted = "auto or off with device=cuda (another process cannot compile there yet)"
        raise FieldError("compilation.serve_while_compiling", wanted, asked)
    if asked != "auto":
        return asked
    is_on = (
        facts.is_served
        and facts.is_cpu
        and config.level >= CompilationLevel.DYNAMO_ONCE
        and config.has_inductor
        and not config.compile_lazily
        # Trials of graphs need what is compiled, before the KV cache takes its memory.
        and not config.reserve_graph_memory
    )
    return "on" if is_on else "off"


_RULES: dict[str, Callable[[CompilationConfig, _Facts], Any]] = {
    "splitting_ops": _splitting_ops,
    "graph_bs": _graph_bs,
    # Before the mode, with which copies may be a contradiction.
    "cudagraph_copy_inputs": lambda config, facts: (
        config.cudagraph_copy_inputs and facts.mode is CUDAGraphMode.PIECEWISE
    ),
    "cudagraph_mode": _mode,
    "compile_sizes": _compile_sizes,
    "capture_num_tokens": _num_tokens,
    **{field: partial(_warmups, field) for field in DEFAULT_WARMUPS},
    "passes": _passes,
    "max_num_streams": _max_num_streams,
    "enable_userbuffers": _enable_userbuffers,
    "capture_logits": lambda config, facts: (
        not facts.is_cpu if config.capture_logits is None else config.capture_logits
    ),
    "serve_while_compiling": _serve_while_compiling,
    "cudagraph_capture_sizes": _sizes_left,
}
