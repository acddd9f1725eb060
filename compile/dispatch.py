"""`decide`: whether a step replays a graph, which one, and the sizes it is padded to.

It is decided here alone, by a pure function of values that every rank holds alike, so that ranks
cannot part before a collective. This file imports no torch.

1. The mode of this kind of step is NONE: eager, for all.
2. The mode is PIECEWISE: pad the tokens to the next captured count. Any number of sequences.
3. The mode is FULL and all sequences decode: pad the sequences to the next captured batch size.
   Where some compute draft tokens, the graph has room for as many in every sequence; if none is
   large enough, the step runs like one in which not all decode.
4. The mode is FULL and they do not: the smallest captured full graph that holds the step.
5. Nothing captured is large enough: eager, at the step's own size.

Sizes that graphs are captured for are only ever dropped, never added or moved.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from compile.config import CUDAGraphMode

DEFAULT_NUM_TOKENS = (*(2**i for i in range(8)), *range(256, 3073, 256))
"""Token counts of piecewise graphs: powers of 2 to 128, then every 256th to 3072 (TensorRT-LLM)."""


class BatchDescriptor(NamedTuple):
    """The key of a captured graph, and the sizes that ranks pad a step to if they pad at all.
    Invariant: a full graph of decode steps has `num_tokens` == `num_seqs` x query length."""

    num_tokens: int
    """Of the longest rank."""
    num_seqs: int | None
    """`graph_bs`; None: each rank runs its own number."""
    uniform_decode: bool
    """Every sequence decodes: in a graph one token each, or up to `num_tokens / num_seqs`."""

    @property
    def has_chunks(self) -> bool:
        """Return whether attention treats sequences as chunks of several tokens."""
        return not self.uniform_decode or self.num_tokens != self.num_seqs

    def graph_key(self, mode: CUDAGraphMode) -> BatchDescriptor | None:
        """Return the key of the graph that such a step replays; None: it runs eagerly."""
        match mode:
            case CUDAGraphMode.PIECEWISE:
                return BatchDescriptor(self.num_tokens, None, False)
            case CUDAGraphMode.FULL:
                return self
            case _:
                return None


@dataclass(frozen=True)
class CapturedGraphs:
    """What all ranks of a group replay. Invariant: equal on every rank; sizes ascend."""

    mode: CUDAGraphMode = CUDAGraphMode.NONE
    """Which steps replay graphs, and of which kind."""
    batch_sizes: tuple[int, ...] = ()
    """Of full graphs of decode steps of one token a sequence."""
    token_counts: tuple[int, ...] = ()
    """Of piecewise graphs."""
    mixed: tuple[BatchDescriptor, ...] = ()
    """Full graphs of steps in which not all decode; by tokens, then sequences."""
    enable_padding: bool = True
    """Steps replay the next larger full graph; False: one of exactly their size."""
    draft_batch_sizes: tuple[int, ...] = ()
    """Of full graphs of decode steps of up to `query_len` tokens a sequence."""
    query_len: int = 1
    """One token and the most draft tokens behind it."""


def decide(
    *,
    is_uniform_decode: bool,
    num_tokens: int,
    num_seqs: int,
    query_len: int = 1,
    captured: CapturedGraphs,
) -> tuple[CUDAGraphMode, BatchDescriptor]:
    """Decide how all ranks run a step (NONE, PIECEWISE or FULL) and the sizes that they pad it to,
    from the largest numbers of any rank (after ATOM's ForwardMode and vLLM's dispatcher).
    `is_uniform_decode`: on every rank each sequence decodes, up to `query_len` tokens; ValueError:
    so many sequences cannot have so many tokens."""
    if is_uniform_decode and not num_seqs <= num_tokens <= num_seqs * query_len:
        wanted = f"{num_seqs} x 1 to {query_len} in a uniform decode step"
        raise ValueError(f"num_tokens: wanted {wanted}, found {num_tokens}")
    if is_uniform_decode and num_seqs and query_len > 1:
        return _full_drafting(num_seqs, query_len, captured) or decide(
            is_uniform_decode=False, num_tokens=num_tokens, num_seqs=num_seqs, captured=captured
        )
    # Attention alone looks at sequences. If all decode, ranks pad those too, graph or none.
    graph_bs = num_seqs if is_uniform_decode else None
    eager = CUDAGraphMode.NONE, BatchDescriptor(num_tokens, graph_bs, is_uniform_decode)
    mode = captured.mode.decode_mode() if is_uniform_decode else captured.mode.mixed_mode()
    if num_tokens == 0 or mode is CUDAGraphMode.NONE:
        return eager
    if mode is CUDAGraphMode.PIECEWISE:
        # Padding is no choice here: prompts have any length.
        padded = padded_size(captured.token_counts, num_tokens)
        if padded is None:
            return eager
        return mode, BatchDescriptor(padded, graph_bs, is_uniform_decode)
    if not is_uniform_decode:
        return _full_mixed(num_tokens, num_seqs, captured) or eager
    padding = captured.enable_padding
    padded = padded_size(captured.batch_sizes, num_seqs, enable_padding=padding)
    return eager if padded is None else (mode, BatchDescriptor(padded, padded, True))


def _full_drafting(
    num_seqs: int, query_len: int, captured: CapturedGraphs
) -> tuple[CUDAGraphMode, BatchDescriptor] | None:
    """Find the graph of a step whose sequences decode up to `query_len` tokens: which of them has
    how many is among its inputs."""
    is_full = captured.mode.decode_mode() is CUDAGraphMode.FULL
    if not is_full or query_len > captured.query_len:
        return None
    # Sequences that have fewer tokens leave padding, whatever is padded between graphs.
    padded = padded_size(
        captured.draft_batch_sizes, num_seqs, enable_padding=captured.enable_padding
    )
    if padded is None:
        return None
    return CUDAGraphMode.FULL, BatchDescriptor(padded * captured.query_len, padded, True)


def _full_mixed(
    num_tokens: int, num_seqs: int, captured: CapturedGraphs
) -> tuple[CUDAGraphMode, BatchDescriptor] | None:
    for graph in captured.mixed:
        seqs = graph.num_seqs or 0
        is_exact = (graph.num_tokens, seqs) == (num_tokens, num_seqs)
        holds = graph.num_tokens >= num_tokens and seqs >= num_seqs
        if is_exact or (captured.enable_padding and holds):
            return CUDAGraphMode.FULL, graph
    return None


def capture_sizes(explicit: Sequence[int] | None, graph_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return batch sizes to capture, ascending and each once, before any is dropped (ATOM). One
    value N of `graph_sizes` stands for 1, 2, 4, 8 and every 16th up to N; `explicit` wins."""
    if explicit is not None:
        return ascending(explicit)
    if len(graph_sizes) == 1:
        return (1, 2, 4, 8, *range(16, graph_sizes[0] + 1, 16))
    return ascending(graph_sizes)


def ascending(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(sizes)))


def within(sizes: Sequence[int], most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(n for n in sizes if n <= most), tuple(n for n in sizes if n > most)


def padded_size(sizes: Sequence[int], wanted: int, *, enable_padding: bool = True) -> int | None:
    """Return the smallest of ascending sizes that holds `wanted`, without padding `wanted` itself;
    None if there is none."""
    at = bisect_left(sizes, wanted)
    if at == len(sizes) or not (enable_padding or sizes[at] == wanted):
        return None
    return sizes[at]
