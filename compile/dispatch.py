"""`decide`: whether a step replays a graph, which one, and the sizes it is padded to.

The one thing to know: this is the only place that decides it, and it is a pure function of values
that every rank holds alike (the agreement, the configuration, what was captured). Ranks that call
it with equal arguments cannot part before a collective.

1. Somebody may not use a graph, or the mode of such a step is NONE: eager, for all.
2. The mode is PIECEWISE: pad the tokens to the next captured count. Any number of sequences.
3. The mode is FULL and all sequences decode: pad the sequences to the next captured batch size.
4. The mode is FULL and they do not: the smallest captured whole graph that holds the step.
5. Nothing captured is large enough: eager, at the step's own size.

Who captured a graph, and how, is no concern of this file.
"""

from __future__ import annotations

from dataclasses import dataclass

from compile.config import CompilationConfig, CUDAGraphMode
from compile.context import BatchDescriptor
from compile.sizes import padded_size


@dataclass(frozen=True)
class CapturedGraphs:
    """What all ranks of a group have captured.

    Invariant: equal on every rank; a size that one rank had to skip is missing on all. Sizes
    ascend.
    """

    graph_bs: tuple[int, ...] = ()
    """Batch sizes of whole decode graphs."""
    num_tokens: tuple[int, ...] = ()
    """Token counts of piecewise graphs."""
    mixed: tuple[BatchDescriptor, ...] = ()
    """Whole graphs of steps in which not all decode; by tokens, then sequences."""


@dataclass(frozen=True)
class ForwardMode:
    """How a step runs. Invariant: `descriptor` is None exactly where `mode` is NONE.

    `num_tokens` and `num_seqs` are what the step's inputs are padded to.
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor | None
    num_tokens: int
    num_seqs: int


def decide(
    *,
    is_uniform_decode: bool,
    num_tokens: int,
    num_seqs: int,
    query_len: int = 1,
    config: CompilationConfig,
    captured: CapturedGraphs,
    is_graph_allowed: bool = True,
) -> ForwardMode:
    """Decide how all ranks run a step (after ATOM's ForwardMode and vLLM's dispatcher).

    Args:
        is_uniform_decode: on every rank each sequence decodes `query_len` tokens.
        num_tokens, num_seqs: the largest over the ranks.
        is_graph_allowed: no rank has a reason against a graph.

    Raises:
        ValueError: a uniform decode step whose tokens are not sequences x query length.
    """
    if is_uniform_decode and num_tokens != num_seqs * query_len:
        wanted = f"{num_seqs} x {query_len} in a uniform decode step"
        raise ValueError(f"num_tokens: wanted {wanted}, found {num_tokens}")
    eager = ForwardMode(CUDAGraphMode.NONE, None, num_tokens, num_seqs)
    mode = config.graph_mode
    mode = mode.decode_mode() if is_uniform_decode else mode.mixed_mode()
    if not is_graph_allowed or num_tokens == 0 or mode is CUDAGraphMode.NONE:
        return eager
    if mode is CUDAGraphMode.PIECEWISE:
        return _pieces(num_tokens, num_seqs, captured) or eager
    padding = config.enable_padding
    if is_uniform_decode:
        return _whole_decode(num_seqs, query_len, captured, enable_padding=padding) or eager
    return _whole_mixed(num_tokens, num_seqs, captured, enable_padding=padding) or eager


def _pieces(num_tokens: int, num_seqs: int, captured: CapturedGraphs) -> ForwardMode | None:
    """Padding is no choice here: prompts have any length."""
    padded = padded_size(captured.num_tokens, num_tokens)
    if padded is None:
        return None
    return ForwardMode(CUDAGraphMode.PIECEWISE, BatchDescriptor(padded), padded, num_seqs)


def _whole_decode(
    num_seqs: int, query_len: int, captured: CapturedGraphs, *, enable_padding: bool
) -> ForwardMode | None:
    graph_bs = padded_size(captured.graph_bs, num_seqs, enable_padding=enable_padding)
    if graph_bs is None:
        return None
    descriptor = BatchDescriptor(graph_bs * query_len, graph_bs, uniform_decode=True)
    return ForwardMode(CUDAGraphMode.FULL, descriptor, graph_bs * query_len, graph_bs)


def _whole_mixed(
    num_tokens: int, num_seqs: int, captured: CapturedGraphs, *, enable_padding: bool
) -> ForwardMode | None:
    for graph in captured.mixed:
        seqs = graph.num_seqs or 0
        is_exact = (graph.num_tokens, seqs) == (num_tokens, num_seqs)
        if is_exact or (enable_padding and graph.num_tokens >= num_tokens and seqs >= num_seqs):
            return ForwardMode(CUDAGraphMode.FULL, graph, graph.num_tokens, seqs)
    return None
