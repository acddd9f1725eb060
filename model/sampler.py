"""Draw tokens from logits, a whole batch at once and without waiting for a GPU.

A row's token depends on its own logits, parameters and uniform number alone: what other rows ask
for leaves it untouched bit by bit, so a seeded request gives the same tokens alone and in any
batch.

Shapes: B rows, R rows of the tables (at least B), V vocabulary, K likeliest tokens reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from model.kernels.dispatch import kernels_for
from model.kernels.drawing import likeliest


@dataclass(frozen=True)
class Penalties:
    """The sequences' tokens, and what each row makes of them. All tensors lie on the device."""

    presence: torch.Tensor
    """float32 [B]; 0 is off."""
    frequency: torch.Tensor
    """float32 [B]; 0 is off."""
    repetition: torch.Tensor
    """float32 [B], above 0; 1 is off."""
    output_counts: torch.Tensor
    """int32 [R, V]: how often each output has each token."""
    is_in_prompt: torch.Tensor
    """bool [R, V]"""
    drafted: torch.Tensor | None = None
    """int64 [D, 2]: output tokens that one of the B rows has beside the counted ones."""


@dataclass(frozen=True)
class Adjustments:
    """What a batch's rows want done to their logits; None is what no row wants."""

    rows: torch.Tensor
    """int64 [B]: where each sampled row stands in the tables."""
    bias: torch.Tensor | None
    """float32 [R, V], -inf for a token that may not be drawn."""
    is_stop: torch.Tensor | None
    """bool [R, V]: tokens that may not be drawn before `min_tokens`."""
    is_before_min_tokens: torch.Tensor | None
    """bool [B]"""
    penalties: Penalties | None


def adjust_logits(logits: torch.Tensor, wanted: Adjustments) -> torch.Tensor:
    """Apply bias, the mask of stop tokens, then penalties, as vLLM does. logits: [B, V]."""
    if wanted.bias is not None:
        logits = logits + wanted.bias[wanted.rows]
    if wanted.is_stop is not None and wanted.is_before_min_tokens is not None:
        is_masked = wanted.is_stop[wanted.rows] & wanted.is_before_min_tokens.unsqueeze(-1)
        logits = logits.masked_fill(is_masked, -torch.inf)
    if wanted.penalties is not None:
        logits = _penalise(logits, wanted.rows, wanted.penalties)
    return logits


def _penalise(logits: torch.Tensor, rows: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    counts, is_in_prompt = penalties.output_counts, penalties.is_in_prompt
    if penalties.drafted is not None:
        counts, is_in_prompt = counts[rows], is_in_prompt[rows]  # copies
        counts.index_put_(tuple(penalties.drafted.unbind(1)), counts.new_ones(()), accumulate=True)
        rows = torch.arange(len(rows), device=rows.device)
    of_rows = (penalties.presence, penalties.frequency, penalties.repetition)
    adjusted: torch.Tensor = kernels_for(logits).penalise(
        logits, counts, is_in_prompt, rows, *of_rows
    )
    return adjusted


@dataclass(frozen=True)
class SamplingTensors:
    """How each row is sampled. The tensors have length B and lie on the device; the flags may be
    True without need, never False against it."""

    temperature: torch.Tensor
    """float32; 0 is greedy."""
    top_k: torch.Tensor
    """int64; 0 keeps all."""
    top_p: torch.Tensor
    """float32 in (0, 1]; 1 keeps all."""
    min_p: torch.Tensor
    """float32 in [0, 1]; 0 keeps all."""
    uniform: torch.Tensor
    """float64 in [0, 1), from `draw_uniform`."""
    num_logprobs: int
    """The largest number of likeliest tokens that a row wants; -1 if none wants logprobs."""
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    adjustments: Adjustments | None
    allowed: torch.Tensor | None = None
    """int32 [B, at least V / 32]: bit i % 32 of word i // 32 allows token i; None allows all."""


@dataclass(frozen=True)
class SamplerOutput:
    """What was drawn, on the device. Logprobs are None where no row wants them."""

    token_ids: torch.Tensor
    """int64 [B]"""
    logprobs: torch.Tensor | None
    """float32 [B], of the drawn token under the raw logits."""
    ranks: torch.Tensor | None
    """int64 [B]; 1 for the likeliest token."""
    top_token_ids: torch.Tensor | None
    """int64 [B, K], likeliest first."""
    top_logprobs: torch.Tensor | None
    """float32 [B, K]"""


def costliest_sampling(num_rows: int, vocab_size: int, device: torch.device) -> SamplingTensors:
    """Return what takes the most memory: every rule and every filter for every row."""
    ones, shape = torch.ones(num_rows, device=device), (num_rows, vocab_size)
    return SamplingTensors(
        temperature=ones,
        top_k=torch.full((num_rows,), vocab_size, device=device),
        top_p=ones / 2,
        min_p=ones / 2,
        uniform=ones.double() / 2,
        num_logprobs=0,
        all_greedy=False,
        any_top_k=True,
        any_top_p=True,
        any_min_p=True,
        adjustments=Adjustments(
            rows=torch.arange(num_rows, device=device),
            bias=torch.zeros(shape, device=device),
            is_stop=torch.zeros(shape, dtype=torch.bool, device=device),
            is_before_min_tokens=torch.ones(num_rows, dtype=torch.bool, device=device),
            penalties=Penalties(
                presence=ones,
                frequency=ones,
                repetition=ones,
                output_counts=torch.zeros(shape, dtype=torch.int32, device=device),
                is_in_prompt=torch.zeros(shape, dtype=torch.bool, device=device),
            ),
        ),
        allowed=torch.full((num_rows, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device),
    )


def sample(
    logits: torch.Tensor, tensors: SamplingTensors, known: torch.Tensor | None = None
) -> SamplerOutput:
    """Draw one token per row. logits: float32 [B, V], raw; known: `likeliest(logits)`, if computed
    before.

    The order is vLLM's: bias and allowed tokens, the mask of stop tokens before `min_tokens`,
    repetition, frequency and presence penalty; then the likeliest for greedy rows; for the others
    temperature, min-p, top-k, top-p. Logprobs are those of the raw logits.
    """
    adjusted = logits
    if tensors.adjustments is not None:
        adjusted = adjust_logits(logits, tensors.adjustments)
    if adjusted is not logits:
        known = None
    if tensors.all_greedy and tensors.allowed is None:
        token_ids = likeliest(adjusted) if known is None else known
    else:
        token_ids = kernels_for(logits).draw(
            adjusted,
            tensors.temperature,
            None if tensors.all_greedy else tensors.uniform,
            tensors.allowed,
            tensors.top_k if tensors.any_top_k else None,
            tensors.top_p if tensors.any_top_p else None,
            tensors.min_p if tensors.any_min_p else None,
            known,
        )
    if tensors.num_logprobs < 0:
        return SamplerOutput(token_ids, None, None, None, None)
    return score(logits, token_ids, tensors.num_logprobs)


def score(logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int) -> SamplerOutput:
    """Return given tokens [B] with their logprobs, ranks and the likeliest ones of their rows [B,
    V]."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(-1))
    ranks = (logits > logits.gather(1, token_ids.unsqueeze(-1))).sum(dim=-1) + 1
    top_logprobs, top_token_ids = logprobs.topk(min(num_logprobs, logits.shape[-1]), dim=-1)
    return SamplerOutput(token_ids, chosen.squeeze(-1), ranks, top_token_ids, top_logprobs)


# --- uniform numbers --------------------------------------------------------------------------

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def draw_uniform(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per seed and output position. seeds: uint64 [B]; positions: int64
    [B].

    SplitMix64 (Steele, Lea and Flood, 2014) with the mixed seed as its state, advanced to
    `position`, in integers, so that every platform agrees. Mixing keeps the streams of neighbouring
    seeds apart.
    """
    counters = positions.astype(np.uint64) + np.uint64(1)
    bits = _mix(_mix(seeds.astype(np.uint64)) + _GOLDEN * counters)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Stafford's variant 13 of the MurmurHash3 one)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
