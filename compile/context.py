"""The forward context: what an opaque op may know about the step without an argument. Ops take
tensors and their layer's name alone, so the traced graph does not depend on the batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import call
from typing import Any, TypeAlias, TypeVar

import torch

from compile.config import CUDAGraphMode
from compile.dispatch import BatchDescriptor as BatchDescriptor


@dataclass(frozen=True)
class KVCacheTensor:
    """One layer's views of the KV pool: [num_blocks, block_size, num_kv_heads, head_dim]."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor


@dataclass(frozen=True)
class DPMetadata:
    """Token counts of the data-parallel ranks in a step, padding included (after ATOM and vLLM).
    Invariant: every field is identical on every rank; there are several ranks, each with tokens."""

    num_tokens_across_dp: tuple[int, ...]

    @classmethod
    def make(cls, num_tokens_across_dp: Sequence[int], dp_rank: int, num_tokens: int) -> DPMetadata:
        """Return the counts for a rank; ValueError: it runs another number than others believe."""
        if num_tokens_across_dp[dp_rank] != num_tokens:
            wanted = f"{num_tokens_across_dp[dp_rank]} as all ranks agreed"
            raise ValueError(f"num_tokens: wanted {wanted}, found {num_tokens}")
        return cls(tuple(num_tokens_across_dp))

    @property
    def max_tokens_across_dp(self) -> int:
        return max(self.num_tokens_across_dp)

    def chunked_sizes(self, max_chunk: int, index: int) -> tuple[int, ...]:
        """Return each rank's tokens in a chunk; at least one, so that all join its collectives."""
        before = max_chunk * index
        return tuple(max(1, min(max_chunk, n - before)) for n in self.num_tokens_across_dp)


@dataclass(frozen=True)
class SpecDecodeMetadata:
    """What stands behind a step's tokens, drafts and drawn ones, for the layer that drafts (names
    as in vLLM and ATOM). All tensors are int64. D sequences that draw, N tokens that are drawn, K
    draft tokens that they are compared with."""

    num_draft_tokens: torch.Tensor
    """[D]; 0: none."""
    cu_num_draft_tokens: torch.Tensor
    """[D]: their running sum."""
    draft_token_ids: torch.Tensor
    """[K]"""
    target_logits_indices: torch.Tensor
    """[K]: which of the drawn tokens each is compared with."""
    bonus_logits_indices: torch.Tensor
    """[D]: which of the drawn tokens is behind all of a sequence's draft."""
    logits_indices: torch.Tensor
    """[N]: of the step's tokens those behind which one is drawn."""
    known_indices: torch.Tensor
    """Of the step's tokens those at the end of a chunk behind which none is."""
    known_token_ids: torch.Tensor
    """What is behind them in the prompt, to be computed in the next step."""

    def last_accepted(self, drawn: torch.Tensor) -> torch.Tensor:
        """Return which of the step's tokens is each sequence's last one that holds: int64 [D]. A
        draft token holds if it was drawn, and all before it. drawn: int64 [N]"""
        num_right = self.num_draft_tokens
        if len(self.draft_token_ids):
            places = torch.arange(len(self.draft_token_ids), device=drawn.device)
            of = torch.searchsorted(self.cu_num_draft_tokens, places, right=True)
            in_draft = places - (self.cu_num_draft_tokens - self.num_draft_tokens)[of]
            is_wrong = drawn[self.target_logits_indices] != self.draft_token_ids
            ends = torch.where(is_wrong, in_draft, self.num_draft_tokens[of])
            num_right = num_right.scatter_reduce(0, of, ends, "amin")
        return self.logits_indices[self.bonus_logits_indices - self.num_draft_tokens + num_right]

    def token_ids_behind(self, input_ids: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        """Return what is behind each of the step's tokens; anything behind padding. input_ids:
        int64 [T]; drawn: int64 [N]"""
        behind = input_ids.roll(-1)
        behind[self.logits_indices] = drawn
        behind[self.known_indices] = self.known_token_ids
        return behind


ReplayPart: TypeAlias = Callable[[Callable[[], None]], None]
"""Calls what replays a graph, or one captured part of it."""


@dataclass(frozen=True)
class Context:
    """Facts about the step. Ops in a replayed graph see those of the capture, on padding alone.
    Invariant: `graph_bs` is the padded batch size, `batch_size` the real one."""

    is_prefill: bool = False
    """Not all sequences decode."""
    is_dummy_run: bool = False
    """The batch is padding alone: a rank without work, or one that is not ready yet."""
    batch_size: int = 0
    graph_bs: int = 0
    is_draft: bool = False
    """The forward is that of the layer that drafts, behind the model's."""
    positions: torch.Tensor | None = field(default=None, compare=False)
    """int64 [tokens]: the position of each token in its sequence."""


_Layer = TypeVar("_Layer")


def static_forward_context(layers: Iterable[tuple[str, _Layer]]) -> dict[str, _Layer]:
    """Return layers by name; ValueError: of two of one name, one would use the other's cache."""
    by_name: dict[str, _Layer] = {}
    for name, layer in layers:
        if name in by_name:
            raise ValueError(f"layer_name: wanted a name for each layer, found {name!r} twice")
        by_name[name] = layer
    return by_name


@dataclass(frozen=True)
class ForwardContext:
    """Everything that opaque ops of one forward look up. An empty one outside of a forward."""

    no_compile_layers: dict[str, Any] = field(default_factory=dict)
    """Layers by name, from `static_forward_context`."""
    attn_metadata: Any = None
    kv_cache_data: dict[str, KVCacheTensor] = field(default_factory=dict)
    """KV caches by layer. Ranks may be threads of one process, so there is no global table."""
    context: Context | None = None
    dp_metadata: DPMetadata | None = None
    """Token counts of the data-parallel ranks; None if there is one."""
    adapters: torch.Tensor | None = None
    """int32 [tokens]: one more than the slot of each one's LoRA adapter, 0 for none; None if there
    are no slots."""
    spec_decode_metadata: SpecDecodeMetadata | None = None
    """What follows the step's tokens; None unless a layer drafts, or in a step of padding."""
    batch_descriptor: BatchDescriptor | None = None
    """The graph to capture or replay; None if the step runs eagerly."""
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE
    """NONE, PIECEWISE or FULL: what this forward captures or replays."""
    replay: ReplayPart = field(default=call, compare=False)
    """A step that is timed brings one that reads a clock around the call."""


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.current: ForwardContext | None = None


_state = _PerThread()


def get_forward_context() -> ForwardContext:
    """Return this thread's forward context; AssertionError: none was ever set on it."""
    current = _state.current
    assert current is not None, "forward context: wanted one from forward_context(), found none"
    return current


@contextmanager
def forward_context(value: ForwardContext) -> Iterator[ForwardContext]:
    """Set this thread's context, then restore the one before; after the outermost it is empty."""
    before = _state.current
    _state.current = value
    try:
        yield value
    finally:
        _state.current = before or ForwardContext()


def current_context() -> ForwardContext | None:
    """Return what `get_forward_context` would, or None if no context was ever set."""
    return _state.current


@contextmanager
def resumed_context(value: ForwardContext | None) -> Iterator[None]:
    """Set a context that was current earlier and put back the one before: for replays."""
    before = _state.current
    _state.current = value
    try:
        yield
    finally:
        _state.current = before
