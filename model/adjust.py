"""What a request does to its logits before a token is drawn from them: bias, masks, penalties.

A row that asks for nothing is computed along and comes out bit by bit as it went in: its bias is 0,
its penalties are 0 and 1.

Shapes: B sampled rows, R rows of the tables (at least B), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
    """Apply the repetition penalty (CTRL; Keskar et al., 2019), then OpenAI's two."""
    counts = penalties.output_counts[rows]
    is_in_output = counts > 0
    is_seen = is_in_output | penalties.is_in_prompt[rows]
    factor = torch.where(is_seen, penalties.repetition.unsqueeze(-1), 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    logits = logits - penalties.frequency.unsqueeze(-1) * counts
    return logits - penalties.presence.unsqueeze(-1) * is_in_output
